"""Reinforcement learning on real gloo ranks, from records of steps: against a written-out
reference, on every number of ranks, and that no step is trained twice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.reinforcement.prompt_file import PromptFile
from ft_service.reinforcement.schedule import RolloutSchedule
from ft_service.reinforcement.step_commands import commands_of, first_commands
from ft_service.reinforcement.step_records import (
    AnsweredPrompt,
    SampledAnswer,
    StepRecord,
    TrainedRow,
)
from ft_service.rundir.checkpoints import complete_checkpoints
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import CheckpointMarker, Outcome, OutcomeKind, Result
from ft_service.rundir.events import read_segments
from ft_service.spec import JobSpec
from ft_service.tinker.commands import CommandLog
from ft_service.tinker.saved_weights import samplers_of
from tests.support.ranks import run_on_ranks
from tests.support.rollouts import (
    answer,
    group,
    random_groups,
    random_trajectories,
    record,
    rollout_spec,
    save_prompts,
)
from tests.support.training.attempts import adapter, attempt_on_rank, losses, run_attempt
from tests.support.training.engine_runs import engine_on_rank, new_engine, prepare, state_of
from tests.support.training.models import (
    VOCABULARY,
    reference,
    save_chat_base,
    save_chats,
    spec_for,
)
from workers.base.load import initial_adapter, plain_name
from workers.output import report
from workers.tinker import attendance

PRECISION = {"default": "nf4", "compute": "fp32"}
RATE = 2e-3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_base(tmp_path_factory.mktemp("base"))


def new_run(
    folder: Path,
    base: Path,
    ranks: int,
    *,
    adam: Mapping[str, float] | None = None,
    **hyperparameters: Any,
) -> tuple[RunDir, JobSpec, RolloutSchedule]:
    """A run of two steps of three prompts. `adam`: options of `training`."""
    folder.mkdir(parents=True, exist_ok=True)
    training = {
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "max_grad_norm": 0.0,
    }
    spec = rollout_spec(
        base,
        save_prompts(folder / "prompts.jsonl", 6),
        {"batch_size": 3, "num_generations": 4, **hyperparameters},
        ranks=ranks,
        validation=save_prompts(folder / "valid.jsonl", 2, first=50),
        training={"max_length": 120, "per_device_train_batch_size": 2, **training, **(adam or {})},
        lora={"r": 4},
        precision=PRECISION,
    )
    run = RunDir(folder / "run")
    run.write("spec.json", spec)
    return run, spec, RolloutSchedule.of(spec, 6, 2)


def give(
    run: RunDir, spec: JobSpec, schedule: RolloutSchedule, records: Sequence[StepRecord]
) -> None:
    for command in [
        *first_commands(spec.job_id),
        *(one for own in records for one in commands_of(own, spec, schedule)),
    ]:
        CommandLog(run).put(command)


def two_steps(seed: int = 0, temperature: float = 1.0) -> list[StepRecord]:
    """Records of two steps, each of one forward_backward, and of the end. The second step has
    rollouts of several calls, of which those to the last prompt have a reward for each.

    `temperature`: of the answers.
    """
    first = record(
        1, random_groups(3, 4, VOCABULARY, seed=seed), first_seq=2, temperature=temperature
    )
    rollouts = random_trajectories(3, 4, VOCABULARY, seed=seed + 1, processes=[2])
    second = record(2, rollouts, first_seq=5, temperature=temperature)
    return [first, second, record(3, [], first_seq=8, ends=True)]


def trained(folder: Path, base: Path, ranks: int, **options: Any) -> RunDir:
    run, spec, schedule = new_run(folder, base, ranks, **options)
    give(run, spec, schedule, two_steps(temperature=options.get("temperature", 1.0)))
    assert run_attempt(run, 1, ranks).kind is OutcomeKind.SUCCEEDED
    return run


@pytest.fixture(scope="module")
def on_two(base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained(tmp_path_factory.mktemp("two"), base, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks(on_two: RunDir, base: Path, tmp_path: Path, ranks: int) -> None:
    """Gradients are compared before AdamW, which divides them by their size: where they are next to
    nothing, the step is the whole of what rounding has left.
    """
    run = trained(tmp_path, base, ranks)
    whole = gradients(on_two)
    assert max(float(tensor.abs().max()) for tensor in whole.values()) > 0.1, "there are some"
    for name, tensor in gradients(run).items():
        torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-6)
    stored = adapter(on_two)
    for name, tensor in adapter(run).items():
        torch.testing.assert_close(stored[name], tensor, rtol=0, atol=1e-5)


def gradients(run: RunDir, beta: float = 0.9) -> dict[str, Tensor]:
    """That of the second step, and `beta`, AdamW's first, times that of the first one."""
    state = state_of(run, complete_checkpoints(run)[-1])
    return {
        name.removeprefix("exp_avg/"): own / (1 - beta)
        for name, own in state.items()
        if name.startswith("exp_avg/")
    }


def test_it_is_the_policy_gradient_of_the_groups(on_two: RunDir, base: Path) -> None:
    """Against transformers and PEFT as released, on the dequantised base, with GRPO's loss written
    out.
    """
    assert_follows_gradient(on_two, base, betas=(0.9, 0.999), eps=1e-8)


def test_adamw_has_the_numbers_of_the_job_and_the_policy_the_temperature_of_its_answers(
    base: Path, tmp_path: Path
) -> None:
    adam = {"adam_beta1": 0.5, "adam_beta2": 0.8, "adam_epsilon": 1e-3}
    run = trained(tmp_path, base, 1, adam=adam, temperature=0.6)
    assert_follows_gradient(run, base, temperature=0.6, betas=(0.5, 0.8), eps=1e-3)


def assert_follows_gradient(
    run: RunDir, base: Path, *, temperature: float = 1.0, **adam: Any
) -> None:
    """`adam`: what torch's AdamW has."""
    spec = run.read("spec.json", JobSpec)
    assert spec is not None
    model = reference(base, spec)
    named = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(initial_adapter(plain_name(name), tuple(parameter.shape), spec.seed))
    stock = torch.optim.AdamW(named.values(), lr=RATE, weight_decay=0.0, **adam)
    for own in two_steps()[:2]:
        grpo_loss(model, own, temperature).backward()
        stock.step()
        stock.zero_grad()
    beta = adam["betas"][0]
    found = gradients(run, beta)
    assert found.keys() == named.keys()
    for name, parameter in named.items():
        expected = stock.state[parameter]["exp_avg"] / (1 - beta)
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-5)
    stored = adapter(run)
    for name, parameter in named.items():
        torch.testing.assert_close(
            stored[name.replace(".default", "")], parameter.detach(), rtol=0, atol=2e-5
        )


def grpo_loss(model: nn.Module, own: StepRecord, temperature: float) -> Tensor:
    """The mean over all tokens of -min(ratio, 2) A log p, whose ratio has no gradient."""
    parts: list[Tensor] = []
    for prompt in own.groups:
        rewards = torch.tensor([answer.reward for answer in prompt.answers])
        for one, outcome in zip(prompt.answers, rewards - rewards.mean(), strict=True):
            advantage = outcome if prompt.rewards_of_calls is None else of_tokens(prompt, one)
            drawn = torch.cat(
                [logs_of_drawn(model, row, temperature) for row in one.rows(prompt.ids)]
            )
            ratio = (drawn.detach() - torch.tensor(one.logprobs)).exp().clamp(max=2.0)
            parts.append(-(ratio * advantage * drawn))
    return torch.cat(parts).mean()


def of_tokens(prompt: AnsweredPrompt, own: SampledAnswer) -> Tensor:
    """A(t), the sum over the calls that end at t or later of their rewards less the mean over all
    calls of the group (DeepSeekMath, section 4.1.3), of each sampled token, row by row.
    """
    ways = [answer.trajectory for answer in prompt.answers]
    every = torch.tensor([reward for way in ways if way is not None for reward in way.rewards])
    assert own.trajectory is not None
    lengths = [call["completion_tokens"] for call in own.trajectory.calls]
    ends = torch.tensor(lengths).cumsum(0)
    normalised = torch.tensor(own.trajectory.rewards) - every.mean()
    found = [normalised[ends > t].sum() for t in range(sum(lengths))]
    by_call = torch.stack(found).split(lengths)
    return torch.cat([by_call[number] for row in own.trajectory.rows for number in row.calls])


def logs_of_drawn(model: nn.Module, row: TrainedRow, temperature: float) -> Tensor:
    """Log-probabilities of a row's sampled tokens."""
    ids = torch.tensor(row.tokens)
    logs = model(ids[None]).logits[0].float().div(temperature).log_softmax(-1)
    places = [place for begin, end in row.sampled for place in range(begin, end)]
    return torch.stack([logs[place - 1, ids[place]] for place in places])


def test_what_the_ranks_tell_and_offer(on_two: RunDir, base: Path) -> None:
    prompts = PromptFile(on_two)
    assert (prompts.header.training, prompts.header.validation) == (6, 2)
    tokenizer: Any = load_tokenizer(str(base))
    assert tokenizer.eos_token_id in prompts.header.ends
    third = prompts.training(2)
    held_out = prompts.validation(1)
    assert (third.item, third.text) == ({"answer": "3"}, "2 + 1 =")
    assert held_out.item == {"answer": "52"}
    messages = [{"role": "user", "content": "2 + 1 ="}]
    assert list(third.ids) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert losses(on_two, "train_mean_reward").keys() == {1, 2}
    assert all(value > 0 for value in losses(on_two, "sampler/logprob_gap").values())
    assert samplers_of(on_two) == ["step-000000", "step-000001", "step-000002"]


def attempt_with_short_wait_on_rank(rank: int, world: int, root: str, attempt: int) -> Outcome:
    attendance.LEAVE_AFTER_SECONDS = 0.5
    return attempt_on_rank(rank, world, root, attempt)


def test_an_attempt_without_commands_ends_and_the_next_goes_on_with_what_was_recorded(
    on_two: RunDir, base: Path, tmp_path: Path
) -> None:
    run, spec, schedule = new_run(tmp_path, base, 2)
    records = two_steps()
    give(run, spec, schedule, records[:1])
    outcome = run_attempt(run, 1, 2, on_rank=attempt_with_short_wait_on_rank)
    assert outcome.kind is OutcomeKind.STOPPED
    give(run, spec, schedule, records)
    assert run_attempt(run, 2, 2, outcome.checkpoint).kind is OutcomeKind.SUCCEEDED
    whole = adapter(on_two)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in adapter(run).items())
    result = run.read("result.json", Result)
    assert result is not None
    assert result.steps == 2


def engine_with_heartbeats_on_rank(rank: int, world: int, root: str) -> None:
    """An engine whose jobs send heartbeats often while they wait."""
    report.HEARTBEAT_SECONDS = 0.05
    engine_on_rank(rank, world, root)


@pytest.mark.slow
def test_in_an_engine_beside_others_it_ends_as_alone(
    on_two: RunDir, base: Path, tmp_path: Path
) -> None:
    """Beside supervised training, and a second job of its kind, which gets each step when the one
    before is done.
    """
    own, spec, schedule = new_run(tmp_path / "own", base, 2)
    second, its_spec, its_schedule = new_run(tmp_path / "second", base, 2)
    training = {"max_steps": 4, "batch_size": 4, "learning_rate": 5e-3}
    supervised = spec_for(
        base,
        save_chats(tmp_path / "chats.jsonl", 6),
        ranks=2,
        training=training,
        precision=PRECISION,
    )
    specs = {
        "own": spec,
        "second": its_spec.model_copy(update={"job_id": "ftjob-second", "seed": 3}),
        "supervised": supervised.model_copy(update={"job_id": "ftjob-supervised"}),
    }
    runs = {"own": own, "second": second, "supervised": RunDir(tmp_path / "supervised")}
    engine = new_engine(tmp_path / "engine", spec)
    for name, of_job in specs.items():
        prepare(of_job, runs[name], engine)
    give(own, spec, schedule, two_steps())
    ended = threading.Event()

    def give_each_step() -> None:
        records = two_steps(seed=5)
        for number, following in enumerate(records, start=1):
            give(second, specs["second"], its_schedule, records[:number])
            while not CommandLog(second).has_result(
                following.head.first_seq + 2
            ) and not ended.wait(0.01):
                pass

    thread = threading.Thread(target=give_each_step)
    thread.start()
    try:
        run_on_ranks(engine_with_heartbeats_on_rank, 2, str(engine.root))
    finally:
        ended.set()
        thread.join()
    assert {
        name: run.has("adapter/adapter_model.safetensors") for name, run in runs.items()
    } == dict.fromkeys(runs, True)
    whole = adapter(on_two)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in adapter(own).items())
    assert [len(losses(run, "learning_rate")) for run in runs.values()] == [2, 2, 4]
    assert any(not segment.events for segment in read_segments(second, 1)), (
        "who waits for commands is not taken to be stuck"
    )


@pytest.fixture(scope="module")
def after_one_step(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The adapter of a job of one step, on one rank."""
    run, spec, _ = new_run(tmp_path_factory.mktemp("one"), base, 1)
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"max_steps": 1})})
    run.write("spec.json", spec)
    records = [
        record(1, random_groups(3, 4, VOCABULARY, seed=0), first_seq=2),
        record(2, [], first_seq=5, ends=True),
    ]
    give(run, spec, RolloutSchedule.of(spec, 6, 2), records)
    assert run_attempt(run, 1, 1).kind is OutcomeKind.SUCCEEDED
    return adapter(run)


@pytest.mark.parametrize(
    "paused",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["at once", "paused in between"],
)
def test_the_best_step_by_reward_is_published(
    base: Path, after_one_step: dict[str, Tensor], tmp_path: Path, paused: bool
) -> None:
    run, spec, schedule = new_run(tmp_path, base, 1)
    spec = spec.model_copy(
        update={"training": spec.training.model_copy(update={"load_best_model_at_end": True})}
    )
    run.write("spec.json", spec)
    good = [group(0, [answer([5], 1.0)], ids=())]
    bad = [group(0, [answer([5], 0.0)], ids=())]
    groups = random_groups(3, 4, VOCABULARY, seed=0)
    records = [
        record(1, groups, first_seq=2),
        record(2, groups, first_seq=5, validation=good),
        record(3, [], first_seq=9, ends=True, validation=bad),
    ]
    attempt = 1
    checkpoint = None
    if paused:
        give(run, spec, schedule, records[:1])
        attempt = 2
        checkpoint = run_attempt(run, 1, 1, on_rank=attempt_with_short_wait_on_rank).checkpoint
        assert checkpoint == "step-1-a1"
    give(run, spec, schedule, records)
    assert run_attempt(run, attempt, 1, checkpoint).kind is OutcomeKind.SUCCEEDED
    markers = {
        name: run.read(f"checkpoints/{name}/COMPLETE", CheckpointMarker)
        for name in complete_checkpoints(run)
    }
    criteria = {name: marker.criterion for name, marker in markers.items() if marker}
    assert criteria == {f"step-1-a{attempt}": -1.0, f"step-2-a{attempt}": 0.0}
    assert all(torch.equal(tensor, after_one_step[name]) for name, tensor in adapter(run).items())


def test_a_step_without_variance_changes_nothing(base: Path, tmp_path: Path) -> None:
    run, spec, schedule = new_run(tmp_path, base, 1)
    same = [group(0, [answer([5], 1.0), answer([6], 1.0)])]
    give(
        run,
        spec,
        schedule,
        [
            record(1, same, first_seq=2),
            record(2, same, first_seq=4),
            record(3, [], first_seq=6, ends=True),
        ],
    )
    assert run_attempt(run, 1, 1).kind is OutcomeKind.SUCCEEDED
    assert all(not tensor.any() for name, tensor in adapter(run).items() if "lora_B" in name)
    assert losses(run, "groups/without_variance") == {1: 1.0, 2: 1.0}
