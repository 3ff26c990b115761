"""The reference of answers whose log-probabilities are known: what is computed, kept and told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ft_service.data.tokens.token_set import TokenSet
from ft_service.rundir.directory import RunDir
from ft_service.spec import DpoOptions, KtoOptions
from tests.support.training.looked_up import LookedUp, log_of, sample
from workers.data.micro_batches import MicroBatchLimits
from workers.training import reference_logprobs as module
from workers.training.kto import Labelled
from workers.training.objective import Preference
from workers.training.reference_logprobs import NeededAnswers, compute_reference, key_of_reference

CPU = torch.device("cpu")
KTO = KtoOptions(beta=0.5, loss_type="kto", desirable_weight=1.0, undesirable_weight=1.0)
DPO = DpoOptions(beta=0.5, loss_type="sigmoid")
ANSWERS = TokenSet.of(
    [
        *(sample([0, 3, 2], 2, True), sample([0, 1], 1, False)),
        *(sample([2, 2], 1, True), sample([1, 1, 1, 0], 3, False)),
    ]
)
LOGS = [log_of(0.4, 0.15), log_of(0.2), log_of(0.45), log_of(0.25, 0.25, 0.5)]


def dumped(value: Any) -> Any:
    return SimpleNamespace(model_dump=lambda mode: [mode, value])


def test_the_key_is_of_all_that_decides_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(
        base: str = "b",
        parent: str | None = None,
        precision: str = "bf16",
        longest: int = 9,
        loss: Any = DPO,
        seed: int = 1,
        train: TokenSet = ANSWERS,
        valid: TokenSet = ANSWERS,
    ) -> str:
        origins = SimpleNamespace(
            base=SimpleNamespace(digest=base),
            parent=SimpleNamespace(digest=parent) if parent else None,
        )
        run: Any = SimpleNamespace(read=lambda name, kind: origins)
        training = SimpleNamespace(max_length=longest)
        spec: Any = SimpleNamespace(
            precision=dumped(precision), training=training, loss=loss, seed=seed
        )
        return key_of_reference(run, spec, train, valid)

    fewer = ANSWERS[:2]
    changes: list[dict[str, Any]] = [
        *({}, {"base": "c"}, {"parent": "p"}, {"precision": "nf4"}, {"longest": 8}),
        *({"loss": KTO}, {"loss": KTO, "seed": 2}, {"train": fewer}, {"valid": fewer}),
    ]
    keys = [key(**change) for change in changes]
    assert len(set(keys)) == len(changes)
    assert key(seed=2) == keys[0], "only KTO draws"
    assert keys[0] == key()


def spec_of(steps: int, *, preferences: bool) -> Any:
    training = SimpleNamespace(
        **{"batch": 1, "epochs": 1, "max_steps": steps, "eval_steps": None},
        **{"early_stopping_patience": None, "group_by_length": False},
        load_best_model_at_end=False,
    )
    checkpoint = SimpleNamespace(interval=lambda *_: 1, keep_every=None, keep_best=False)
    return SimpleNamespace(
        training=training,
        checkpoint=checkpoint,
        seed=0,
        rung_steps=lambda steps: (),
        preferences=DPO if preferences else None,
    )


@pytest.mark.parametrize(("steps", "trained"), [(1, 1), (2, 2), (9, 2)])
def test_steps_need_the_pairs_that_they_read_and_validations_all(steps: int, trained: int) -> None:
    train, valid = (Preference.without_reference(part, DPO) for part in (ANSWERS, ANSWERS[:2]))
    needed = NeededAnswers.of(spec_of(steps, preferences=True), train, valid)
    (first, second) = needed.parts
    assert (first.begin, first.values, first.answers, len(first.read)) == (0, 4, train, trained)
    assert (second.begin, second.values, second.answers, list(second.read)) == (4, 2, valid, [0])
    assert (needed.values, needed.items, needed.unit) == (6, trained + 1, "pair")


def labelled(samples: TokenSet) -> Labelled:
    return Labelled.without_values(samples, KTO, seed=0, max_length=9)


def test_mismatched_answers_are_needed_beside_their_own() -> None:
    train, valid = labelled(ANSWERS), labelled(ANSWERS[:3])
    needed = NeededAnswers.of(spec_of(2, preferences=False), train, valid)
    assert [(part.begin, part.values) for part in needed.parts] == [(0, 4), (4, 4), (8, 3), (11, 3)]
    assert [part.answers for part in needed.parts] == [
        *(train, train.baseline),
        *(valid, valid.baseline),
    ]
    assert [len(part.read) for part in needed.parts] == [2, 2, 3, 3]
    assert needed.unit == "answer"


def context_of(
    told: list[str], *, world: int = 1, stops_after: int = 99, context: Any = None
) -> Any:
    asked: list[int] = []

    def agreed() -> bool:
        asked.append(1)
        return len(asked) > stops_after

    model = LookedUp()
    runtime = SimpleNamespace(rank=0, world=world, device=CPU, run=None, context=context)
    reporter = SimpleNamespace(message=told.append, heartbeat=lambda: told.append("alive"))
    return SimpleNamespace(
        runtime=runtime,
        model=model,
        limits=MicroBatchLimits(5),
        reporter=reporter,
        stop=SimpleNamespace(agreed=agreed),
    )


@pytest.mark.parametrize("kto", [False, True])
def test_values_stand_in_their_places_and_what_no_step_reads_is_no_number(
    kto: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the clock takes 20 seconds: every second portion is told of."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += 20
        return now[0]

    freed: list[Any] = []
    written: list[Any] = []
    monkeypatch.setattr(module.time, "monotonic", monotonic)
    monkeypatch.setattr(module, "ROUNDS_AT_ONCE", 1)
    monkeypatch.setattr(module, "reshard", freed.append)
    monkeypatch.setattr(
        module, "_write", lambda runtime, key, values: written.append((key, values))
    )
    make: Any = labelled if kto else (lambda part: Preference.without_reference(part, DPO))
    train, valid = make(ANSWERS), make(ANSWERS[:2])
    needed = NeededAnswers.of(spec_of(1, preferences=not kto), train, valid)
    told: list[str] = []
    context = context_of(told)
    found = compute_reference(context, "the key", needed)
    assert found is not None
    values = torch.cat(found)
    places = needed.places()
    assert np.array_equal(values.isfinite().numpy(), places)
    assert [len(part) for part in found] == [part.values for part in needed.parts]
    own = [(LOGS, found[0]), (LOGS[:2], found[-2 if kto else 1])]
    for logs, part in own:
        known = part.isfinite()
        assert part[known].tolist() == pytest.approx(torch.tensor(logs).double()[known].tolist())
    ((key, kept),) = written
    assert (key, np.array_equal(kept, values.numpy(), equal_nan=True)) == ("the key", True)
    assert context.model.training
    assert all(given["training"] is False for given in context.model.given)
    portions = len(freed)
    assert sum("are computed." in text for text in told) == portions // 2
    assert told[-1].startswith("Reference log-probabilities of the ")
    assert told.count("alive") >= portions
    assert f", in {now[0] - 20:.0f} seconds." in told[-1]
    first = next(text for text in told if text.endswith("are computed."))
    assert f"of 2 of {needed.items} {needed.unit}s" in first


def test_a_stop_before_any_portion_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_write", lambda *given: pytest.fail("it is not whole"))
    monkeypatch.setattr(module, "ROUNDS_AT_ONCE", 1)
    own = Preference.without_reference(ANSWERS, DPO)
    needed = NeededAnswers.of(spec_of(9, preferences=True), own, own)
    for after in (0, 1):
        context = context_of([], stops_after=after)
        assert compute_reference(context, "key", needed) is None
        assert len(context.model.given) == after


@pytest.mark.parametrize("reports", [True, False])
def test_ranks_add_their_values_and_those_that_share_a_row_only_once(
    reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: Any = SimpleNamespace(reports=reports)
    monkeypatch.setattr(
        module,
        "answer_log_probabilities",
        lambda model, own: (torch.arange(1.0, 1 + len(own.counts)).double(), None),
    )
    batch = SimpleNamespace(
        batch=SimpleNamespace(shared=shared), counts=[1, 1], part_of=lambda own: batch
    )
    answers: Any = SimpleNamespace(
        members=lambda items: [2 * item + side for item in items for side in (0, 1)],
        share_out=lambda items, world, limits: [[[1]]],
        micro_batch=lambda members, device, keys, packed: batch,
    )
    group = SimpleNamespace(ranks=1)
    values = torch.zeros(6).double()
    module._add(values, context_of([], context=group), answers, [0, 2])
    assert values.tolist() == ([0, 0, 0, 0, 1, 2] if reports else [0] * 6)
    summed: list[Any] = []
    monkeypatch.setattr(module.dist, "all_reduce", summed.append)
    monkeypatch.setattr(module, "_write", lambda *given: None)
    monkeypatch.setattr(module, "_add", lambda values, *given: values.add_(1))
    own = Preference.without_reference(ANSWERS, DPO)
    needed = NeededAnswers.of(spec_of(9, preferences=True), own, own)
    for world in (1, 2):
        compute_reference(context_of([], world=world), "key", needed)
        assert len(summed) == world - 1


@pytest.mark.parametrize("size", [0, 8, 16])
def test_what_is_stored_is_read_if_it_is_no_larger_than_asked_for(
    size: int, tmp_path: Path
) -> None:
    runtime: Any = SimpleNamespace(run=RunDir(tmp_path), fence=SimpleNamespace(check=lambda: None))
    module._write(runtime, "key", np.array([-1.5, 2.0]))
    stored = module._stored(runtime.run, size)
    assert (stored is not None) is (size == 16)
    if stored is not None:
        assert (stored[0].key, stored[1].tolist(), stored[1].dtype) == ("key", [-1.5, 2], "float64")
