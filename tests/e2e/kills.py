"""A job under blows: what strikes it when follows from a seed; what it leaves is compared with the
uninterrupted job.

    python -m tests.e2e.kills [--blows 50] [--seed 1]

plays whole jobs until so many blows have struck, and writes the figures to
benchmarks/results/kills.json.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import openai
import torch
from safetensors.torch import load_file

from ft_service.rundir.attempt import Attempt, last_attempt
from ft_service.rundir.checkpoints import (
    CHECKPOINT_NAME,
    complete_checkpoints,
    newest_checkpoint,
    newest_step,
)
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from ft_service.rundir.events import read_segments
from tests.support.attempts import wait_for
from tests.support.service import (
    SECONDS,
    Server,
    eventually,
    nothing_left,
    processes_of,
    submit,
    wait_until,
)
from tests.support.training.attempts import run_attempt
from tests.support.training.models import save_chat_base, save_chats
from workers.data.batches import batch_of_step
from workers.output.report import metrics_of_all_attempts

Kind = Literal["rank", "torchrun", "supervisor", "server", "sigterm", "pause", "torn", "full"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RESUMES = ("pause", "torn")
SAMPLES = 64
BATCH = 16
SEED = 7
FULL_BYTES = 32 * 1024
"""Larger than any event segment, smaller than any shard."""


@dataclass(frozen=True)
class Blow:
    """`pause` and `torn` (a pause, and half of the newest checkpoint's shard is lost) resume the
    job on `ranks` ranks.
    """

    kind: Kind
    after: float | None = None
    """Seconds from when the attempt's supervisor lives: any moment from the first import on.

    None: once the attempt has written a checkpoint.
    """
    victim: int = 0
    """Which rank, or which shard."""
    ranks: int = 2


def schedule(
    seed: int,
    count: int,
    *,
    kinds: Sequence[Kind] = KINDS,
    ranks: Sequence[int] = (2,),
    longest: float = 8.0,
) -> list[Blow]:
    """Blows in an order, at moments and with victims that the seed decides; every kind equally
    often, give or take one.

    `ranks`: to resume on, after a pause; another number each time, if there are several.
    """
    rng = random.Random(seed)
    drawn: list[Kind] = []
    while len(drawn) < count:
        drawn += rng.sample(kinds, len(kinds))
    blows: list[Blow] = []
    now = 2
    for kind in drawn[:count]:
        if kind in RESUMES:
            now = rng.choice([other for other in ranks if other != now] or ranks)
        blows.append(Blow(kind, rng.uniform(0.0, longest), rng.randrange(8), now))
    return blows


@dataclass
class Story:
    """What became of one job."""

    run: RunDir
    struck: list[Kind] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    resized_at: list[int] = field(default_factory=list)
    """Steps of the checkpoints that were resumed on another number of ranks."""
    refused_saves: int = 0
    """Checkpoints that could not be written."""

    @property
    def finished(self) -> bool:
        return self.run.path("result.json").exists()

    def starts(self) -> list[Start]:
        found = [
            self.run.read(f"attempts/{n}/start.json", Start)
            for n in range(1, last_attempt(self.run) + 1)
        ]
        return [start for start in found if start is not None]


def play(server: Server, data: Path, blows: Sequence[Blow], *, steps: int) -> Story:
    """Run a job through the server under these blows, as many of them as come before its end; it
    must succeed.
    """
    job_id = submit(server.client(), data, steps=steps, seed=SEED, extra=options(steps)).id
    story = Story(server.run(job_id))
    strikes = _Strikes(server, job_id, story)
    for blow in blows:
        if not strikes.wait_for_moment(blow):
            break
        if strikes.strike(blow):
            story.struck.append(blow.kind)
    wait_until(server.client(), job_id, "succeeded")
    eventually(lambda: nothing_left(story.run))
    return story


def options(steps: int) -> dict[str, Any]:
    return {
        "precision": {"default": "nf4", "compute": "fp32"},
        "lora": {"r": 4, "lora_dropout": 0.1},
        "training": {
            "max_steps": steps,
            "batch_size": BATCH,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
        },
    }


class _Strikes:
    """Deals the blows to one job."""

    def __init__(self, server: Server, job_id: str, story: Story) -> None:
        self._server = server
        self._id = job_id
        self._story = story
        self._run = story.run
        self._ranks = 2
        self._failures = 0
        self._reached = -1

    def wait_for_moment(self, blow: Blow) -> bool:
        """Wait until it is due. False: the job was faster."""
        eventually(lambda: self._story.finished or processes_of(self._run)["supervisor"])
        due = time.monotonic() + (blow.after or 0.0)
        while not self._story.finished:
            self._check_one_attempt_lives()
            # With every loss without a checkpoint further on the pauses grow, and the test with
            # them.
            if newest_step(self._run) > self._reached:
                self._failures = 0
            ready = (
                time.monotonic() >= due
                if blow.after is not None
                else self._has_saved(last_attempt(self._run))
            )
            if ready and self._failures < 2:
                return True
            time.sleep(0.05)
        return False

    def strike(self, blow: Blow) -> bool:
        """False: the job was faster."""
        self._reached = max(self._reached, newest_step(self._run))
        if blow.kind == "server":
            self._server.kill()
            time.sleep((blow.after or 0.0) / 4)
            self._server.start()
        elif blow.kind in RESUMES:
            self._pause(blow)
        elif blow.kind == "full":
            self._fill_disk()
        else:
            return self._kill(blow)
        return True

    def _has_saved(self, attempt: int) -> bool:
        return any(name.endswith(f"-a{attempt}") for name in complete_checkpoints(self._run))

    def _kill(self, blow: Blow) -> bool:
        kind = "supervisor" if blow.kind == "sigterm" else blow.kind
        attempt = last_attempt(self._run)
        # Where it has not started yet, or has gone already, its supervisor in its place.
        there = eventually(
            lambda: self._victims(kind) or self._victims("supervisor") or self._story.finished
        )
        if isinstance(there, bool):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(
                there[blow.victim % len(there)],
                signal.SIGTERM if blow.kind == "sigterm" else signal.SIGKILL,
            )
        if blow.kind != "sigterm":
            self._failures += 1
        eventually(lambda: self._story.finished or last_attempt(self._run) > attempt)
        return True

    def _victims(self, kind: str) -> list[int] | None:
        return processes_of(self._run)[kind] or None

    def _pause(self, blow: Blow) -> None:
        jobs = self._server.client().fine_tuning.jobs
        with contextlib.suppress(openai.BadRequestError):  # it has succeeded meanwhile
            jobs.pause(self._id)
        if wait_until(self._server.client(), self._id, "paused", "succeeded").status == "succeeded":
            return
        left = processes_of(self._run)
        assert not left["rank"] + left["torchrun"], "a paused job trains no more"
        # The supervisor writes its record, and then goes.
        eventually(lambda: nothing_left(self._run))
        if blow.kind == "torn":
            self._tear(blow.victim)
        if blow.ranks != self._ranks:
            match = CHECKPOINT_NAME.fullmatch(newest_checkpoint(self._run) or "")
            self._story.resized_at.append(int(match[1]) if match else 0)
            self._ranks = blow.ranks
        self._failures = 0
        jobs.resume(self._id, extra_body={"distributed": {"nproc_per_node": blow.ranks}})

    def _tear(self, victim: int) -> None:
        names = complete_checkpoints(self._run)
        if len(names) < 2:
            return
        shards = sorted(self._run.path(f"checkpoints/{names[-1]}").glob("*.distcp"))
        shard = shards[victim % len(shards)]
        os.truncate(shard, shard.stat().st_size // 2)
        self._story.torn.append(names[-1])

    def _fill_disk(self) -> None:
        """Let the ranks write only small files until a checkpoint has failed of it, by the kernel's
        own limit.
        """
        attempt = last_attempt(self._run)

        def met() -> bool:
            self._limit_files(FULL_BYTES)  # of ranks that have just started, too
            return (
                self._story.finished
                or last_attempt(self._run) > attempt
                or self._refused(attempt) > 0
            )

        wait_for(met, SECONDS)
        self._story.refused_saves += self._refused(attempt)
        self._failures += last_attempt(self._run) > attempt
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        for pid in processes_of(self._run)["rank"]:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def _refused(self, attempt: int) -> int:
        events = [
            event for segment in read_segments(self._run, attempt) for event in segment.events
        ]
        outcome = Attempt(
            self._run, attempt
        ).read_outcome()  # of the last step's checkpoint, without which the attempt fails
        said = [event.message for event in events] + (
            [outcome.error.message] if outcome and outcome.error else []
        )
        return sum("could not be written" in message for message in said)

    def _check_one_attempt_lives(self) -> None:
        attempts = {_last_word(pid) for pid in processes_of(self._run)["rank"]} - {None}
        assert len(attempts) <= 1, f"ranks of attempts {attempts} live at once"


def _last_word(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").rsplit("\0", 1)[-1]
    except FileNotFoundError:
        return None


def uninterrupted(like: RunDir, folder: Path) -> RunDir:
    """The same job without a blow, on two ranks."""
    run = RunDir(folder)
    spec = like.get("spec.json")
    assert spec is not None
    run.put("spec.json", spec)
    assert run_attempt(run, 1, 2).kind == "succeeded"
    return run


def compare(story: Story, whole: RunDir, steps: int) -> dict[str, float]:
    """Assert what was promised; the largest relative differences of losses."""
    rows = metrics_of_all_attempts(story.run, last_attempt(story.run))
    truth = metrics_of_all_attempts(whole, 1)
    assert [row.step for row in rows] == [row.step for row in truth] == list(range(1, steps + 1))
    # Lengths differ, so that other samples would be another number of tokens.
    assert [row.tokens for row in rows] == [row.tokens for row in truth]
    assert (
        rows[-1].trained_tokens == truth[-1].trained_tokens == sum(row.tokens or 0 for row in rows)
    )
    for first in range(0, steps - steps % (SAMPLES // BATCH), SAMPLES // BATCH):
        epoch = [
            i
            for step in range(first, first + SAMPLES // BATCH)
            for i in batch_of_step(step, SAMPLES, BATCH, SEED)
        ]
        assert sorted(epoch) == list(range(SAMPLES)), "every sample once an epoch"
    assert not set(story.torn) & {start.checkpoint for start in story.starts()}, (
        "a torn checkpoint was read"
    )
    apart = {
        a.step: abs((a.train_loss or 0) / (b.train_loss or 1) - 1)
        for a, b in zip(rows, truth, strict=True)
    }
    resized = min(story.resized_at, default=steps)
    assert all(difference == 0 for step, difference in apart.items() if step <= resized), (
        "bitwise on the same ranks"
    )
    soon = max(
        (difference for step, difference in apart.items() if resized < step <= resized + 10),
        default=0.0,
    )
    assert soon <= 1e-6, "within 1e-6 on others, over the first ten steps"
    if not story.resized_at:
        ours, theirs = (
            load_file(run.path("adapter/adapter_model.safetensors")) for run in (story.run, whole)
        )
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    return {"ten_steps_after_a_resize": soon, "any_step": max(apart.values())}


def trained_again(story: Story) -> int:
    """Steps that were done more than once, over all attempts."""
    done = Counter(
        event.metrics.step
        for attempt in range(1, last_attempt(story.run) + 1)
        for segment in read_segments(story.run, attempt)
        for event in segment.events
        if event.kind == "metrics" and event.metrics is not None
    )
    return sum(count - 1 for count in done.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blows", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=160, help="of each job")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        help="to resume on, in every job (default: 2 in one job, 1 to 3 in the next)",
    )
    parser.add_argument("--name", default="kills", help="of the file with the figures")
    arguments = parser.parse_args()
    from benchmarks.machine import machine, save

    told = machine() | {"command": " ".join(["python -m tests.e2e.kills", *sys.argv[1:]])}
    with tempfile.TemporaryDirectory() as folder:
        options = arguments.blows, arguments.seed, arguments.steps, arguments.kinds, arguments.ranks
        for figures in campaign(Path(folder), *options):
            save(arguments.name, told | figures)


def campaign(
    folder: Path,
    blows: int,
    seed: int,
    steps: int,
    kinds: Sequence[Kind] = KINDS,
    ranks: Sequence[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Whole jobs until `blows` have struck, every second one also on other numbers of ranks, or all
    on `ranks`.

    The figures so far, behind every job.
    """
    save_chat_base(folder / "models" / "tiny")
    data = folder / "train.jsonl"
    save_chats(data, SAMPLES)
    home = folder / "home"
    home.mkdir()
    server = Server(home, folder / "models", slots=3)
    server.start()
    stories: list[Story] = []
    apart: list[dict[str, float]] = []
    whole: RunDir | None = None
    began = time.monotonic()
    try:
        while sum(len(story.struck) for story in stories) < blows:
            of_job = ranks or ((2,) if len(stories) % 2 == 0 else (1, 2, 3))
            story = play(
                server,
                data,
                schedule(seed + len(stories), 12, kinds=kinds, ranks=of_job),
                steps=steps,
            )
            whole = whole or uninterrupted(story.run, folder / "whole")
            apart.append(compare(story, whole, steps))
            stories.append(story)
            yield figures_of(stories, apart) | {
                "steps_per_job": steps,
                "seconds": round(time.monotonic() - began),
            }
    finally:
        server.stop()


def figures_of(stories: Sequence[Story], apart: Sequence[dict[str, float]]) -> dict[str, Any]:
    struck = Counter(kind for story in stories for kind in story.struck)
    return {
        "blows": sum(struck.values()),
        "by_kind": dict(sorted(struck.items())),
        "jobs": len(stories),
        "jobs_lost": 0,
        "attempts": sum(last_attempt(story.run) for story in stories),
        "ranks_changed": sum(len(story.resized_at) for story in stories),
        "checkpoints_torn": sum(len(story.torn) for story in stories),
        "torn_checkpoints_read": 0,
        "checkpoints_refused_by_the_disk": sum(story.refused_saves for story in stories),
        "steps_trained_again": sum(trained_again(story) for story in stories),
        "samples_missed_or_repeated": 0,
        "largest_relative_difference_of_a_loss": {
            key: max(found[key] for found in apart) for key in apart[0]
        },
    }


if __name__ == "__main__":
    main()
