"""The examples for rented GPUs, and for vLLM beside the service, as far as they can be checked without either."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from ft_service.local.spec_file import load_spec_file
from ft_service.settings import Settings
from tests.cluster.versions import KUBERNETES_VERSIONS
from tests.support.pod_security import pods_in, violations
from tests.support.programs.clean import FT

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "deploy/examples/gpu-hosts"
FILES = sorted(HOSTS.iterdir())


def test_there_is_one_file_for_each_kind_of_host() -> None:
    assert {path.name for path in FILES} == {"modal_job.py", "rented-host.sh", "skypilot.yaml"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_it_names_is_there(path: Path) -> None:
    """The files of the repository, the extras, and the commands with their options."""
    text = path.read_text()
    for name in re.findall(r"deploy/examples/[\w./-]+", text):
        assert (ROOT / name).is_file(), name
    for spec in set(re.findall(r"deploy/examples/[\w-]+\.yaml", text)):
        load_spec_file(ROOT / spec)
    assert "constraints.txt" in text
    assert "'.[workers]'" in text
    assert "--run-dir" in text
    assert "--model" in text
