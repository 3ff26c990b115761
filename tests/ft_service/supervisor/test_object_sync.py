from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ft_service.errors import FtError, UnavailableError
from ft_service.host import processes
from ft_service.installation import ROOT
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.attempt_seal import Fence
from ft_service.rundir.checkpoints import checkpoint_faults, complete_checkpoints, newest_checkpoint
from ft_service.rundir.directory import RunDir, sha256_of
from ft_service.rundir.documents import (
    CheckpointMarker,
    Control,
    Desired,
    Exit,
    ExitReason,
    Outcome,
    OutcomeKind,
    Result,
    Start,
)
from ft_service.rundir.events import Event, read_segments, write_segment
from ft_service.rundir.file_digest import NamedFile
from ft_service.spec import DataFileRef
from ft_service.storage import object_store
from ft_service.storage.locations import Places
from ft_service.storage.object_store import ObjectStore
from ft_service.supervisor import object_sync
from ft_service.supervisor.object_sync import Sync
from tests.support.attempts import family, gone, scripted, signal_all, wait_for
from tests.support.reconciling import spec_of
from tests.support.storage import Gate, gated_s3, local_s3, new_bucket
from tests.support.worker_policy import allowed, requests_of

JOB = "ftjob-1"


@pytest.fixture(scope="module", autouse=True)
def s3() -> Iterator[None]:
    with local_s3():
        yield


@pytest.fixture
def objects() -> ObjectStore:
    return ObjectStore(new_bucket())


@pytest.fixture
def service(objects: ObjectStore, tmp_path: Path) -> Places:
    """The service, whose disk is not the nodes'."""
    return Places(tmp_path / "service", objects)


def start_of(attempt: int, checkpoint: str | None = None) -> Start:
    return Start(
        job_id=JOB, attempt=attempt, world_size=2, generation=1, checkpoint=checkpoint, nodes=2
    )


class Nodes:
    """Two nodes in one attempt, each with a disk of its own."""

    def __init__(
        self,
        service: Places,
        objects: ObjectStore,
        folder: Path,
        attempt: int,
        checkpoint: str | None = None,
    ) -> None:
        self.attempt = attempt
        self.service = service.run(JOB)
        self.homes = [folder / f"attempt-{attempt}" / f"node-{index}" for index in range(2)]
        service.files_dir.mkdir(parents=True, exist_ok=True)
        (service.files_dir / "file-1").write_bytes(b"data")
        service.keep("file-1")
        self.service.write(f"attempts/{attempt}/start.json", start_of(attempt, checkpoint))
        self.runs = [RunDir(home / "runs" / JOB) for home in self.homes]
        self.syncs: list[Sync] = []
        for index, home in enumerate(
            self.homes
        ):  # each sees the home at the path that the service has
            data = DataFileRef(name="train.jsonl", path=str(home / "files/file-1"), sha256="0")
            self.service.write("spec.json", spec_of(JOB, training_data=data))
            self.syncs.append(Sync(objects, self.runs[index], attempt, index))
            self.syncs[index].fetch()

    def save(self, step: int) -> str:
        """A checkpoint with a shard of each node; rank 0 is on the first."""
        name = f"step-{step}-a{self.attempt}"
        files = []
        for index, run in enumerate(self.runs):
            run.put(
                f"checkpoints/{name}/__{index}_0.distcp", f"shard {index} of step {step}".encode()
            )
            path = run.path(f"checkpoints/{name}/__{index}_0.distcp")
            files.append(
                NamedFile(name=path.name, bytes=path.stat().st_size, sha256=sha256_of(path))
            )
        marker = CheckpointMarker(step=step, attempt=self.attempt, world_size=2, files=files)
        self.runs[0].write(f"checkpoints/{name}/COMPLETE", marker)
        seq = len(self.runs[0].list(f"attempts/{self.attempt}/events"))
        event = Event(time=1.0, kind="checkpoint", message=f"saved {step}", checkpoint=name)
        write_segment(self.runs[0], self.attempt, seq, [event])
        return name

    def messages(self) -> list[str]:
        return [
            event.message
            for segment in read_segments(self.service, self.attempt)
            for event in segment.events
        ]


@pytest.fixture
def nodes(service: Places, objects: ObjectStore, tmp_path: Path) -> Nodes:
    return Nodes(service, objects, tmp_path, 1)


def test_a_node_begins_with_documents_and_data(nodes: Nodes) -> None:
    for run, home in zip(nodes.runs, nodes.homes, strict=True):
        assert run.read("attempts/1/start.json", Start) == start_of(1)
        assert (home / "files/file-1").read_bytes() == b"data"


def test_a_node_fetches_the_tokens_of_its_own_data_alone(
    service: Places, objects: ObjectStore, tmp_path: Path
) -> None:
    assert service.tokens_dir is not None
    for name in ("0.a/index.json", "0.a/lock", "1.a/index.json"):
        path = service.tokens_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if path.name == "lock" else name)
    service.share_tokens("0")
    service.share_tokens("1")
    nodes = Nodes(service, objects, tmp_path, 1)
    for home in nodes.homes:
        found = sorted(
            path.relative_to(home / "tokens").as_posix() for path in (home / "tokens").rglob("*")
        )
        assert found == ["0.a", "0.a/index.json", "0.a/lock"]
        assert (home / "tokens/0.a/index.json").read_text() == "0.a/index.json"
    service.remove_tokens("0")
    assert list(objects.list("tokens")) == ["tokens/1.a/index.json"]
    assert [path.name for path in service.tokens_dir.iterdir()] == ["1.a"]


def test_a_checkpoint_and_what_names_it_wait_for_every_nodes_shards(nodes: Nodes) -> None:
    write_segment(nodes.runs[0], 1, 0, [Event(time=1.0, message="before")])
    name = nodes.save(5)
    write_segment(nodes.runs[0], 1, 2, [Event(time=1.0, message="after")])
    assert not nodes.syncs[0].push()
    assert (complete_checkpoints(nodes.service), nodes.messages()) == ([], ["before"])
    assert nodes.syncs[1].push()
    assert complete_checkpoints(nodes.service) == [], "the marker is the first node's to bring"
    assert nodes.syncs[0].push()
    assert complete_checkpoints(nodes.service) == [name]
    assert nodes.messages() == ["before", "saved 5", "after"]
    assert newest_checkpoint(nodes.service) == name


def test_a_look_costs_no_more_after_many_segments(
    nodes: Nodes, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long job writes a hundred thousand; the process beside it looks twice a second."""
    for pause in ("LOOK_SECONDS", "LOGS_SECONDS"):
        monkeypatch.setattr(object_sync, pause, 3600.0)
    run = nodes.runs[0]
    sync = nodes.syncs[0]
    costs = []
    for segments in (range(3), range(3, 40)):
        for seq in segments:
            write_segment(run, 1, seq, [Event(time=1.0, message=str(seq))])
        sync.push()
        costs.append(calls_of(sync.push))
    again = Sync(objects, run, 1, 0)
    assert calls_of(again.push) > costs[0]
    assert costs == [calls_of(again.push)] * 2
    write_segment(run, 1, 40, [Event(time=1.0, message="40")])
    again.push()
    assert nodes.messages() == [str(seq) for seq in range(41)]


def calls_of(work: Callable[[], object]) -> int:
    """How many functions, of C too, it calls in this thread."""
    kinds: list[str] = []
    sys.setprofile(lambda frame, kind, what: kinds.append(kind))
    try:
        work()
    finally:
        sys.setprofile(None)
    return kinds.count("call") + kinds.count("c_call")


def test_segments_go_up_once_and_one_that_cannot_be_read_keeps_none_back(
    nodes: Nodes, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = nodes.runs[0]
    write_segment(run, 1, 0, [Event(time=1.0, message="0")])
    run.path("attempts/1/events/00000001.jsonl").symlink_to("elsewhere")
    nodes.syncs[0].push()
    put: list[str] = []
    real = objects.put_if_absent
    monkeypatch.setattr(
        objects, "put_if_absent", lambda key, body: put.append(key) or real(key, body)
    )
    write_segment(run, 1, 2, [Event(time=1.0, message="2")])
    nodes.syncs[0].push()
    Sync(objects, run, 1, 0).push()
    assert put == [f"runs/{JOB}/attempts/1/events/00000002.jsonl"]


def test_the_next_attempt_resumes_on_other_disks(
    nodes: Nodes, service: Places, objects: ObjectStore, tmp_path: Path
) -> None:
    name = nodes.save(5)
    for sync in (nodes.syncs[1], nodes.syncs[0]):
        sync.push()
    following = Nodes(service, objects, tmp_path, 2, checkpoint=newest_checkpoint(nodes.service))
    for run in following.runs:
        assert checkpoint_faults(run, name) == []
        assert read_segments(run, 1), "the table of metrics is made of all attempts' events"


def test_a_damaged_checkpoint_is_set_aside(
    nodes: Nodes, service: Places, objects: ObjectStore, tmp_path: Path
) -> None:
    older = nodes.save(5)
    newer = nodes.save(10)
    for sync in (nodes.syncs[1], nodes.syncs[0]):
        sync.push()
    # As long as it was.
    objects.put(f"runs/{JOB}/checkpoints/{newer}/__1_0.distcp", b"SHARD 1 of step 10")
    assert newest_checkpoint(nodes.service) == newer
    with pytest.raises(
        FtError,
        match=f"Checkpoint {newer} is damaged on object storage: __1_0.distcp has other contents",
    ):
        Nodes(service, objects, tmp_path, 2, checkpoint=newer)
    assert newest_checkpoint(nodes.service) == older


def test_what_retention_removes_goes_there_too(nodes: Nodes, objects: ObjectStore) -> None:
    first = nodes.save(5)
    second = nodes.save(10)
    for sync in (nodes.syncs[1], nodes.syncs[0]):
        sync.push()
    remove(nodes.runs[0], first)  # by rank 0, on its own disk
    nodes.syncs[0].push()
    assert complete_checkpoints(nodes.service) == [second]
    nodes.syncs[1].push()
    assert [path.name for path in nodes.runs[1].path("checkpoints").iterdir()] == [second], (
        "shards of other nodes go as well"
    )
    nodes.syncs[1].push()
    assert not objects.list(f"runs/{JOB}/checkpoints/{first}")


def remove(run: RunDir, name: str) -> None:
    folder = run.path(f"checkpoints/{name}")
    (folder / "COMPLETE").unlink()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def outcome_of(objects: ObjectStore) -> dict[str, bytes | None]:
    """All that decides what is resumed from and what is published."""
    kept = [
        key for key in objects.list(f"runs/{JOB}") if not key.startswith(f"runs/{JOB}/attempts/")
    ]
    return {key: objects.get(key) for key in kept}


def publish(nodes: Nodes) -> None:
    run = nodes.runs[0]
    attempt = nodes.attempt
    run.put("adapter/adapter_model.safetensors", f"weights of attempt {attempt}".encode())
    run.put("metrics.csv", f"step\n{attempt}\n".encode())
    run.write(
        "result.json",
        Result(attempt=attempt, steps=1, trained_tokens=1, train_loss=None, valid_loss=None),
    )


def test_a_sealed_attempts_nodes_bring_and_remove_nothing(
    nodes: Nodes,
    service: Places,
    objects: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old nodes were cut off: they have a newer checkpoint and an outcome of their own, and
    remove an older one.
    """
    # Longer ago than any look.
    monkeypatch.setattr("ft_service.supervisor.object_sync.LOOK_SECONDS", 0.0)
    first = nodes.save(5)
    for sync in (nodes.syncs[1], nodes.syncs[0]):
        sync.push()
    following = Nodes(service, objects, tmp_path, 2, checkpoint=first)
    late = nodes.save(10)
    remove(nodes.runs[0], first)
    publish(nodes)
    following.save(7)
    for sync in (following.syncs[1], following.syncs[0]):
        sync.push()
    before = outcome_of(objects)
    again = [
        Sync(objects, run, 1, index) for index, run in enumerate(nodes.runs)
    ]  # as after storage was away
    for sync in (*nodes.syncs[::-1], *again[::-1]):
        sync.listen()
        assert sync.push(logs=True), "there is nothing to wait for"
        sync.flush()
    assert outcome_of(objects) == before
    assert not objects.list(f"runs/{JOB}/checkpoints/{late}")
    assert newest_checkpoint(nodes.service) == "step-7-a2"
    for run in nodes.runs:
        assert run.read("attempts/2/start.json", Start), (
            "supervisor and ranks see the seal on their own disk"
        )


def test_the_later_attempts_outcome_replaces_what_an_old_one_brought_unfinished(
    nodes: Nodes, service: Places, objects: ObjectStore, tmp_path: Path
) -> None:
    publish(nodes)
    nodes.syncs[0]._put_outcome("adapter/adapter_model.safetensors")  # and then it was cut off
    following = Nodes(service, objects, tmp_path, 2)
    # Stopped between its look and its act.
    nodes.syncs[0]._fence = Fence(RunDir(tmp_path / "nothing"), 1)
    objects.put_if_absent(f"runs/{JOB}/result.json", nodes.runs[0].get("result.json") or b"")
    publish(following)
    following.syncs[0].flush()
    assert (
        service.run(JOB).path("adapter/adapter_model.safetensors").read_text()
        == "weights of attempt 2"
    )
    assert service.run(JOB).get("metrics.csv") == b"step\n2\n"
    assert nodes.service.read("result.json", Result) == following.runs[0].read(
        "result.json", Result
    )


def test_nothing_is_removed_there_before_the_newer_checkpoint_is_complete_there(
    nodes: Nodes,
) -> None:
    first = nodes.save(5)
    second = nodes.save(10)
    nodes.syncs[1].push()
    nodes.syncs[0].push()
    third = nodes.save(15)
    for name in (first, second):
        remove(nodes.runs[0], name)
    assert not nodes.syncs[0].push(), "the shards of the other node are not there yet"
    assert complete_checkpoints(nodes.service) == [first, second]
    nodes.syncs[1].push()
    assert nodes.syncs[0].push()
    assert complete_checkpoints(nodes.service) == [third]


@pytest.mark.slow
def test_processes_that_slept_through_the_next_attempt_change_nothing_there(
    service: Places, objects: ObjectStore, tmp_path: Path
) -> None:
    """Supervisor, ranks and what brings files to object storage, each attempt on a disk of its
    own.
    """
    old = supervised(service, objects, tmp_path, 1, "checkpoint=3,hang")
    try:
        wait_for(lambda: bool(complete_checkpoints(service.run(JOB))), 120)
        everybody = family(old.process.pid)
        assert len(everybody) >= 5, (
            "supervisor, torchrun, two ranks, and who brings files to object storage"
        )
        signal_all(everybody, signal.SIGSTOP)
        old.run.write(
            "checkpoints/step-6-a1/COMPLETE",
            CheckpointMarker(step=6, attempt=1, world_size=2, files=[]),
        )
        remove(old.run, "step-3-a1")
        old.run.put("metrics.csv", b"of attempt 1")
        old.run.write(
            "result.json",
            Result(attempt=1, steps=9, trained_tokens=1, train_loss=None, valid_loss=None),
        )
        following = supervised(service, objects, tmp_path, 2, "checkpoint=5,succeed", "step-3-a1")
        assert following.process.wait(120) == 0
        before = outcome_of(objects)
        assert nodes_result(service) == 2
        frozen = [processes.of(pid) for pid in everybody]
        signal_all(everybody[::-1], signal.SIGCONT)
        old.process.wait(120)
        wait_for(lambda: gone(frozen), 120)
    finally:
        signal_all(family(old.process.pid)[::-1], signal.SIGKILL)
        old.process.wait()
    assert outcome_of(objects) == before
    assert complete_checkpoints(service.run(JOB)) == ["step-3-a1", "step-5-a2"]


def nodes_result(service: Places) -> int:
    result = service.run(JOB).read("result.json", Result)
    return result.attempt if result else 0


@dataclass(frozen=True)
class Supervised:
    run: RunDir
    process: subprocess.Popen[bytes]


def supervised(
    service: Places,
    objects: ObjectStore,
    folder: Path,
    attempt: int,
    script: str,
    checkpoint: str | None = None,
) -> Supervised:
    home = folder / f"host-{attempt}"
    service.files_dir.mkdir(parents=True, exist_ok=True)
    (service.files_dir / "file-1").write_bytes(b"data")
    service.keep("file-1")
    shared = service.run(JOB)
    data = DataFileRef(name="train.jsonl", path=str(home / "files/file-1"), sha256="0")
    shared.write("spec.json", spec_of(JOB, training_data=data))
    start = Start(job_id=JOB, attempt=attempt, world_size=2, generation=1, checkpoint=checkpoint)
    shared.write(f"attempts/{attempt}/start.json", start)
    run = RunDir(home / "runs" / JOB)
    run.root.mkdir(parents=True)
    command = [
        sys.executable,
        "-P",
        "-m",
        "ft_service.supervisor",
        str(run.root),
        str(attempt),
        "--mirror",
        objects.url,
    ]
    process = subprocess.Popen(
        [*command, "--command", *scripted(script)], stderr=subprocess.DEVNULL
    )
    return Supervised(run, process)


def test_a_wish_and_a_stop_reach_every_node(nodes: Nodes) -> None:
    nodes.service.write("attempts/1/control.json", Control(generation=2, desired=Desired.PAUSE))
    nodes.runs[1].put("attempts/1/stop.json", b'{"reason": "SIGTERM"}')
    nodes.syncs[1].push()
    for sync in nodes.syncs:
        sync.listen()
    for run in nodes.runs:
        assert run.read("attempts/1/control.json", Control) == Control(
            generation=2, desired=Desired.PAUSE
        )
        assert run.get("attempts/1/stop.json") is not None


def test_the_result_comes_behind_the_adapter_and_exit_records_last(
    nodes: Nodes, objects: ObjectStore
) -> None:
    seen: list[str] = []
    for name in ("put_if_absent", "upload", "upload_if_absent"):
        real = getattr(objects, name)

        def noted(first: object, second: object, real=real, name=name) -> object:
            seen.append(
                str(first if name == "put_if_absent" else second).removeprefix(f"runs/{JOB}/")
            )
            return real(first, second)

        setattr(objects, name, noted)
    run = nodes.runs[0]
    run.put("adapter/adapter_model.safetensors", b"weights")
    run.put("metrics.csv", b"step\n1\n")
    run.put("attempts/1/logs/node-0/torchrun.log", b"hello")
    run.write(
        "result.json",
        Result(attempt=1, steps=1, trained_tokens=1, train_loss=None, valid_loss=None),
    )
    run.write("attempts/1/outcome.json", Outcome(kind=OutcomeKind.SUCCEEDED))
    run.write("attempts/1/nodes/0/exit.json", exit_of(ExitReason.SUCCEEDED, "done"))
    nodes.syncs[0].flush()
    assert seen[-1] == "attempts/1/nodes/0/exit.json"
    assert (
        seen.index("adapter/adapter_model.safetensors")
        < seen.index("result.json")
        > seen.index("metrics.csv")
    )
    assert nodes.service.read("attempts/1/nodes/0/exit.json", Exit) == exit_of(
        ExitReason.SUCCEEDED, "done"
    )
    assert nodes.service.path("adapter/adapter_model.safetensors").read_bytes() == b"weights"
    assert nodes.service.get("attempts/1/logs/node-0/torchrun.log") == b"hello"


def test_the_workers_policy_is_enough_and_gives_no_file_away(
    service: Places, objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(service, objects, tmp_path, 1)
    workers = ObjectStore(objects.url)
    asked = requests_of(workers, monkeypatch)
    for sync in nodes.syncs:
        sync.objects = workers
    first = nodes.save(5)
    _ = nodes.save(10)
    nodes.syncs[1].push()
    nodes.syncs[0].push()
    remove(nodes.runs[0], first)
    nodes.runs[0].write(
        "result.json",
        Result(attempt=1, steps=1, trained_tokens=1, train_loss=None, valid_loss=None),
    )
    nodes.runs[0].put("adapter/adapter_model.safetensors", b"weights")
    (nodes.homes[0] / "files/file-1").unlink()
    for sync in nodes.syncs:
        sync.listen()
        sync.flush()
    nodes.syncs[0].fetch()
    bucket = objects.url.split("/")[2]
    assert {action for action, _ in asked} == {
        "s3:GetObject",
        "s3:PutObject",
        "s3:DeleteObject",
        "s3:ListBucket",
    }
    assert {entry for entry in asked if not allowed(bucket, *entry)} == set()
    for action in ("s3:PutObject", "s3:DeleteObject"):
        assert not allowed(bucket, action, "ft/files/file-1")
    assert not allowed(bucket, "s3:GetObject", "ft/credentials")


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("verb", "outage", "code"),
    [("flush", 2700.0, 0), ("flush", 7200.0, 1), ("fetch", 10.0, 0), ("fetch", 60.0, 1)],
)
def test_the_last_upload_waits_out_an_outage_and_a_fetch_is_left_to_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch, verb: str, outage: float, code: int
) -> None:
    clock = Clock()
    tries: list[float] = []

    class Away:
        def __init__(self, *_: object) -> None:
            tries.append(clock.now)
            if clock.now < outage:
                raise UnavailableError("503 Slow Down")

        def flush(self) -> None: ...

        def fetch(self) -> None: ...

    monkeypatch.setattr(object_sync, "Sync", Away)
    monkeypatch.setattr(object_sync, "ObjectStore", lambda url: None)
    monkeypatch.setattr(object_sync, "time", clock)
    assert object_sync.main([verb, "s3://b/ft", "/nowhere/runs/j", "1", "0"]) == code
    assert tries[:4] == [0.0, 2.0, 6.0, 14.0]
    assert all(after - before <= 60.0 for before, after in itertools.pairwise(tries))
    assert clock.now <= 3600.0


@pytest.fixture
def gate(objects: ObjectStore) -> Iterator[Gate]:
    """In front of the nodes' storage, not of the service's."""
    with gated_s3() as gate:
        yield gate


def test_storage_that_denies_says_what_and_gets_all_once_it_allows_it(
    service: Places, objects: ObjectStore, tmp_path: Path, gate: Gate
) -> None:
    nodes = Nodes(service, ObjectStore(objects.url), tmp_path, 1)
    name = nodes.save(5)
    nodes.syncs[1].push()
    gate.denied = {"PUT"}
    with pytest.raises(UnavailableError) as caught:
        nodes.syncs[0].push()
    assert caught.value.code == "storage_denied"
    assert f"{objects.url} denies writing runs/{JOB}/checkpoints/{name}/" in str(caught.value)
    assert "or lack s3:PutObject" in str(caught.value)
    assert complete_checkpoints(nodes.service) == []
    assert nodes.messages() == []
    gate.denied = {"GET"}
    with pytest.raises(UnavailableError, match=r"denies listing runs: .* s3:ListBucket"):
        nodes.syncs[0].objects.list("runs")
    with pytest.raises(UnavailableError, match=r"denies reading a: .* s3:GetObject"):
        nodes.syncs[0].objects.get("a")
    gate.denied = set()
    nodes.syncs[0].push()
    assert complete_checkpoints(nodes.service) == [name]
    assert nodes.messages() == ["saved 5"]


def test_storage_that_is_silent_is_given_up_and_gets_all_once_it_answers(
    service: Places,
    objects: ObjectStore,
    tmp_path: Path,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_store, "SILENT_SECONDS", 0.3)
    nodes = Nodes(service, ObjectStore(objects.url), tmp_path, 1)
    name = nodes.save(5)
    nodes.syncs[1].push()
    gate.held = {"PUT"}
    before = len(gate.asked)
    with pytest.raises(UnavailableError, match=r"cannot be used: writing runs/.*[Tt]imeout"):
        nodes.syncs[0].push()
    assert gate.asked[before:].count("PUT") <= 6, "each try takes its time"
    gate.held = set()
    gate.open.set()
    nodes.syncs[0].push()
    assert complete_checkpoints(nodes.service) == [name]


def test_the_process_beside_a_job_waits_for_rights_and_says_so_once(
    nodes: Nodes, objects: ObjectStore, gate: Gate, tmp_path: Path
) -> None:
    gate.denied = {"PUT"}
    name = nodes.save(5)
    nodes.syncs[1].push()  # without the gate
    with (tmp_path / "log").open("w+") as log:
        command = [sys.executable, "-P", "-m", "ft_service.supervisor.object_sync", "follow"]
        words = [objects.url, str(nodes.runs[0].root), "1", "0"]
        path = {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([*command, *words], stderr=log, env={**os.environ, **path})
        try:
            wait_for(lambda: gate.asked.count("PUT") > 2)
            assert complete_checkpoints(nodes.service) == []
            gate.denied = set()
            wait_for(lambda: complete_checkpoints(nodes.service) == [name])
            wait_for(lambda: "takes what has waited" in (tmp_path / "log").read_text())
        finally:
            process.kill()
            process.wait()
    assert (tmp_path / "log").read_text().count(f"denies writing runs/{JOB}/") == 1
