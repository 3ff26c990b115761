"""A client's training loop on real gloo ranks: what it trains, in what order, and that nothing is
lost or done twice.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ft_service.errors import SpecError
from ft_service.rundir.checkpoints import complete_checkpoints
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import OutcomeKind, Result
from ft_service.tinker.commands import Command, CommandLog
from ft_service.tinker.saved_weights import (
    PROBES,
    SamplerProbes,
    WeightsOptions,
    options_of,
    sampler_key,
    samplers_of,
    saved_weights,
    set_options,
)
from tests.support.training.attempts import adapter, losses, run_attempt
from tests.support.training.commands import ADAM, Script, attempt_until, examples, loop_spec
from tests.support.training.models import reference, save_chat_base
from workers.base.load import initial_adapter, plain_name
from workers.tinker.command_loop import KEEP_RESULT_SECONDS
from workers.training.guards import STEPS_UNTIL_CHANGE

PRECISION = {"default": "nf4", "compute": "fp32"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_base(tmp_path_factory.mktemp("base"))


def new_run(folder: Path, base: Path, ranks: int = 1) -> RunDir:
    run = RunDir(folder)
    run.write("spec.json", loop_spec(base, ranks=ranks, lora={"r": 4}, precision=PRECISION))
    return run


def trained(folder: Path, base: Path, ranks: int, parts: int) -> tuple[RunDir, Script, list[int]]:
    """Two steps of eight examples each, sent in `parts` calls a step."""
    run = new_run(folder, base, ranks)
    script = Script(run)
    calls = []
    for step in (1, 2):
        data = examples(8, seed=step)
        size = len(data) // parts
        calls += [script.losses(data[begin : begin + size]) for begin in range(0, len(data), size)]
        script.step()
    script.add("finish")
    assert run_attempt(run, 1, ranks).kind is OutcomeKind.SUCCEEDED
    return run, script, calls


def near(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether they are the same but for the order in which ranks of another number add up."""
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=0, atol=1e-6) for name in one
    )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Script, list[int]]:
    return trained(tmp_path_factory.mktemp("whole"), base, 2, 1)


def test_a_call_of_eight_is_two_calls_of_four(
    whole: tuple[RunDir, Script, list[int]], base: Path, tmp_path: Path
) -> None:
    run, script, [first, second] = whole
    parted_run, parted, calls = trained(tmp_path, base, 2, 2)
    assert same(adapter(run), adapter(parted_run))
    logs = script.output(first)[1] + script.output(second)[1]
    of_parts = [log for call in calls for log in parted.output(call)[1]]
    assert len(logs) == len(of_parts) == 16
    assert all(np.array_equal(one, other) for one, other in zip(logs, of_parts, strict=True))


@pytest.fixture(scope="module")
def on_one(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunDir, Script, list[int]]:
    return trained(tmp_path_factory.mktemp("one"), base, 1, 1)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_ranks(
    whole: tuple[RunDir, Script, list[int]],
    on_one: tuple[RunDir, Script, list[int]],
    base: Path,
    tmp_path: Path,
    ranks: int,
) -> None:
    run, script, calls = whole
    other_run, other, _ = on_one if ranks == 1 else trained(tmp_path, base, ranks, 1)
    assert near(adapter(other_run), adapter(run))
    for call in calls:
        assert other.output(call)[0] == pytest.approx(script.output(call)[0], abs=1e-4)


def test_an_embedding_of_which_some_ranks_have_no_rows_in_the_data_is_trained(
    base: Path, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    options: dict[str, Any] = {
        "lora": {"r": 4, "modules_to_save": ["embed_tokens"]},
        "precision": {"compute": "fp32"},
    }
    run.write("spec.json", loop_spec(base, ranks=2, **options))
    script = Script(run)
    ids = np.arange(3, 20)
    for _ in range(STEPS_UNTIL_CHANGE):
        script.losses(
            [(ids[:-1], {"target_tokens": ids[1:], "weights": np.ones(len(ids) - 1, np.float32)})]
        )
        script.step()
    script.add("finish")
    assert run_attempt(run, 1, 2).kind is OutcomeKind.SUCCEEDED


@pytest.mark.parametrize(
    ("section", "option"),
    [("lora", {"lora_dropout": 0.1}), ("training", {"neftune_noise_alpha": 5.0})],
)
def test_noise_is_refused_where_a_sampler_is_to_be_the_same_model(
    section: str, option: dict[str, Any], base: Path
) -> None:
    given: dict[str, Any] = {section: option}
    with pytest.raises(
        SpecError,
        match=rf"{section}\.{next(iter(option))} with method\.type = 'tinker': .* than the sampler",
    ):
        loop_spec(base, **given)


def test_it_is_adam_on_the_sum_of_losses(
    whole: tuple[RunDir, Script, list[int]], base: Path
) -> None:
    """Against transformers and PEFT as released, on the dequantised base."""
    run, script, calls = whole
    spec = loop_spec(base, lora={"r": 4}, precision=PRECISION)
    model = reference(base, spec)
    full = {
        n.replace("base_model.model.", "").replace(".default", ""): n
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    named = {name: model.get_parameter(long) for name, long in full.items()}
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(
                initial_adapter(plain_name(full[name]), tuple(parameter.shape), spec.seed)
            )
    adam = torch.optim.AdamW(
        named.values(), lr=ADAM["learning_rate"], betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0
    )
    reported = losses(run)
    for step, call in zip((1, 2), calls, strict=True):
        parts = [sum_of_losses(model, ids, arrays) for ids, arrays in examples(8, seed=step)]
        total = torch.stack(parts).sum()
        total.backward()
        adam.step()
        adam.zero_grad()
        assert script.output(call)[0] == pytest.approx(total.item(), rel=1e-4)
        weight = sum(np.abs(arrays["weights"]).sum() for _, arrays in examples(8, seed=step))
        assert reported[step] == pytest.approx(total.item() / weight, rel=1e-4), "a mean by weight"
    stored = {
        name.replace("base_model.model.", ""): tensor for name, tensor in adapter(run).items()
    }
    assert stored.keys() == named.keys()
    for name, parameter in named.items():
        torch.testing.assert_close(stored[name], parameter.detach(), rtol=0, atol=2e-5)


def sum_of_losses(model: nn.Module, ids: np.ndarray, arrays: dict[str, np.ndarray]) -> Tensor:
    logs = model(torch.as_tensor(ids)[None]).logits[0].float().log_softmax(-1)
    of_targets = logs.gather(1, torch.as_tensor(arrays["target_tokens"])[:, None])[:, 0]
    return -(torch.as_tensor(arrays["weights"]) * of_targets).sum()


def test_an_attempt_goes_on_where_another_was_stopped_or_killed(
    whole: tuple[RunDir, Script, list[int]], base: Path, tmp_path: Path
) -> None:
    stopped_run = new_run(tmp_path / "stopped", base, 2)
    killed_run = new_run(tmp_path / "killed", base, 1)
    stopped = Script(stopped_run)
    killed = Script(killed_run)
    for script in (stopped, killed):
        script.losses(examples(8, seed=1))
        script.step()
        script.losses(examples(8, seed=2))
    outcome = attempt_until(stopped_run, 1, 2, 3)
    assert outcome.kind is OutcomeKind.STOPPED
    assert outcome.checkpoint == "step-1-a1", (
        "the state after the step; what came later is computed again"
    )
    before = [stopped.log.result(seq) for seq in range(4)]
    for seq, result in enumerate(before):  # as if the other had died before it wrote a checkpoint
        assert result is not None
        killed.log.put_result(seq, result)
    for run, script, ranks, checkpoint in (
        (stopped_run, stopped, 2, outcome.checkpoint),
        (killed_run, killed, 1, None),
    ):
        script.step()
        script.add("finish")
        assert run_attempt(run, 2, ranks, checkpoint).kind is OutcomeKind.SUCCEEDED
        assert near(adapter(run), adapter(whole[0]))
        assert ranks == 1 or same(adapter(run), adapter(whole[0]))
        assert [script.log.result(seq) for seq in range(4)] == before, "answers stay"
        result = run.read("result.json", Result)
        assert result is not None
        assert result.steps == 2


def test_a_model_that_rested_for_long_ends_by_the_next_number(base: Path, tmp_path: Path) -> None:
    """The checkpoint of its pause holds all commands, and their results are too old to be asked
    for.
    """
    run = new_run(tmp_path, base)
    script = Script(run)
    script.losses(examples(2, seed=1))
    last = script.step()
    outcome = attempt_until(run, 1, 1, last, rested_seconds=2 * KEEP_RESULT_SECONDS)
    assert (outcome.kind, outcome.checkpoint) == (OutcomeKind.STOPPED, "step-1-a1")
    assert [seq for seq in range(last + 1) if script.log.has(seq)] == []
    assert script.log.first_missing() == last + 1
    script.log.put(Command(script.log.first_missing(), "finish"))
    assert run_attempt(run, 2, 1, outcome.checkpoint).kind is OutcomeKind.SUCCEEDED
    assert adapter(run)


def test_what_cannot_be_done_is_answered_and_changes_nothing(
    whole: tuple[RunDir, Script, list[int]], base: Path, tmp_path: Path
) -> None:
    run = new_run(tmp_path, base, 2)
    script = Script(run)
    data = examples(8, seed=1)
    wrong = script.losses(
        [(ids, {**arrays, "target_tokens": arrays["target_tokens"] + 1000}) for ids, arrays in data]
    )
    script.losses(data)
    refused = script.add("refused", {"error": "Not here."})
    script.losses(examples(3, seed=9), forward_only=True)
    script.step()
    script.losses(
        [
            (ids, {**arrays, "weights": np.full_like(arrays["weights"], 3e38)})
            for ids, arrays in examples(4, seed=3)
        ]
    )
    infinite = script.step()
    script.losses(examples(8, seed=2))
    script.step()
    script.add("finish")
    assert run_attempt(run, 1, 2).kind is OutcomeKind.SUCCEEDED
    errors = {
        seq: dict(result.document)
        for seq in range(script.seq)
        if (result := script.log.result(seq)) and "error" in result.document
    }
    assert errors.keys() == {wrong, refused, infinite}
    assert "data.0.loss_fn_inputs.target_tokens" in errors[wrong]["error"]
    assert errors[refused] == {"error": "Not here.", "category": "user"}
    assert "finite" in errors[infinite]["error"]
    assert same(adapter(run), adapter(whole[0]))


def test_a_command_stays_until_it_is_answered(base: Path, tmp_path: Path) -> None:
    """Its client would be told that there is none.

    A load writes a checkpoint before it is answered.
    """
    run = new_run(tmp_path / "one", base)
    script = Script(run)
    script.losses(examples(2, seed=1))
    script.step()
    script.add("save_weights", {"name": "one", "path": "p"})
    script.add("finish")
    assert run_attempt(run, 1, 1).kind is OutcomeKind.SUCCEEDED
    [saved] = saved_weights(run)
    load = {
        "path": "p",
        "run_dir": str(run.root),
        "checkpoint": saved.checkpoint,
        "optimizer": True,
    }
    other = new_run(tmp_path / "two", base)
    log = CommandLog(other)
    log.put(Command(0, "create_model", {"model_id": "m", "load": load}))
    log.put(Command(1, "finish"))
    ended = threading.Event()
    gaps = list[int]()

    def watch() -> None:
        while not ended.wait(0.0005):
            if not log.has(0) and not log.has_result(0):
                gaps.append(0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert run_attempt(other, 1, 1).kind is OutcomeKind.SUCCEEDED
    finally:
        ended.set()
        thread.join()
    assert gaps == []
    result = log.result(0)
    assert result is not None
    assert result.document == {"model_id": "m", "type": "load_weights", "path": "p"}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_saved_weights_are_loaded_with_their_optimizer_or_without(
    ranks: int,
    whole: tuple[RunDir, Script, list[int]],
    on_one: tuple[RunDir, Script, list[int]],
    base: Path,
    tmp_path: Path,
) -> None:
    uninterrupted = adapter((on_one if ranks == 1 else whole)[0])
    saving = new_run(tmp_path / "one", base, ranks)
    script = Script(saving)
    script.losses(examples(8, seed=1))
    script.step()
    for earlier in (
        "weights/one",
        "weights/later",
        "sampler_weights/sampled",
    ):  # of weights that were deleted
        set_options(saving, earlier, WeightsOptions(public=True, expires_at=1.0))
    own = {"ttl_seconds": 3600, "user_metadata": {"epoch": "1"}}
    saved = script.add("save_weights", {"name": "one", "path": "tinker://m/weights/one", **own})
    sampler = script.add(
        "save_weights_for_sampler",
        {"name": "sampled", "path": "tinker://m/sampler_weights/sampled", **own},
    )
    script.add(
        "save_weights",
        {"name": "one", "path": "tinker://m/weights/one", "user_metadata": {"of": "a refused one"}},
    )
    for seed in (5, 6, 7):
        script.losses(examples(2, seed=seed))
        script.step()
    script.add("save_weights", {"name": "later", "path": "tinker://m/weights/later"})
    script.add("finish")
    assert run_attempt(saving, 1, ranks).kind is OutcomeKind.SUCCEEDED
    assert script.log.result(saved).document["path"] == "tinker://m/weights/one"  # pyright: ignore[reportOptionalMemberAccess]
    assert script.log.result(sampler).document["path"] == "tinker://m/sampler_weights/sampled"  # pyright: ignore
    assert [weights.name for weights in saved_weights(saving)] == ["one", "later"]
    assert {weights.checkpoint for weights in saved_weights(saving)} <= set(
        complete_checkpoints(saving)
    ), "not pruned"
    assert samplers_of(saving) == ["sampled"]
    for checkpoint_id in ("weights/one", "sampler_weights/sampled"):
        options = options_of(saving, checkpoint_id)
        assert (options.public, options.user_metadata) == (False, {"epoch": "1"})
        assert options.expires_at is not None
        assert options.expires_at > 3600
    assert options_of(saving, "weights/later") == WeightsOptions()
    probes = SamplerProbes.model_validate_json(
        saving.path(f"{sampler_key('sampled')}/{PROBES}").read_text()
    )
    assert len(probes.probes) > 0

    going_on = new_run(tmp_path / "two", base, ranks)
    script = Script(going_on)
    path = {
        "path": "p",
        "run_dir": str(saving.root),
        "checkpoint": saved_weights(saving)[0].checkpoint,
    }
    script.losses(examples(4, seed=11))  # dropped by the load
    loaded = script.add("load_weights", {**path, "optimizer": True})
    script.losses(examples(8, seed=2))
    script.step()
    script.add("finish")
    assert run_attempt(going_on, 1, ranks).kind is OutcomeKind.SUCCEEDED
    assert same(adapter(going_on), uninterrupted), "as if it had not been interrupted"
    assert script.log.result(loaded) is not None

    without = new_run(tmp_path / "three", base, 1)
    script = Script(without)
    script.add("load_weights", {**path, "optimizer": False})
    script.losses(examples(8, seed=2))
    script.step()
    script.add("finish")
    assert run_attempt(without, 1, 1).kind is OutcomeKind.SUCCEEDED
    assert not near(adapter(without), uninterrupted), "its moments begin again"
