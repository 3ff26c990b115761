"""The loop that samples, grades, records and gives commands: with ranks and samplers that only
answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.control.reinforcement import reinforcement_jobs
from ft_service.control.reinforcement.reinforcement_jobs import (
    JobPaused,
    ReinforcementJobs,
)
from ft_service.errors import SpecError
from ft_service.graders import text_processes
from ft_service.graders.limits import GraderLimits
from ft_service.host.helper_process import HelperProcess
from ft_service.jobs.states import Desired
from ft_service.reinforcement.prompt_file import PromptTokens, write_prompts
from ft_service.reinforcement.step_records import (
    record_key,
    recorded_steps,
)
from ft_service.reinforcement.step_texts import read_texts, texts_key
from ft_service.serving import server_samples, token_sampler
from ft_service.serving.handoff import teaching_servers
from ft_service.serving.server_samples import PREFIX, ServerSampler
from ft_service.serving.token_sampler import Sampler, SamplingStopped
from ft_service.settings import Settings
from ft_service.spec import parse_request
from ft_service.spec.teachers import TeacherRef
from ft_service.storage.locations import Places
from ft_service.store.records import NewEvent
from ft_service.tinker.commands import TARGETS, Command, CommandLog
from ft_service.tinker.loss_calls import LossRequest
from ft_service.tinker.saved_weights import samplers_of
from tests.support.attempts import wait_for
from tests.support.creating import create_job
from tests.support.reconciling import PROJECT, get, new_store
from tests.support.rest.fake_vllm import FakeVllm, fake_vllm
from tests.support.rollout_loops import (
    BASE,
    HEADER,
    STEPS,
    TUNED,
    EchoSampler,
    Place,
)
from tests.support.rollouts import rollout_spec, save_prompts


def new_place(
    folder: Path,
    sampler: Sampler,
    answers: Sequence[dict[str, str]] | None = None,
    context: Sequence[int] = (),
    **hyperparameters: Any,
) -> Place:
    """`answers`: items of the training prompts; None: each has the first token of its prompt.
    `context`: what a teacher reads before each of these.
    """
    files = (
        save_prompts(folder / "prompts.jsonl", HEADER.training),
        save_prompts(folder / "valid.jsonl", HEADER.validation),
    )
    given = {
        "batch_size": 2,
        "num_generations": 2,
        "eval_interval": 2,
        "max_completion_length": 4,
        **hyperparameters,
    }
    spec = rollout_spec(
        folder,
        files[0],
        given,
        validation=files[1],
        training={"max_length": 32, "max_steps": STEPS},
    )
    run = Places(folder).run(spec.job_id)
    numbers = [{"answer": str(number)} for number in range(HEADER.training)]
    prompts = [
        PromptTokens(
            [i, 2],
            item,
            f"prompt {i}",
            tools=True,
            teacher_ids=[*context, i, 2] if context else (),
        )
        for i, item in enumerate(answers or numbers)
    ]
    held_out = [
        PromptTokens([i, 3], item, f"held out {i}")
        for i, item in enumerate(numbers[: HEADER.validation])
    ]
    write_prompts(run, HEADER, [*prompts, *held_out])
    return Place(run, spec, sampler)


def test_a_students_answers_are_recorded_without_grades_and_given_to_its_teacher(
    tmp_path: Path,
) -> None:
    place = new_place(tmp_path, EchoSampler())
    method = {
        "type": "distillation",
        "distillation": {
            "teacher": "tiny",
            "answers": "student",
            "hyperparameters": {
                "batch_size": 2,
                "num_generations": 2,
                "max_completion_length": 4,
            },
        },
    }
    student = parse_request({"model": "tiny", "training_file": "prompts", "method": method}).method
    changed = {"loss": student.loss_options(), "reinforcement": student.reinforcement_options()}
    place.spec = place.spec.model_copy(update={**changed, "validation_data": None})
    assert (place.spec.method, place.job.spec.by_commands) == ("distillation", True)
    with place.ranks():
        place.loop().run()
    records = place.records()
    assert [len(record.answers) for record in records] == [4, 4, 4, 0]
    assert {answer.reward for record in records for answer in record.answers} == {None}
    log = CommandLog(place.run)
    given = [command for seq in range(log.first_missing()) if (command := log.command(seq))]
    taught = [command for command in given if command.op == "distill"]
    assert len(taught) == STEPS
    assert "forward_backward" not in {command.op for command in given}
    call = LossRequest.parse(taught[0].body).call(vocabulary=300, longest=32)
    assert [datum.inputs["weights"].tolist() for datum in call.data] == [[0, 1, 1]] * 4
    assert taught[0].options == {TARGETS: 8}
    report = next(command.options["report"] for command in given if command.op == "optim_step")
    assert report["more"].keys() == {
        "completions/mean_length",
        "completions/max_length",
        "completions/truncated",
        "seconds/sampling",
    }


def test_what_a_teacher_with_a_context_reads_is_recorded_with_the_answers(tmp_path: Path) -> None:
    sampler = EchoSampler()
    place = new_place(tmp_path, sampler, context=[7, 8, 9])
    section = {
        "with_context": "Be brief.",
        "answers": "student",
        "hyperparameters": {"batch_size": 2, "max_completion_length": 4},
    }
    method = {"type": "distillation", "distillation": section}
    student = parse_request({"model": "tiny", "training_file": "prompts", "method": method}).method
    changed = {"loss": student.loss_options(), "reinforcement": student.reinforcement_options()}
    place.spec = place.spec.model_copy(update={**changed, "validation_data": None})
    with place.ranks():
        place.loop().run()
    groups = [group for record in place.records() for group in record.groups]
    assert len(groups) == 2 * STEPS
    for own in groups:
        assert [*own.teacher_ids] == [7, 8, 9, *own.ids]
        assert [*own.ids] in sampler.prompts
        assert [*own.teacher_ids] not in sampler.prompts, "the student reads no context"
    log = CommandLog(place.run)
    given = [command for seq in range(log.first_missing()) if (command := log.command(seq))]
    taught = next(command for command in given if command.op == "distill")
    data = LossRequest.parse(taught.body).call(vocabulary=300, longest=32).data
    assert [datum.ids[:3].tolist() == [7, 8, 9] for datum in data] == [False, True] * 2
    place.require_commands_of_records()


def asked_by(server: FakeVllm, place: Place, top_k: int) -> ServerSampler:
    """The place's job becomes a student whose teacher a server answers for."""
    section = {"teacher": "larger", "answers": "student", "teacher_at": "server", "top_k": top_k}
    section["hyperparameters"] = {
        "batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 4,
    }
    method = {"type": "distillation", "distillation": section}
    student = parse_request({"model": "tiny", "training_file": "prompts", "method": method}).method
    loss = student.loss_options()
    assert loss is not None
    larger = TeacherRef(kind="server", name=server.base, path="/larger")
    changed = {
        "loss": loss.model_copy(update={"teacher": larger}),
        "reinforcement": student.reinforcement_options(),
        "validation_data": None,
    }
    place.spec = place.spec.model_copy(update=changed)
    settings = Settings.model_validate({"home": place.run.root, "teacher_url": server.url})
    return ServerSampler(settings, teaching_servers(settings))


@pytest.mark.parametrize("context", [(), (7, 8, 9)], ids=["no context", "a context"])
def test_a_server_is_asked_about_a_students_answers_and_what_it_says_is_recorded(
    context: tuple[int, ...], tmp_path: Path
) -> None:
    place = new_place(tmp_path, EchoSampler(), context=context)
    with fake_vllm() as server, place.ranks():
        server.base = "larger"
        teachers = asked_by(server, place, 2)
        place.loop(teachers).run()
        asked = list(server.bodies)
        teachers.run(stopped())
    records = place.records()
    answers = [answer for record in records for answer in record.answers]
    assert len(asked) == len(answers) == 12
    assert {(body["model"], body["prompt_logprobs"]) for body in asked} == {("larger", 2)}
    prompts = {tuple(body["prompt"]) for body in asked}
    groups = [group for record in records for group in record.groups]
    given = {(*context, *group.ids, *own.tokens) for group in groups for own in group.answers}
    assert prompts == given, "by their tokens"
    assert {tuple(group.teacher_ids) for group in groups} == {()}, "the ranks read none of it"
    said = answers[0].taught
    assert said is not None
    assert (said.own, [len(words) for words in said.words]) == ([-1.0, -1.0], [2, 2])
    assert [len(own) for own in said.logprobs] == [2, 2]
    log = CommandLog(place.run)
    commands = [command for seq in range(log.first_missing()) if (command := log.command(seq))]
    taught = next(command for command in commands if command.op == "distill")
    data = LossRequest.parse(taught.body).call(vocabulary=300, longest=32).data
    assert [datum.targets.ndim for datum in data] == [1, 2] * 4
    first = place.records()[0].answers[0]
    assert first.taught is not None
    assert data[1].targets[1:].tolist() == [
        [*words, token] for words, token in zip(first.taught.words, first.tokens, strict=True)
    ]
    assert data[1].inputs["weights"][1:, -1].tolist() == pytest.approx(first.taught.own)
    assert taught.options == {TARGETS: 8}
    place.require_commands_of_records()


def test_a_server_that_tells_too_few_words_ends_the_attempt_with_the_setting_named(
    tmp_path: Path,
) -> None:
    place = new_place(tmp_path, EchoSampler())
    with fake_vllm() as server, place.ranks():
        server.base, server.max_logprobs = "larger", 5
        teachers = asked_by(server, place, 6)
        with pytest.raises(
            SpecError, match=r"max allowed: 5\. Start vLLM with --max-logprobs"
        ) as no:
            place.loop(teachers).run()
        teachers.run(stopped())
        assert no.value.param == "method.distillation.top_k"
        with pytest.raises(SpecError, match="FT_TEACHER_URL"):
            place.loop()
    assert recorded_steps(place.run) == []


def stopped() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return new_place(tmp_path, EchoSampler())


def test_each_step_is_sampled_graded_recorded_and_then_given(place: Place) -> None:
    with place.ranks():
        place.loop().run()
    place.require_commands_of_records()
    records = place.records()
    assert [record.head.sampled_from for record in records] == [0, 1, 2, 3]
    assert [record.head.ends for record in records] == [False, False, False, True]
    for step, record in enumerate(records[:-1], start=1):
        assert [group.prompt for group in record.groups] == place.schedule.prompts_of(step)
        assert [group.rewards for group in record.groups] == [[1.0, 0.0]] * 2, (
            "the end's text is no part of the answer"
        )
        assert [answer.truncated for answer in record.answers] == [False, True] * 2
    assert [len(record.validation) for record in records] == [2, 0, 2, 2]
    assert records[0].validation[0].answers[0].reward == 1.0
    assert place.told == []
    assert samplers_of(place.run) == ["step-000003"], "earlier weights are removed"


def test_rewards_that_never_differ_are_told_once_with_two_answers(tmp_path: Path) -> None:
    place = new_place(tmp_path, EchoSampler(), [{"answer": "nothing"}] * HEADER.training)
    with place.ranks():
        place.loop().run()
        assert [record.head.flat_steps for record in place.records()] == [1, 2, 3, 0]
        (told,) = place.told
        assert told.level == "warn"
        assert told.message.startswith("Steps 1 to 3: in none of their groups")
        group = place.records()[2].groups[0]
        assert (
            f"Two answers to prompt {group.prompt + 1} and their rewards: '{group.ids[0]}': 0; "
            "'wrong': 0." in told.message
        )
        place.run.path(record_key(STEPS + 1)).unlink()
        place.loop().run()
    assert len(place.told) == 1, "another service does not tell it again"


class KilledHere(Exception):
    pass


class KilledLog(CommandLog):
    """The log of a service that is killed before its second new command."""

    has_given = False

    def put(self, command: Command) -> bool:
        if not self.has(command.seq):
            if self.has_given:
                raise KilledHere
            self.has_given = True
        return super().put(command)


def test_a_service_that_is_killed_before_any_command_goes_on_with_the_recorded_answers(
    tmp_path: Path,
) -> None:
    place = new_place(tmp_path, sampler := EchoSampler())
    kills = 0
    with place.ranks():
        while True:
            loop = place.loop()
            loop.commands = KilledLog(place.run)
            with contextlib.suppress(KilledHere):
                loop.run()
                break
            kills += 1
    place.require_commands_of_records()
    assert kills == CommandLog(place.run).first_missing() - 1, "before each but the first"
    drawn = [prompt for prompt in sampler.prompts if prompt[1:] == [2]]
    assert len(drawn) == 2 * STEPS, "no step is sampled twice"


class OvertakenSampler(EchoSampler):
    """Of a service that another one overtakes once it samples by the first step's weights, which
    the ranks then remove.
    """

    overtake: Callable[[], None] | None = None

    def submit(
        self,
        model: object,
        order: dict[str, Any],
        deliver: Callable[[dict[str, Any]], None],
        **options: Any,
    ) -> object:
        if self.overtake is not None and Path(order["adapter"]).name == "step-000001":
            overtake = self.overtake
            self.overtake = None
            overtake()
            raise SpecError("The adapter's folder is not there.", param="model")
        return super().submit(model, order, deliver, **options)


def test_a_service_that_another_one_overtakes_leaves_the_job_running(tmp_path: Path) -> None:
    place = new_place(tmp_path, sampler := OvertakenSampler())
    sampler.overtake = lambda: place.loop().run()
    with place.ranks():
        with pytest.raises(SamplingStopped):
            place.loop().run()
        place.loop().run()
    place.require_commands_of_records()
    assert samplers_of(place.run) == ["step-000003"]


def test_texts_that_were_not_written_before_a_kill_are_written_when_the_job_goes_on(
    place: Place,
) -> None:
    with place.ranks():
        place.loop().run()
        path = place.run.path(texts_key(STEPS + 1))
        path.unlink()
        place.loop().run()
    assert path.is_file()
    [texts] = read_texts(place.run, [STEPS + 1], 100)
    assert texts.valid_mean_reward == place.records()[-1].valid_mean_reward


def test_a_step_that_the_ranks_could_not_carry_out_is_a_warning(place: Place) -> None:
    place.fails = {2: "log-probabilities are missing", 3: "the gradient was not finite"}
    with place.ranks():
        place.loop().run()
    assert [(event.level, event.message) for event in place.told] == [
        ("warn", "Step 1: log-probabilities are missing"),
        ("warn", "Step 1: the gradient was not finite"),
    ]
    place.require_commands_of_records()


def test_weights_that_could_not_be_saved_pause_the_job_and_are_saved_again(place: Place) -> None:
    place.fails = {4: "the disk is full"}
    with place.ranks():
        with pytest.raises(JobPaused, match="the disk is full"):
            place.loop().run()
        assert recorded_steps(place.run) == [1]
        place.loop().run()
    assert recorded_steps(place.run) == [1, 2, 3, 4]
    seqs = [record.head.first_seq for record in place.records()]
    assert seqs[1] == 6, "number 5 saves the weights after the first step again"


@pytest.mark.parametrize(("most", "is_paused"), [(0.5, False), (0.4, True)])
def test_answers_without_a_grade(tmp_path: Path, most: float, is_paused: bool) -> None:
    """The items of half of the prompts lack what the grader reads."""
    items = [{"answer": "0"}, {"other": "1"}, {"answer": "2"}, {"other": "3"}]
    place = new_place(tmp_path, EchoSampler(), items, batch_size=4, max_error_share=most)
    with place.ranks():
        if is_paused:
            with pytest.raises(
                JobPaused,
                match=r"4 of the 8 answers of step 1 got no grade.*invalid_variable_error",
            ):
                place.loop().run()
            assert recorded_steps(place.run) == []
        else:
            place.loop().run()
            rewards = [answer.reward for answer in place.records()[0].answers]
            assert sorted(map(str, rewards)) == ["0.0"] * 2 + ["1.0"] * 2 + ["None"] * 4


def test_a_host_that_kills_what_grades_is_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = text_processes._started
    kills = 2 * text_processes.TRIES
    killed: list[int] = []

    def killed_at_first() -> HelperProcess:
        process = started()
        if len(killed) < kills:
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
        return process

    text_processes.TEXT_PROCESSES.close()
    monkeypatch.setattr(text_processes, "_started", killed_at_first)
    monkeypatch.setattr(reinforcement_jobs, "pause_seconds", lambda _: 0.01)
    monkeypatch.setattr(reinforcement_jobs, "TOLD_AFTER", 2)
    with place.ranks():
        place.loop().run()
    assert len(killed) == kills
    place.require_commands_of_records()
    assert [group.rewards for record in place.records()[:-1] for group in record.groups] == [
        [1.0, 0.0]
    ] * 2 * STEPS
    assert [event.level for event in place.told] == ["warn"]


def test_a_user_who_stops_a_job_ends_its_loop(place: Place) -> None:
    place.stopped.set()
    with pytest.raises(SamplingStopped):  # no ranks: it waits for the first weights
        place.loop().run()


@pytest.mark.parametrize(
    ("error", "why", "tries"),
    [
        (
            SpecError("The prompt is too long."),
            "Its answers cannot be sampled: The prompt is too long.",
            1,
        ),
        (
            OverflowError("too large"),
            "The service failed 5 times at its answers (OverflowError: too large).",
            5,
        ),
    ],
)
def test_a_job_that_cannot_go_on_is_paused_with_the_reason(
    error: Exception, why: str, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(EchoSampler):
        def submit(
            self,
            model: object,
            order: dict[str, Any],
            deliver: Callable[[dict[str, Any]], None],
            **_: Any,
        ) -> object:
            self.prompts.append(order["prompt"])
            raise error

    monkeypatch.setattr(reinforcement_jobs, "LOOK_SECONDS", 0.02)

    place = new_place(tmp_path, sampler := Refusing())
    store = new_store(tmp_path)
    stop = threading.Event()
    job = create_job(store, place.job)
    jobs = ReinforcementJobs(store, sampler, Places(tmp_path), GraderLimits())
    thread = threading.Thread(target=jobs.run, args=(stop,))
    with place.ranks():
        thread.start()
        try:
            assert wait_for(lambda: get(store, job.id).desired is Desired.PAUSE, 20)
        finally:
            stop.set()
            thread.join()
    errors = [
        event.message
        for event in store.jobs.list_events(PROJECT, job.id).data
        if event.level == "error"
    ]
    assert (errors, len(sampler.prompts)) == (
        [f"{why} The job is paused; resume it to try again."],
        tries,
    )
    store.close()


def test_a_job_whose_run_directory_was_replaced_is_paused_and_keeps_no_other_from_its_start(
    tmp_path: Path,
) -> None:
    """Pods of engines may write to the folder of their project."""
    place = new_place(tmp_path, EchoSampler())
    store = new_store(tmp_path)
    stop = threading.Event()
    job = create_job(store, place.job)
    other = create_job(store, replace(place.job, id="ftjob-other"))
    run = Places(tmp_path).run_of_project(PROJECT, job.id).root
    run.rename(run.with_name("elsewhere"))
    run.symlink_to(run.with_name("elsewhere"))
    jobs = ReinforcementJobs(store, place.sampler, Places(tmp_path), GraderLimits())
    thread = threading.Thread(target=jobs.run, args=(stop,))
    thread.start()
    try:
        assert wait_for(lambda: get(store, job.id).desired is Desired.PAUSE, 20)
        assert wait_for(lambda: CommandLog(Places(tmp_path).run(other.id)).has(0), 20)
    finally:
        stop.set()
        thread.join()
    [why] = [
        event.message
        for event in store.jobs.list_events(PROJECT, job.id).data
        if event.level == "error"
    ]
    assert "was replaced by a link" in why
    store.close()


# Inference servers


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with fake_vllm() as vllm:
        vllm.logprobs = lambda name, tokens: TUNED if name.startswith(PREFIX) else BASE
        yield vllm


@pytest.fixture
def served(tmp_path: Path, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A job whose answers come from a server; patience is short."""
    monkeypatch.setattr(token_sampler, "BUSY_SECONDS", 0.01)
    monkeypatch.setattr(token_sampler, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(server_samples, "AWAY_SECONDS", 0.01)
    monkeypatch.setattr(reinforcement_jobs, "TELL_SECONDS", 0.02)
    settings = Settings.model_validate(
        {"home": tmp_path, "inference_url": vllm.url, "adapters": tmp_path / "served"}
    )
    sampler = ServerSampler(settings)
    stop = threading.Event()
    yield (place := new_place(tmp_path, sampler))
    place.stopped.set()
    stop.set()
    sampler.run(stop)


def of_the_server(served: Place) -> list[NewEvent]:
    """What was told, but that the rewards of these answers never differ."""
    return [event for event in served.told if "do the rewards differ" not in event.message]


@pytest.mark.parametrize("status", [404, 500, 503])
def test_a_server_that_fails_is_waited_for_and_its_words_are_told_once(
    served: Place, vllm: FakeVllm, status: int
) -> None:
    vllm.status = status
    with served.ranks(), served.running():
        assert wait_for(lambda: bool(served.told), 20)
        vllm.status = None
    served.require_commands_of_records()
    [event] = of_the_server(served)
    assert event.level == "warn"
    assert f"answers {status}: Not now" in event.message
    assert "waits for up to 30 minutes" in event.message


def test_a_server_that_fails_for_long_pauses_the_job(
    served: Place, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reinforcement_jobs, "MOST_REFUSED_SECONDS", 0.1)
    vllm.status = 404
    with (
        served.ranks(),
        pytest.raises(
            JobPaused, match=r"Nothing was sampled for 0 minutes: .* answers 404: Not now\.$"
        ),
    ):
        served.loop().run()
    assert recorded_steps(served.run) == []


def test_a_server_that_ignores_the_adapter_pauses_the_job(served: Place, vllm: FakeVllm) -> None:
    vllm.logprobs = lambda name, tokens: BASE
    with (
        served.ranks(),
        pytest.raises(JobPaused, match=r"after step 1 are not in use: the server.* 2\.367 nats"),
    ):
        served.loop().run()
    assert recorded_steps(served.run) == [1], "the base's answers are not trained on"


def test_a_server_that_computes_otherwise_is_a_warning(served: Place, vllm: FakeVllm) -> None:
    vllm.logprobs = lambda name, tokens: [logprob - 1.0 for logprob in TUNED]
    with served.ranks():
        served.loop().run()
    served.require_commands_of_records()
    [event] = of_the_server(served)
    assert (
        "the server's answers are not the trained model's: 1 prompts' log-probabilities lie 1.000 "
        "nats" in event.message
    )


@pytest.mark.parametrize(("processed", "beta"), [(True, 0.0), (True, 0.1), (False, 0.0)])
def test_a_server_must_tell_log_probabilities_at_the_temperature_of_sampling(
    served: Place, tmp_path: Path, vllm: FakeVllm, processed: bool, beta: float
) -> None:
    raw = -0.3 if processed else -0.5
    """Of a token that the server draws at -0.5, 0.4 nats behind the likeliest, which has -0.1 at
    either temperature.
    """
    vllm.logprobs = lambda name, tokens: TUNED if tokens == [1, 2, 3, 4] else [raw] * len(tokens)
    (tmp_path / "warm").mkdir()
    place = new_place(tmp_path / "warm", served.sampler, temperature=0.5, beta=beta)
    with place.ranks():
        if processed and not beta:
            place.loop().run()
            place.require_commands_of_records()
            assert {record.head.temperature for record in place.records()} == {0.5}
            return
        with pytest.raises(SpecError) as refused:
            place.loop().run()
    assert refused.value.param == "temperature"
    assert ("processed_logprobs" in str(refused.value)) == (not processed)
    assert recorded_steps(place.run) == []


def test_the_preview_is_asked_for_log_probabilities_at_the_temperature_of_sampling(
    tmp_path: Path,
) -> None:
    place = new_place(tmp_path, EchoSampler(), temperature=0.5, beta=0.1)
    with place.ranks():
        place.loop().run()
    assert isinstance(place.sampler, EchoSampler)
    asked = {
        (bool(order["scored"]), order["temperature"], order["logprobs_at"])
        for order in place.sampler.orders
    }
    assert asked == {(False, 0.5, 0.5), (True, 0.0, 0.5), (True, 0.0, 1.0)}, (
        "of answers, of the start, and of probes"
    )


def test_calls_of_tools_are_read_from_a_servers_answers(served: Place, vllm: FakeVllm) -> None:
    vllm.text = 'I add.<end> <call>{"name": "add", "arguments": {"a": 1}}'
    with served.ranks():
        served.loop().run()
    answers = [answer for record in served.records() for answer in record.answers]
    assert {answer.text for answer in answers} == {"I add."}
    assert all(answer.calls == [{"name": "add", "arguments": '{"a": 1}'}] for answer in answers)
    held_out = [
        answer
        for record in served.records()
        for prompt in record.validation
        for answer in prompt.answers
    ]
    assert held_out
    assert {answer.text for answer in held_out} == {vllm.text.replace("<end>", "")}, (
        "its prompts offer no tools"
    )
    assert not any(body["skip_special_tokens"] for body in vllm.bodies)
