"""The manifests of deploy/kubernetes as kustomize renders them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
NOT_KUBERNETES = (
    "kustomize.config.k8s.io/",
    "kueue.x-k8s.io/",
    "monitoring.coreos.com/",
    "external-secrets.io/",
)
"""API groups whose schemas are not Kubernetes' own."""

Object = dict[str, Any]


def documents_of(text: str) -> list[Object]:
    return [document for document in yaml.safe_load_all(text) if document]


def kustomize(folder: Path) -> list[Object]:
    command = ["kubectl", "kustomize", str(folder)]
    return documents_of(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
