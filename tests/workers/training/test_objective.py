"""Which samples an item has, what its loss is the mean over, and which micro-batches a rank
computes; continued training on documents, on ranks, against the loss of stock parts on each window
alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.data.tokens.tokenize import file_samples, load_tokenizer
from ft_service.data.tokens.training_set.windows import in_rows, in_windows
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.spec import DataFileRef, DpoOptions, JobSpec
from tests.support.training.attempts import losses, run_attempt
from tests.support.training.models import save_chat_base, spec_for
from workers.data.batches import batch_of_step
from workers.data.micro_batches import MicroBatchLimits
from workers.training.objective import (
    Preference,
    RankShare,
    Supervised,
    WholeRows,
    batch_order,
    loss_with_baseline,
    supervised,
)
from workers.training.preference import REWARDS

LENGTH = 32
ROWS = 2
STEPS = 6
CPU = torch.device("cpu")
DPO = DpoOptions(beta=0.1, loss_type="sigmoid")


def token_set(*counts: tuple[int, int]) -> TokenSet:
    """Samples of so many tokens, of which the last so many are targets."""
    return TokenSet.of(
        Tokens(np.arange(length, dtype=np.int32), np.arange(length) >= length - targets, label=None)
        for length, targets in counts
    )


SAMPLES = ((4, 1), (6, 2), (8, 3), (3, 2))


def limits(tokens: int = 100, **values: Any) -> Any:
    given = {"samples": None, "tokens": tokens, "packed": True}
    return MicroBatchLimits(**given | values)


def test_a_sample_is_an_item_and_its_targets_are_what_the_loss_is_the_mean_over() -> None:
    own = Supervised(token_set(*SAMPLES))
    assert (len(own), own.members([2, 0]), own.divisor([2, 0])) == (4, [2, 0], 4)
    read = own.read([5.0, 2.0], [1, 2])
    assert (read.loss, read.correct, read.targets) == (5.0, 2, 5)
    assert own.baseline is None
    batch = own.micro_batch([1, 3], CPU, None, True)
    assert batch.targets.tolist() == [4, 5, 1, 2]


def test_a_row_has_the_samples_that_share_it() -> None:
    rows = (np.array([2]), np.array([0, 3]), np.array([1]))
    own = WholeRows(token_set(*SAMPLES), rows)  # type: ignore[arg-type]
    assert (len(own), own.members([1, 0]), own.divisor([1, 0])) == (3, [0, 3, 2], 6)
    found = own.share_out([0, 1, 2], 1, limits(8))
    assert sorted(position for (micro,) in found for position in micro) == [0, 1, 2]
    assert all(len(micro) == 1 for (micro,) in found), "of 8, 7 and 6 tokens"
    assert len(own.share_out([0, 1, 2], 1, limits(21))) == 1


@pytest.mark.parametrize(("whole", "packed"), [(True, True), (True, False), (False, True)])
def test_only_what_is_learned_whole_and_packed_shares_rows(whole: bool, packed: bool) -> None:
    counts = [(length, length - 1 if whole else 1) for length, _ in SAMPLES]
    spec: Any = SimpleNamespace(training=SimpleNamespace(max_length=8))
    own = supervised(token_set(*counts), spec, packed=packed)
    assert isinstance(own, WholeRows) is (whole and packed)
    assert sorted(own.members(range(len(own)))) == [0, 1, 2, 3]


def test_a_pair_is_an_item_of_two_samples_and_its_first_answer_counts() -> None:
    own = Preference.without_reference(token_set(*SAMPLES), DPO)
    assert (len(own), own.members([1, 0]), own.divisor([1, 0])) == (2, [2, 3, 0, 1], 2)
    assert own.lengths([1, 0]) == [11, 10]
    read = own.read([1.0, 2.0, *range(len(REWARDS))], [1])
    assert (read.loss, read.correct, read.pairs, read.targets) == (1.0, 2, 1, 3)
    assert read.rewards == tuple(range(len(REWARDS)))
    assert own.parts == (own,)
    known = own.with_reference([torch.tensor([-1.0, -2.0, -3.0, -4.0]).double()])
    batch = known.micro_batch([2, 3], CPU, None, True)
    assert batch.reference.tolist() == [-3, -4]
    assert batch.counts.tolist() == [3, 2]
    assert batch.answers.tolist() == [0, 0, 0, 1, 1]
    assert own.reference.tolist() == [0] * 4
    assert own.share_out([1, 0], 1, limits(10, packed=False)) == [[[0]], [[1]]]
    assert own.share_out([1, 0], 1, limits(20, packed=True)) == [[[0]], [[1]]]
    (together,) = own.share_out([1, 0], 1, limits(21))
    assert sorted(together[0]) == [0, 1]


@pytest.mark.parametrize(
    ("world", "context", "tokens"), [(1, 1, 100), (2, 1, 100), (2, 2, 10), (4, 2, 100)]
)
def test_every_rank_has_its_own_items_and_those_that_share_rows_the_same(
    world: int, context: int, tokens: int
) -> None:
    own = Supervised(token_set(*SAMPLES, *SAMPLES))
    items = [7, 1, 2, 3, 4, 5]
    group: Any = None if context == 1 else SimpleNamespace(ranks=context)
    shares = [
        [
            sample
            for micro in RankShare(rank, world, CPU, limits(tokens), group).members(own, items)
            for sample in micro
        ]
        for rank in range(world)
    ]
    assert all(shares[rank] == shares[rank - rank % context] for rank in range(world))
    assert sorted(item for share in shares[::context] for item in share) == sorted(items)
    if context == 2 and world == 2:
        micro = list(RankShare(0, world, CPU, limits(tokens), group).members(own, items))
        most = max(own.samples.lengths[one].sum() for one in micro)
        assert 10 < most <= 20, "tokens are those of a rank's part"


def test_samples_of_a_micro_batch_have_their_own_keys() -> None:
    own = Supervised(token_set(*SAMPLES))
    share = RankShare(0, 1, CPU, limits())
    (batch,) = share.batches(own, [2, 0], lambda sample: 10 + sample)
    (order,) = share.members(own, [2, 0])
    assert sorted(order) == [0, 2]
    expected = own.micro_batch(order, CPU, [10 + sample for sample in order], True)
    assert batch.keys is not None
    assert expected.keys is not None
    assert torch.equal(batch.keys, expected.keys)
    (plain,) = share.batches(own, [2, 0])
    assert plain.keys is None


def test_a_baseline_is_computed_by_the_model_at_rest_before_the_loss() -> None:
    model = nn.Linear(1, 1)
    seen: list[Any] = []

    def sums_of(model: nn.Module, batch: int, scale: float) -> Any:
        seen.append((batch, model.training, torch.is_grad_enabled(), scale))
        return torch.zeros(()), torch.tensor([float(batch)]).double()

    baseline = SimpleNamespace(loss_of=lambda items: sums_of)
    objective: Any = SimpleNamespace(
        baseline=baseline, loss_of=lambda items, sums=None: (items, sums)
    )

    def loss(own: Any) -> Any:
        return loss_with_baseline(model, own, [4, 5], 1, lambda shared, items: iter(items))

    for training in (True, False):
        model.train(training)
        items, sums = loss(objective)
        assert (items, sums.tolist(), model.training) == ([4, 5], [9.0], training)
    assert seen == [(4, False, False, 1.0), (5, False, False, 1.0)] * 2
    assert loss(SimpleNamespace(baseline=None, loss_of=objective.loss_of)) == ([4, 5], None)


def test_items_are_grouped_by_their_longest_sample() -> None:
    def spec(by_length: bool) -> Any:
        training = SimpleNamespace(group_by_length=by_length, batch=2)
        return SimpleNamespace(training=training, seed=0)

    pairs = Preference.without_reference(
        token_set((9, 1), (2, 1), (2, 1), (3, 1), (3, 1), (9, 1), (2, 1), (2, 1)), DPO
    )
    order = batch_order(pairs, spec(True))
    assert {frozenset(order.of_step(step)) for step in (0, 1)} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }
    plain = batch_order(pairs, spec(False))
    assert sorted(plain.of_step(0) + plain.of_step(1)) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    folder = tmp_path_factory.mktemp("documents")
    path = folder / "train.jsonl"
    texts = [f"document {number} " * (1 + number % 9) for number in range(20)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return spec_for(
        save_chat_base(folder / "base"),
        DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path)),
        ranks=2,
        precision={"compute": "fp32"},
        training={
            "max_steps": STEPS,
            "batch_size": ROWS,
            "max_length": LENGTH,
            "learning_rate": 1e-9,
        },
        checkpoint={"save_steps": 2, "save_total_limit": 10},
        lora={"r": 4},
    )


@pytest.fixture(scope="module")
def finished(spec: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = RunDir(tmp_path_factory.mktemp("finished"))
    run.write("spec.json", spec)
    assert run_attempt(run, 1, 2) == Outcome(kind=OutcomeKind.SUCCEEDED)
    return run


@pytest.mark.slow
def test_the_loss_of_a_row_is_that_of_its_windows_alone(finished: RunDir, spec: JobSpec) -> None:
    """At a rate that changes nothing, so that every step is the base's own."""
    tokenizer = load_tokenizer(spec.model.path)
    windows = in_windows(TokenSet.of(file_samples(tokenizer, spec.data_files[0])), LENGTH)
    rows = in_rows(windows.lengths.tolist(), LENGTH)
    assert len(rows) < len(windows), "short ones share a row"
    model: Any = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32)
    for step, loss in losses(finished).items():
        items = batch_of_step(step - 1, len(rows), ROWS, spec.seed)
        summed = 0.0
        count = 0
        for sample in (windows[number] for item in items for number in rows[item]):
            ids = torch.tensor(sample.ids).long()[None]
            with torch.no_grad():
                own = torch.nn.functional.cross_entropy(
                    model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum"
                )
            summed = summed + float(own)
            count = count + ids.shape[1] - 1
        assert loss == pytest.approx(summed / count, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_job_goes_on_with_the_same_rows(
    finished: RunDir, spec: JobSpec, tmp_path: Path, world: int
) -> None:
    run = RunDir(tmp_path)
    shutil.copytree(finished.path("attempts"), run.path("attempts"))
    shutil.copytree(finished.path("checkpoints/step-2-a1"), run.path("checkpoints/step-2-a1"))
    run.write("spec.json", spec)
    assert run_attempt(run, 2, world, "step-2-a1") == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert losses(run) == pytest.approx(losses(finished), abs=1e-6)
