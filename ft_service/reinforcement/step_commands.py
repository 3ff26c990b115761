"""The commands to the ranks that follow from a step's record, and the metrics that it is reported
with. Pure.

    checkpoint?  forward_backward…  optim_step  save_weights_for_sampler         the last record:
                 checkpoint?  finish

The loss of a token with advantage A is -sg(min(r, cap)) lp A, where r = exp(lp - q), lp is its
log-probability by the trainer and q by the sampler, both at the temperature of sampling, since what
is drawn from is the policy whose reward is to rise: the policy gradient with truncated importance
sampling. It is the CISPO of ft_service/tinker without a lower bound. With loss_type gspo it is the
GSPO there, whose ratio is one for all tokens of an answer, clipped to the cap and its inverse. What
counts as the mean over a step is in the advantages.

In distillation `distill` stands in place of `forward_backward`: its answers have no rewards, and
the ranks ask the teacher about each of their tokens. A teacher with a context reads the answer
behind another prompt: that row follows each answer's. What a server has said about them goes with
them: behind each answer the same tokens once more, at whose places the targets are the teacher's
likeliest words and the answer's own token, with their log-probabilities as weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from ft_service.reinforcement.advantages import advantages, step_advantages, weights
from ft_service.reinforcement.flat_steps import is_flat
from ft_service.reinforcement.schedule import RolloutSchedule
from ft_service.reinforcement.step_records import (
    AGENT_ERRORS,
    AnsweredPrompt,
    SampledAnswer,
    StepRecord,
    TaughtTokens,
    TrainedRow,
    mean_reward,
)
from ft_service.spec import JobSpec
from ft_service.spec.methods import ReinforcementOptions
from ft_service.tinker import tinker_messages_pb2 as pb
from ft_service.tinker.commands import TARGETS, TEMPERATURE, Command
from ft_service.tinker.loss_calls import CLIP_HIGH, CLIP_LOW

DATA_OF_COMMAND = 256
"""Answers of one command, at most."""
TOKENS_OF_COMMAND = 2**20
"""Tokens of one command, at most, unless one answer with its prompt has more: a token takes 20
bytes of the command's file.
"""
TAUGHT_TOKENS_OF_COMMAND = 2**18
"""The same where the teacher's words go with them, on half of the tokens: with 20 of them such a
token takes 270 bytes more.
"""


def first_commands(job_id: str) -> list[Command]:
    """The commands before the first step: the start is saved to sample from."""
    return [Command(0, "create_model", {"model_id": job_id}), save_command(1, 0)]


def sampler_name(after: int) -> str:
    """Name of the weights after so many steps, to sample from."""
    return f"step-{after:06d}"


def commands_of(record: StepRecord, spec: JobSpec, schedule: RolloutSchedule) -> list[Command]:
    """The commands of a record, in their order."""
    assert spec.reinforcement is not None, "the job's answers are sampled"
    head = record.head
    seq = record.head.first_seq
    commands: list[Command] = []

    def add(op: str, options: Mapping[str, Any], body: bytes = b"") -> None:
        commands.append(Command(seq + len(commands), op, options, body))

    valid = record.valid_mean_reward
    if head.step > 1 and (head.saves or valid is not None):
        add(
            "checkpoint",
            {"criterion": None if valid is None else -valid, "saves": head.saves or head.ends},
        )
    if head.ends:
        add(
            "finish",
            {"report": {"total_steps": schedule.total_steps, "more": _validation_metrics(record)}},
        )
        return commands
    if spec.sampled_for == "teacher":
        trained = [answer for answer in record.answers if answer.tokens]
        data = list(_answered(record))
        options = {TARGETS: sum(len(answer.tokens) for answer in trained)}
        is_told = any(answer.taught is not None for answer in trained)
        for part in _parts(data, TAUGHT_TOKENS_OF_COMMAND if is_told else TOKENS_OF_COMMAND):
            body = _answers_message(part).SerializeToString(deterministic=True)
            add("distill", options, body)
        more = answer_metrics(record)
    else:
        trained = list(_data(record, spec.reinforcement, spec.longest_rollout))
        data = [[datum] for answer in trained for datum in answer]
        at = {} if head.temperature == 1 else {TEMPERATURE: head.temperature}
        for part in _parts(data, TOKENS_OF_COMMAND):
            body = _message(part, spec.reinforcement).SerializeToString(deterministic=True)
            add("forward_backward", at, body)
        more = {**metrics_of(record, len(trained)), **_validation_metrics(record)}
    report = {
        "total_steps": schedule.total_steps,
        "epoch": head.step / schedule.steps_of_epoch,
        "more": more,
    }
    add("optim_step", {"scheduled": schedule.total_steps, "skipped": not data, "report": report})
    commands.append(save_command(seq + len(commands), head.step))
    return commands


def answer_metrics(record: StepRecord) -> dict[str, float]:
    """Metrics of a step's answers, whatever is learned of them."""
    answers = record.answers
    if not answers:
        return {}
    return {
        "completions/mean_length": fmean(len(answer.tokens) for answer in answers),
        "completions/max_length": float(max(len(answer.tokens) for answer in answers)),
        "completions/truncated": fmean(answer.truncated for answer in answers),
        "seconds/sampling": record.head.sampling_seconds,
    }


def metrics_of(record: StepRecord, trained: int) -> dict[str, float]:
    """Metrics of a step's graded answers. `trained`: number of answers that are trained on."""
    answers = record.answers
    head = record.head
    if not answers:
        return {}
    known = [answer.reward for answer in answers if answer.reward is not None]
    same = sum(map(is_flat, record.groups))
    found = {
        **answer_metrics(record),
        "completions/trained": trained / len(answers),
        "groups/without_variance": same / len(record.groups),
        "grader/errors": sum(answer.reward is None for answer in answers) / len(answers),
        "seconds/grading": head.grading_seconds,
    }
    if known:
        found = {"train_mean_reward": fmean(known), "train_reward_std": pstdev(known), **found}
    kinds = Counter(kind for answer in answers for kind in answer.errors)
    for kind, count in sorted(kinds.items()):
        whose = "environment" if kind.startswith(AGENT_ERRORS) else "grader"
        found[f"{whose}/errors/{kind}"] = count / len(answers)
    return {**found, **_environment_metrics(answers)}


def _environment_metrics(answers: Sequence[SampledAnswer]) -> dict[str, float]:
    """Means over rollouts. rewritten: the share of calls behind a rollout's first whose history was
    another one than was sampled. refused: refused calls of a rollout.
    """
    ways = [answer.trajectory for answer in answers if answer.trajectory is not None]
    if not ways:
        return {}
    later = sum(max(0, len(way.calls) - 1) for way in ways)
    return {
        "environment/turns": fmean(len(way.calls) for way in ways),
        "environment/rows": fmean(len(way.rows) for way in ways),
        "environment/rewritten": sum(way.rewritten for way in ways) / max(1, later),
        "environment/refused": fmean(sum(way.refused.values()) for way in ways),
        "environment/seconds": fmean(way.seconds for way in ways),
    }


def _validation_metrics(record: StepRecord) -> dict[str, float]:
    answers = [answer for prompt in record.validation for answer in prompt.answers]
    reward = mean_reward(answers)
    if not answers:
        return {}
    found = {"valid_completions/mean_length": fmean(len(answer.tokens) for answer in answers)}
    return found if reward is None else {"valid_mean_reward": reward, **found}


def save_command(seq: int, after: int) -> Command:
    """The command that saves the weights after so many steps, to sample from."""
    name = sampler_name(after)
    return Command(seq, "save_weights_for_sampler", {"name": name, "path": name})


def _data(
    record: StepRecord, options: ReinforcementOptions, longest: int
) -> Iterator[list[pb.Datum]]:
    """The rows of each answer whose advantage is not 0. All rows of an answer share its advantage,
    and count as one answer together.

    Of those that the loss leaves out since they were cut off it is a mean over the answers, but not
    over their tokens, as TRL has it.
    """

    def is_left_out(answer: SampledAnswer) -> bool:
        return options.mask_truncated_completions and answer.truncated

    counted = [answer for answer in record.answers if answer.reward is not None and answer.tokens]
    weight_of = dict(
        zip(
            map(id, counted),
            weights(
                [0 if is_left_out(a) else len(a.tokens) for a in counted],
                options.loss_type,
                longest,
            ),
            strict=True,
        )
    )
    for group in record.groups:
        own = _advantages(group, options)
        for answer, of_tokens in zip(group.answers, own, strict=True):
            if id(answer) not in weight_of or is_left_out(answer):
                continue
            if options.beta and answer.reference is not None:
                # An estimate of the divergence, as part of the reward (Ziegler et al., 2019,
                # equation 2).
                of_tokens -= options.beta * (
                    np.asarray(answer.logprobs) - np.asarray(answer.reference)
                )
            if of_tokens.any():
                yield list(_rows(group, answer, of_tokens * weight_of[id(answer)]))


def _advantages(group: AnsweredPrompt, options: ReinforcementOptions) -> list[np.ndarray]:
    """Of each answer of a group the advantages of its tokens, float64, before `beta`. With process
    supervision those of its calls, each of all tokens of the call's answer.
    """
    of_calls = group.rewards_of_calls
    if of_calls is None:
        own = advantages(group.rewards, options.scale_rewards)
        return [np.full(len(a.tokens), value) for a, value in zip(group.answers, own, strict=True)]
    found: list[np.ndarray] = []
    steps = step_advantages(of_calls, options.scale_rewards)
    for answer, own in zip(group.answers, steps, strict=True):
        parts = [np.zeros(0)]
        for row in answer.rows(group.ids) if own else ():
            answers = zip(row.calls, row.sampled, strict=True)
            parts += [np.full(end - begin, own[call]) for call, (begin, end) in answers]
        found.append(np.concatenate(parts) if own else np.zeros(len(answer.tokens)))
    return found


def _answered(record: StepRecord) -> Iterator[list[pb.Datum]]:
    """The rows of each answer, in which its tokens have weight 1, each with what its teacher reads
    where that is another row, or with what a server that was asked has said about it.
    """
    for group in record.groups:
        for answer in group.answers:
            if not answer.tokens:
                continue
            (row,) = answer.rows(group.ids)  # there is no environment
            weights = {"weights": np.ones(len(answer.tokens))}
            own = [_datum(row, weights)]
            if answer.taught is not None:
                own.append(_taught_datum(row, answer.taught))
            elif group.teacher_ids:
                (behind,) = answer.rows(group.teacher_ids)
                own.append(_datum(behind, weights))
            yield own


def _taught_datum(row: TrainedRow, said: TaughtTokens) -> pb.Datum:
    """A teacher's likeliest words at the places of a row's sampled tokens, and behind them that
    token; their log-probabilities are the weights.
    """
    datum = pb.Datum()
    datum.model_input.add().encoded_text.tokens = np.asarray(row.tokens[:-1], "<i4").tobytes()
    shape = len(row.tokens) - 1, len(said.words[0]) + 1
    words, logprobs = np.zeros(shape, "<i8"), np.zeros(shape, "<f4")
    places = _places(row)
    words[places] = np.column_stack([said.words, row.answered])
    logprobs[places] = np.column_stack([said.logprobs, said.own])
    for name, dtype, values in (
        ("target_tokens", pb.DTYPE_INT64, words),
        ("weights", pb.DTYPE_FLOAT32, logprobs),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = dtype, values.tobytes()
        tensor.shape.extend(shape)
    return datum


def _answers_message(data: Sequence[pb.Datum]) -> pb.ForwardBackwardRequest:
    """Rows in the form that the ranks check and read."""
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    message.data.extend(data)
    return message


def _parts(data: Sequence[Sequence[pb.Datum]], most_tokens: int) -> Iterator[list[pb.Datum]]:
    """The data of each command, in their order. `data`: what stays together."""
    part: list[pb.Datum] = []
    together = tokens = 0
    for own in data:
        more = sum(len(datum.model_input[0].encoded_text.tokens) for datum in own) // 4  # int32
        if part and (together == DATA_OF_COMMAND or tokens + more > most_tokens):
            yield part
            part = []
            together = tokens = 0
        part += own
        together += 1
        tokens += more
    if part:
        yield part


def _rows(group: AnsweredPrompt, answer: SampledAnswer, own: np.ndarray) -> Iterator[pb.Datum]:
    """`own`: advantage times weight of each of the answer's tokens."""
    logprobs = np.asarray(answer.logprobs)
    at = 0
    for row in answer.rows(group.ids):
        there = at + len(row.answered)
        yield _datum(row, {"logprobs": logprobs[at:there], "advantages": own[at:there]})
        at = there


def _places(row: TrainedRow) -> np.ndarray:
    """int64 [sampled tokens]: the place before each of them."""
    return np.concatenate([np.arange(begin, end) for begin, end in row.sampled]) - 1


def _datum(row: TrainedRow, inputs: Mapping[str, np.ndarray]) -> pb.Datum:
    """`inputs`: of the row's sampled tokens; its other tokens count for nothing."""
    places = _places(row)
    datum = pb.Datum()
    datum.model_input.add().encoded_text.tokens = np.asarray(row.tokens[:-1], "<i4").tobytes()
    arrays: dict[str, tuple[pb.DType, np.ndarray]] = {
        "target_tokens": (pb.DTYPE_INT64, np.asarray(row.tokens[1:], "<i8"))
    }
    for name, values in inputs.items():
        of_targets = np.zeros(len(row.tokens) - 1)
        of_targets[places] = values
        arrays[name] = pb.DTYPE_FLOAT32, of_targets.astype("<f4")
    for name, (dtype, values) in arrays.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = dtype, values.tobytes()
        tensor.shape.append(len(values))
    return datum


def _message(data: Sequence[pb.Datum], options: ReinforcementOptions) -> pb.ForwardBackwardRequest:
    cap = options.importance_sampling_cap
    of_sequences = options.loss_type == "gspo"
    message = pb.ForwardBackwardRequest(loss_fn="gspo" if of_sequences else "cispo")
    message.data.extend(data)
    message.loss_fn_config[CLIP_LOW] = 1 / cap if of_sequences else 0.0
    message.loss_fn_config[CLIP_HIGH] = cap
    return message
