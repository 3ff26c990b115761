"""Losses beside TRL's own functions, in value and gradient: divergences from a teacher, SimPO, ORPO.

Needs trl (the extra `bench`). DPO's losses and KTO's are compared with TRL's trainers in
test_preference.py and test_kto.py, on a whole model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ft_service.spec import OrpoOptions, SimpoOptions
from workers.model.divergence import (
    Divergence,
    Likeliest,
    divergence_gradient,
    divergence_sums,
)
from workers.training.preference import pair_losses

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}
TOKENS, WORDS, HIDDEN, WIDER = 9, 61, 16, 24


@pytest.fixture(scope="module")
def rows() -> dict[str, Tensor]:
    """Hidden states before the head, and heads, of a student and a wider teacher, fp32."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "student": (TOKENS, HIDDEN),
        "own_head": (WORDS, HIDDEN),
        "teacher": (TOKENS, WIDER),
        "head": (WORDS, WIDER),
    }
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def ours(rows: dict[str, Tensor], kind: str, top_k: int | None = None) -> tuple[float, Tensor]:
    """The mean loss, and its gradient in the student's hidden states."""
    own = (rows["student"] @ rows["own_head"].t()).log_softmax(-1)
    given: Any = (rows["teacher"] @ rows["head"].t()).log_softmax(-1)
    targets = torch.zeros(TOKENS, dtype=torch.int64)
    if top_k is not None:
        given = Likeliest.of(given, targets, top_k)
    divergence = Divergence(kind, BETAS[kind], top_k)
    loss = divergence_sums(own, given, targets, divergence)[0].item() / TOKENS
    return loss, divergence_gradient(own, given, divergence) @ rows["own_head"] / TOKENS


def assert_same(found: tuple[float, Tensor], loss: Tensor, student: Tensor) -> None:
    (expected,) = torch.autograd.grad(loss, student)
    assert found[0] == pytest.approx(loss.item(), rel=1e-5)
    assert (found[1] - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("kind", BETAS)
def test_divergences_are_those_of_the_distillation_trainer(
    rows: dict[str, Tensor], kind: str
) -> None:
    trl: Any = pytest.importorskip("trl.trainer.distillation_trainer")
    student = rows["student"][None].clone().requires_grad_()
    loss, _, count = trl._chunked_divergence_loss(
        student,
        rows["teacher"][None],
        rows["own_head"],
        rows["head"],
        torch.ones(1, TOKENS),
        BETAS[kind],
    )
    assert int(count) == TOKENS
    value, gradient = ours(rows, kind)
    assert_same((value, gradient[None]), loss, student)


@pytest.mark.parametrize("kind", BETAS)
def test_divergences_are_those_of_gkd(rows: dict[str, Tensor], kind: str) -> None:
    trl: Any = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    student = rows["student"].clone().requires_grad_()
    loss = trl.GKDTrainer.generalized_jsd_loss(
        (student @ rows["own_head"].t())[None],
        (rows["teacher"] @ rows["head"].t())[None],
        labels=torch.zeros(1, TOKENS, dtype=torch.int64),
        beta=BETAS[kind],
    )
    assert_same(ours(rows, kind), loss, student)


@pytest.mark.parametrize("kind", BETAS)
def test_likeliest_words_have_trls_tail(rows: dict[str, Tensor], kind: str) -> None:
    trl: Any = pytest.importorskip(
        "trl.experimental.server_distillation.server_distillation_trainer"
    )
    student = rows["student"].clone().requires_grad_()
    own = (student @ rows["own_head"].t()).log_softmax(-1)
    given = (rows["teacher"] @ rows["head"].t()).log_softmax(-1)
    words = given.topk(6).indices
    every = torch.ones_like(words, dtype=torch.bool)
    (s, mask), (t, _) = (
        trl._add_tail_bucket(logs.gather(1, words), every) for logs in (own, given)
    )
    loss = trl._jsd_divergence(s, t, BETAS[kind], mask).sum() / TOKENS
    assert_same(ours(rows, kind, top_k=6), loss, student)


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_reference_are_trls(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    counts = torch.randint(1, 9, (5, 2), generator=generator)
    logs = (-2 * torch.rand(5, 2, generator=generator) * counts).requires_grad_()
    means = logs / counts
    chosen, rejected = means.unbind(1)
    if name == "simpo":
        trl: Any = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
        stand_in: Any = SimpleNamespace(
            alpha=0.0,
            beta=2.0,
            simpo_gamma=1.0,
            loss_type="simpo",
            label_smoothing=0.0,
            accelerator=SimpleNamespace(device="cpu"),
        )
        theirs, *rewards = trl.CPOTrainer.cpo_loss(stand_in, chosen, rejected)
        options: SimpoOptions | OrpoOptions = SimpoOptions(beta=2.0, gamma=1.0)
    else:
        trl = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
        stand_in = SimpleNamespace(beta=0.5, accelerator=SimpleNamespace(device="cpu"))
        ratio, *rewards = trl.ORPOTrainer.odds_ratio_loss(stand_in, chosen, rejected)[:3]
        theirs = -chosen - ratio
        options = OrpoOptions(beta=0.5)
    (expected,) = torch.autograd.grad(theirs.sum(), logs)
    own = logs.detach().clone().requires_grad_()
    losses, found = pair_losses(own, torch.zeros_like(own), counts, options)
    (gradient,) = torch.autograd.grad(losses.sum(), own)
    torch.testing.assert_close(losses, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, torch.stack(rewards, dim=1).detach())
