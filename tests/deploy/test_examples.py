"""Every example that we ship loads, and the one that claims to show every option does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from ft_service.spec import JobRequest
from ft_service.spec.environments import (
    EndpointEnvironment,
    McpEnvironment,
    OpenEnvEnvironment,
)
from ft_service.spec.methods import ReinforcementMethod
from ft_service.spec_files.spec_file import load_spec_file

EXAMPLES = Path(__file__).parents[2] / "deploy/examples"


OTHERS = {"vllm.yaml"}
"""Examples that are no SPEC."""


@pytest.mark.parametrize(
    "path",
    sorted(path for path in EXAMPLES.glob("*.yaml") if path.name not in OTHERS),
    ids=lambda path: path.name,
)
def test_every_example_loads_and_finds_its_files(path: Path) -> None:
    spec = load_spec_file(path, sweep=path.name == "sweep.yaml")
    assert spec.training_file.path.is_file()
    without = path.name == "student.yaml" or path.name.endswith("-shown.yaml")
    assert spec.validation_file is not None or without


def test_there_are_examples() -> None:
    assert (EXAMPLES / "quickstart.yaml").is_file()


def options_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner: Any = field.annotation
        if name == "reinforcement":  # a section without defaults, since its grader has none
            inner = ReinforcementMethod
        if name == "environment":  # its types have options of their own
            for kind in (EndpointEnvironment, McpEnvironment, OpenEnvEnvironment):
                yield from options_of(kind, f"{prefix}{name}.")
            continue
        older_place = name == "hyperparameters" and not prefix  # its options are shown under method
        if isinstance(inner, type) and issubclass(inner, BaseModel) and not older_place:
            yield from options_of(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def leaves_of(body: dict[str, object], prefix: str = "") -> Iterator[str]:
    for name, value in body.items():
        if isinstance(value, dict) and value and name not in ("metadata", "overrides", "grader"):
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_option_is_in_the_example_that_shows_them_all() -> None:
    shown = set(leaves_of(yaml.safe_load((EXAMPLES / "every-option.yaml").read_text())))
    # A job has one method: the options of the other one are shown in its own example.
    for file, section in (
        ("preferences.yaml", "method.dpo"),
        ("simpo.yaml", "method.simpo"),
        ("orpo.yaml", "method.orpo"),
        ("kto.yaml", "method.kto"),
        ("distillation.yaml", "method.distillation"),
        ("student.yaml", "method.distillation"),
        ("reinforcement.yaml", "method.reinforcement"),
        ("agent.yaml", "method.reinforcement.environment"),
        ("calculator.yaml", "method.reinforcement.environment"),
        ("dial.yaml", "method.reinforcement.environment"),
    ):
        shown |= {
            name
            for name in leaves_of(yaml.safe_load((EXAMPLES / file).read_text()))
            if section in name
        }
    assert shown == set(options_of(JobRequest))


def test_the_nfs_volume_of_kubernetes_is_mounted_as_slurm_demands() -> None:
    """With the options without which a node sees a request to stop up to a minute late."""
    page = (EXAMPLES.parents[1] / "docs/hosts.md").read_text()
    demanded = re.search(r"Mount NFS with `(.+?)`", page)
    volume = re.search(r"(?m)^    apiVersion: v1\n    kind: PersistentVolume\n(    .*\n)+", page)
    assert demanded is not None
    assert volume is not None
    assert set(demanded[1].split(",")) <= set(yaml.safe_load(volume[0])["spec"]["mountOptions"])
