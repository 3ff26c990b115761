"""KTO against its paper's formula on stock parts, and against TRL: losses, rewards, gradients; and
which answers z0 is estimated from.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from ft_service.data.tokens.sample import ImageUse, Picture, Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.spec import JobSpec, KtoOptions
from tests.support.ranks import run_on_ranks
from tests.support.training.models import (
    VOCABULARY,
    reference,
    save_chat_base,
    save_tiny_llama,
    spec_for,
)
from tests.support.training.parity import CPU, Step, assert_parity, constructed, full
from workers.base.load import adapters, plain_name
from workers.data.batches import BatchOrder, collate
from workers.data.micro_batches import MicroBatchLimits
from workers.training.kto import Labelled, LabelledSums, kto_losses, mismatched_partners
from workers.training.objective import RankShare, loss_with_baseline
from workers.training.preference import answer_log_probabilities, make_answers
from workers.training.step import forward_backward

COUNT = 6
STEPS = 3
SEED = 11
LABELS = (True, False, True, True, False, True)
OPTIONS = {
    "kto": KtoOptions(beta=0.3, loss_type="kto", desirable_weight=0.8, undesirable_weight=1.7),
    "apo_zero_unpaired": KtoOptions(
        beta=0.3, loss_type="apo_zero_unpaired", desirable_weight=1.2, undesirable_weight=0.6
    ),
}


def drawn(length: int, generator: torch.Generator) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def rows() -> list[tuple[list[int], list[int], bool]]:
    """Prompt, completion and label."""
    generator = torch.Generator().manual_seed(2)
    return [
        (drawn(3 + i, generator), drawn(9 - i, generator), good) for i, good in enumerate(LABELS)
    ]


def token_set(given: list[tuple[list[int], list[int], bool]]) -> TokenSet:
    return TokenSet.of(
        Tokens(
            np.array(prompt + answer, dtype=np.int32),
            np.array([False] * len(prompt) + [True] * len(answer)),
            label=good,
        )
        for prompt, answer, good in given
    )


def objective_of(options: KtoOptions, samples: TokenSet | None = None) -> Labelled:
    own = token_set(rows()) if samples is None else samples
    return Labelled.without_values(own, options, seed=SEED, max_length=64)


def drawn_reference(objective: Labelled) -> Labelled:
    """With reference values of answers whose tokens are drawn at random, nearly; those of the
    mismatched ones are lower, so that z0 is not cut at 0.
    """
    generator = torch.Generator().manual_seed(5)
    targets = torch.from_numpy(objective.samples.target_counts)
    values = [
        torch.randn(COUNT, generator=generator, dtype=torch.float64)
        - math.log(VOCABULARY) * targets
        - 6 * number
        for number in range(len(objective.parts))
    ]
    return objective.with_reference(values)


@torch.no_grad()
def descend(parameters: dict[str, Any]) -> None:
    for parameter in parameters.values():
        parameter.sub_(parameter.grad, alpha=0.05)
        parameter.grad = None


def kto_steps(
    rank: int, world: int, spec: JobSpec, packed: bool, options: list[KtoOptions]
) -> list[list[tuple[Step, float]]]:
    """Steps by the real worker code for each of the options, and their z0."""
    built = constructed(spec, world)
    trained = dict(adapters(built.peft_model))
    begun = {name: parameter.detach().clone() for name, parameter in trained.items()}
    found = []
    for own in options:
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(begun[name])
        objective = drawn_reference(objective_of(own))
        found.append(
            [
                one_step(objective, built.peft_model, trained, rank, world, packed)[:2]
                for _ in range(STEPS)
            ]
        )
    return found


def one_step(
    objective: Labelled,
    model: torch.nn.Module,
    trained: dict[str, Any],
    rank: int,
    world: int,
    packed: bool = True,
) -> tuple[Step, float, LabelledSums]:
    items = list(range(COUNT))
    share = RankShare(rank, world, CPU, MicroBatchLimits(40, None, packed))
    loss_of = loss_with_baseline(model, objective, items, world, share.batches)
    sums = forward_backward(
        model, share.batches(objective, items), COUNT, world, loss_of=loss_of
    ).tolist()
    read = objective.read(sums, items)
    done = Step(read.mean_loss, {name: full(p.grad) for name, p in trained.items()})
    descend(trained)
    return done, read.baseline, read


def paper_steps(model: Path, spec: JobSpec, options: KtoOptions) -> list[tuple[Step, float]]:
    """The same by the formula: whole logits, plain autograd, one unsharded process."""
    peft_model = reference(model, spec)
    trained = {plain_name(n): p for n, p in peft_model.named_parameters() if p.requires_grad}
    objective = drawn_reference(objective_of(options))
    done = []
    for _ in range(STEPS):
        gained = torch.stack([answer(peft_model, own) for own in objective.samples])
        gained = gained - objective.reference
        zero = torch.zeros((), dtype=torch.float64)
        if objective.baseline is not None:
            other = objective.baseline
            with torch.no_grad():
                moved = torch.stack([answer(peft_model, other.sample(i)) for i in range(COUNT)])
            zero = (moved - other.reference).mean()
            assert zero > 0
        loss = paper_losses(gained, zero, options).mean()
        loss.backward()
        step = Step(loss.item(), {name: full(p.grad) for name, p in trained.items()})
        done.append((step, zero.item()))
        descend(trained)
    return done


def paper_losses(gained: Tensor, zero: Tensor, options: KtoOptions) -> Tensor:
    """The losses of the answers with LABELS, as the papers write them, by exp alone."""

    def sigma(x: Tensor) -> Tensor:
        return 1 / (1 + torch.exp(-x))

    beta = options.beta
    return torch.stack(
        [
            options.desirable_weight * (1 - sigma(beta * (own - zero)))
            if good
            else options.undesirable_weight * (1 - sigma(beta * (zero - own)))
            for own, good in zip(gained, LABELS, strict=True)
        ]
    )


def answer(model: torch.nn.Module, sample: Tokens) -> Tensor:
    batch = collate([sample], CPU)
    logits = model(input_ids=batch.ids).logits.double().flatten(0, 1)[batch.places]
    return logits.log_softmax(-1).gather(1, batch.targets[:, None]).sum()


@pytest.mark.parametrize(
    ("world", "storage", "packed"),
    [
        (2, "nf4", True),
        pytest.param(1, "nf4", False, marks=pytest.mark.slow),
        pytest.param(3, "nf4", True, marks=pytest.mark.slow),
        pytest.param(3, "fp8", False, marks=pytest.mark.slow),
        pytest.param(2, "bf16", True, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_the_paper(
    world: int, storage: str, packed: bool, tmp_path: Path
) -> None:
    model = save_tiny_llama(tmp_path / "base")
    spec = spec_for(
        model, ranks=world, precision={"default": storage, "compute": "fp32"}, lora={"r": 4}
    )
    options = list(OPTIONS.values())
    expected = [paper_steps(model, spec, own) for own in options]
    for rank in run_on_ranks(kto_steps, world, spec, packed, options):
        for ours, truth in zip(rank, expected, strict=True):
            assert_parity([step for step, _ in ours], [step for step, _ in truth])
            assert [zero for _, zero in ours] == pytest.approx([zero for _, zero in truth], 1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_their_gradients_are_those_of_the_formula(name: str) -> None:
    options = OPTIONS[name]
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(COUNT, generator=generator, dtype=torch.float64) * 4
    zero = torch.tensor(1.5 if name == "kto" else 0.0, dtype=torch.float64)
    ours = start.clone().requires_grad_()
    theirs = start.clone().requires_grad_()
    losses = kto_losses(ours, torch.tensor(LABELS), zero, options)
    truth = paper_losses(theirs, zero, options)
    losses.sum().backward()
    truth.sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert losses.tolist() == pytest.approx(truth.tolist(), rel=1e-9)
    assert ours.grad.tolist() == pytest.approx(theirs.grad.tolist(), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("loss", OPTIONS)
@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs trl (pip install 'ft-service[bench]')"
)
def test_losses_metrics_and_gradients_are_those_of_trl(loss: str, tmp_path: Path) -> None:
    model = save_chat_base(tmp_path / "base")
    spec = spec_for(model, precision={"default": "bf16", "compute": "fp32"}, lora={"r": 4})
    [ours] = run_on_ranks(steps_on_rows_of_trl, 1, spec, OPTIONS[loss])
    peft_model = cast("Any", reference(model, spec))
    trained = {plain_name(n): p for n, p in peft_model.named_parameters() if p.requires_grad}
    trainer = trl_trainer(peft_model, model, OPTIONS[loss], tmp_path / "out")
    batch = trainer.data_collator(rows_of_trl(OPTIONS[loss]))
    for number, (expected, gradients, metrics) in enumerate(ours):
        truth = trainer.compute_loss(peft_model, batch)
        truth.backward()
        assert expected == pytest.approx(truth.item(), rel=1e-5), number
        for name, parameter in trained.items():
            assert parameter.grad is not None
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5, (number, name)
        for name, value in metrics.items():
            logged = trainer._metrics["train"][name][-1]
            assert value == pytest.approx(logged, rel=1e-5, abs=1e-5), (number, name)
        descend(trained)


def rows_of_trl(options: KtoOptions) -> list[dict[str, Any]]:
    """The rows as TRL's collator takes them, with our mismatched answers."""
    given = rows()
    partners: Any = range(COUNT)
    baseline = objective_of(options).baseline
    if baseline is not None:
        partners = baseline.partners.tolist()
    return [
        {
            "prompt_ids": prompt,
            "completion_ids": words,
            "label": good,
            **({"KL_completion_ids": given[partner][1]} if baseline is not None else {}),
        }
        for (prompt, words, good), partner in zip(given, partners, strict=True)
    ]


def trl_trainer(peft_model: Any, model: Path, options: KtoOptions, folder: Path) -> Any:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer
    from trl.trainer.kto_config import KTOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.kto_trainer import KTOTrainer  # pyright: ignore[reportMissingImports]

    config = KTOConfig(
        output_dir=str(folder),
        beta=options.beta,
        loss_type=options.loss_type,
        desirable_weight=options.desirable_weight,
        undesirable_weight=options.undesirable_weight,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    unused = Dataset.from_list(
        [{"prompt": "a", "completion": "b", "label": good} for good in (True, False)]
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    return KTOTrainer(
        model=peft_model, args=config, train_dataset=unused, processing_class=tokenizer
    )


def steps_on_rows_of_trl(rank: int, world: int, spec: JobSpec, options: KtoOptions) -> list[Any]:
    """Loss, gradients and metrics of each step.

    The reference is the model with its adapter as it begins, as it is for TRL.
    """
    built = constructed(spec, world)
    trained = dict(adapters(built.peft_model))
    objective = objective_of(options)
    kept: list[Tensor] = []
    for part in objective.parts:
        own = [
            part.samples[i] if isinstance(part, Labelled) else part.sample(i) for i in range(COUNT)
        ]
        batch = make_answers(own, torch.zeros(COUNT, dtype=torch.float64), CPU)
        with torch.no_grad():
            kept.append(answer_log_probabilities(built.peft_model, batch)[0])
    objective = objective.with_reference(kept)
    steps = []
    for _ in range(STEPS):
        done, _, read = one_step(objective, built.peft_model, trained, rank, world)
        steps.append((done.loss, done.grads, read.more))
    return steps


def test_an_answer_s_neighbour_has_another_prompt_and_is_the_same_in_every_step() -> None:
    """Prompts that stand next to each other often are the same: the good and the bad answers to
    one question.
    """
    generator = torch.Generator().manual_seed(4)
    prompts = [drawn(4, generator) for _ in range(5)]
    given = [(prompts[i // 4], drawn(3, generator), i % 2 == 0) for i in range(20)]
    samples = token_set(given)
    begins = np.full(20, 4)
    for seed in range(20):
        partners = mismatched_partners(samples, begins, seed)
        assert all(given[i][0] != given[p][0] for i, p in enumerate(partners.tolist()))
    assert not np.array_equal(
        mismatched_partners(samples, begins, 0), mismatched_partners(samples, begins, 1)
    )
    alike = token_set([(prompts[0], words, good) for _, words, good in given])
    partners = mismatched_partners(alike, begins, 3)
    assert sorted(partners.tolist()) == list(range(20)), "each answer once, behind another's prompt"
    assert not np.any(partners == np.arange(20))
    assert mismatched_partners(token_set([]), np.empty(0, np.int64), 0).tolist() == []
    assert mismatched_partners(token_set(given[:1]), begins[:1], 0).tolist() == [0]


def test_a_mismatched_answer_stands_behind_the_prompt_and_its_images_and_is_cut() -> None:
    picture = Picture.of(b"picture")
    first = Tokens(
        np.arange(10, dtype=np.int32),
        np.array([False] * 6 + [True, False, True, True]),
        images=(ImageUse(2, 4, picture),),
    )
    second = Tokens(np.arange(20, 27, dtype=np.int32), np.array([False] * 3 + [True] * 4))
    samples = TokenSet.of([replace(first, label=True), replace(second, label=False)])
    objective = Labelled.without_values(samples, OPTIONS["kto"], seed=0, max_length=8)
    assert objective.baseline is not None
    found = objective.baseline.sample(0)
    assert found.ids.tolist() == [0, 1, 2, 3, 4, 5, 23, 24]
    assert found.targets.tolist() == [False] * 6 + [True] * 2
    assert [use.begin for use in found.images] == [2]
    other = objective.baseline.sample(1)
    assert (other.ids.tolist(), other.images) == ([20, 21, 22, 6, 7, 8, 9], ())
    assert other.targets.tolist() == [False] * 3 + [True, False, True, True]
    assert objective.baseline.lengths([0, 1]) == [8, 7]


def test_sums_are_read_as_means_over_the_answers_of_each_label() -> None:
    sums = LabelledSums(
        loss=6.0,
        correct=5,
        rewards=(3.0, -4.0),
        logps=(-30.0, -80.0),
        baseline=0.25,
        good=2,
        bad=4,
        targets=10,
    )
    assert (sums.mean_loss, sums.accuracy, sums.is_impossible) == (1.0, 0.5, False)
    assert sums.more == {
        "kl": 0.25,
        "rewards/chosen": 1.5,
        "rewards/rejected": -1.0,
        "rewards/margins": 2.5,
        "logps/chosen": -15.0,
        "logps/rejected": -20.0,
    }
    alone = replace(sums, good=0, rewards=(0.0, -4.0), logps=(0.0, -80.0), targets=0, correct=0)
    assert alone.more == {"kl": 0.25, "rewards/rejected": -1.0, "logps/rejected": -20.0}
    assert alone.accuracy == 0


@pytest.mark.parametrize(
    ("good", "bad", "mean", "more"),
    [
        (
            2,
            1,
            2.0,
            {
                "rewards/chosen": 2.0,
                "rewards/rejected": -3.0,
                "rewards/margins": 5.0,
                "logps/chosen": -5.0,
                "logps/rejected": -7.0,
            },
        ),
        (1, 0, 6.0, {"rewards/chosen": 4.0, "logps/chosen": -10.0}),
        (0, 1, 6.0, {"rewards/rejected": -3.0, "logps/rejected": -7.0}),
        (0, 0, 6.0, {}),
    ],
)
def test_metrics_are_means_over_the_answers_of_a_label_that_there_are(
    good: int, bad: int, mean: float, more: dict[str, float]
) -> None:
    sums = LabelledSums(6.0, 3, (4.0, -3.0), (-10.0, -7.0), 0.25, good, bad, targets=4 * good)
    assert sums.mean_loss == mean
    assert sums.accuracy == (3 / (4 * good) if good else 3.0)
    assert sums.more == {"kl": 0.25, **more}


def test_a_mismatched_answer_is_that_of_the_next_sample_of_the_first_epoch() -> None:
    samples = token_set([([number], [9], True) for number in range(7)])
    begins = np.ones(7, np.int64)
    for seed in (0, 1):
        order = BatchOrder(7, 7, seed).of_step(0)
        following = dict(zip(order, [*order[1:], order[0]], strict=True))
        partners = mismatched_partners(samples, begins, seed).tolist()
        assert partners == [following[number] for number in range(7)]
