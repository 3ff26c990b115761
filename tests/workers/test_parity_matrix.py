"""Parity over combinations of options: most pairs of values in a short list, the whole product
marked slow.

Compiling takes half a minute a case, so the product is not compiled; the pairs with a compiled case
are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.spec import JobSpec
from tests.support.ranks import run_on_ranks
from tests.support.training.models import save_tiny_llama, spec_for
from tests.support.training.parity import (
    MIXED,
    Step,
    assert_parity,
    reference_steps,
    steps_needed,
    steps_of_sharding,
)

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"default": "bf16"},
    "fp8": {"default": "fp8"},
    "nf4": {"default": "nf4"},
    "mixed": MIXED,
}
ROWS = {
    "even": {},
    "uneven": {"vocab_size": 259, "intermediate_size": 203, "num_key_value_heads": 1},
}


@dataclass(frozen=True)
class Case:
    format: str
    world: int
    rows: str
    reshard: bool | int
    checkpointing: str
    accumulate: bool
    kept: bool
    copies: int
    padded: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        flags = [
            name for name in ("accumulate", "kept", "padded", "compiled") if getattr(self, name)
        ]
        return (
            f"{self.format} {self.world}/{self.copies} {self.rows} {self.reshard} "
            f"{self.checkpointing} {' '.join(flags)}"
        )

    @property
    def valid(self) -> bool:
        """Whether the service takes it; and keeping what is gathered leaves nothing to reshard."""
        number = not isinstance(self.reshard, bool)
        shards_by_number = self.format == "bf16" and self.world // self.copies == 4
        return (
            self.world % self.copies == 0
            and not (self.kept and self.reshard is not True)
            and (not number or shards_by_number)
        )

    @property
    def pairs(self) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(enumerate(self.__dict__.values()), 2))

    def spec(self, bases: Path) -> JobSpec:
        return spec_for(
            bases / self.rows,
            ranks=self.world,
            precision={**FORMATS[self.format], "compute": "fp32"},
            training={
                "per_device_train_batch_size": 2 if self.accumulate else 8,
                "packing": not self.padded,
            },
            lora={"r": 4},
            distributed={
                "replicate": self.copies,
                "reshard_after_forward": self.reshard,
                "activation_checkpointing": self.checkpointing,
                "keep_unsharded": self.kept,
                "compile": self.compiled,
            },
        )


def product() -> Iterator[Case]:
    no_yes = (False, True)
    values = (
        FORMATS,
        (1, 2, 3, 4),
        ROWS,
        (True, False, 2),
        ("none", "full", "selective"),
        no_yes,
        no_yes,
        (1, 2),
        no_yes,
    )
    return (case for chosen in itertools.product(*values) if (case := Case(*chosen)).valid)


def pairs_of(cases: list[Case]) -> set[tuple[Any, ...]]:
    return set[tuple[Any, ...]]().union(*(case.pairs for case in cases))


def covering(cases: list[Case], share: float = 1.0) -> list[Case]:
    """Some of the cases that hold a share of the pairs of values which any of them holds; the
    greedy choice, of few ranks.
    """
    missing = pairs_of(cases)
    left = len(missing) * (1 - share)
    chosen = []
    while len(missing) > left:
        best = max(cases, key=lambda case: len(case.pairs & missing) / case.world**0.5)
        chosen.append(best)
        missing -= best.pairs
    return chosen


PRODUCT = list(product())
SHORT = covering(PRODUCT, share=0.75)
COMPILED = covering([replace(case, compiled=True) for case in PRODUCT])
ONE_COMPILED = Case("mixed", 2, "one layer", True, "none", True, False, 1, compiled=True)
"""A second layer would be compiled once more; that any number takes two is tested in
tests/workers/model/test_compiling.py.
"""


def train_all(rank: int, world: int, specs: dict[Case, JobSpec]) -> dict[Case, list[Step]]:
    return {case: steps_of_sharding(rank, world, spec) for case, spec in specs.items()}


class Runs:
    """The cases of a list; those of one world size on ranks that are started once, at most 40 at a
    time.
    """

    def __init__(self, cases: list[Case], bases: Path) -> None:
        self._bases = bases
        self._cases = cases
        self._done: dict[Case, list[list[Step]]] = {}
        self._truth: dict[tuple[str, str], list[Step]] = {}

    def check(self, case: Case) -> None:
        if case not in self._done:
            self._run(
                [
                    other
                    for other in self._cases
                    if other.world == case.world and other not in self._done
                ],
                case,
            )
        truth = self._truth.setdefault((case.format, case.rows), self._reference(case))
        for steps in self._done[case]:
            assert_parity(steps, truth[: steps_needed(case.spec(self._bases))])

    def _run(self, cases: list[Case], first: Case) -> None:
        batch = cases[cases.index(first) :][:40]
        specs = {case: case.spec(self._bases) for case in batch}
        by_rank = run_on_ranks(train_all, first.world, specs, timeout=800)
        self._done.update({case: [found[case] for found in by_rank] for case in batch})

    def _reference(self, case: Case) -> list[Step]:
        return self._truth.get((case.format, case.rows)) or reference_steps(
            self._bases / case.rows, case.spec(self._bases)
        )


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for rows, changes in ROWS.items():
        save_tiny_llama(folder / rows, **changes)
    save_tiny_llama(folder / ONE_COMPILED.rows, **ROWS["uneven"], num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module")
def short(bases: Path) -> Runs:
    return Runs(SHORT, bases)


@pytest.fixture(scope="module")
def whole(bases: Path) -> Runs:
    return Runs(PRODUCT, bases)


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_most_pairs_of_options_equal_the_unsharded_reference(case: Case, short: Runs) -> None:
    short.check(case)


def test_compiled_layers_equal_the_unsharded_reference(bases: Path) -> None:
    Runs([ONE_COMPILED], bases).check(ONE_COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=str)
def test_every_combination_equals_the_unsharded_reference(case: Case, whole: Runs) -> None:
    whole.check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_every_pair_of_options_compiled_equals_the_unsharded_reference(
    case: Case, bases: Path
) -> None:
    Runs([case], bases).check(case)


def test_the_short_list_is_short_and_holds_every_value() -> None:
    assert len(SHORT) <= 7
    assert len(pairs_of(SHORT)) >= 0.75 * len(pairs_of(PRODUCT))
    for case in PRODUCT:
        for field, value in case.__dict__.items():
            assert value in {getattr(chosen, field) for chosen in SHORT}, field
