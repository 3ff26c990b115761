"""Homes that earlier versions left (tests/fixtures/homes), put where a test can go on with them."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import tarfile
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_service.launcher.local_launcher import host_id

ROOT = Path(__file__).resolve().parents[2]
HOMES = ROOT / "tests" / "fixtures" / "homes"
MODELS = ROOT / "examples" / "models"

PLACE = "/srv/ft-fixture"
"""Where homes are made. Their paths begin with it."""
PLACE_OF_MODELS = f"{PLACE}/models"
HOST = "ft-fixture-host"
"""In place of the name of the host that a home was made on."""
BOOT = "00000000-0000-0000-0000-000000000000"
"""In place of its boot id: the processes that a home knows are of an earlier boot, and gone."""


@dataclass(frozen=True)
class OldHome:
    """What a version left, unpacked below a folder."""

    folder: Path
    recorded: dict[str, Any]
    """recorded.json: ids and keys, what the old server answered, and how many steps the jobs
    have.
    """

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def job_id(self, name: str) -> str:
        return self.recorded["jobs"][name]

    def run(self, name: str) -> Path:
        """The run directory of a job."""
        return self.home / "runs" / self.job_id(name)

    def steps(self, name: str) -> list[int]:
        """The steps of a job from its first to its last."""
        return list(range(1, self.recorded["steps"][name] + 1))


def releases() -> list[str]:
    """Versions whose homes are here."""
    return sorted(path.name.removesuffix(".tar.gz") for path in HOMES.glob("*.tar.gz"))


def unpack(version: str, folder: Path) -> OldHome:
    """The home that `version` left, with the paths and the host of here."""
    with tarfile.open(HOMES / f"{version}.tar.gz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
        archive.extractall(folder)
    _check_bases(folder)
    here = {PLACE_OF_MODELS: str(MODELS), PLACE: str(folder), HOST: host_id()}
    for path in documents(folder):
        text = path.read_text(encoding="utf-8")
        path.write_text(_replaced(text, here), encoding="utf-8")
    with closing(sqlite3.connect(folder / "home" / "ft.db")) as database, database:
        replace_in_database(database, here)
        # An upload waits for an hour only.
        database.execute(
            "UPDATE uploads SET expires_at = ? WHERE status = 'pending'", (time.time() + 3600,)
        )
    return OldHome(folder, json.loads((folder / "recorded.json").read_text()))


def documents(folder: Path) -> list[Path]:
    """Text files whose paths are to be those of here.

    A finished run stays byte for byte as it was left, and so does what is in a checkpoint: digests
    cover them, and the paths in them are not used.
    """
    finished = {path.parent for path in folder.rglob("result.json")}
    texts = (path for suffix in ("json", "yaml") for path in folder.rglob(f"*.{suffix}"))
    return sorted(
        path
        for path in texts
        if "checkpoints" not in path.relative_to(folder).parts and finished.isdisjoint(path.parents)
    )


def replace_in_database(database: sqlite3.Connection, here: dict[str, str]) -> None:
    """Put other words in place of some, in every text of every table."""
    tables = [
        name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    ]
    for table in tables:
        for _, column, *_ in database.execute(f'PRAGMA table_info("{table}")').fetchall():
            for old, new in here.items():
                database.execute(
                    f'UPDATE "{table}" SET "{column}" = replace("{column}", ?, ?) '
                    f'WHERE typeof("{column}") = \'text\' AND instr("{column}", ?)',
                    (old, new, old),
                )


def _replaced(text: str, here: dict[str, str]) -> str:
    for old, new in here.items():
        text = text.replace(old, new)
    return text


def _check_bases(folder: Path) -> None:
    """A base that has changed is refused by the jobs that began on it: say so here, where it is
    plain what to do.
    """
    for base in _bases(folder.rglob("origins.json")):
        for name, digest in base["files"].items():
            path = MODELS / base["name"] / name
            assert sha256_of(path) == digest["sha256"], (
                f"{path} has changed: homes of earlier versions were trained on it"
            )


def _bases(paths: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())["base"] for path in paths]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
