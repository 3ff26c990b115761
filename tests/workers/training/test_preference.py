"""Losses on pairs against the papers' formulas on stock parts, and those of direct preference
optimisation against TRL: losses, rewards, gradients.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.spec import DpoOptions, JobSpec, OrpoOptions, PairOptions, SimpoOptions
from ft_service.spec.methods import DpoLoss
from tests.support.ranks import run_on_ranks
from tests.support.training.models import (
    VOCABULARY,
    reference,
    save_chat_base,
    save_tiny_llama,
    spec_for,
)
from tests.support.training.parity import CPU, Step, assert_parity, constructed, full, samples
from workers.base.load import adapters, plain_name
from workers.data.batches import collate
from workers.data.micro_batches import MicroBatchLimits
from workers.training.objective import Preference, RankShare
from workers.training.preference import (
    PairSums,
    answer_log_probabilities,
    make_answers,
    pair_losses,
)
from workers.training.step import forward_backward

PAIRS = 4
STEPS = 3
OPTIONS: dict[str, DpoOptions] = {
    "sigmoid": DpoOptions(beta=0.3, loss_type="sigmoid"),
    "ipo": DpoOptions(beta=0.3, loss_type="ipo"),
    "sigmoid_norm": DpoOptions(beta=2.0, loss_type="sigmoid_norm"),
    "smoothed": DpoOptions(beta=0.3, loss_type="sigmoid", label_smoothing=0.2),
    "hinge": DpoOptions(beta=0.3, loss_type="hinge"),
    "robust": DpoOptions(beta=0.3, loss_type="robust", label_smoothing=0.2),
    "apo_zero": DpoOptions(beta=0.3, loss_type="apo_zero"),
    "apo_down": DpoOptions(beta=0.3, loss_type="apo_down"),
    "with a term of supervised training": DpoOptions(beta=0.3, loss_type="sigmoid", rpo_alpha=0.7),
}
WITHOUT_REFERENCE: dict[str, PairOptions] = {
    "simpo": SimpoOptions(beta=2.0, gamma=1.0),
    "orpo": OrpoOptions(beta=0.5),
}
ON_RANKS = ("sigmoid_norm", "with a term of supervised training", "orpo")
"""On ranks in every run: with a reference, by the tokens of answers, by those of the batch, and by
odds. The formulas of all are compared below.
"""
IN_TRL: dict[str, tuple[list[str], list[float]]] = {
    **{name: ([name], [1.0]) for name in OPTIONS if name in get_args(DpoLoss)},
    "with a term of supervised training": (["sigmoid", "sft"], [1.0, 0.7]),
}
"""TRL's names and weights. Its `sigmoid` leaves label_smoothing out (1.16)."""


@torch.no_grad()
def descend(parameters: dict[str, Any]) -> None:
    """With steps that are small against the losses' curvature, across which roundings would
    grow.
    """
    for parameter in parameters.values():
        parameter.sub_(parameter.grad, alpha=0.05)
        parameter.grad = None


def pairs() -> TokenSet:
    """Eight samples of lengths 24, 22, ..: four pairs."""
    return TokenSet.of(samples(2 * PAIRS, 24))


def reference_values() -> Tensor:
    """Of answers whose tokens are drawn at random, nearly."""
    noise = torch.randn(2 * PAIRS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return noise - math.log(VOCABULARY) * torch.from_numpy(pairs().target_counts)


def preference_steps(
    rank: int, world: int, spec: JobSpec, packed: bool, options: list[PairOptions]
) -> list[list[Step]]:
    """Steps by the real worker code for each of the options, from the same beginning."""
    built = constructed(spec, world)
    trained = dict(adapters(built.peft_model))
    begun = {name: parameter.detach().clone() for name, parameter in trained.items()}
    found = []
    for own in options:
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(begun[name])
        objective = Preference(pairs(), reference_values(), own)
        found.append(
            [_step(objective, built.peft_model, trained, rank, world, packed) for _ in range(STEPS)]
        )
    return found


def _step(
    objective: Preference,
    model: torch.nn.Module,
    trained: dict[str, Any],
    rank: int,
    world: int,
    packed: bool,
) -> Step:
    items = list(range(PAIRS))
    batches = RankShare(rank, world, CPU, MicroBatchLimits(60, None, packed)).batches(
        objective, items
    )
    divisor = objective.divisor(items)
    loss_of = objective.loss_of(items)
    sums = objective.read(
        forward_backward(model, batches, divisor, world, loss_of=loss_of).tolist(), items
    )
    done = Step(sums.mean_loss, {name: full(p.grad) for name, p in trained.items()})
    descend(trained)
    return done


def paper_steps(model: Path, spec: JobSpec, options: PairOptions) -> list[Step]:
    """The same by the formula: whole logits, plain autograd, one unsharded process."""
    peft_model = reference(model, spec)
    trained = {plain_name(n): p for n, p in peft_model.named_parameters() if p.requires_grad}
    data = list(pairs())
    kept = reference_values()
    done = []
    for _ in range(STEPS):
        of_answers = torch.stack([_answer(peft_model, sample) for sample in data])
        tokens = torch.tensor([sample.target_count for sample in data], dtype=torch.float64)
        loss = paper_losses(of_answers, kept, tokens, options).mean()
        if isinstance(options, DpoOptions) and options.rpo_alpha:
            loss = loss - options.rpo_alpha * of_answers[0::2].sum() / tokens[0::2].sum()
        loss.backward()
        done.append(Step(loss.item(), {name: full(p.grad) for name, p in trained.items()}))
        descend(trained)
    return done


def paper_losses(of_answers: Tensor, kept: Tensor, tokens: Tensor, options: PairOptions) -> Tensor:
    """The losses of the pairs, as their papers write them, by exp and log alone."""

    def sigma(x: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-x))

    if not isinstance(options, DpoOptions):
        means = of_answers / tokens
        better = means[0::2]
        worse = means[1::2]
        if isinstance(options, SimpoOptions):
            return -torch.log(sigma(options.beta * better - options.beta * worse - options.gamma))
        odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in (better, worse)]
        return -better - options.beta * torch.log(sigma(torch.log(odds[0] / odds[1])))
    gained = of_answers - kept
    if options.loss_type in ("ipo", "sigmoid_norm"):
        gained = gained / tokens
    w = gained[0::2]
    v = gained[1::2]
    beta = options.beta
    wrong = options.label_smoothing
    right = -torch.log(sigma(beta * (w - v)))
    swapped = -torch.log(sigma(beta * (v - w)))
    return {
        "sigmoid": (1 - wrong) * right + wrong * swapped,
        "sigmoid_norm": right,
        "ipo": (w - v - 1 / (2 * beta)) ** 2,
        "hinge": torch.where(beta * (w - v) < 1, 1 - beta * (w - v), 0),
        "robust": ((1 - wrong) * right - wrong * swapped) / (1 - 2 * wrong),
        "apo_zero": 1 - sigma(beta * w) + sigma(beta * v),
        "apo_down": sigma(beta * w) + 1 - sigma(beta * (w - v)),
    }[options.loss_type]


def _answer(model: torch.nn.Module, sample: Tokens) -> Tensor:
    batch = collate([sample], CPU)
    logits = model(input_ids=batch.ids).logits.double().flatten(0, 1)[batch.places]
    return logits.log_softmax(-1).gather(1, batch.targets[:, None]).sum()


@pytest.mark.parametrize(
    ("world", "storage", "packed", "losses"),
    [
        (2, "nf4", True, ON_RANKS),
        *(
            pytest.param(*case, (*OPTIONS, *WITHOUT_REFERENCE), marks=pytest.mark.slow)
            for case in (
                (2, "nf4", True),
                (1, "nf4", True),
                (3, "nf4", False),
                (2, "fp8", True),
                (2, "bf16", True),
            )
        ),
    ],
)
def test_losses_and_gradients_are_those_of_the_paper(
    world: int, storage: str, packed: bool, losses: tuple[str, ...], tmp_path: Path
) -> None:
    model = save_tiny_llama(tmp_path / "base")
    spec = spec_for(
        model, ranks=world, precision={"default": storage, "compute": "fp32"}, lora={"r": 4}
    )
    options = [{**OPTIONS, **WITHOUT_REFERENCE}[loss] for loss in losses]
    expected = [paper_steps(model, spec, own) for own in options]
    for rank in run_on_ranks(preference_steps, world, spec, packed, options):
        for ours, truth in zip(rank, expected, strict=True):
            # In three steps some fall to a quarter: a difference of log-probabilities as large as
            # before, whose roundings are a larger share of it.
            assert_parity(ours, truth, loss=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", IN_TRL)
@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs trl (pip install 'ft-service[bench]')"
)
def test_losses_rewards_and_gradients_are_those_of_trl(loss: str, tmp_path: Path) -> None:
    model = save_chat_base(tmp_path / "base")
    spec = spec_for(model, precision={"default": "bf16", "compute": "fp32"}, lora={"r": 4})
    [ours] = run_on_ranks(steps_on_pairs_of_trl, 1, spec, OPTIONS[loss])
    peft_model = cast("Any", reference(model, spec))
    trained = {plain_name(n): p for n, p in peft_model.named_parameters() if p.requires_grad}
    trainer = trl_trainer(peft_model, model, loss, tmp_path / "out")
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    batch = trainer.data_collator([dict(zip(names, pair, strict=True)) for pair in trl_pairs()])
    for number, (expected, gradients, rewards) in enumerate(ours):
        truth = trainer.compute_loss(peft_model, batch)
        truth.backward()
        assert expected == pytest.approx(truth.item(), rel=1e-5), number
        for name, parameter in trained.items():
            assert parameter.grad is not None
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5, (number, name)
        for name, value in rewards.items():
            logged = trainer._metrics["train"][name][-1]
            assert value == pytest.approx(logged, rel=1e-5, abs=1e-5), (number, name)
        descend(trained)


def trl_trainer(peft_model: Any, model: Path, loss: str, folder: Path) -> Any:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer
    from trl.trainer.dpo_config import DPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]

    types, weights = IN_TRL[loss]
    config = DPOConfig(
        output_dir=str(folder),
        beta=OPTIONS[loss].beta,
        loss_type=types,
        loss_weights=weights,
        label_smoothing=OPTIONS[loss].label_smoothing,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    unused = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    tokenizer = AutoTokenizer.from_pretrained(model)
    return DPOTrainer(
        model=peft_model, args=config, train_dataset=unused, processing_class=tokenizer
    )


def trl_pairs() -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, chosen and rejected as tokens."""
    generator = torch.Generator().manual_seed(2)

    def drawn(length: int) -> list[int]:
        return torch.randint(3, 250, (length,), generator=generator).tolist()

    return [(drawn(4 + i), drawn(6 + 2 * i), drawn(9 - i)) for i in range(PAIRS)]


def steps_on_pairs_of_trl(rank: int, world: int, spec: JobSpec, options: DpoOptions) -> list[Any]:
    """Loss, gradients and rewards of each step.

    The reference is the model with its adapter as it begins, as it is for TRL.
    """
    data = []
    for prompt, *answers in trl_pairs():
        for answer in answers:
            learned = np.array([False] * len(prompt) + [True] * len(answer))
            data.append(Tokens(np.array(prompt + answer, dtype=np.int32), learned))
    built = constructed(spec, world)
    trained = dict(adapters(built.peft_model))
    with torch.no_grad():
        nothing = torch.zeros(len(data), dtype=torch.float64)
        kept, _ = answer_log_probabilities(built.peft_model, make_answers(data, nothing, CPU))
    objective = Preference(TokenSet.of(data), kept, options)
    items = list(range(PAIRS))
    steps = []
    for _ in range(STEPS):
        batches = RankShare(rank, world, CPU, MicroBatchLimits(60)).batches(objective, items)
        sums = forward_backward(
            built.peft_model, batches, PAIRS, world, loss_of=objective.loss_of(items)
        )
        measured = objective.read(sums.tolist(), items)
        steps.append(
            (measured.mean_loss, {name: full(p.grad) for name, p in trained.items()}, measured.more)
        )
        descend(trained)
    return steps


@pytest.mark.parametrize("name", [*OPTIONS, *WITHOUT_REFERENCE])
def test_losses_and_their_gradients_are_those_of_the_formula(name: str) -> None:
    options = {**OPTIONS, **WITHOUT_REFERENCE}[name]
    generator = torch.Generator().manual_seed(3)
    tokens = torch.tensor([[3, 9], [5, 2], [7, 7], [1, 4]])
    start = -torch.rand(4, 2, generator=generator) * 2 * tokens
    kept = -torch.rand(4, 2, generator=generator) * 2 * tokens
    ours = start.clone().requires_grad_()
    theirs = start.clone().requires_grad_()
    losses, rewards = pair_losses(ours, kept, tokens, options)
    truth = paper_losses(theirs.flatten(), kept.flatten(), tokens.flatten(), options)
    losses.sum().backward()
    truth.sum().backward()
    assert losses.tolist() == pytest.approx(truth.tolist(), rel=1e-6, abs=1e-6)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert ours.grad.flatten().tolist() == pytest.approx(
        theirs.grad.flatten().tolist(), rel=1e-6, abs=1e-6
    )
    gained = start - kept if name in OPTIONS else start / tokens
    assert torch.allclose(rewards, options.beta * gained)
    assert not rewards.requires_grad


def test_odds_of_certain_answers_are_finite() -> None:
    logs = torch.tensor([[0.0, -1.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    losses, _ = pair_losses(logs, logs, torch.ones(2, 2), WITHOUT_REFERENCE["orpo"])
    losses.sum().backward()
    assert logs.grad is not None
    assert bool(losses.isfinite().all() and logs.grad.isfinite().all())


def test_rewards_are_beta_times_what_was_gained() -> None:
    logs = torch.tensor([[-10.0, -12.0], [-8.0, -3.0]])
    kept = torch.tensor([[-11.0, -11.0], [-6.0, -3.0]])
    losses, rewards = pair_losses(
        logs, kept, torch.ones(2, 2, dtype=torch.int64), OPTIONS["sigmoid"]
    )
    assert rewards.tolist() == [[pytest.approx(0.3), pytest.approx(-0.3)], [pytest.approx(-0.6), 0]]
    assert losses[0] < torch.log(torch.tensor(2.0)) < losses[1], (
        "the second pair is ranked the wrong way round"
    )


def test_a_rank_without_pairs_takes_part() -> None:
    empty = make_answers([], torch.zeros(0, dtype=torch.float64), CPU)
    assert empty.batch.ids.shape == (1, 2)
    assert len(empty.answers) == len(empty.counts) == 0


def test_sums_are_read_as_means_over_pairs() -> None:
    sums = PairSums(6.0, 5, (3.0, -3.0, 6.0, 2.0, -30.0, -60.0), pairs=3, targets=10)
    assert (sums.mean_loss, sums.accuracy, sums.is_impossible) == (2.0, 0.5, False)
    assert sums.more["rewards/margins"] == 2.0
    assert sums.more["rewards/accuracies"] == pytest.approx(2 / 3)
