from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases import describing
from ft_service.bases.describing import DescribeLaterError, Descriptions, Make, NotDescribedError
from ft_service.bases.description import Described, Refusal, write_described
from ft_service.errors import SpecError, UnavailableError
from ft_service.rundir.directory import RunDir
from tests.support.attempts import wait_for
from tests.support.bases import save_base
from tests.support.describing import VERSIONS, oddly, small_document

Open = Callable[..., Descriptions]


@pytest.fixture
def open_descriptions(tmp_path: Path) -> Iterator[Open]:
    """Opens descriptions over one cache, and closes them."""
    made: list[Descriptions] = []

    def opened(
        make: Make | None = None, describer: str | None = "here", **options: Any
    ) -> Descriptions:
        made.append(Descriptions(RunDir(tmp_path / "cache"), describer, make, **options))
        return made[-1]

    yield opened
    for descriptions in made:
        descriptions.close()
    wait_for(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "describing"]
    )


class Counted:
    """Makes documents at once, and counts."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def __call__(self, folder: Path, stop: Callable[[], bool]) -> Described:
        self.folders.append(folder)
        return small_document(folder)


def test_what_was_described_once_is_in_the_cache_for_any_copy(
    tmp_path: Path, open_descriptions: Open
) -> None:
    made = Counted()
    base = save_base(tmp_path / "base")
    assert open_descriptions().known(base) is None
    assert open_descriptions(made).describe(base).base is not None
    shutil.copytree(base, tmp_path / "copy")

    found = open_descriptions().known(tmp_path / "copy")

    assert found is not None
    assert found.key == small_document(base).key
    assert open_descriptions(made).describe(tmp_path / "copy").base is not None
    assert made.folders == [base]


def test_a_document_of_other_versions_serves_where_nothing_can_describe(
    tmp_path: Path, open_descriptions: Open
) -> None:
    base = save_base(tmp_path / "base")
    open_descriptions(Counted(), "of yesterday").describe(base)

    assert open_descriptions(None, "of today").known(base) is None
    assert open_descriptions(None, None).description(base).model_type == "llama"


def test_another_config_is_another_base_and_another_tokenizer_is_not(
    tmp_path: Path, open_descriptions: Open
) -> None:
    made = Counted()
    base = save_base(tmp_path / "base")
    descriptions = open_descriptions(made)
    descriptions.describe(base)

    (base / "tokenizer.json").write_text("{}")
    (base / "README.md").write_text("of no weight")
    assert descriptions.known(base) is not None
    save_base(base, rope_theta=5e5)
    assert descriptions.known(base) is None
    descriptions.describe(base)
    save_base(base, num_hidden_layers=3)  # and so other files with weights
    descriptions.describe(base)

    assert len(made.folders) == 3


def test_what_is_known_costs_no_read_of_a_file(
    tmp_path: Path, open_descriptions: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base(tmp_path / "base")
    descriptions = open_descriptions(Counted())
    first = descriptions.describe(base)
    monkeypatch.setattr(describing, "description_key", lambda *_: pytest.fail("it was read again"))

    assert descriptions.known(base) is first
    assert descriptions.ask(base) is first


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("spin", "needed more than 1 seconds of a processor"),
        ("eat", "needed more than 512 MiB of memory"),
        ("crash", r"killed by signal 6 \(SIGABRT\).*the folder made it stumble"),
        ("garbage", "what is not JSON: 'all is well'"),
        ("other", "not a description of a base"),
    ],
)
def test_a_folder_that_cannot_be_described_is_refused_in_words_and_left_alone(
    tmp_path: Path, open_descriptions: Open, test: str, words: str
) -> None:
    log = tmp_path / "log"
    base = save_base(tmp_path / "odd", test=test, log=str(log))
    descriptions = open_descriptions(oddly(cpu_seconds=1 if test == "spin" else 60))

    found = descriptions.describe(base)

    assert found.refused is not None
    assert found.refused.code == "model_undescribable"
    with pytest.raises(
        SpecError, match=f"odd cannot be described, so it cannot be tuned here: .*{words}"
    ):
        descriptions.description(base)
    assert descriptions.ask(base) is found
    assert open_descriptions(oddly()).describe(base) == found, (
        "another process reads it in the cache"
    )
    assert len(log.read_text().splitlines()) == 1


def test_a_folder_that_could_not_be_described_is_tried_again_after_a_while(
    tmp_path: Path, open_descriptions: Open
) -> None:
    log = tmp_path / "log"
    base = save_base(tmp_path / "odd", test="garbage", log=str(log))
    descriptions = open_descriptions(oddly(), failed_seconds=0.5)
    descriptions.describe(base)
    wait_for(lambda: descriptions.known(base) is None)

    assert descriptions.describe(base).refused is not None
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("test", "words"), [("killed", r"killed by signal 9"), ("hang", "took longer than 1 seconds")]
)
def test_a_process_that_the_host_ends_says_nothing_of_the_base(
    tmp_path: Path, open_descriptions: Open, test: str, words: str
) -> None:
    """Neither to those who wait, nor in the cache, nor after a restart; the base is described once
    the host lets it.
    """
    log = tmp_path / "log"
    go = tmp_path / "go"
    base = save_base(tmp_path / "base", test=test, log=str(log), go=str(go))
    descriptions = open_descriptions(
        oddly(seconds=1.0 if test == "hang" else 60.0), lost_seconds=0.2
    )
    for losses in (1, 2, 3):
        with pytest.raises(NotDescribedError, match=words) as caught:
            wait_for(
                lambda: descriptions.describe(base) if descriptions.delay(base) is None else None
            )
        assert caught.value.code == "model_not_described"
        assert (caught.value.retry_after or 0) >= 1
        assert len(log.read_text().splitlines()) == losses
        with pytest.raises(NotDescribedError, match=words):
            descriptions.description(base)
        assert descriptions.ask(base) is None
        assert words.split()[0] in str(descriptions.delay(base))
    assert list((tmp_path / "cache").glob("*")) == []
    if test == "hang":
        save_base(base)
    go.touch()

    assert open_descriptions(oddly()).describe(base).base is not None, (
        "another process begins at once"
    )
    assert wait_for(lambda: descriptions.ask(base)).base is not None
    assert descriptions.delay(base) is None


def test_refusals_of_0_2_0_that_blame_a_base_for_the_hosts_doing_are_not_believed(
    tmp_path: Path, open_descriptions: Open
) -> None:
    base = save_base(tmp_path / "base")
    key = open_descriptions()._key(base)
    folder = hashlib.sha256(str(base).encode()).hexdigest()[:16]
    refused = Described(
        "",
        VERSIONS,
        refused=Refusal("workers.describe was killed by signal 9", code="model_undescribable"),
    )
    RunDir(tmp_path / "cache").put(
        f"{key}.{folder}.refused", f"{time.time() + 600}\n".encode() + write_described(refused)
    )

    assert open_descriptions().known(base) is None
    assert open_descriptions(Counted()).describe(base).base is not None


def test_what_prevents_a_description_is_no_fault_of_the_base(
    tmp_path: Path, open_descriptions: Open
) -> None:
    faults = [DescribeLaterError("the cluster is away")]
    base = save_base(tmp_path / "base")

    def make(folder: Path, stop: Callable[[], bool]) -> Described:
        if faults:
            raise faults.pop()
        return small_document(folder)

    descriptions = open_descriptions(make, lost_seconds=0.5)
    with pytest.raises(UnavailableError, match=r"cannot be described now.*: the cluster is away"):
        descriptions.describe(base)
    assert descriptions.known(base) is None
    assert "the cluster is away" in str(descriptions.delay(base))
    found = wait_for(lambda: descriptions.ask(base))

    assert found.base is not None
    assert descriptions.delay(base) is None


def test_bases_are_described_by_project_in_turn(tmp_path: Path, open_descriptions: Open) -> None:
    """A project that asks for many takes none of another's turns, nor all processes; who asks for
    the same base shares it.
    """
    begun = list[str]()
    go = threading.Event()

    def make(folder: Path, stop: Callable[[], bool]) -> Described:
        begun.append(folder.name)
        go.wait(60)
        return small_document(folder)

    bases = {
        name: save_base(tmp_path / name, rope_theta=float(theta))
        for theta, name in enumerate(["a1", "a2", "a3", "a4", "b1"])
    }
    descriptions = open_descriptions(make)
    for name in ("a1", "a2", "a3", "a4"):
        descriptions.ask(bases[name], "a")
    wait_for(lambda: len(begun) == 2)
    for name in ("b1", "a4"):
        descriptions.ask(bases[name], "b")
    go.set()
    for base in bases.values():
        wait_for(lambda base=base: descriptions.known(base))

    assert begun[:2] == ["a1", "a2"]
    assert begun[2] == "b1", "not after all of the other project's"
    assert sorted(begun) == sorted(bases)


def test_one_process_describes_a_base_for_all_who_ask(
    tmp_path: Path, open_descriptions: Open
) -> None:
    log = tmp_path / "log"
    go = tmp_path / "go"
    base = save_base(tmp_path / "base", test="slow", log=str(log), go=str(go))
    shutil.copytree(base, tmp_path / "copy")
    descriptions = open_descriptions(oddly())
    found: list[Described] = []
    folders = [base, tmp_path / "copy"] * 4
    threads = [
        threading.Thread(target=lambda folder=folder: found.append(descriptions.describe(folder)))
        for folder in folders
    ]
    for thread in threads:
        thread.start()
    wait_for(log.exists)
    assert descriptions.ask(base) is None
    go.touch()
    for thread in threads:
        thread.join(60)

    assert [document is found[0] for document in found] == [True] * 8
    assert len(log.read_text().splitlines()) == 1


def test_a_base_that_hangs_keeps_no_other_waiting_and_urgent_ones_go_first(
    tmp_path: Path, open_descriptions: Open
) -> None:
    log = tmp_path / "log"
    hanging = save_base(tmp_path / "hanging", test="hang", log=str(log))
    go = tmp_path / "go"
    # Which the others wait for.
    held = save_base(tmp_path / "held", test="slow", log=str(log), go=str(go))
    others = [
        save_base(tmp_path / f"other-{number}", rope_theta=float(number), log=str(log))
        for number in range(1, 3)
    ]
    urgent = save_base(tmp_path / "urgent", rope_theta=99.0, log=str(log))
    descriptions = open_descriptions(oddly())
    descriptions.ask(hanging)
    wait_for(log.exists)
    for base in (held, *others):
        assert descriptions.ask(base, first=False) is None
    descriptions.ask(urgent)
    go.touch()

    for base in (held, urgent, *others):
        wait_for(lambda base=base: descriptions.known(base))
    begun = [line.split()[0] for line in log.read_text().splitlines()]
    assert begun[:3] == ["hanging", "held", "urgent"], "after the one that was being described"
    assert descriptions.known(hanging) is None


def test_no_more_than_two_bases_are_described_at_once(
    tmp_path: Path, open_descriptions: Open
) -> None:
    log = tmp_path / "log"
    go = tmp_path / "go"
    bases = [
        save_base(
            tmp_path / f"b{number}", test="slow", log=str(log), go=str(go), rope_theta=float(number)
        )
        for number in range(3)
    ]
    descriptions = open_descriptions(oddly())
    for base in bases:
        descriptions.ask(base)
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    time.sleep(0.5)
    assert len(log.read_text().splitlines()) == 2
    go.touch()
    for base in bases:
        wait_for(lambda base=base: descriptions.known(base))


def test_bases_that_take_long_keep_no_other_waiting(
    tmp_path: Path, open_descriptions: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describing, "LONG_SECONDS", 1.0)
    log = tmp_path / "log"
    hanging = [
        save_base(tmp_path / f"h{number}", test="hang", log=str(log), rope_theta=float(number))
        for number in range(3)
    ]
    base = save_base(tmp_path / "base")
    descriptions = open_descriptions(oddly())
    for one in hanging:
        descriptions.ask(one)
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 2)

    assert descriptions.describe(base).base is not None
    assert [descriptions.known(one) for one in hanging] == [None] * 3


def test_who_ends_the_service_ends_the_process_and_says_nothing_of_the_base(
    tmp_path: Path, open_descriptions: Open
) -> None:
    log = tmp_path / "log"
    base = save_base(tmp_path / "base", test="hang", log=str(log))
    descriptions = open_descriptions(oddly())
    descriptions.ask(base)
    wait_for(lambda: log.exists() and len(log.read_text().split()) > 1)
    pid = int(log.read_text().split()[1])
    descriptions.close()

    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    assert open_descriptions().known(base) is None
    save_base(base)
    assert open_descriptions(oddly()).describe(base).base is not None


def test_a_base_that_changes_meanwhile_is_described_as_it_is_then(
    tmp_path: Path, open_descriptions: Open
) -> None:
    base = save_base(tmp_path / "base")

    def make(folder: Path, stop: Callable[[], bool]) -> Described:
        document = small_document(folder)
        if "changed" not in (folder / "config.json").read_text():
            save_base(folder, changed=True)
        return document

    descriptions = open_descriptions(make)
    descriptions.ask(base)

    assert wait_for(lambda: descriptions.ask(base)).base is not None
    assert descriptions.describe(base).key == small_document(base).key


@pytest.mark.parametrize("kind", ["absent", "fifo", "out"])
def test_a_folder_that_cannot_be_read_is_refused_without_a_process(
    tmp_path: Path, open_descriptions: Open, kind: str
) -> None:
    base = tmp_path / "base"
    if kind == "fifo":
        save_base(base)
        (base / "config.json").unlink()
        (base / "config.json").symlink_to("/etc/hostname")
    elif kind == "out":
        save_base(base)
        (base / "model.safetensors").unlink()
        (base / "model.safetensors").symlink_to("/etc/hostname")
    made = Counted()

    with pytest.raises(SpecError) as caught:
        open_descriptions(made).describe(base).description()

    assert caught.value.code == "model_unreadable"
    assert made.folders == []


def test_a_document_that_is_used_is_marked_so_in_the_cache(
    tmp_path: Path, open_descriptions: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base(tmp_path / "base")
    open_descriptions(Counted()).describe(base)
    (document,) = (tmp_path / "cache").iterdir()
    os.utime(document, (1, 1))
    reader = open_descriptions(None, None)
    assert reader.known(base) is not None
    assert document.stat().st_mtime > 1, "it was read"

    os.utime(document, (1, 1))
    assert reader.known(base) is not None
    assert document.stat().st_mtime == 1, "it was marked a moment ago"
    monkeypatch.setattr(describing, "MARK_SECONDS", -1.0)
    assert reader.known(base) is not None
    assert document.stat().st_mtime > 1, "it was found in memory"


def test_a_damaged_document_in_the_cache_is_made_again(
    tmp_path: Path, open_descriptions: Open
) -> None:
    base = save_base(tmp_path / "base")
    open_descriptions(Counted()).describe(base)
    (document,) = (tmp_path / "cache").iterdir()
    document.write_bytes(document.read_bytes()[:-20])
    made = Counted()

    assert open_descriptions(made).describe(base).base is not None
    assert made.folders == [base]
    json.loads(document.read_bytes())


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(
    tmp_path: Path, open_descriptions: Open
) -> None:
    base = save_base(tmp_path / "base")
    (tmp_path / "cache").write_text("a file where the folder should be")
    descriptions = open_descriptions(Counted())

    assert descriptions.describe(base).base is not None
    assert descriptions.known(base) is not None


def test_a_document_of_a_server_is_taken_over_if_the_files_are_the_same(
    tmp_path: Path, open_descriptions: Open
) -> None:
    base = save_base(tmp_path / "base")
    other = save_base(tmp_path / "other", rope_theta=7.0)
    descriptions = open_descriptions(None, None)
    with pytest.raises(NotDescribedError, match="being described"):
        descriptions.description(base)

    descriptions.add(base, small_document(base, VERSIONS))

    assert descriptions.description(base).model_type == "llama"
    with pytest.raises(SpecError, match="other files"):
        descriptions.add(other, small_document(base, VERSIONS))
