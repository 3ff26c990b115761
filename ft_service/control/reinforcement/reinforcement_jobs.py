"""Jobs whose answers are sampled, of reinforcement learning and of distillation by a student: they
are sampled and graded here, and their ranks get the commands that follow.

Each running job has a thread. All that it has decided is a file of the job's run directory: the
record of a step is stored before the first of its commands, so that a service that is killed goes
on where it was, and no step is trained twice. While the service is away, the ranks wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ft_service.agents.addresses import Access
from ft_service.agents.counterparts import counterpart_of
from ft_service.agents.open_rollouts import OpenRollouts
from ft_service.control.admission.reinforcement_admission import (
    BY_SERVERS,
    no_calls_here,
    no_preview,
)
from ft_service.control.reinforcement import agent_rollouts
from ft_service.control.reinforcement.agent_rollouts import AgentRollouts
from ft_service.control.webhook_delivery import secrets_of
from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.graders.grades import Case, Grade
from ft_service.graders.grading import GraderContext, grade_all
from ft_service.graders.limits import GraderLimits
from ft_service.host.loops import every
from ft_service.jobs.states import Job
from ft_service.jobs.user_actions import Verb
from ft_service.meters import Meters
from ft_service.reinforcement.flat_steps import flat_steps, flat_text
from ft_service.reinforcement.prompt_file import PROMPTS, PromptFile, PromptHeader, PromptTokens
from ft_service.reinforcement.schedule import RolloutSchedule, seed_of
from ft_service.reinforcement.step_commands import (
    commands_of,
    first_commands,
    sampler_name,
    save_command,
)
from ft_service.reinforcement.step_records import (
    AnsweredPrompt,
    RecordHead,
    SampledAnswer,
    StepRecord,
    TaughtTokens,
    read_record,
    recorded_steps,
    write_record,
)
from ft_service.reinforcement.step_texts import remove_records, write_texts
from ft_service.rundir.directory import RunDir
from ft_service.serving.preview import PreviewModel
from ft_service.serving.served_verdict import is_of_base, judge
from ft_service.serving.token_sampler import Sampler, SamplingStopped, TokenSampler
from ft_service.settings import Settings
from ft_service.shared_work.losses import TOLD_AFTER, pause_seconds
from ft_service.spec import DistillationOptions
from ft_service.spec.environments import EndpointEnvironment, Environment, McpEnvironment
from ft_service.spec.graders import Grader
from ft_service.spec.methods import ReinforcementOptions
from ft_service.spec.teachers import PLACE
from ft_service.storage.locations import Places
from ft_service.store.records import NewEvent
from ft_service.store.sql import Store
from ft_service.tinker.commands import Command, CommandLog
from ft_service.tinker.sample_calls import (
    ModelInput,
    SampleRequest,
    SamplingParams,
    TextChunk,
)
from ft_service.tinker.saved_weights import delete_sampler, sampler_key, samplers_of

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How often it is looked for jobs that run, and whether a job still does."""
POLL_SECONDS = 0.02
AT_ONCE = 64
"""Most jobs at once."""
TELL_SECONDS = 30.0
"""Time for which nothing is sampled, after which a job's user is told why."""
MOST_REFUSED_SECONDS = 1800.0
"""Time for which nothing is sampled, after which a job is paused: an inference server with a large
base takes many minutes to start again, and meanwhile the ranks hold their slots.
"""
TRIES = 5
"""Failures at the same step for which nothing is known, after which a job is paused."""
MOST_TEXT = 16_384
"""Characters of an answer's text, and of its reasoning, that its record keeps."""


def run(
    settings: Settings,
    store: Store,
    meters: Meters,
    stop: threading.Event,
    *,
    sampler: Sampler,
    rollouts: OpenRollouts | None = None,
    teachers: Sampler | None = None,
) -> None:
    """Look after jobs until `stop` is set.

    `rollouts`: where agents call the model; None: the sampler is no preview of this process.
    `teachers`: what answers for the bases of FT_TEACHER_URL; None: nothing does.
    """
    limits = GraderLimits.from_settings(settings)
    ReinforcementJobs(store, sampler, Places.of(settings), limits, rollouts, teachers).run(stop)


@dataclass
class ReinforcementJobs:
    """The threads of the jobs that run."""

    store: Store
    sampler: Sampler
    places: Places
    limits: GraderLimits
    rollouts: OpenRollouts | None = None
    teachers: Sampler | None = None
    threads: dict[str, threading.Thread] = field(default_factory=dict[str, threading.Thread])
    running: frozenset[str] = frozenset()
    """Jobs that run and are to run on."""
    failures: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Job → step at which something unknown failed, and how often in a row."""

    def run(self, stop: threading.Event) -> None:
        """Look after jobs until `stop` is set."""

        def look() -> None:
            # Before the jobs are read: a thread that pauses its job and ends in between would be
            # started again.
            self.threads = {
                job_id: thread for job_id, thread in self.threads.items() if thread.is_alive()
            }
            jobs = {job.id: job for job in self.store.jobs.running_that_sample()}
            self.running = frozenset(jobs)
            self.failures = {
                job_id: failed for job_id, failed in self.failures.items() if job_id in jobs
            }
            for job in jobs.values():
                if job.id not in self.threads and len(self.threads) < AT_ONCE:
                    self._start(job, stop)

        every(LOOK_SECONDS, look, stop, "looking after jobs of reinforcement learning")
        for thread in self.threads.values():
            thread.join(2 * LOOK_SECONDS)

    def _start(self, job: Job, stop: threading.Event) -> None:
        thread = threading.Thread(
            target=self._drive, args=(job, stop), name=f"rollouts-{job.id}", daemon=True
        )
        self.threads[job.id] = thread
        thread.start()

    def _loop(self, job: Job, stop: threading.Event) -> RolloutLoop:
        """Raises FtError if the job's run directory cannot be used."""

        def stopped() -> bool:
            return stop.is_set() or job.id not in self.running

        def secrets(endpoint_id: str) -> list[str]:
            return secrets_of(self.store.webhooks.get_webhook(job.project_id, endpoint_id))

        return RolloutLoop(
            job,
            self.places.run(job.id),
            self.sampler,
            GraderContext(project=job.project_id, limits=self.limits, secrets=secrets),
            lambda event: self.store.jobs.add_events(job, [event]),
            stopped,
            self.rollouts,
            self.teachers,
        )

    def _drive(self, job: Job, stop: threading.Event) -> None:
        try:
            self._loop(job, stop).run()
        except SamplingStopped:
            pass
        except JobPaused as paused:
            self._pause(job, str(paused))
        except UnavailableError as error:
            log.info("a job's answers wait: %s", error.message, extra={"job_id": job.id})
        except FtError as error:
            self._pause(job, f"Its answers cannot be sampled: {error.message}")
        except OSError as error:
            log.warning("a job's answers wait: %s", error, extra={"job_id": job.id})
            time.sleep(LOOK_SECONDS)
        except Exception as error:
            log.exception("a job's answers wait", extra={"job_id": job.id})
            time.sleep(LOOK_SECONDS)
            if self._has_failed_often(job):
                said = f"{type(error).__name__}: {str(error)[:200]}"
                self._pause(job, f"The service failed {TRIES} times at its answers ({said}).")

    def _has_failed_often(self, job: Job) -> bool:
        """Count a failure of which nothing is known.

        Trying on for ever would keep the ranks waiting, and tell nobody why.
        """
        step = max(recorded_steps(self.places.run(job.id)), default=0)
        at, before = self.failures.get(job.id, (step, 0))
        tries = before + 1 if at == step else 1
        self.failures[job.id] = step, tries % TRIES
        return tries == TRIES

    def _pause(self, job: Job, why: str) -> None:
        self.store.jobs.add_events(
            job,
            [NewEvent(level="error", message=f"{why} The job is paused; resume it to try again.")],
        )
        self.store.jobs.request(job.project_id, job.id, Verb.PAUSE)


class JobPaused(Exception):
    """The job cannot go on until its user has done something."""


@dataclass
class RolloutLoop:
    """The steps of one job. For one thread."""

    job: Job
    run_dir: RunDir
    sampler: Sampler
    graders: GraderContext
    tell: Callable[[NewEvent], object]
    stopped: Callable[[], bool]
    rollouts: OpenRollouts | None = None
    """Where agents call the model; None: the sampler is no preview of this process."""
    teachers: Sampler | None = None
    """What answers for the bases of FT_TEACHER_URL; None: nothing does."""

    def __post_init__(self) -> None:
        options = self.job.spec.reinforcement
        assert options is not None, "the job's answers are sampled"
        self.options: ReinforcementOptions = options
        spec = self.job.spec
        self.is_graded = spec.sampled_for == "rewards"
        """Whether answers get rewards. Those of a student are compared with its teacher's."""
        model = PreviewModel(
            spec.model.path, spec.precision.model_dump(mode="json"), name=spec.model.name
        )
        self._sampler = TokenSampler(
            self.sampler, self.job.project_id, model, self.stopped, self._refused
        )
        self._teacher = self._served_teacher()
        self.agents = self._agents(options.environment, model)
        self.commands = CommandLog(self.run_dir)
        self._saves: dict[int, int] = {}
        """Number of steps → number of the command that saves the weights after them."""
        self._unread: dict[int, list[int]] = {}
        """Step → numbers of its commands whose results were not looked at."""
        self._proved: set[int] = set()
        """Numbers of steps after which the weights were compared with what the sampler answers by
        them.
        """
        self._flat_steps = 0
        """Flat steps in a row up to the newest record."""
        self._tells_of_refusal = self._tells_of_distance = True
        """Whether the user is told if nothing is sampled, or if the sampler is far from the
        trainer; once is enough.
        """

    def _served_teacher(self) -> TokenSampler | None:
        """What is asked about the job's teacher; None: the ranks compute it, or there is none.

        Raises SpecError if this service knows no server that teaches.
        """
        ref = self.job.spec.served_teacher
        if ref is None:
            return None
        if self.teachers is None:
            raise SpecError(
                f"{PLACE} = {ref.name}: this service knows no server that teaches (FT_TEACHER_URL). "
                "Its operator sets it; then resume the job.",
                param=PLACE,
                code="not_available",
            )
        model = PreviewModel(ref.path, {}, name=ref.name)
        return TokenSampler(self.teachers, self.job.project_id, model, self.stopped, self._refused)

    def _agents(self, environment: Environment | None, model: PreviewModel) -> AgentRollouts | None:
        """What runs the job's rollouts; None: it has no environment.

        Raises SpecError if agents cannot call the model here.
        """
        if environment is None:
            return None
        if self.rollouts is None:
            raise no_preview(BY_SERVERS)
        if isinstance(environment, EndpointEnvironment) and not self.rollouts.base_url:
            raise no_calls_here()
        counterpart = counterpart_of(
            environment,
            Access(self.job.project_id, self.graders.secrets, self.graders.limits.allow_private),
            model=self.job.spec.model.name,
            sampler=self.sampler,
            opened=self.rollouts,
            has_grader=self.options.grader is not None,
        )

        def look() -> None:
            if self.stopped():
                raise SamplingStopped

        return AgentRollouts(self.job.spec, model, counterpart, look, self._refused, self.tell)

    def run(self) -> None:
        """Give the ranks one step after the other until the last one.

        Raises SamplingStopped, JobPaused, FtError.
        """
        done = recorded_steps(self.run_dir)[-2:]
        if not done:
            self._put(first_commands(self.job.id))
            self._saves[0] = 1
        # The ranks write it before their first command.
        self._wait_for(self.run_dir.path(PROMPTS).is_file)
        self.prompts = PromptFile(self.run_dir)
        header = self.prompts.header
        self._require_calls(header)
        self.schedule = RolloutSchedule.of(self.job.spec, header.training, header.validation)
        for step in done:
            record = read_record(self.run_dir, step)
            assert record is not None, "it was listed, and only this thread removes it"
            self._flat_steps = record.head.flat_steps
            self._follow(record)
        self._find_repeated_saves()
        step = done[-1] if done else 0
        while step <= self.schedule.total_steps:
            step += 1
            self._require_newest(step)
            try:
                record = self._record(step)
            except (FtError, JobPaused):
                # Ranks that follow another service remove the weights that this one samples by.
                self._require_newest(step)
                raise
            if write_record(self.run_dir, record) and (text := flat_text(record)) is not None:
                self.tell(NewEvent(level="warn", message=text))
            # Another service may have been first.
            self._follow(read_record(self.run_dir, step) or record)
            remove_records(self.run_dir, self.options.keep_rollouts)

    def _require_newest(self, step: int) -> None:
        """Raise SamplingStopped if another service has recorded this step, or a later one: the job
        is begun again behind its newest record.
        """
        if recorded_steps(self.run_dir)[-1:] >= [step]:
            raise SamplingStopped

    def _require_calls(self, header: PromptHeader) -> None:
        """Raise SpecError if tools are offered, and nobody knows how the base calls them."""
        answers = header.answers
        if not isinstance(self.options.environment, McpEnvironment):
            return
        if answers.calls is None and not answers.has_channels:
            raise SpecError(
                "method.reinforcement.environment.type = 'mcp': the chat template writes no calls "
                "of tools that can be read. Give another job a chat_template that does, or a base "
                "that has one.",
                param="method.reinforcement.environment.type",
            )

    # Commands

    def _follow(self, record: StepRecord) -> None:
        """Give the ranks the commands of a record, unless they have them, and keep its texts for
        people.
        """
        commands = commands_of(record, self.job.spec, self.schedule)
        self._put(commands)
        write_texts(self.run_dir, record)
        if commands[-1].op == "save_weights_for_sampler":
            self._saves[record.head.step] = commands[-1].seq
            self._unread[record.head.step] = [command.seq for command in commands[:-1]]

    def _put(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if not self.commands.has_result(command.seq):
                self.commands.put(command)
        self._next_seq = commands[-1].seq + 1

    def _find_repeated_saves(self) -> None:
        """Take into account the commands that were given behind those of the newest record: saves
        that had failed before.
        """
        while self._saves and (
            self.commands.has(self._next_seq) or self.commands.has_result(self._next_seq)
        ):
            self._saves[max(self._saves)] = self._next_seq
            self._next_seq += 1

    def _weights(self, after: int) -> str:
        """The adapter's folder after so many steps, once the ranks have saved it.

        Raises SamplingStopped; JobPaused if they could not, and then they are told to try again.
        """
        folder = self.run_dir.path(sampler_key(sampler_name(after)))
        seq = self._saves.get(after)
        self._wait_for(
            lambda: folder.is_dir() or (seq is not None and self.commands.has_result(seq))
        )
        if not folder.is_dir():
            assert seq is not None, "it has a result"
            result = self.commands.result(seq)
            self._put([save_command(self._next_seq, after)])
            self._saves[after] = self._next_seq - 1
            raise JobPaused(
                str(result.document.get("error")) if result is not None else "Weights are gone."
            )
        self._tell_of_failures(after)
        return str(folder)

    def _tell_of_failures(self, step: int) -> None:
        """Warn the job's user of the commands of a step that its ranks could not carry out, such as
        an update that is not finite.
        """
        for seq in self._unread.pop(step, []):
            result = self.commands.result(seq)
            if result is not None and "error" in result.document:
                self.tell(
                    NewEvent(level="warn", message=f"Step {step}: {result.document['error']}")
                )

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Raises SamplingStopped."""
        looked_at = time.monotonic()
        while not condition():
            time.sleep(POLL_SECONDS)
            if time.monotonic() - looked_at > LOOK_SECONDS:
                looked_at = time.monotonic()
                if self.stopped():
                    raise SamplingStopped

    # A step's answers

    def _record(self, step: int) -> StepRecord:
        """The record of a step: its answers, and those to the validation file where they are
        due.
        """
        schedule = self.schedule
        after = step - 1
        ends = step > schedule.total_steps
        validation: list[AnsweredPrompt] = []
        groups: list[AnsweredPrompt] = []
        seconds = [0.0, 0.0]
        if schedule.is_evaluated(after):
            numbers = range(self.prompts.header.validation)
            prompts = [(number, self.prompts.validation(number)) for number in numbers]
            validation = self._answered(
                after, -after, prompts, self.options.eval_samples, [0.0, 0.0]
            )
        sampled_from = schedule.sampled_from(step)
        if not ends:
            prompts = [
                (number, self.prompts.training(number)) for number in schedule.prompts_of(step)
            ]
            groups = self._answered(
                sampled_from, step, prompts, self.options.num_generations, seconds
            )
            if self.is_graded:
                self._require_graded(step, groups)
        self._flat_steps = flat_steps(groups, self._flat_steps) if self.is_graded else 0
        self._forget_weights(min(sampled_from, after))
        head = RecordHead(
            step=step,
            first_seq=self._next_seq,
            sampled_from=sampled_from,
            temperature=self.options.temperature,
            groups=len(groups),
            flat_steps=self._flat_steps,
            saves=schedule.is_saved(after),
            ends=ends,
            sampling_seconds=seconds[0],
            grading_seconds=seconds[1],
            time=time.time(),
        )
        return StepRecord(head=head, groups=groups, validation=validation)

    def _answered(
        self,
        after: int,
        step: int,
        prompts: Sequence[tuple[int, PromptTokens]],
        count: int,
        seconds: list[float],
    ) -> list[AnsweredPrompt]:
        """`count` answers to each prompt, graded, by the weights after so many steps.

        `step`: of the seeds. `seconds`: those of sampling and of grading are added to them.
        """
        self._weights(after)
        self._require_weights_in_use(after)
        began = time.perf_counter()
        if self.agents is None:
            answers = self._from_sampler(after, step, prompts, count)
        else:
            answers = self.agents.answers(self._weights(after), prompts, count, step)
        if self.options.beta and step > 0:
            answers = self._with_reference(prompts, answers, count)
        if self._teacher is not None and step > 0:
            answers = self._taught(self._teacher, prompts, answers, count)
        sampled_at = time.perf_counter()
        items = [prompt.item for _, prompt in prompts for _ in range(count)]
        graded = self._graded(answers, items) if self.is_graded else list(map(self._cut, answers))
        seconds[0] += sampled_at - began
        seconds[1] += time.perf_counter() - sampled_at
        is_trained = step > 0
        return [
            AnsweredPrompt(
                prompt=number,
                ids=prompt.ids if is_trained else (),
                teacher_ids=prompt.teacher_ids if is_trained and self._teacher is None else (),
                text=prompt.text,
                answers=graded[place * count : (place + 1) * count],
            )
            for place, (number, prompt) in enumerate(prompts)
        ]

    def _from_sampler(
        self, after: int, step: int, prompts: Sequence[tuple[int, PromptTokens]], count: int
    ) -> list[SampledAnswer]:
        """One answer after the other to each prompt, not graded yet."""
        requests = [
            self._request(prompt, count, seed_of(self.job.spec.seed, step, number))
            for number, prompt in prompts
        ]
        sampled = self._sampler.sample(
            self._weights(after), requests, logprobs_at=self.options.temperature
        )
        answers: list[SampledAnswer] = []
        for (_, prompt), own in zip(prompts, sampled, strict=True):
            for index in range(count):
                read = self.prompts.header.read(own.texts[index], prompt)
                answer = SampledAnswer(
                    tokens=own.tokens[index],
                    logprobs=own.logprobs[index],
                    text=read.text,
                    reasoning=read.reasoning,
                    calls=read.calls,
                    truncated=own.reasons[index] == "length",
                )
                answers.append(answer)
        return answers

    def _request(self, prompt: PromptTokens, count: int, seed: int) -> SampleRequest:
        params = SamplingParams(
            max_tokens=self.job.spec.longest_answer,
            seed=seed,
            stop=list(self.prompts.header.ends),
            temperature=self.options.temperature,
        )
        chunk = TextChunk(tokens=list(prompt.ids))
        return SampleRequest(
            num_samples=count, prompt=ModelInput(chunks=[chunk]), sampling_params=params
        )

    def _refused(self, error: FtError, seconds: float) -> None:
        """Tell the job's user, once each time, that nothing is sampled, and why; raise JobPaused
        after a long while.
        """
        reason = error.message.removesuffix(".")
        if seconds >= MOST_REFUSED_SECONDS:
            raise JobPaused(f"Nothing was sampled for {seconds / 60:.0f} minutes: {reason}.")
        if seconds == 0:
            self._tells_of_refusal = True
        elif seconds >= TELL_SECONDS and self._tells_of_refusal:
            self._tells_of_refusal = False
            limit = f"{MOST_REFUSED_SECONDS / 60:.0f} minutes"
            self.tell(
                NewEvent(
                    level="warn",
                    message=f"Nothing is sampled, and the job waits for up to {limit}: {reason}.",
                )
            )

    def _require_weights_in_use(self, after: int) -> None:
        """Compare the sampler's log-probabilities with those that the trainer has left beside its
        weights, once for each of them. Raises JobPaused if they are the base's; another distance is
        a warning.
        """
        if after in self._proved:
            return
        self._proved.add(after)
        probes, served = self._sampler.score_probes(self._weights(after))
        verdict = judge(probes, served)
        if is_of_base(probes, served):
            raise JobPaused(f"The weights after step {after} are not in use: {verdict.text}.")
        if verdict.verified is False and self._tells_of_distance:
            self._tells_of_distance = False
            self.tell(
                NewEvent(
                    level="warn",
                    message=f"Answers by the weights after step {after}: {verdict.text}.",
                )
            )

    def _with_reference(
        self,
        prompts: Sequence[tuple[int, PromptTokens]],
        answers: Sequence[SampledAnswer],
        count: int,
    ) -> list[SampledAnswer]:
        """The answers with the log-probabilities of their tokens by the model that training started
        from.
        """
        rows = [answer.rows(prompts[place // count][1].ids) for place, answer in enumerate(answers)]
        sequences = [
            (row.tokens, len(row.tokens) - row.sampled[0][0]) for own in rows for row in own
        ]
        scored = iter(
            self._sampler.score(self._weights(0), sequences, logprobs_at=self.options.temperature)
        )
        found = []
        for answer, own in zip(answers, rows, strict=True):
            reference = [value for row in own for value in row.of_sampled(next(scored))]
            found.append(answer.model_copy(update={"reference": reference}))
        return found

    def _taught(
        self,
        teacher: TokenSampler,
        prompts: Sequence[tuple[int, PromptTokens]],
        answers: Sequence[SampledAnswer],
        count: int,
    ) -> list[SampledAnswer]:
        """The answers with what a server's teacher thinks of their tokens."""
        loss = self.job.spec.loss
        assert isinstance(loss, DistillationOptions)
        assert loss.top_k is not None
        read = [prompt.teacher_ids or prompt.ids for _, prompt in prompts]
        rows = [(read[place // count], answer.tokens) for place, answer in enumerate(answers)]
        asked = [place for place, (_, tokens) in enumerate(rows) if tokens]
        said = teacher.told([rows[place] for place in asked], loss.top_k)
        found = list(answers)
        for place, own in zip(asked, said, strict=True):
            found[place] = answers[place].model_copy(update={"taught": TaughtTokens(**own)})
        return found

    def _graded(
        self, answers: Sequence[SampledAnswer], items: Sequence[Mapping[str, Any]]
    ) -> list[SampledAnswer]:
        """The answers with their grades, unless an agent has given them a reward or an error, and
        with their texts cut.
        """
        places = [
            place
            for place, answer in enumerate(answers)
            if answer.reward is None and not answer.errors
        ]
        grader = self.options.grader
        graded = dict(enumerate(answers))
        if grader is None:
            why = "the environment gives no reward, and the job has no grader"
            for place in places:
                graded[place] = answers[place].model_copy(
                    update={"errors": {"agent_no_reward": why}}
                )
        elif places:
            cases = [Case(answers[place].sample, items[place]) for place in places]
            for place, grade in zip(places, self._grades(grader, cases), strict=True):
                given = {
                    "reward": None if grade.errors else grade.reward,
                    "errors": dict(grade.errors),
                    "scores": dict(grade.scores),
                }
                graded[place] = answers[place].model_copy(update=given)
        return [self._cut(graded[place]) for place in range(len(answers))]

    def _cut(self, answer: SampledAnswer) -> SampledAnswer:
        """An answer with as much of its texts as its record keeps."""
        texts: dict[str, Any] = {
            "text": answer.text[:MOST_TEXT],
            "reasoning": answer.reasoning[:MOST_TEXT],
        }
        if answer.trajectory is not None:
            texts["trajectory"] = agent_rollouts.cut(answer.trajectory)
        return answer.model_copy(update=texts)

    def _grades(self, grader: Grader, cases: Sequence[Case]) -> list[Grade]:
        """The grades of answers; while the host cannot grade, the job waits.

        Raises SamplingStopped.
        """
        losses = 0
        while not self.stopped():
            try:
                return grade_all(grader, cases, self.graders)
            except UnavailableError as error:
                losses += 1
                if losses == TOLD_AFTER:
                    message = f"Nothing is graded, and the job waits: {error.message}"
                    self.tell(NewEvent(level="warn", message=message))
                again_at = time.monotonic() + pause_seconds(losses)
                self._wait_for(lambda again_at=again_at: time.monotonic() >= again_at)
        raise SamplingStopped

    def _require_graded(self, step: int, groups: Sequence[AnsweredPrompt]) -> None:
        """Raise JobPaused if too many answers have no grade."""
        answers = [answer for group in groups for answer in group.answers]
        failed = [answer for answer in answers if answer.reward is None]
        if len(failed) / len(answers) <= self.options.max_error_share and len(failed) < len(
            answers
        ):
            return
        kind, detail = next(iter(failed[0].errors.items()))
        share = f"{len(failed)} of the {len(answers)} answers of step {step} got no grade"
        most = f"more than max_error_share = {self.options.max_error_share:g} allows"
        raise JobPaused(f"{share}, {most}. The first error: {kind}: {detail[:500]}")

    def _forget_weights(self, needed: int) -> None:
        """Remove the weights that nothing is sampled from any more."""
        kept = {sampler_name(0)} if self.options.beta else set[str]()
        for name in samplers_of(self.run_dir):
            if name not in kept and name < sampler_name(needed):
                delete_sampler(self.run_dir, name)
