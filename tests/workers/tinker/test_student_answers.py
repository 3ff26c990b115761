"""A student that answers: its commands on real gloo ranks, beside the formula; resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.plan.teacher import teaching_spec
from ft_service.reinforcement.prompt_file import PromptFile
from ft_service.reinforcement.schedule import RolloutSchedule
from ft_service.reinforcement.step_commands import commands_of, first_commands
from ft_service.reinforcement.step_records import StepRecord, TaughtTokens
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.spec import BaseModelRef, JobContext, JobSpec, parse_request, resolve
from ft_service.spec.teachers import TeacherRef
from ft_service.tinker.commands import CommandLog
from tests.support.bases import AS_IT_IS
from tests.support.rollouts import random_groups, record, save_prompts
from tests.support.training.attempts import adapter, attempt_on_rank, run_attempt, table
from tests.support.training.models import VOCABULARY, reference, save_chat_base
from workers.tinker import attendance

RATE = 2e-3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student's base; beside it another one with the same tokenizer."""
    folder = tmp_path_factory.mktemp("bases")
    save_chat_base(folder / "other", hidden_size=96)
    return save_chat_base(folder / "own")


def new_run(
    folder: Path, base: Path, ranks: int, at: str = "ranks", **method: Any
) -> tuple[RunDir, JobSpec]:
    folder.mkdir(parents=True, exist_ok=True)
    teacher = method.get("teacher", "other")
    body: dict[str, Any] = {
        "model": "tiny",
        "training_file": "prompts",
        "method": {
            "type": "distillation",
            "distillation": {
                "teacher": teacher,
                "answers": "student",
                **method,
                **({} if at == "ranks" else {"teacher_at": at}),
                "hyperparameters": {"batch_size": 3, "num_generations": 4},
            },
        },
        "training": {
            "max_length": 120,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
            "max_grad_norm": 0.0,
        },
        "lora": {"r": 4},
        "precision": {"default": "nf4", "compute": "fp32"},
        "distributed": {"nproc_per_node": ranks, **AS_IT_IS},
    }
    spec = resolve(
        parse_request(body),
        JobContext(
            job_id="ftjob-test",
            organization="local",
            model=BaseModelRef(name="tiny", path=str(base)),
            training_data=save_prompts(folder / "prompts.jsonl", 6),
            validation_data=None,
            teacher=None
            if teacher is None
            else TeacherRef(
                kind="base" if at == "ranks" else "server",
                name="other",
                path=str(base.with_name("other")),
            ),
            seed=7,
            gpus=0,
        ),
    )
    run = RunDir(folder / "run")
    run.write("spec.json", spec)
    return run, spec


def two_steps() -> list[StepRecord]:
    """Records of two steps, each of one distill, and of the end; their answers have no rewards."""
    seqs = (2, 5)
    steps = [
        record(number, _ungraded(random_groups(3, 4, VOCABULARY, seed=number)), first_seq=seq)
        for number, seq in enumerate(seqs, 1)
    ]
    return [*steps, record(3, [], first_seq=8, ends=True)]


def _ungraded(groups: Any) -> list[Any]:
    def bare(answer: Any) -> Any:
        return answer.model_copy(update={"reward": None, "errors": {}, "scores": {}})

    return [
        group.model_copy(update={"answers": [bare(answer) for answer in group.answers]})
        for group in groups
    ]


def give(run: RunDir, spec: JobSpec, records: list[StepRecord]) -> None:
    schedule = RolloutSchedule.of(spec, 6, 0)
    for command in [
        *first_commands(spec.job_id),
        *(one for own in records for one in commands_of(own, spec, schedule)),
    ]:
        CommandLog(run).put(command)


def trained(folder: Path, base: Path, ranks: int, **method: Any) -> RunDir:
    run, spec = new_run(folder, base, ranks, **method)
    give(run, spec, two_steps())
    assert run_attempt(run, 1, ranks).kind is OutcomeKind.SUCCEEDED
    return run


def attempt_with_short_wait_on_rank(rank: int, world: int, root: str, attempt: int) -> Outcome:
    attendance.LEAVE_AFTER_SECONDS = 0.5
    return attempt_on_rank(rank, world, root, attempt)


def mean_reverse_kl(base: Path, spec: JobSpec, own: StepRecord) -> float:
    """KL(student || teacher) at every token of the answers, of the student as it begins."""
    other = base.with_name("other")
    student: Any = reference(base, spec)
    teacher: Any = reference(other, teaching_spec(spec, str(other), "other"))
    found: list[Tensor] = []
    with torch.no_grad(), student.disable_adapter(), teacher.disable_adapter():
        for group in own.groups:
            for answer in group.answers:
                ids = torch.tensor([[*group.ids, *answer.tokens]])
                first = len(group.ids) - 1
                s, t = (
                    model(input_ids=ids).logits[0, first:-1].double().log_softmax(-1)
                    for model in (student, teacher)
                )
                found.append((s.exp() * (s - t)).sum(-1))
    return torch.cat(found).mean().item()


def test_a_student_learns_from_its_own_answers_on_ranks(base: Path, tmp_path: Path) -> None:
    run = trained(tmp_path, base, 2, top_k=None)
    spec = run.read("spec.json", JobSpec)
    assert spec is not None
    assert (spec.method, spec.by_commands, spec.longest_answer) == ("distillation", True, 60)
    first, second = (row for row in table(run) if row["train_loss"])
    expected = mean_reverse_kl(base, spec, two_steps()[0])
    assert float(first["train_loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(first["kl/reverse"]) == pytest.approx(expected, rel=1e-5)
    assert "teacher/gap" in second
    assert "grader/errors" not in second


CONTEXT = [5, 9, 4, 11, 6]


def behind_context(own: StepRecord) -> StepRecord:
    """A record whose teacher reads five tokens more before each prompt."""
    groups = [
        group.model_copy(update={"teacher_ids": [*CONTEXT, *group.ids]}) for group in own.groups
    ]
    return own.model_copy(update={"groups": groups})


def divergence_behind_context(base: Path, spec: JobSpec, own: StepRecord) -> float:
    """KL(student || base behind the context) at every token, of the student as it begins."""
    model: Any = reference(base, spec)
    found: list[Tensor] = []
    with torch.no_grad(), model.disable_adapter():
        for group in own.groups:
            for answer in group.answers:
                s, t = (
                    model(input_ids=torch.tensor([[*ids, *answer.tokens]]))
                    .logits[0, len(ids) - 1 : -1]
                    .double()
                    .log_softmax(-1)
                    for ids in (group.ids, group.teacher_ids)
                )
                found.append((s.exp() * (s - t)).sum(-1))
    return torch.cat(found).mean().item()


def test_a_student_learns_what_its_base_says_behind_a_context(base: Path, tmp_path: Path) -> None:
    run, spec = new_run(tmp_path, base, 2, teacher=None, with_context="Be brief.")
    records = [behind_context(own) for own in two_steps()]
    give(run, spec, records)
    assert run_attempt(run, 1, 2).kind is OutcomeKind.SUCCEEDED
    first, second = (row for row in table(run) if row["train_loss"])
    expected = divergence_behind_context(base, spec, records[0])
    assert expected > 1e-4
    assert float(first["train_loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(second["train_loss"]) > 0
    prompts = PromptFile(run)
    assert prompts.header.training == 6, "each is one, with what its teacher reads"
    one = prompts.training(0)
    tokenizer = load_tokenizer(spec.model.path, spec.chat_template)
    asked, behind = (str(tokenizer.decode([*ids])) for ids in (one.ids, one.teacher_ids))
    assert "0 + 1 =" in asked
    assert "Be brief." not in asked
    assert behind.index("Be brief.") < behind.index("0 + 1 =")


TOP = 6


def told(base: Path, spec: JobSpec, own: StepRecord) -> StepRecord:
    """A record with what the other base thinks of its answers, as a server tells it: six digits."""
    other = base.with_name("other")
    teacher: Any = reference(other, teaching_spec(spec, str(other), "other"))

    def asked(ids: Any, answer: Any) -> Any:
        whole = torch.tensor([[*ids, *answer.tokens]])
        with torch.no_grad(), teacher.disable_adapter():
            logs = teacher(input_ids=whole).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        top = logs.topk(TOP)
        of_tokens = logs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        said = TaughtTokens(
            own=of_tokens.tolist(), words=top.indices.tolist(), logprobs=top.values.tolist()
        )
        return answer.model_copy(update={"taught": said})

    groups = [
        group.model_copy(update={"answers": [asked(group.ids, one) for one in group.answers]})
        for group in own.groups
    ]
    return own.model_copy(update={"groups": groups})


@pytest.mark.slow
def test_what_a_server_tells_of_a_teacher_is_learned_as_if_ranks_held_it(
    base: Path, tmp_path: Path
) -> None:
    by_ranks, spec = new_run(tmp_path / "held", base, 1, top_k=TOP)
    give(by_ranks, spec, two_steps())
    asked, served = new_run(tmp_path / "asked", base, 1, at="server", top_k=TOP)
    give(asked, served, [told(base, served, one) for one in two_steps()])
    for run in (by_ranks, asked):
        assert run_attempt(run, 1, 1).kind is OutcomeKind.SUCCEEDED
    names = ("train_loss", "kl/forward", "kl/reverse", "teacher/kept", "teacher/gap")
    for name in (*names, "teacher/agreement", "student/logps"):
        ours, theirs = ([float(row[name]) for row in table(run)[:2]] for run in (asked, by_ranks))
        assert ours == pytest.approx(theirs, rel=1e-4), name
    for name, matrix in adapter(by_ranks).items():
        torch.testing.assert_close(adapter(asked)[name], matrix, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_ranks_and_a_second_attempt_change_nothing(base: Path, tmp_path: Path) -> None:
    whole = trained(tmp_path / "two", base, 2, top_k=6)
    alone = trained(tmp_path / "one", base, 1, top_k=6)
    for name in ("train_loss", "kl/forward", "teacher/kept", "student/logps"):
        ours, theirs = ([float(row[name]) for row in table(own)[:2]] for own in (whole, alone))
        assert ours == pytest.approx(theirs, rel=1e-5), name
    run, spec = new_run(tmp_path / "again", base, 2, top_k=6)
    records = two_steps()
    give(run, spec, records[:1])
    outcome = run_attempt(run, 1, 2, on_rank=attempt_with_short_wait_on_rank)
    assert outcome.kind is OutcomeKind.STOPPED
    give(run, spec, records)
    assert run_attempt(run, 2, 2, outcome.checkpoint).kind is OutcomeKind.SUCCEEDED
    for name, matrix in adapter(whole).items():
        assert torch.equal(adapter(run)[name], matrix), name
