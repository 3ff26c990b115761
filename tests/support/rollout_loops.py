"""A loop of reinforcement learning with a sampler and ranks that only answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_service.control.reinforcement.reinforcement_jobs import RolloutLoop
from ft_service.data.answer_format import AnswerFormat
from ft_service.data.tool_call_parser import CallFormat
from ft_service.errors import UnavailableError
from ft_service.graders.grading import GraderContext
from ft_service.jobs.states import Job, Phase, State
from ft_service.reinforcement.prompt_file import PromptHeader
from ft_service.reinforcement.schedule import RolloutSchedule
from ft_service.reinforcement.step_commands import commands_of, first_commands
from ft_service.reinforcement.step_records import (
    StepRecord,
    read_record,
    recorded_steps,
)
from ft_service.reinforcement.step_texts import texts_key
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import Probe
from ft_service.serving.token_sampler import Sampler
from ft_service.spec import JobSpec, StoredSpec
from ft_service.store.records import NewEvent
from ft_service.tinker.commands import Command, CommandLog, CommandResult
from ft_service.tinker.saved_weights import PROBES, SamplerProbes, sampler_key
from tests.support.agents import parts_of
from tests.support.reconciling import PROJECT
from tests.support.records import new_job

STEPS = 3
TUNED = [-0.1, -0.2, -0.1]
BASE = [-2.0, -3.0, -2.5]
CALLS = CallFormat("<call>", "name", "arguments")
HEADER = PromptHeader(ends=[9], training=4, validation=2, answers=AnswerFormat(("<end>",), CALLS))


class EchoSampler:
    """Answers the first of a prompt's answers rightly, and no two requests with the same tokens."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.adapters: list[str] = []
        self.orders: list[dict[str, Any]] = []

    def submit(
        self,
        model: object,
        order: dict[str, Any],
        deliver: Callable[[dict[str, Any]], None],
        **_: Any,
    ) -> object:
        self.prompts.append(order["prompt"])
        self.adapters.append(Path(order["adapter"]).name)
        self.orders.append(order)
        if order["scored"]:
            deliver(
                {
                    "kind": "scores",
                    "place": len(order["prompt"]) - order["scored"],
                    "logprobs": TUNED[-order["scored"] :],
                }
            )
        for index in range(order["n"]):
            text = f"{order['prompt'][0]}<end>" if index == 0 else "wrong"
            deliver(
                {
                    "kind": "tokens",
                    "index": index,
                    "tokens": [len(self.prompts), index],
                    "logprobs": [-0.7, -0.7],
                }
            )
            deliver(
                {
                    "kind": "end",
                    "index": index,
                    "reason": "length" if index else "stop",
                    "text": text,
                }
            )
        deliver({"kind": "done"})
        return None

    def cancel(self, ticket: object) -> None:
        pass


class PlayedSampler(EchoSampler):
    """Answers conversations with how many messages they have. A prompt's tokens are those of its
    messages: 1 and the tokens that were drawn for one of its own, else 2. A text is answered with
    itself, and is 2.
    """

    busy = 0
    """Calls that it has no place for."""

    def submit(self, model: object, order: dict[str, Any], deliver: Any, **options: Any) -> object:
        is_text = order.get("op") == "text"
        if "messages" not in order and not is_text:
            return super().submit(model, order, deliver, **options)
        if self.busy:
            self.busy -= 1
            raise UnavailableError("busy", code="preview_busy")
        self.orders.append(order)
        if is_text:
            given = order["prompt"]
            prompt = [2] if isinstance(given, str) else given
            said = parts_of((40, 41), prompt, str(given), prompt_text=f"read {given}")
        else:
            read: list[int] = []
            for message in order["messages"]:
                read += [1, 40, 41] if message["role"] == "assistant" else [2]
            said = parts_of((40, 41), [*read, 1], str(len(order["messages"])))
        for part in said:
            deliver(part)
        return None


@dataclass
class Place:
    """A run directory with prompts, and ranks that answer commands in their order without computing
    anything.
    """

    run: RunDir
    spec: JobSpec
    sampler: Sampler
    told: list[NewEvent] = field(default_factory=list)
    fails: dict[int, str] = field(default_factory=dict)
    """Number of a command → error that is its result."""
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def job(self) -> Job:
        request = {"method": {"type": "reinforcement"}}
        spec = StoredSpec.of(self.spec)
        running = {"state": State.RUNNING, "phase": Phase.TRAINING}
        return new_job(
            id=self.spec.job_id,
            project_id=PROJECT,
            request=request,
            stored_spec=spec,
            slots=1,
            **running,
        )

    @property
    def schedule(self) -> RolloutSchedule:
        return RolloutSchedule.of(self.spec, HEADER.training, HEADER.validation)

    def loop(self, teachers: Sampler | None = None) -> RolloutLoop:
        return RolloutLoop(
            self.job,
            self.run,
            self.sampler,
            GraderContext(project="p"),
            self.told.append,
            self.stopped.is_set,
            teachers=teachers,
        )

    def records(self) -> list[StepRecord]:
        found = [read_record(self.run, step) for step in recorded_steps(self.run)]
        return [record for record in found if record is not None]

    def require_commands_of_records(self) -> None:
        """Every step has one record, and exactly the commands that follow from it."""
        assert recorded_steps(self.run) == list(range(1, STEPS + 2))
        assert all(self.run.has(texts_key(step)) for step in range(1, STEPS + 2))
        commands = first_commands(self.spec.job_id)
        for record in self.records():
            assert record.head.first_seq == len(commands)
            commands += commands_of(record, self.spec, self.schedule)
        log = CommandLog(self.run)
        assert [log.command(seq) for seq in range(log.first_missing())] == commands

    @contextmanager
    def ranks(self) -> Iterator[None]:
        ended = threading.Event()

        def answer_commands() -> None:
            log = CommandLog(self.run)
            seq = 0
            while not ended.is_set():
                if (command := log.command(seq)) is None:
                    ended.wait(0.002)
                    continue
                log.put_result(seq, self._carry_out(command))
                seq += 1

        thread = threading.Thread(target=answer_commands)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The loop in a thread, whose end is waited for unless the test fails."""
        thread = threading.Thread(target=self.loop().run, daemon=True)
        thread.start()
        yield
        thread.join(30)
        assert not thread.is_alive()

    def _carry_out(self, command: Command) -> CommandResult:
        if command.seq in self.fails:
            return CommandResult.failed(self.fails[command.seq])
        if command.op == "save_weights_for_sampler":
            probes = [Probe(tokens=[1, 2, 3, 4], tuned=TUNED, base=BASE)] * (command.seq > 1)
            self.run.put("saved/adapter_model.safetensors", command.options["name"].encode())
            self.run.put("saved/adapter_config.json", json.dumps({"r": 8}).encode())
            self.run.put(
                f"saved/{PROBES}",
                SamplerProbes(command=command.seq, probes=probes).model_dump_json().encode(),
            )
            target = self.run.path(sampler_key(command.options["name"]))
            target.parent.mkdir(exist_ok=True)
            self.run.path("saved").rename(target)
        return CommandResult({"type": command.op})
