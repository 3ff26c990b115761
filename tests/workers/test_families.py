"""Every family of architectures against transformers and PEFT as they come, sharded and
quantised: loss and every adapter gradient. The short list has all families; the whole product is
marked slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.models import (
    FAMILIES,
    KINDS,
    MIXED_IN_FAMILIES,
    OF_EXPERTS,
    save_tiny,
    spec_for,
)
from tests.support.training.parity import Step, reference_steps, relative_error, train_steps

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"default": "bf16"},
    "fp8": {"default": "fp8"},
    "nf4": {"default": "nf4"},
    "mixed": MIXED_IN_FAMILIES,
}

OFTEN = {
    "qwen2": "mixed",
    "qwen3": "nf4",
    "mistral": "fp8",
    "gemma": "fp8",
    "gemma2": "nf4",
    "gemma3_text": "mixed",
    "phi": "mixed",
    "phi3": "mixed",
    "gpt_neox": "nf4",
    "mixtral": "mixed",
    "qwen3_moe": "nf4",
    "olmoe": "bf16",
    "deepseek_v3": "nf4",
    "gpt_oss": "nf4",
    "llama4_text": "mixed",
    "ernie4_5_moe": "fp8",
    "nemotron_h": "nf4",
    "qwen3_next": "nf4",
    "qwen3_5_text": "mixed",
    "olmo_hybrid": "fp8",
    "kimi_linear": "mixed",
    "granitemoehybrid": "nf4",
    "falcon_h1": "mixed",
    "bamba": "nf4",
    "lfm2": "nf4",
    "jamba": "mixed",
    "gemma4_text": "mixed",
}
"""Family → format of its base in the short list, which shards one family of each kind of layers."""
SHORT = [(family, 2 if family in KINDS else 1, form) for family, form in OFTEN.items()]
LEFT_OUT = {"qwen2", "gemma", "olmoe", "ernie4_5_moe", "qwen3_next", "olmo_hybrid", "bamba"}
"""Slow ones of the short list: others of it have their kinds of layers between them."""
PRODUCT = [(family, world, form) for family in FAMILIES for world in (1, 2, 3) for form in FORMATS]

Case = tuple[str, int, str]


def options_for(family: str) -> dict[str, Any]:
    lora = {"r": 3, "target_modules": OF_EXPERTS.get(family, "all-linear")}
    return {"training": {"per_device_train_batch_size": 2}, "lora": lora}


def train_all(rank: int, world: int, specs: dict[Case, JobSpec]) -> dict[Case, Step]:
    return {case: train_steps(rank, world, spec, steps=1)[0] for case, spec in specs.items()}


class Runs:
    """The cases of a list, those of one world size on ranks that are started once."""

    def __init__(self, cases: list[Case], folder: Path) -> None:
        families = {family: save_tiny(family, folder / family) for family, _, _ in cases}
        self.specs = {
            case: spec_for(
                families[case[0]],
                ranks=case[1],
                precision={**FORMATS[case[2]], "compute": "fp32"},
                **options_for(case[0]),
            )
            for case in cases
        }
        self._done: dict[int, list[dict[Case, Step]]] = {}

    def ranks(self, case: Case) -> list[Step]:
        """What each rank found in one case."""
        world = case[1]
        if world not in self._done:
            specs = {other: spec for other, spec in self.specs.items() if other[1] == world}
            self._done[world] = run_on_ranks(
                train_all, world, specs, timeout=1700 if len(specs) > 20 else 800
            )
        return [found[case] for found in self._done[world]]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Runs]:
    @cache
    def of(is_left_out: bool) -> Runs:
        cases = [case for case in SHORT if (case[0] in LEFT_OUT) == is_left_out]
        return Runs(cases, tmp_path_factory.mktemp("short"))

    return lambda case: of(case[0] in LEFT_OUT)


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(PRODUCT, tmp_path_factory.mktemp("product"))


def check(runs: Runs, case: Case) -> None:
    spec = runs.specs[case]
    (truth,) = reference_steps(Path(spec.model.path), spec, steps=1)
    for result in runs.ranks(case):
        assert result.loss == pytest.approx(truth.loss, rel=1e-5)
        assert result.grads.keys() == truth.grads.keys()
        for name, grad in result.grads.items():
            assert truth.grads[name].norm() > 0, name
            assert relative_error(grad, truth.grads[name]) < 1e-5, name


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case[0] in LEFT_OUT), id=str(case))
        for case in SHORT
    ],
)
def test_a_family_equals_the_unsharded_reference(case: Case, short: Callable[[Case], Runs]) -> None:
    check(short(case), case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", PRODUCT, ids=str)
def test_every_family_format_and_world_size_equals_the_unsharded_reference(
    case: Case, product: Runs
) -> None:
    check(product, case)


def test_every_family_is_in_the_short_list() -> None:
    assert {family for family, _, _ in SHORT} | {"llama"} == set(FAMILIES)
    assert {form for _, _, form in SHORT} == set(FORMATS)
    assert torch.get_default_dtype() == torch.float32
