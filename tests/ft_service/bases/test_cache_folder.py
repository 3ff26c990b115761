"""The folder of quantised bases: what is used last stays longest, what is in use stays, half-done
entries are never seen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ft_service.bases.cache_folder import INDEX, Cache, folder_of
from ft_service.errors import FtError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Start
from ft_service.supervisor import torchrun
from ft_service.supervisor.torchrun import Node


def put(cache: Cache, key: str, size: int, used: int | None = None) -> bool:
    staged = cache.stage(size)
    if staged is None:
        return False
    (staged.folder / INDEX).write_text(key)
    (staged.folder / "rows").write_bytes(b"x" * (size - len(key)))
    if used is not None:
        os.utime(staged.folder / INDEX, (used, used))
    return cache.publish(staged, key)


def keys(cache: Cache) -> list[str]:
    return [entry.name for entry in cache.entries()]


def test_an_entry_is_found_once_it_is_published(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "cache")
    assert cache.find("a") is None
    staged = cache.stage(10)
    assert staged is not None
    (staged.folder / INDEX).write_text("mine")
    assert (cache.find("a"), keys(cache)) == (None, [])
    assert cache.publish(staged, "a")
    found = cache.find("a")
    assert found is not None
    assert (found.folder / INDEX).read_text() == "mine"
    found.close()


def test_the_first_of_two_writers_wins_and_the_other_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    one = cache.stage(10)
    other = cache.stage(10)
    assert one is not None
    assert other is not None
    (one.folder / INDEX).write_text("one")
    (other.folder / INDEX).write_text("other")
    assert cache.publish(one, "a")
    assert not cache.publish(other, "a")
    assert (tmp_path / "a" / INDEX).read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_entry_used_longest_ago_makes_room(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=1000)
    for key, used in [("a", 1), ("b", 2), ("c", 3)]:
        assert put(cache, key, 300, used)
    found = cache.find("a")
    assert found is not None
    found.close()
    assert put(cache, "d", 500)
    assert keys(cache) == ["a", "d"], "b and c had to go; a was used after them"
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1000


def test_an_entry_in_use_stays(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=1000)
    assert put(cache, "a", 400, 1)
    assert put(cache, "b", 400, 2)
    reading = cache.find("a")
    assert reading is not None
    os.utime(tmp_path / "a" / INDEX, (1, 1))
    assert put(cache, "c", 500)
    assert keys(cache) == ["a", "c"]
    assert not cache.remove("a")
    assert not put(cache, "d", 900), "what is in use leaves no room"
    assert "a" in keys(cache)
    reading.close()
    assert cache.remove("a")


READER = """
import pathlib, sys
from ft_service.supervisor import torchrun
from ft_service.bases.cache_folder import Cache
entry = Cache(pathlib.Path(sys.argv[1])).find("a")
print("has it", flush=True)
input()
"""


def test_an_entry_read_by_another_process_stays(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    put(cache, "a", 10)
    with subprocess.Popen(
        [sys.executable, "-c", READER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"has it\n"
        assert not cache.remove("a")
        reader.kill()
    assert cache.remove("a"), "a killed reader holds nothing"


def test_an_entry_that_another_process_removes_meanwhile_keeps_no_other_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path, limit=100)
    look = Cache.entries
    put(cache, "a", 10)

    def removed_behind_the_look(self: Cache) -> dict[Path, int]:
        found = look(self)
        self.remove("a")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "entries", removed_behind_the_look)
        assert put(cache, "b", 20)
    assert keys(cache) == ["b"]


def test_an_entry_larger_than_the_cache_removes_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=1000)
    assert put(cache, "a", 400)
    assert cache.stage(1001) is None
    assert keys(cache) == ["a"]


def test_without_a_limit_half_of_the_free_disk_is_the_limit(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    cache = Cache(tmp_path)
    assert cache.stage(free * 6 // 10) is None
    staged = cache.stage(free * 4 // 10)
    assert staged is not None
    cache.discard(staged)


def test_what_killed_writers_left_is_removed_and_what_living_ones_write_is_not(
    tmp_path: Path,
) -> None:
    cache = Cache(tmp_path)
    living = cache.stage(10)
    killed = cache.stage(10)
    assert living is not None
    assert killed is not None
    killed.close()
    put(cache, "a", 10)
    assert living.folder.is_dir()
    assert not killed.folder.exists()
    cache.discard(living)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"FT_CACHE": ""}, None),
        ({"FT_CACHE": "/cache", "FT_CACHE_BYTES": "0"}, None),
        ({"FT_CACHE": "/cache"}, Cache(Path("/cache"))),
        ({"FT_CACHE": "/cache", "FT_CACHE_BYTES": "500"}, Cache(Path("/cache"), 500)),
    ],
)
def test_where_the_environment_puts_it(environment: dict[str, str], expected: Cache | None) -> None:
    assert Cache.from_environment(environment) == expected


def test_a_limit_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(FtError, match="FT_CACHE_BYTES = '5GB'"):
        Cache.from_environment({"FT_CACHE": "/cache", "FT_CACHE_BYTES": "5GB"})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Path("/state/cache")),
        ({"FT_CACHE": "/fast"}, Path("/fast")),
        ({"FT_CACHE": "~/fast"}, Path.home() / "fast"),
        ({"FT_CACHE": "fast"}, Path.cwd() / "fast"),
        ({"FT_CACHE": ""}, None),
    ],
)
def test_the_folder_is_the_same_for_those_who_fill_it_and_those_who_prune_it(
    tmp_path: Path, environment: dict[str, str], expected: Path | None
) -> None:
    assert folder_of(environment, Path("/state")) == expected
    start = Start(job_id="ftjob-1", attempt=1, world_size=1, generation=1, checkpoint=None)
    of_ranks = torchrun.environment(
        {"FT_HOME": "/state", **environment}, start, RunDir(tmp_path), Node()
    )
    assert of_ranks["FT_CACHE"] == str(expected or "")
