"""Adapters that PEFT would rename as it loads them, of a type that no test knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_service.bases import adapter_names
from ft_service.bases.families import acceptance
from ft_service.bases.families.family import DEFAULT
from ft_service.errors import SpecError
from tests.support.training.causal_types import save_type
from tests.support.training.models import spec_for
from tests.support.training.parity import CPU
from workers.model.build import build


def test_a_base_whose_adapters_would_be_missed_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    assert save_type("laguna", tmp_path)
    spec = spec_for(tmp_path, lora={"r": 2, "target_modules": "all-linear"})
    monkeypatch.setattr(acceptance, "TESTED", frozenset())
    build(spec, CPU)
    monkeypatch.setattr(adapter_names, "family_of", lambda _: DEFAULT)
    with pytest.raises(SpecError, match=r"would rename 6 .*shared_experts"):
        build(spec, CPU)
