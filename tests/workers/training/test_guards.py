"""Numbers that cannot be right stop the job, on all ranks, by name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig

from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.token_set import TokenSet
from ft_service.errors import SpecError
from ft_service.spec import JobSpec, TrainingOptions
from tests.support.ranks import run_on_ranks
from tests.support.training.models import VOCABULARY, save_tiny_llama, spec_for
from tests.support.training.parity import batches_of, constructed, samples
from workers.base.load import adapters, load
from workers.job.training_state import JobState
from workers.model.build import build
from workers.model.whole_modules import EmbeddedRows
from workers.quant.rowwise import RowQuantized
from workers.ranks.runtime import COMPUTE_DTYPE, TrainingError
from workers.ranks.sharding import Gradients, shard
from workers.training.guards import (
    STEPS_UNTIL_CHANGE,
    AdapterWatch,
    check_gathered_weights,
    check_ids,
    check_positions,
    check_step,
    checksum,
)
from workers.training.step import Sums, forward_backward

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "longest", "refused"),
    [
        (GPT2Config(n_positions=8, n_embd=8, n_layer=1, n_head=1, vocab_size=32), 9, True),
        (GPT2Config(n_positions=8, n_embd=8, n_layer=1, n_head=1, vocab_size=32), 8, False),
        (
            OPTConfig(
                max_position_embeddings=8,
                hidden_size=8,
                word_embed_proj_dim=8,
                num_attention_heads=1,
                ffn_dim=8,
            ),
            9,
            True,
        ),
        (
            LlamaConfig(
                max_position_embeddings=8, hidden_size=8, num_attention_heads=1, intermediate_size=8
            ),
            9,
            False,
        ),
    ],
)
def test_samples_are_no_longer_than_the_positions_that_a_base_has_learned(
    config: Any, longest: int, refused: bool
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tokens = [
        Tokens(np.arange(length, dtype=np.int32), np.ones(length, dtype=bool))
        for length in (3, longest)
    ]
    with pytest.raises(SpecError, match="learned 8 positions") if refused else nullcontext():
        check_positions(model, TokenSet.of(tokens), TokenSet.of([]))


def check_each(rank: int, world: int, cases: list[tuple[JobSpec, str]]) -> list[str]:
    return [check_on_rank(rank, world, spec, fault) for spec, fault in cases]


def check_on_rank(rank: int, world: int, spec: JobSpec, fault: str) -> str:
    """Build, load and check; the error's text, if any. The fault is of one rank only."""
    built = build(spec, CPU)
    dtype = COMPUTE_DTYPE[spec.precision.compute]
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    shard(built.peft_model, built.layers, mesh, spec.distributed, dtype)
    load(built.peft_model, spec.model.path, seed=1, compute_dtype=dtype, device=CPU)
    try:
        with broken_gather(fault if rank == world - 1 else ""):
            check_gathered_weights(built.peft_model, dtype)
    except TrainingError as error:
        return error.message
    return ""


def broken_gather(fault: str) -> AbstractContextManager[Any]:
    original = RowQuantized.fsdp_post_all_gather

    def broken(self: RowQuantized, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if fault == "a bit":
            outputs[0].view(torch.uint8)[0, 0] ^= 1
        elif fault == "the order of the shards":
            outputs[0].copy_(outputs[0].flip(0))
        return original(self, outputs, *args, **kwargs)

    return patch.object(RowQuantized, "fsdp_post_all_gather", broken)


def test_gathered_weights_are_those_that_were_read(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "base", vocab_size=VOCABULARY + 1, intermediate_size=200)
    overrides = {".*q_proj": "fp8", ".*up_proj": "bf16"}
    specs = {
        compute: spec_for(
            model, ranks=3, precision={"default": "nf4", "overrides": overrides, "compute": compute}
        )
        for compute in ("bf16", "fp32")
    }
    faults = {"bf16": ("a bit", ""), "fp32": ("the order of the shards", "")}
    cases = {(compute, fault): spec for compute, spec in specs.items() for fault in faults[compute]}
    of_ranks = run_on_ranks(check_each, 3, [(spec, fault) for (_, fault), spec in cases.items()])
    for (compute, fault), *messages in zip(cases, *of_ranks, strict=True):
        assert len(set(messages)) == 1, "all ranks say the same"
        assert ("are not what was read" if fault else "") in messages[0], f"{compute}: {fault}"
        assert bool(messages[0]) == bool(fault), f"{compute}: {fault}"


def test_checksum_sees_values_and_positions() -> None:
    a = torch.arange(1000, dtype=torch.float32)
    assert checksum(a) == checksum(a.clone())
    swapped = a.clone()
    swapped[[3, 700]] = swapped[[700, 3]]
    assert checksum(swapped) != checksum(a)
    assert checksum(torch.zeros(5, dtype=torch.uint8)) == 0
    assert checksum(torch.tensor([], dtype=torch.bfloat16)) == 0


def test_checksum_sees_positions_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.arange(1, 33, dtype=torch.int64)
    whole = checksum(a)
    monkeypatch.setattr("workers.training.guards._CHUNK", 8)
    assert checksum(a) == whole
    assert checksum(a.view(2, 16).flip(0)) != whole


@pytest.mark.parametrize(
    ("sums", "norm", "says"),
    [
        (Sums(float("nan"), 0, 4), 1.0, "step 9 the loss was not a finite number"),
        (Sums(2.0, 0, 4), float("inf"), "step 9 the gradient norm was not a finite number"),
        (Sums(0.0, 3, 4), 1.0, "loss of 4 target tokens was exactly 0"),
    ],
)
def test_impossible_steps_are_refused(sums: Sums, norm: float, says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        check_step(9, sums, norm)


def test_possible_steps_pass() -> None:
    check_step(9, Sums(2.0, 0, 4), 1.0)
    check_step(9, Sums(0.0, 0, 0), 0.0)
    check_step(9, Sums(0.0, 4, 4), 0.0)  # learned by heart


def watch(
    rank: int, world: int, changes_on: list[int], learning_rate: float, changes_at: int
) -> tuple[str, int]:
    """What is said, and after which step. The last of three ranks holds no rows."""
    parameter, other = (nn.Parameter(torch.zeros(4 if rank < 2 else 0)) for _ in range(2))
    told: list[str] = []
    name = "base_model.model.{}.lora_B.default.weight"
    job = JobState(
        {name.format("layer"): parameter, name.format("dt_proj"): other}, TrainingOptions()
    )
    watched = AdapterWatch(job, told.append)
    step = 0
    try:
        for step in range(1, STEPS_UNTIL_CHANGE + 1):
            if rank in changes_on and step >= changes_at:
                parameter.data[2] += 1.0
            watched.after_step(learning_rate)
            if told:
                return told[0], step
    except TrainingError as error:
        return error.code, step
    return "", 0


@pytest.mark.parametrize(
    ("changes_on", "changes_at", "learning_rate", "code", "said_at"),
    [
        ([0, 1], 1, 0.1, "", 1),
        ([0, 1], STEPS_UNTIL_CHANGE, 0.1, "", STEPS_UNTIL_CHANGE),
        ([], 1, 0.1, "adapter_unchanged", STEPS_UNTIL_CHANGE),
        ([1], 1, 0.1, "adapter_partly_unchanged", STEPS_UNTIL_CHANGE),
        ([], 1, 0.0, "", 0),
    ],
)
def test_an_adapter_that_never_changes_is_noticed(
    changes_on: list[int], changes_at: int, learning_rate: float, code: str, said_at: int
) -> None:
    """A part of it at once, the whole of it, and rows of some ranks, after a few steps."""
    told = (
        "The adapters of 1 modules get no gradient and stay as they were: dt_proj. Leave them "
        "out of lora.target_modules."
    )
    expected = (told if changes_on and not code else code), said_at
    assert run_on_ranks(watch, 3, changes_on, learning_rate, changes_at) == [expected] * 3


@pytest.mark.parametrize("changes_at", [1, 3, STEPS_UNTIL_CHANGE, None])
def test_what_is_trained_whole_has_as_long_to_change_as_adapters(
    changes_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first moment too: weight decay alone changes no moment."""
    monkeypatch.setattr("workers.training.guards.dist.all_reduce", lambda counts: None)
    adapter, whole = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    names = "base_model.model.layer.lora_B.default.weight", "base_model.model.lm_head.weight"
    job = JobState(dict(zip(names, (adapter, whole), strict=True)), TrainingOptions())
    told: list[str] = []
    watched = AdapterWatch(job, told.append)
    step, code = 0, ""
    try:
        for step in range(1, STEPS_UNTIL_CHANGE + 1):
            adapter.data += 1.0
            whole.data += 1.0
            if changes_at is not None and step >= changes_at:
                job.optimizer.first_moment(names[1]).add_(1.0)
            watched.after_step(0.1)
    except TrainingError as error:
        code = error.code
    assert (code, step) == ("" if changes_at else "adapter_unchanged", STEPS_UNTIL_CHANGE)
    assert told == []


def train_with_lost_gradients(
    rank: int, world: int, spec: JobSpec, of: str, lost_on: list[int], below: int
) -> str:
    """Optimizer steps on sharded parameters, of which the gradients of all named so get lost on
    these ranks; the error's text. `below`: ids of the samples' tokens.
    """
    built = constructed(spec, world)
    job = JobState(dict(adapters(built.peft_model)), spec.training)
    watched = AdapterWatch(job, pytest.fail, EmbeddedRows.of(built.peft_model))
    data = [Tokens(sample.ids % below, sample.targets) for sample in samples()]
    batches = batches_of(data, rank, world, spec)
    targets = sum(sample.target_count for sample in data)
    try:
        for _ in range(STEPS_UNTIL_CHANGE):
            forward_backward(
                built.peft_model,
                batches,
                targets,
                world,
                gradients=Gradients(built.peft_model, world),
            )
            for name, parameter in job.parameters.items():
                if of in name and rank in lost_on:
                    assert isinstance(parameter.grad, DTensor)
                    parameter.grad.to_local().zero_()
            job.update(1e-3, max_grad_norm=1.0)
            watched.after_step(1e-3)
    except TrainingError as error:
        return error.message
    return ""


Lost = tuple[str, list[int], int]
"""Arguments of `train_with_lost_gradients`."""


def train_with_each_lost(rank: int, world: int, spec: JobSpec, each: list[Lost]) -> list[str]:
    return [train_with_lost_gradients(rank, world, spec, *lost) for lost in each]


def said_on_all(world: int, spec: JobSpec, *each: Lost) -> list[str]:
    said, *others = run_on_ranks(train_with_each_lost, world, spec, list(each))
    assert others == [said] * len(others)
    return said


def test_an_adapter_of_which_one_ranks_rows_stay_untrained_fails_the_job(tmp_path: Path) -> None:
    """The fault by which 1/N of every lora_B was trained: losses fall, and every adapter changes on
    some rank.
    """
    model = save_tiny_llama(tmp_path / "base", vocab_size=VOCABULARY)
    spec = spec_for(model, ranks=2, precision={"default": "nf4", "compute": "fp32"}, lora={"r": 4})
    said, nothing = said_on_all(2, spec, (".lora_B.", [1], VOCABULARY), ("", [], VOCABULARY))
    assert (
        "14 parameters are trained on some ranks only, the first: of the lora_B of "
        "model.layers.0.self_attn.q_proj" in said
    )
    assert (
        "the rows on 1 of 2 ranks have changed in 3 optimizer steps, those on the others never"
        in said
    )
    assert nothing == ""


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_modules_trained_whole_are_watched_on_every_rank(tied: bool, tmp_path: Path) -> None:
    """Weight decay alone, which changes all rows, is no training."""
    model = save_tiny_llama(tmp_path / "base", vocab_size=VOCABULARY, tie_word_embeddings=tied)
    lora = {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]}
    decay = {"weight_decay": 0.1}
    spec = spec_for(
        model, ranks=3, precision={"default": "nf4", "compute": "fp32"}, lora=lora, training=decay
    )
    modules = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    on_one: list[Lost] = [(module, [2], VOCABULARY) for module in modules]
    on_all: list[Lost] = [(module, [0, 1, 2], VOCABULARY) for module in modules]
    *said, nothing = said_on_all(3, spec, *on_one, *on_all, ("", [], VOCABULARY // 3))
    for module, of_one, of_all in zip(
        modules, said[: len(modules)], said[len(modules) :], strict=True
    ):
        assert "1 parameters are trained on some ranks only, the first: of " in of_one
        assert (
            f"{module}.weight (lora.modules_to_save) the rows on 2 of 3 ranks have changed"
            in of_one
        )
        assert f"{module}.weight (lora.modules_to_save) has changed in 3 optimizer steps" in of_all
    assert nothing == "", "no token of the other ranks' rows occurs"


@pytest.mark.parametrize(
    ("ids", "rows", "largest"),
    [([[1, 7], [3]], 8, None), ([[1, 7], [3]], 7, 7), ([[3], [1, 9]], 9, 9), ([], 0, None)],
)
def test_a_token_without_a_row_in_the_embedding_is_refused(
    ids: list[list[int]], rows: int, largest: int | None
) -> None:
    data = TokenSet.of(Tokens(np.array(own, np.int32), np.ones(len(own), np.bool_)) for own in ids)
    if largest is None:
        check_ids(data, rows)
        return
    with pytest.raises(SpecError, match=f"token {largest} of the data") as refused:
        check_ids(data, rows)
    assert f"has {rows} rows, for ids up to {rows - 1}:" in str(refused.value)
    assert (refused.value.param, refused.value.code) == ("model", "vocabulary_too_small")
    check_ids(data.cut(1), rows)  # whose largest ids are cut off
