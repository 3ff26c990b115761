"""Whole attempts of direct preference optimisation on real gloo ranks: any number of ranks,
stopped, resumed, going on.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Desired, Outcome, OutcomeKind
from ft_service.rundir.verify import verify
from ft_service.spec import AdapterRef, JobSpec
from tests.support.training.attempts import (
    adapter,
    losses,
    messages,
    run_attempt,
    table,
    trained,
)
from tests.support.training.models import save_chat_base, save_pairs, spec_for
from workers.data.micro_batches import MicroBatchLimits
from workers.training import reference_logprobs
from workers.training.reference_logprobs import NeededAnswers, Part, _portions

STEPS = 5


@pytest.mark.parametrize(
    ("world", "tokens", "portions"),
    [
        (1, 10, [[0, 2], [4], [5]]),
        (1, 11, [[0, 2, 4], [5]]),
        (2, 5, [[0, 2], [4], [5]]),
        (1, 100, [[0, 2, 4, 5]]),
        (1, 1, [[0], [2], [4], [5]]),
    ],
)
def test_items_are_computed_in_portions_that_a_stop_need_not_wait_for(
    world: int, tokens: int, portions: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5, 5, 1 and 12 tokens; one that is larger is a portion alone."""
    monkeypatch.setattr(reference_logprobs, "ROUNDS_AT_ONCE", 1)
    lengths = {0: 5, 2: 5, 4: 1, 5: 12}
    answers: Any = SimpleNamespace(lengths=lambda items: [lengths[item] for item in items])
    part = Part(begin=0, answers=answers, values=8, read=list(lengths))
    found = list(_portions(part, world, MicroBatchLimits(tokens)))
    assert found == portions
    assert list(_portions(replace(part, read=[]), world, MicroBatchLimits(tokens))) == []


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    folder = tmp_path_factory.mktemp("job")
    return spec_for(
        save_chat_base(folder / "base"),
        save_pairs(folder / "train.jsonl", 11),
        valid=save_pairs(folder / "valid.jsonl", 4),
        ranks=2,
        method={
            "type": "dpo",
            "dpo": {"hyperparameters": {"beta": 0.5, "batch_size": 5, "rpo_alpha": 0.1}},
        },
        precision={"default": "nf4", "compute": "fp32", "compare_served": "off"},
        training={"max_steps": STEPS, "tokens_per_micro_batch": 128, "learning_rate": 5e-3},
        checkpoint={"save_steps": 2, "save_total_limit": 10},
        lora={"r": 4, "lora_dropout": 0.1},
    )


@pytest.fixture(scope="module")
def finished(spec: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The uninterrupted job on two ranks."""
    return trained(spec, tmp_path_factory.mktemp("finished"), 2)


def test_pairs_are_learned_and_measured(finished: RunDir) -> None:
    rows = table(finished)
    first = rows[0]
    last = rows[-1]
    assert float(first["rewards/margins"]) == pytest.approx(0, abs=1e-3), (
        "dropout apart, nothing is learned yet"
    )
    assert float(last["train_loss"]) < float(first["train_loss"]) - 0.05
    assert float(last["rewards/margins"]) > 0.1
    assert float(last["rewards/accuracies"]) == 1
    margin = float(last["rewards/chosen"]) - float(last["rewards/rejected"])
    assert float(last["rewards/margins"]) == pytest.approx(margin, abs=1e-9)
    assert float(last["valid_rewards/margins"]) > 0
    assert [row["step"] for row in rows if row["valid_loss"]] == ["3", "5"], (
        "an epoch is 3 steps of 5 pairs"
    )
    assert verify(finished.root).faults == []


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_any_number_of_ranks_learns_the_same(
    finished: RunDir, spec: JobSpec, tmp_path: Path, world: int
) -> None:
    found = table(trained(spec, tmp_path, world))
    for name in (
        "train_loss",
        "valid_loss",
        "rewards/chosen",
        "rewards/rejected",
        "valid_rewards/margins",
        "grad_norm",
    ):
        ours = [float(row[name]) for row in found if row[name]]
        assert ours == pytest.approx(
            [float(row[name]) for row in table(finished) if row[name]], rel=1e-5, abs=1e-6
        ), name
    steps = losses(finished)
    assert losses(RunDir(tmp_path)) == pytest.approx(steps, rel=1e-6)


def resumed(finished: RunDir, folder: Path, world: int, *, reference: bool) -> RunDir:
    """The same job, as if it had been killed behind step 2 and gone on."""
    run = RunDir(folder)
    shutil.copytree(finished.path("attempts"), run.path("attempts"))
    shutil.copytree(finished.path("checkpoints/step-2-a1"), run.path("checkpoints/step-2-a1"))
    kept = ("reference.json", "reference.bin") if reference else ()
    for name in ("spec.json", "origins.json", *kept):
        shutil.copy(finished.path(name), run.path(name))
    assert run_attempt(run, 2, world, "step-2-a1") == Outcome(kind=OutcomeKind.SUCCEEDED)
    return run


@pytest.mark.slow  # test_kto_attempts.py has one whose reference is kept
@pytest.mark.parametrize("reference", [True, False])
def test_a_resumed_job_equals_the_uninterrupted_one(
    finished: RunDir, tmp_path: Path, reference: bool
) -> None:
    run = resumed(finished, tmp_path, 2, reference=reference)
    assert run.get("reference.bin") == finished.get("reference.bin"), (
        "by the adapter as it began, not as it was resumed"
    )
    assert losses(run) == losses(finished)
    for name, matrix in adapter(finished).items():
        assert torch.equal(adapter(run)[name], matrix), name


def test_only_what_the_steps_read_is_computed(spec: JobSpec, tmp_path: Path) -> None:
    training = spec.training.model_copy(update={"max_steps": 2, "batch_size": 2})
    short = spec.model_copy(update={"training": training})
    once = trained(short, tmp_path / "once", 1)
    values = np.frombuffer(once.get("reference.bin") or b"", "<f8")
    assert np.isfinite(values[: 2 * 11]).sum() == 2 * 4, "two steps of two pairs"
    assert np.isfinite(values[2 * 11 :]).all(), "each validation reads all of its pairs"
    assert any("the 8 pairs of 15 that are read" in text for text in messages(once))

    again = RunDir(tmp_path / "again")
    again.write("spec.json", short)
    for name in ("reference.json", "reference.bin"):
        shutil.copy(once.path(name), again.path(name))
    assert run_attempt(again, 1, 1) == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert not any("Reference" in text for text in messages(again)), "they are there"
    assert losses(again) == losses(once)

    longer = RunDir(tmp_path / "longer")
    longer.write(
        "spec.json",
        short.model_copy(update={"training": training.model_copy(update={"max_steps": 3})}),
    )
    for name in ("reference.json", "reference.bin"):
        shutil.copy(once.path(name), longer.path(name))
    assert run_attempt(longer, 1, 1) == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert any("the 10 pairs of 15 that are read" in text for text in messages(longer)), (
        "its third step reads others"
    )


@pytest.mark.slow
def test_a_job_that_goes_on_is_measured_against_its_parent(
    finished: RunDir, spec: JobSpec, tmp_path: Path
) -> None:
    parent = AdapterRef(
        name="ft:tiny:local::parent", job_id="ftjob-parent", path=str(finished.path("adapter"))
    )
    going_on = spec.model_copy(update={"job_id": "ftjob-next", "parent": parent})
    run = trained(going_on, tmp_path / "next", 1)
    assert abs(float(table(run)[0]["rewards/margins"])) < 1e-2 * float(
        table(finished)[-1]["rewards/margins"]
    )
    assert run.get("reference.bin") != finished.get("reference.bin")

    going_on_again = RunDir(tmp_path / "again")
    for folder in ("attempts", "checkpoints/step-2-a1"):
        shutil.copytree(run.path(folder), going_on_again.path(folder))
    for name in ("spec.json", "origins.json", "reference.json"):
        shutil.copy(run.path(name), going_on_again.path(name))
    going_on_again.path("reference.bin").write_bytes(b"damaged.")
    assert run_attempt(going_on_again, 2, 1, "step-2-a1") == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert going_on_again.get("reference.bin") == run.get("reference.bin"), (
        "computed again with the parent's adapter"
    )


def test_a_job_is_stopped_while_its_reference_is_computed(spec: JobSpec, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write("spec.json", spec)
    run.write("attempts/1/control.json", Control(generation=2, desired=Desired.PAUSE))
    assert run_attempt(run, 1, 2) == Outcome(kind=OutcomeKind.STOPPED)
    assert run.get("reference.json") is None


def needed() -> NeededAnswers:
    """Of four and two pairs: the first, the last, and none of the second part's second."""

    def pairs(count: int) -> Any:
        class Pairs:
            def members(self, items: Any) -> list[int]:
                return [2 * item + side for item in items for side in (0, 1)]

            def __len__(self) -> int:
                return count

        return Pairs()

    return NeededAnswers([Part(0, pairs(4), 8, [0, 3]), Part(8, pairs(2), 4, [0])], "pair")


def test_what_is_read_of_each_part_has_its_place() -> None:
    some = needed()
    assert (some.values, some.items) == (12, 3)
    assert np.flatnonzero(some.places()).tolist() == [0, 1, 6, 7, 8, 9]
    assert [part.tolist() for part in some.split(torch.arange(12))] == [
        list(range(8)),
        list(range(8, 12)),
    ]
    assert reference_logprobs._which(some) == "the 3 pairs of 6 that are read"
    every = replace(
        some, parts=[replace(part, read=range(len(part.answers))) for part in some.parts]
    )
    assert reference_logprobs._which(every) == "all 6 pairs"
    none = replace(some, parts=[some.parts[0], replace(some.parts[1], values=0, read=[])])
    assert np.flatnonzero(none.places()).tolist() == [0, 1, 6, 7], "there is no validation file"


def test_a_reference_is_read_only_if_it_is_whole_and_of_the_same_key(tmp_path: Path) -> None:
    runtime: Any = SimpleNamespace(run=RunDir(tmp_path), fence=SimpleNamespace(check=lambda: None))
    some = needed()
    assert not reference_logprobs.is_intact(runtime.run)
    values = np.arange(12.0)
    values[~some.places()] = np.nan
    reference_logprobs._write(runtime, "key", values)
    assert reference_logprobs.is_intact(runtime.run)

    def read(key: str = "key", of: NeededAnswers = some) -> list[Any] | None:
        return reference_logprobs.find_reference(runtime.run, key, of)

    found = read()
    assert found is not None
    assert [len(part) for part in found] == [8, 4]
    assert (found[0][7], found[1][1]) == (7.0, 9.0)
    assert read("other") is None
    assert read(of=replace(some, parts=some.parts[:1])) is None, "more than it should be"
    more = replace(some, parts=[*some.parts, replace(some.parts[1], begin=12, read=[])])
    assert read(of=more) is None, "less than it should be"
    assert read(of=replace(some, parts=[replace(some.parts[0], read=[1]), some.parts[1]])) is None
    whole = tmp_path / reference_logprobs.VALUES
    body = whole.read_bytes()
    for damaged in (body[:-8], body[:-1], body[:-1] + b"!", b""):
        whole.write_bytes(damaged)
        assert (read(), reference_logprobs.is_intact(runtime.run)) == (None, False)
    whole.unlink()
    assert read() is None
