from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ft_service.errors import UnavailableError
from ft_service.installation import ROOT
from ft_service.rundir.attempt import Attempt
from ft_service.rundir.attempt_outcome import exit_of, killed_exit
from ft_service.rundir.checkpoints import complete_checkpoints, newest_checkpoint
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import (
    CheckpointMarker,
    Control,
    Desired,
    ExitReason,
    Result,
    Start,
)
from ft_service.rundir.engine import ENGINE, SeatOrder, arriving_key, left_key, seat_key
from ft_service.rundir.engine_spec import EngineSpec
from ft_service.rundir.events import Event, write_segment
from ft_service.rundir.file_digest import NamedFile
from ft_service.spec import AdapterRef, DataFileRef
from ft_service.storage.locations import Places
from ft_service.storage.object_store import ObjectStore
from ft_service.supervisor import engine_sync, object_sync
from ft_service.supervisor.engine_sync import EngineSync, Seats
from ft_service.supervisor.object_sync import Sync, follow
from tests.support.attempts import wait_for
from tests.support.reconciling import spec_of
from tests.support.storage import local_s3, new_bucket
from tests.support.worker_policy import allowed, requests_of

NAME = "engine-1"
ONE, TWO = "ftjob-1", "ftjob-2"


@pytest.fixture(scope="module", autouse=True)
def s3() -> Iterator[None]:
    with local_s3():
        yield


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_sync, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(object_sync, "FOLLOW_SECONDS", 0.02)
    monkeypatch.setattr(object_sync, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setitem(object_sync.TRY_SECONDS, "fetch", 0.2)


class Node:
    """An engine's node, whose disk is not the service's, and the service."""

    def __init__(self, folder: Path) -> None:
        self.objects = ObjectStore(new_bucket())
        self.service = Places(folder / "service", self.objects)
        self.home = folder / "node"
        self.run = RunDir(self.home / "engines" / NAME)
        there = self.service.engine(NAME)
        held = EngineSpec(
            engine_id=NAME, project_id="p", spec=spec_of(ONE), most_seats=8, idle_seconds=60.0
        )
        there.write(ENGINE, held)
        Attempt(there, 1).write_start(start_of(NAME))
        self.seats = Seats(self.run)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def order(self, job_id: str, data: str = "file-1", attempt: int = 1, **changes: Any) -> None:
        """What the service does when a job gets a seat."""
        self.service.files_dir.mkdir(parents=True, exist_ok=True)
        (self.service.files_dir / data).write_text(data)
        self.service.keep(data)
        assert self.service.tokens_dir is not None
        tokens = self.service.tokens_dir / f"{data}.how/rows"
        tokens.parent.mkdir(parents=True, exist_ok=True)
        tokens.write_text(f"tokens of {data}")
        self.service.share_tokens(data)
        run = self.service.run(job_id)
        path = str(self.home / "files" / data)
        named = DataFileRef(name="train.jsonl", path=path, sha256=data)
        run.write("spec.json", spec_of(job_id, training_data=named, **changes))
        engine = str(self.run.root)
        start = start_of(job_id, attempt, newest_checkpoint(run), engine)
        Attempt(run, attempt).write_start(start)
        path = str(self.home / "runs" / job_id)
        ordered = SeatOrder(job_id=job_id, attempt=attempt, run_dir=path)
        self.service.engine(NAME).write(seat_key(job_id, attempt), ordered)

    def sync(self) -> EngineSync:
        return EngineSync(self.seats, self.objects, self.run, 1, 0)

    def follow(self) -> None:
        self.sync().fetch()
        self._thread.start()

    def _follow(self) -> None:
        follow(self.sync, until=self._over.is_set)

    def seat(self, job_id: str, attempt: int = 1) -> Attempt:
        """An attempt of a job on this node."""
        return Attempt(RunDir(self.home / "runs" / job_id), attempt)

    def there(self, job_id: str, attempt: int = 1) -> Attempt:
        """The same as the service sees it."""
        return Attempt(self.service.run(job_id), attempt)

    def is_ordered(self, job_id: str, attempt: int = 1) -> bool:
        """Whether the ranks see it."""
        return self.run.has(seat_key(job_id, attempt))

    def leave(self, job_id: str, attempt: int = 1) -> None:
        """What rank 0 says once no rank uses the seat's files."""
        self.run.put(left_key(seat_key(job_id, attempt)), b"")

    def files(self) -> set[str]:
        """What is on the disk besides the engine's own directory, by folder or file."""
        return {
            path.relative_to(self.home).as_posix()
            for folder in ("files", "tokens", "runs")
            for path in (self.home / folder).glob("*")
        }

    def close(self) -> None:
        """End its threads, whatever they wait for."""
        for key in (*self.run.list("seats"), *self.run.list("arriving")):
            self.run.put(left_key(key.replace("arriving/", "seats/")), b"")
        wait_for(lambda: not self.seats._attended)
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()


def start_of(
    job_id: str, attempt: int = 1, checkpoint: str | None = None, engine: str | None = None
) -> Start:
    return Start(
        job_id=job_id,
        attempt=attempt,
        world_size=2,
        generation=1,
        checkpoint=checkpoint,
        engine=engine,
    )


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def save(seat: Attempt, step: int) -> str:
    """A checkpoint and its event, as rank 0 writes them."""
    name = f"step-{step}-a{seat.number}"
    shard = f"checkpoints/{name}/__0_0.distcp"
    seat.run.put(shard, f"step {step}".encode())
    size = seat.run.size(shard)
    assert size is not None
    file = NamedFile(name="__0_0.distcp", bytes=size, sha256=sha256_of(seat.run.path(shard)))
    marker = CheckpointMarker(step=step, attempt=seat.number, world_size=2, files=[file])
    seat.run.write(f"checkpoints/{name}/COMPLETE", marker)
    event = Event(time=1.0, kind="checkpoint", message=f"saved {step}", checkpoint=name)
    seq = len(seat.run.list(seat.keys.events))
    write_segment(seat.run, seat.number, seq, [event])
    return name


def test_ranks_see_an_order_once_its_files_are_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    real = Sync.fetch_files

    def held(sync: Sync, *given: Any) -> None:
        if sync.run.root.name == ONE:
            assert goes_on.wait(60)
        real(sync, *given)

    monkeypatch.setattr(Sync, "fetch_files", held)
    node.order(ONE)
    node.follow()
    assert node.run.has(arriving_key(seat_key(ONE, 1))), "before any rank runs: it is not idle"
    node.order(TWO)
    wait_for(lambda: node.is_ordered(TWO))
    assert not node.is_ordered(ONE), "it keeps no other waiting"
    goes_on.set()
    wait_for(lambda: node.is_ordered(ONE))
    assert not node.run.list("arriving")
    assert (node.home / "files/file-1").read_text() == "file-1"
    assert (node.home / "tokens/file-1.how/rows").read_text() == "tokens of file-1"
    assert node.seat(ONE).has_start()


def test_a_seats_exit_comes_last_and_its_disk_is_given_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.order(ONE)
    node.order(TWO, "file-2")
    node.order("ftjob-3")  # of the same data as the first
    node.follow()
    wait_for(lambda: all(map(node.is_ordered, (ONE, TWO, "ftjob-3"))))
    seat = node.seat(ONE)
    name = save(seat, 5)
    wait_for(lambda: complete_checkpoints(node.there(ONE).run) == [name])
    assert not node.there(ONE).has_exit()
    asked = requests_of(node.objects, monkeypatch)
    seat.run.put("adapter/adapter_model.safetensors", b"weights")
    done = Result(attempt=1, steps=1, trained_tokens=1, train_loss=None, valid_loss=None)
    seat.run.write("result.json", done)
    seat.write_exit(exit_of(ExitReason.SUCCEEDED, "done"))
    node.leave(ONE)
    wait_for(lambda: not node.is_ordered(ONE))
    written = [key.rpartition(f"/{ONE}/")[2] for action, key in asked if action == "s3:PutObject"]
    assert written[-2:] == ["result.json", "attempts/1/exit.json"]
    assert node.there(ONE).read_exit() == exit_of(ExitReason.SUCCEEDED, "done")
    assert node.service.run(ONE).get("adapter/adapter_model.safetensors") == b"weights"
    wait_for(lambda: f"runs/{ONE}" not in node.files())
    both = {"files/file-1", "files/file-2", "tokens/file-1.how", "tokens/file-2.how"}
    assert node.files() == {*both, f"runs/{TWO}", "runs/ftjob-3"}
    node.leave("ftjob-3")
    wait_for(lambda: node.files() == {"files/file-2", "tokens/file-2.how", f"runs/{TWO}"})
    node.order(ONE, attempt=2)
    wait_for(lambda: node.is_ordered(ONE, 2))
    assert node.seat(ONE, 2).run.has(f"checkpoints/{name}/__0_0.distcp"), "to resume from"
    assert not node.is_ordered(ONE)


def test_an_adapter_that_another_seat_reads_stays(node: Node) -> None:
    node.order(ONE)
    node.service.run(ONE).put("adapters/step-5-a1/adapter_model.safetensors", b"weights")
    path = str(node.home / "runs" / ONE / "adapters/step-5-a1")
    node.order(TWO, parent=AdapterRef(name="ft:tiny:local::1", job_id=ONE, path=path))
    node.follow()
    wait_for(lambda: node.is_ordered(ONE) and node.is_ordered(TWO))
    node.leave(ONE)
    wait_for(lambda: not (node.home / "runs" / ONE / "spec.json").exists())
    assert (Path(path) / "adapter_model.safetensors").read_bytes() == b"weights"
    node.leave(TWO)
    wait_for(lambda: f"runs/{TWO}" not in node.files() and not Path(path).exists())


def test_what_cannot_be_fetched_ends_its_seat_alone(node: Node) -> None:
    node.order(ONE)
    node.order(TWO, "file-2")
    node.service.remove("file-2")
    node.follow()
    ended = wait_for(lambda: node.there(TWO).read_exit())
    assert ended.reason is ExitReason.LAUNCH_FAILED, "it is tried again later"
    assert "could not be fetched to its engine: " in ended.message
    assert "files/file-2" in ended.message
    wait_for(lambda: node.is_ordered(ONE))
    wait_for(lambda: node.files() == {"files/file-1", "tokens/file-1.how", f"runs/{ONE}"})
    assert not node.is_ordered(TWO)
    assert not node.run.list("arriving"), "the engine may be idle again"


def test_an_outage_delays_a_seat_and_ends_none(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    away = threading.Event()
    away.set()
    tried: list[str] = []

    def denied(name: str, real: Any) -> Any:
        def call(sync: Sync, *given: Any) -> Any:
            if not away.is_set():
                return real(sync, *given)
            tried.append(name)
            raise UnavailableError("503 Slow Down")

        return call

    for name in ("fetch_files", "end"):
        monkeypatch.setattr(Sync, name, denied(name, getattr(Sync, name)))
    node.order(ONE)
    node.follow()
    wait_for(lambda: {"fetch_files", "end"} <= set(tried))
    assert node.run.list("arriving"), "its engine waits for it"
    away.clear()
    wait_for(lambda: node.is_ordered(ONE))
    assert not node.there(ONE).has_exit()
    name = save(node.seat(ONE), 5)
    wait_for(lambda: complete_checkpoints(node.there(ONE).run) == [name])


def test_requests_and_the_end_of_a_seat_by_the_service_reach_its_ranks(node: Node) -> None:
    node.order(ONE)
    node.there(ONE).write_exit(killed_exit("user_cancelled"))
    node.order(TWO)
    node.follow()
    wait_for(lambda: node.is_ordered(TWO))
    wait_for(lambda: node.run.has(left_key(seat_key(ONE, 1))))
    assert not node.is_ordered(ONE), "it was over before"
    node.there(TWO).write_control(Control(generation=2, desired=Desired.PAUSE))
    wait_for(lambda: node.seat(TWO).read_control())
    node.there(TWO).write_exit(killed_exit("worker_killed"))
    wait_for(node.seat(TWO).has_exit)
    save(node.seat(TWO), 5)
    assert node.is_ordered(TWO), "its ranks have not left it yet"
    assert node.seat(TWO).has_start()
    node.leave(TWO)
    wait_for(lambda: not node.files())
    assert complete_checkpoints(node.there(TWO).run) == [], "it was over"


def test_the_engines_end_uploads_all_seats_and_its_own_record_last(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.order(ONE)
    node.order(TWO)
    node.follow()
    wait_for(lambda: node.is_ordered(ONE) and node.is_ordered(TWO))
    node._over.set()
    node._thread.join()
    seats = Seats(node.run)  # in a process of its own
    names = [save(node.seat(job_id), 5) for job_id in (ONE, TWO)]
    node.seat(ONE).write_exit(exit_of(ExitReason.STOPPED, "stopped"))
    Attempt(node.run, 1).write_exit(exit_of(ExitReason.STOPPED, "idle"))
    asked = requests_of(node.objects, monkeypatch)
    EngineSync(seats, node.objects, node.run, 1, 0).flush()
    written = [key for action, key in asked if action == "s3:PutObject"]
    assert written[-1] == f"{node.objects.url.split('/', 3)[3]}/engines/{NAME}/attempts/1/exit.json"
    assert [complete_checkpoints(node.there(job_id).run) for job_id in (ONE, TWO)] == [
        [name] for name in names
    ]
    assert node.there(ONE).read_exit() == exit_of(ExitReason.STOPPED, "stopped")
    assert not node.there(TWO).has_exit(), "the service writes it (EngineDirectory.settle)"


def test_a_killed_process_goes_on_where_it_was(node: Node) -> None:
    node.order(ONE)
    assert engine_sync.main(["fetch", node.objects.url, str(node.run.root), "1", "0"]) == 0
    words = [node.objects.url, str(node.run.root), "1", "0"]
    command = [sys.executable, "-P", "-m", "ft_service.supervisor.engine_sync", "follow", *words]
    start = partial(
        subprocess.Popen,
        command,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    process = start()
    try:
        wait_for(lambda: node.is_ordered(ONE))
        process.kill()
        process.wait()
        name = save(node.seat(ONE), 5)
        node.order(TWO, "file-2")
        process = start()
        wait_for(lambda: complete_checkpoints(node.there(ONE).run) == [name])
        wait_for(lambda: node.is_ordered(TWO))
        node.seat(ONE).write_exit(exit_of(ExitReason.STOPPED, "stopped"))
        node.leave(ONE)
        wait_for(lambda: node.files() == {"files/file-2", "tokens/file-2.how", f"runs/{TWO}"})
        assert node.there(ONE).has_exit()
    finally:
        process.kill()
        process.wait()


def test_the_workers_policy_is_enough_for_an_engine(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests_of(node.objects, monkeypatch)
    node.order(ONE)
    node.order(TWO)
    asked.clear()
    node.follow()
    wait_for(lambda: node.is_ordered(ONE) and node.is_ordered(TWO))
    node._over.set()
    node._thread.join()
    save(node.seat(ONE), 5)
    node.leave(ONE)
    node.leave(TWO)
    wait_for(lambda: not node.seats._attended)
    Attempt(node.run, 1).write_exit(exit_of(ExitReason.STOPPED, "idle"))
    node.sync().flush()
    bucket = node.objects.url.split("/")[2]
    assert {entry for entry in asked if not allowed(bucket, *entry)} == set()
    for key in (ENGINE, seat_key(ONE, 1)):
        assert not allowed(bucket, "s3:PutObject", f"ft/engines/{NAME}/{key}")


def test_a_look_is_one_listing_and_a_few_requests_for_each_seat(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_sync, "LOOK_SECONDS", 60.0)
    asked = requests_of(node.objects, monkeypatch)
    node.order(ONE)
    engine = node.sync()
    engine.fetch()
    seat = Sync(node.objects, node.seat(ONE).run, 1, 0)
    seat.fetch()
    node.run.path(arriving_key(seat_key(ONE, 1))).unlink()
    node.leave(ONE)  # nobody attends to it
    for sync, lists in ((engine, 1), (seat, 0)):
        asked.clear()
        sync.listen()
        for _ in range(6):
            sync.push()
        actions = sorted(action for action, _ in asked)
        assert actions == ["s3:GetObject"] * 5 + ["s3:ListBucket"] * lists
