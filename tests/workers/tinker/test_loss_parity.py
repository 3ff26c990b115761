"""Every loss on a sharded NF4 base, on 1, 2 and 3 ranks: its sum, its log-probabilities and the
gradient of each adapter matrix are those of plain PyTorch on the dequantised base. One start of
ranks for all losses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import OutcomeKind
from ft_service.tinker.saved_weights import saved_weights
from tests.support.training.attempts import run_attempt
from tests.support.training.commands import Script, examples, loop_spec
from tests.support.training.engine_runs import state_of
from tests.support.training.models import VOCABULARY, reference, save_chat_base
from workers.tinker.losses import LOSSES

OPTIONS: dict[str, Any] = {"lora": {"r": 4}, "precision": {"default": "nf4", "compute": "fp32"}}
CONFIG = {
    "dro": {"beta": 0.1},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}
GRADIENT = {"learning_rate": 0.0, "beta1": 0.0, "beta2": 0.0}
"""A step of AdamW that changes no weight, and whose first moment is the gradient."""
Example = tuple[np.ndarray, dict[str, np.ndarray]]


def clipped(ratio: Tensor) -> Tensor:
    return torch.clamp(ratio, 0.8, 1.2)


def gspo(lp: Tensor, q: Tensor, a: Tensor) -> Tensor:
    """Equations 8 and 9 of arXiv 2507.18071, whose ratio is one for the whole answer."""
    ratio = torch.exp((lp - q).mean()).detach() * torch.exp(lp - lp.detach())
    return -torch.minimum(ratio * a, clipped(ratio) * a)


PLAIN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda lp, q, a: -(a * lp),
    "importance_sampling": lambda lp, q, a: -(torch.exp(lp - q) * a),
    "ppo": lambda lp, q, a: -torch.minimum(torch.exp(lp - q) * a, clipped(torch.exp(lp - q)) * a),
    "cispo": lambda lp, q, a: -(clipped(torch.exp(lp - q)).detach() * lp * a),
    "dro": lambda lp, q, a: -(lp * a - 0.05 * (lp - q) ** 2),
    "gspo": gspo,
}


def sampled() -> list[Example]:
    """Sequences with a sampler's log-probabilities on both sides of the model's, and beyond where
    ratios are clipped.
    """
    random = np.random.default_rng(3)
    made = []
    for ids, arrays in examples(7, seed=4, longest=12):
        targets = arrays["target_tokens"]
        logprobs = (-np.log(VOCABULARY) + random.normal(scale=0.3, size=targets.shape)).astype(
            np.float32
        )
        advantages = random.normal(scale=0.05, size=targets.shape).astype(np.float32)
        made.append(
            (ids, {"target_tokens": targets, "logprobs": logprobs, "advantages": advantages})
        )
    return made


def given(data: list[Example], name: str) -> list[Example]:
    """The data as a loss takes them: the weights of cross_entropy are the advantages."""
    if name != "cross_entropy":
        return data
    return [
        (ids, {"target_tokens": own["target_tokens"], "weights": own["advantages"]})
        for ids, own in data
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def on_ranks(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[RunDir, Script, dict[str, int]]]:
    @functools.cache
    def run(world: int) -> tuple[RunDir, Script, dict[str, int]]:
        """Each loss from the same weights, which a step has moved so that both matrices have
        gradients.
        """
        run = RunDir(tmp_path_factory.mktemp(f"ranks-{world}"))
        run.write("spec.json", loop_spec(base, ranks=world, **OPTIONS))
        script = Script(run)
        script.losses(examples(8, seed=1))
        script.step(learning_rate=2e-2)
        calls = {}
        for name in LOSSES:
            calls[name] = script.losses(given(sampled(), name), name, CONFIG.get(name))
            script.step(**GRADIENT)
            script.add("save_weights", {"name": name, "path": "p"})
        script.add("finish")
        assert run_attempt(run, 1, world).kind is OutcomeKind.SUCCEEDED
        return run, script, calls

    return run


def saved(run: RunDir, name: str, what: str) -> dict[str, Tensor]:
    """`adapter`, or `exp_avg`: the gradients, of the model that a loss's step has left."""
    [checkpoint] = [weights.checkpoint for weights in saved_weights(run) if weights.name == name]
    state = state_of(run, checkpoint)
    return {
        key.removeprefix(f"{what}/"): tensor
        for key, tensor in state.items()
        if key.startswith(f"{what}/")
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    assert max(float(tensor.abs().max()) for tensor in expected.values()) > 0.1, (
        "there is something to compare"
    )
    for key, tensor in expected.items():
        # Some are larger than 1.
        torch.testing.assert_close(found[key], tensor, rtol=bound, atol=bound)


@pytest.fixture(scope="module")
def plain(base: Path) -> nn.Module:
    return reference(base, loop_spec(base, **OPTIONS))


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(LOSSES))
def test_it_is_plain_pytorch(
    on_ranks: Callable[[int], Any], plain: nn.Module, name: str, world: int
) -> None:
    run, script, calls = on_ranks(world)
    begin = saved(run, name, "adapter")
    named = {key: p for key, p in plain.named_parameters() if p.requires_grad}
    assert named.keys() == begin.keys()
    plain.zero_grad()
    with torch.no_grad():
        for key, parameter in named.items():
            parameter.copy_(begin[key])
    losses = []
    logs = []
    for ids, arrays in sampled():
        targets, q, a = (
            torch.as_tensor(arrays[key]) for key in ("target_tokens", "logprobs", "advantages")
        )
        lp = (
            plain(torch.as_tensor(ids)[None])
            .logits[0]
            .float()
            .log_softmax(-1)
            .gather(1, targets[:, None])[:, 0]
        )
        losses.append(PLAIN[name](lp, q, a).sum())
        logs.append(lp.detach())
    total = torch.stack(losses).sum()
    total.backward()
    loss, found = script.output(calls[name])
    assert loss == pytest.approx(total.item(), abs=1e-5)
    for own, expected in zip(found, logs, strict=True):
        assert np.abs(own - expected.numpy()).max() <= 1e-5
    gradients = saved(run, name, "exp_avg")
    assert_close(gradients, {key: p.grad for key, p in named.items() if p.grad is not None}, 1e-5)
    assert_close(gradients, saved(on_ranks(1)[0], name, "exp_avg"), 1e-6)
