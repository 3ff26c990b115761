"""What a worker's last words say of a package that it cannot import."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ft_service.host.missing_package import WORKER_PACKAGES, failed_import

EXTRA = "Install what workers need: pip install 'ft-service[workers]'."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "ModuleNotFoundError: No module named 'peft'",
            f"The package peft is not installed where the workers run. {EXTRA}",
        ),
        (
            "/usr/bin/python3: Error while finding module specification for "
            "'torch.distributed.run' "
            "(ModuleNotFoundError: No module named 'torch')",
            f"The package torch is not installed where the workers run. {EXTRA}",
        ),
        (
            "/venv/bin/python: No module named torch.distributed.run",
            f"The package torch is not installed where the workers run. {EXTRA}",
        ),
        (
            "ModuleNotFoundError: No module named 'sentencepiece.a'",
            "The package sentencepiece is not installed where the workers run. Install "
            "sentencepiece there.",
        ),
        (
            "ImportError: libcudart.so.12: cannot open\n  shared object file",
            "The workers cannot import a package that they need: ImportError: libcudart.so.12: "
            "cannot open shared object file. " + EXTRA,
        ),
        (
            "ImportError: libtorch.so: failed to map segment from shared object: Cannot allocate "
            "memory",
            None,
        ),
        ("ValueError: No module named 'torch' is no name", None),
        ("it printed nothing.", None),
    ],
)
def test_last_words(words: str, said: str | None) -> None:
    assert failed_import(words) == said


def test_what_is_called_the_workers_is_what_their_extra_installs() -> None:
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {re.split(r"[<>=; ]", line)[0] for line in extras["workers"]} == WORKER_PACKAGES
