"""The gradient of a group's answers against TRL's own GRPOTrainer on the same answers.

Needs trl (the extra `bench`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import nn

from ft_service.reinforcement.schedule import RolloutSchedule
from ft_service.reinforcement.step_commands import commands_of
from ft_service.reinforcement.step_records import StepRecord
from ft_service.tinker.loss_calls import LossRequest
from tests.support.rollouts import random_groups, record, rollout_spec, save_prompts
from tests.support.training.models import VOCABULARY, reference, save_chat_base
from workers.tinker.loss_batches import loss_and_logprobs, make_loss_batch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LONGEST = 20


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize(
    ("scale_rewards", "left_out", "temperature"),
    [("none", (), 1.0), ("group", (), 0.6), ("group", (0, 4), 1.0)],
)
def test_it_is_trls_gradient(
    tmp_path: Path,
    loss_type: str,
    scale_rewards: str,
    left_out: tuple[int, ...],
    temperature: float,
) -> None:
    """`left_out`: answers that were cut off, with mask_truncated_completions."""
    pytest.importorskip("trl")
    base = save_chat_base(tmp_path / "base")
    options = {
        "batch_size": 1,
        "num_generations": 6,
        "loss_type": loss_type,
        "scale_rewards": scale_rewards,
    }
    spec = rollout_spec(
        base,
        save_prompts(tmp_path / "prompts.jsonl", 2),
        {**options, "max_completion_length": LONGEST, "mask_truncated_completions": bool(left_out)},
        training={"max_length": 60},
        lora={"r": 4},
        precision={"default": "bf16", "compute": "fp32"},
    )
    torch.manual_seed(0)
    model = reference(base, spec)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    [group] = random_groups(1, 6, VOCABULARY, seed=4)
    answers = [
        answer.model_copy(update={"truncated": i in left_out})
        for i, answer in enumerate(group.answers)
    ]
    own = record(
        1, [group.model_copy(update={"answers": answers})], first_seq=2, temperature=temperature
    )
    [command] = [
        c
        for c in commands_of(own, spec, RolloutSchedule.of(spec, 2, 0))
        if c.op == "forward_backward"
    ]
    call = LossRequest.parse(command.body).call(vocabulary=VOCABULARY, longest=60)
    batch = make_loss_batch(call.data, torch.device("cpu"), packed=False)
    loss, _, _ = loss_and_logprobs(model, batch, call, command.options.get("temperature", 1.0))
    loss.backward()
    ours = taken_gradients(model)
    trl_loss(model, own, tmp_path, loss_type, scale_rewards, temperature).backward()
    theirs = taken_gradients(model)
    assert ours.keys() == theirs.keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert scale > 1e-4
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5 * max(1.0, scale))


def taken_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def trl_loss(
    model: Any,
    own: StepRecord,
    folder: Path,
    loss_type: str,
    scale_rewards: str,
    temperature: float,
) -> torch.Tensor:
    """The loss of TRL's trainer, with its own correction for another sampler's
    log-probabilities.
    """
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    [group] = own.groups
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        num_generations=6,
        per_device_train_batch_size=6,
        max_completion_length=LONGEST,
        loss_type=loss_type,
        scale_rewards=scale_rewards,
        beta=0.0,
        temperature=temperature,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    data = Dataset(pa.table({"prompt": ["a"] * 6}), fingerprint="prompts")
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * 6,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.model.train()
    lengths = [len(answer.tokens) for answer in group.answers]
    most = max(lengths)
    tokens = torch.tensor(
        [[*answer.tokens, *[0] * (most - len(answer.tokens))] for answer in group.answers]
    )
    kept = zip(lengths, (not answer.truncated for answer in group.answers), strict=True)
    mask = torch.tensor([[int(counts)] * length + [0] * (most - length) for length, counts in kept])
    sampled = torch.tensor(
        [[*answer.logprobs, *[0.0] * (most - len(answer.logprobs))] for answer in group.answers]
    )
    prompts = torch.tensor([list(group.ids)] * 6)
    inputs: dict[str, Any] = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": tokens,
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
    }
    with torch.no_grad():
        whole = torch.cat([prompts, tokens], dim=1)
        attention = torch.cat([torch.ones_like(prompts), mask], dim=1)
        logs, *_ = trainer._get_per_token_logps_and_entropies(model, whole, attention, most)
    inputs["importance_sampling_ratio"] = (logs - sampled).exp().clamp(max=2.0)
    rewards = torch.tensor([answer.reward for answer in group.answers])
    advantages = rewards - rewards.mean()
    inputs["advantages"] = (
        advantages / (rewards.std() + 1e-4) if scale_rewards == "group" else advantages
    )
    trainer.use_vllm = True
    trainer.vllm_importance_sampling_correction = True
    trainer.current_gradient_accumulation_steps = 1
    return trainer._compute_loss(model, inputs)
