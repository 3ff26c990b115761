"""Commands of a client's training loop, as its package sends them, put into a run directory for
real ranks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ft_service.rundir.attempt import Attempt
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Control, Desired, Outcome
from ft_service.spec import BaseModelRef, JobContext, JobSpec, resolve
from ft_service.spec.request import parse_client_loop
from ft_service.tinker import tinker_messages_pb2 as pb
from ft_service.tinker.commands import RESULTS, Command, CommandLog
from tests.support.bases import AS_IT_IS
from tests.support.training.attempts import run_attempt
from tests.support.training.loss_messages import Arrays, loss_message
from tests.support.training.models import VOCABULARY

ADAM = {
    "learning_rate": 2e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


def loop_spec(base: Path, *, ranks: int = 1, **options: Any) -> JobSpec:
    """The spec of a model that its client trains; `options` as in a create body."""
    body = {"model": "tiny", "distributed": {"nproc_per_node": ranks, **AS_IT_IS}, **options}
    _, request = parse_client_loop(body)
    context = JobContext(
        job_id="ftjob-test",
        organization="local",
        model=BaseModelRef(name="tiny", path=str(base)),
        training_data=None,
        validation_data=None,
        seed=7,
        gpus=0,
    )
    return resolve(request, context)


def examples(
    count: int, *, seed: int = 1, longest: int = 30
) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Sequences of different lengths, each with its next tokens and weights of both signs, of which
    some are 0.
    """
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        ids = random.integers(3, VOCABULARY, size=int(random.integers(4, longest)))
        weights = random.normal(size=len(ids) - 1).astype(np.float32)
        weights[0] = 0.0
        made.append((ids[:-1], {"target_tokens": ids[1:], "weights": weights}))
    return made


class Script:
    """The commands of a client, numbered as they are added."""

    def __init__(self, run: RunDir) -> None:
        self.log = CommandLog(run)
        self.seq = 0
        self.log.put(Command(0, "create_model"))

    def losses(
        self, data: Sequence[tuple[np.ndarray, Arrays]], *given: Any, forward_only: bool = False
    ) -> int:
        message = loss_message(self.seq + 1, data, *given, forward_only=forward_only)
        return self.add("forward_backward", body=message.SerializeToString())

    def step(self, **changes: float) -> int:
        return self.add("optim_step", {**ADAM, **changes})

    def add(self, op: str, options: Mapping[str, Any] | None = None, body: bytes = b"") -> int:
        self.seq += 1
        assert self.log.put(Command(self.seq, op, options or {}, body))
        return self.seq

    def output(self, seq: int) -> tuple[float, list[np.ndarray]]:
        """loss:sum and log-probabilities of an answered call."""
        result = self.log.result(seq)
        assert result is not None
        assert "error" not in result.document, result.document
        message = pb.ForwardBackwardOutput.FromString(result.body)
        found = []
        for record in message.loss_fn_outputs:
            batched = record.fields["logprobs"]
            values = np.frombuffer(batched.data, "<f4")
            offsets = np.frombuffer(batched.offsets, "<i8") // 4
            of_data = [values[begin:end] for begin, end in pairwise(offsets)]
            found += [
                one.reshape(-1, *batched.trailing_shape) if batched.trailing_shape else one
                for one in of_data
            ]
        return message.metrics["loss:sum"], found


def attempt_until(
    run: RunDir,
    attempt: int,
    world: int,
    seq: int,
    checkpoint: str | None = None,
    *,
    rested_seconds: float = 0.0,
) -> Outcome:
    """An attempt that is paused once a command is answered, as if it had been answered so many
    seconds before.
    """
    stopped = threading.Event()

    def pause() -> None:
        while not stopped.wait(0.02):
            if CommandLog(run).has_result(seq):
                answered_at = time.time() - rested_seconds
                for key in run.list(RESULTS):
                    os.utime(run.path(key), (answered_at, answered_at))
                Attempt(run, attempt).write_control(Control(generation=2, desired=Desired.PAUSE))
                return

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        return run_attempt(run, attempt, world, checkpoint)
    finally:
        time.sleep(0)
        stopped.set()
        thread.join()
