"""The loop that carries runs of evals out: a thread for each run, which has the model answer items,
has the answers graded, and stores both, a few items at a time.

What is stored stays: the next process goes on behind it when this one has ended or was killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ft_service.control.webhook_delivery import secrets_of
from ft_service.errors import FtError, LimitError, NotFoundError, SpecError, UnavailableError
from ft_service.evals.eval_request import (
    MOST_FILE,
    EvalRequest,
    FileContent,
    ItemLine,
    ItemReference,
    JsonlData,
    ModelData,
    RunRequest,
    needs_sample,
    read_lines,
)
from ft_service.evals.item_results import ItemOutcome, result_of
from ft_service.graders.grades import Case, Grade, Sample, parsed
from ft_service.graders.grading import GraderContext, grade_all
from ft_service.graders.limits import GraderLimits
from ft_service.graders.text_tasks import fill
from ft_service.graders.texts import texts_of
from ft_service.host.loops import every
from ft_service.ids import new_id
from ft_service.meters import Meters
from ft_service.settings import Settings
from ft_service.shared_work.losses import pause_seconds
from ft_service.storage.locations import Places
from ft_service.store.evals import EvalRun
from ft_service.store.records import Principal
from ft_service.store.sql import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 0.5
AT_ONCE = 32
OF_PROJECT = 2
"""Runs that a process carries out at once, and those of one project; others wait."""
BATCH = 8
"""Items of a run that are answered at once, and stored together."""
MOST_REFUSED_SECONDS = 1800.0
"""Time for which nothing is answered or graded, after which a run fails."""

Ask = Callable[[Principal, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Answers the body of a chat completion for a project. Raises FtError: UnavailableError and
LimitError if the same may be answered later.
"""


def run(
    settings: Settings, store: Store, meters: Meters, stop: threading.Event, *, ask: Ask
) -> None:
    """Carry runs out until `stop` is set."""
    limits = GraderLimits.from_settings(settings)
    EvalRuns(store, Places.of(settings), limits, ask).run(stop)


class RunStopped(Exception):
    """The run is over, or is to go on in another process."""


@dataclass
class EvalRuns:
    """The threads of the runs that this process carries out."""

    store: Store
    places: Places
    limits: GraderLimits
    ask: Ask
    owner: str = field(default_factory=lambda: new_id("evals-"))
    threads: dict[str, tuple[str, threading.Thread]] = field(
        default_factory=dict[str, tuple[str, threading.Thread]]
    )
    """Run → its project and its thread."""
    owned: frozenset[str] = frozenset()
    """Runs that go on and are this process's."""

    def run(self, stop: threading.Event) -> None:
        """Carry runs out until `stop` is set."""
        every(LOOK_SECONDS, lambda: self.look(stop), stop, "looking after runs of evals")
        self.owned = frozenset()
        for _, thread in self.threads.values():
            thread.join(4 * LOOK_SECONDS)
        self.store.evals.release_runs(self.owner)

    def look(self, stop: threading.Event) -> None:
        """Keep what is this process's, and take what is free."""
        self.threads = {run_id: own for run_id, own in self.threads.items() if own[1].is_alive()}
        self.owned = frozenset(
            self.store.evals.renew_runs(self.owner, list(self.threads)) if self.threads else ()
        )
        while len(self.threads) < AT_ONCE and not stop.is_set():
            of_project = Counter(project_id for project_id, _ in self.threads.values())
            busy = [name for name, count in of_project.items() if count >= OF_PROJECT]
            taken = self.store.evals.claim_run(self.owner, busy)
            if taken is None or taken.id in self.threads:
                return
            self.owned |= {taken.id}
            thread = threading.Thread(
                target=self._drive, args=(taken,), name=f"eval-{taken.id}", daemon=True
            )
            self.threads[taken.id] = taken.project_id, thread
            thread.start()

    def _drive(self, run: EvalRun) -> None:
        try:
            RunWork(self, run).carry_out()
        except RunStopped:
            pass
        except UnavailableError as error:
            log.info("a run of an eval waits: %s", error.message)
        except FtError as error:
            self._fail(run, error)
        except RecursionError:
            self._fail(run, SpecError("An item is nested too deeply.", code="invalid_item"))
        except Exception:
            log.exception("a run of an eval has failed")
            self._fail(run, FtError("The service has failed at it; its log says how."))

    def _fail(self, run: EvalRun, error: FtError) -> None:
        said = {"code": error.code, "message": error.message}
        try:
            self.store.evals.end_run(run.id, self.owner, "failed", said)
        except UnavailableError as unavailable:  # its ownership lapses, and it fails again
            log.info("the end of a run of an eval is not stored: %s", unavailable.message)


@dataclass
class _Asked:
    """An item on its way: what the model is asked, its answer, and that as output items have it."""

    number: int
    line: ItemLine
    body: dict[str, Any] = field(default_factory=dict[str, Any])
    answer: Sample | None = None
    shown: dict[str, Any] = field(default_factory=dict[str, Any])

    def fail(self, code: str, message: str) -> None:
        self.shown["error"] = {"code": code, "message": message}

    @property
    def case(self) -> Case:
        return Case(self.answer or Sample(""), self.line.item)


class RunWork:
    """One run. For one thread."""

    def __init__(self, runs: EvalRuns, run: EvalRun) -> None:
        """Raises FtError for a run of a project or an eval that is gone."""
        self._runs, self._run, self._store = runs, run, runs.store
        project = self._store.projects.get_project(run.project_id)
        if project.archived_at is not None:
            raise SpecError("The project is archived.", code="project_archived")
        own = self._store.evals.get_eval(run.project_id, run.eval_id)
        self._schema = own.data_source_config["item_schema"]
        self._criteria = EvalRequest.model_validate(
            {
                "data_source_config": own.data_source_config,
                "testing_criteria": own.testing_criteria,
            }
        ).testing_criteria
        self._data = RunRequest.model_validate({"data_source": run.data_source}).data_source
        self._caller = Principal(
            key_id=run.key_id,
            project_id=project.id,
            organization=project.organization,
            scope="submit",
            limits=project.limits,
        )

        def secrets(endpoint_id: str) -> list[str]:
            return secrets_of(self._store.webhooks.get_webhook(project.id, endpoint_id))

        self._graders = GraderContext(project=project.id, limits=runs.limits, secrets=secrets)
        self._refused_since: float | None = None
        """Since when nothing is answered (monotonic, seconds); None: answers come."""

    def carry_out(self) -> None:
        """Answer, grade and store all items that are not stored.

        Raises RunStopped; FtError, with which the run fails.
        """
        lines = self._lines()
        if not self._store.evals.begin_run(self._run.id, self._runs.owner, len(lines)):
            return
        stored = self._store.evals.numbers_of(self._run.id)
        left = [_Asked(at, line) for at, line in enumerate(lines) if at not in stored]
        for begin in range(0, len(left), BATCH):
            batch = left[begin : begin + BATCH]
            if isinstance(self._data, JsonlData):
                self._take_given(batch)
            else:
                self._have_answered(self._data, batch)
            outcomes = self._graded(batch)
            if not self._store.evals.add_items(self._run, self._runs.owner, outcomes):
                return
        self._store.evals.end_run(self._run.id, self._runs.owner, "completed")

    def _lines(self) -> Sequence[ItemLine]:
        """Raises SpecError naming the line, NotFoundError."""
        source = self._data.source
        if isinstance(source, FileContent):
            return source.content
        file = self._store.files.get_file(self._run.project_id, source.id)
        if file.bytes > MOST_FILE:
            raise SpecError(
                f"File {file.id} has {file.bytes:,} bytes, and a run reads at most {MOST_FILE:,}.",
                code="file_too_large",
            )
        with self._runs.places.file(file.id).open("rb") as opened:
            return list(read_lines(opened, self._schema))

    def _take_given(self, batch: Sequence[_Asked]) -> None:
        need = any(map(needs_sample, self._criteria))
        for asked in batch:
            given = asked.line.sample
            if given is not None:
                asked.answer = Sample(given.output_text, given.output_tools)
                asked.shown = {"output": [{"role": "assistant", "content": given.output_text}]}
            elif need:
                asked.fail("no_sample", 'The line has no sample: add {"output_text": "…"}.')

    # Answers

    def _have_answered(self, data: ModelData, batch: Sequence[_Asked]) -> None:
        params = data.sampling_params.model_dump(exclude_none=True)
        for asked, messages in zip(batch, self._messages(data, batch), strict=True):
            asked.shown = {"model": data.model, **params}
            asked.shown.pop("tools", None)
            if isinstance(messages, str):
                asked.fail("invalid_item", messages)
                continue
            asked.shown["input"] = [
                {"role": message.get("role"), "content": _as_text(message.get("content"))}
                for message in messages
            ]
            asked.body = {"model": data.model, "messages": messages, **params}
        asyncio.run(self._ask_all([asked for asked in batch if asked.body]))

    def _messages(
        self, data: ModelData, batch: Sequence[_Asked]
    ) -> list[list[dict[str, Any]] | str]:
        """The messages of each item, or why it has none."""
        given = data.input_messages
        if isinstance(given, ItemReference):
            groups = [[f"{{{{ {given.item_reference} }}}}"]]
        else:
            groups = [texts_of(message) for message in given.template]
        work = [(fill(groups), asked.case) for asked in batch]
        filled = self._waiting(lambda: self._graders.texts.carry_out(self._run.project_id, work))
        found: list[list[dict[str, Any]] | str] = []
        for result in filled:
            if result.error is not None:
                found.append(str(result.error))
            elif isinstance(given, ItemReference):
                found.append(_referred(result.value[0][0], given.item_reference))
            else:
                found.append(
                    [
                        {"role": message.role, "content": "\n".join(texts)}
                        for message, texts in zip(given.template, result.value, strict=True)
                    ]
                )
        return found

    async def _ask_all(self, batch: Sequence[_Asked]) -> None:
        tasks = {asyncio.create_task(self._ask(asked)) for asked in batch}
        pending = set(tasks)
        try:
            while pending:
                self._require_owned()
                done, pending = await asyncio.wait(
                    pending, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, asked: _Asked) -> None:
        """Have an item answered. Raises FtError if the model cannot be asked at all."""
        tries = 0
        while True:
            try:
                answer = await self._runs.ask(self._caller, asked.body)
            except (UnavailableError, LimitError) as error:
                if isinstance(error, UnavailableError) and not error.is_lost:
                    asked.fail(error.code, error.message)
                    return
                tries += 1
                self._note_refusal(error)
                await asyncio.sleep(pause_seconds(tries))
            except FtError as error:
                if isinstance(error, NotFoundError) or error.param == "model":
                    raise
                asked.fail(error.code, error.message)
                return
            else:
                self._refused_since = None
                _take(asked, answer)
                return

    def _note_refusal(self, error: FtError) -> None:
        """Raise SpecError if nothing was done for too long."""
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if now - self._refused_since > MOST_REFUSED_SECONDS:
            minutes = MOST_REFUSED_SECONDS / 60
            raise SpecError(
                f"Nothing was answered for {minutes:.0f} minutes: {error.message}", code=error.code
            )

    def _require_owned(self) -> None:
        if self._run.id not in self._runs.owned:
            raise RunStopped

    def _waiting(self, work: Callable[[], T]) -> T:
        """What the work gives; while the host cannot do it, the run waits."""
        tries = 0
        while True:
            self._require_owned()
            try:
                found = work()
            except UnavailableError as error:
                tries += 1
                self._note_refusal(error)
                self._pause(pause_seconds(tries))
            else:
                self._refused_since = None
                return found

    def _pause(self, seconds: float) -> None:
        """Raises RunStopped."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._require_owned()
            time.sleep(LOOK_SECONDS / 5)

    # Grades

    def _graded(self, batch: Sequence[_Asked]) -> list[ItemOutcome]:
        cases = [asked for asked in batch if not asked.shown.get("error")]
        results: dict[int, list[dict[str, Any]]] = {asked.number: [] for asked in batch}
        for criterion in self._criteria:
            for asked, grade in zip(cases, self._grades(criterion, cases), strict=True):
                results[asked.number].append(result_of(criterion, grade))
        return [
            ItemOutcome(asked.number, asked.line.item, asked.shown, results[asked.number])
            for asked in batch
        ]

    def _grades(self, criterion: Any, batch: Sequence[_Asked]) -> list[Grade]:
        cases = [asked.case for asked in batch]
        return self._waiting(lambda: grade_all(criterion, cases, self._graders)) if cases else []


def _referred(text: str, place: str) -> list[dict[str, Any]] | str:
    """Messages that an item holds, or why they are none."""
    messages = parsed(text)
    if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        return messages
    return f"{place} is no list of messages"


def _take(asked: _Asked, answer: Mapping[str, Any]) -> None:
    """Note a chat completion. It may be any server's."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        calls = message.get("tool_calls") or []
        reason = choice.get("finish_reason") or "stop"
        thoughts = message.get("reasoning_content") or ""
        usage = answer.get("usage") or {}
        asked.answer = Sample(text, calls, reason, thoughts)
    except (KeyError, IndexError, TypeError, AttributeError):
        asked.fail("invalid_answer", "The server's answer is no chat completion.")
        return
    output = {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
    counts = {
        name: usage[name] if isinstance(usage.get(name), int) else 0
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    asked.shown |= {
        "output": [output],
        "finish_reason": reason,
        "usage": counts | {"cached_tokens": 0},
    }


def _as_text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
