"""A back-up of a home with SQLite, made and put back as docs/operating.md says."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from ft_service.store.sql import migrate, open_store

PAGE = Path(__file__).parents[3] / "docs/operating.md"


def test_what_changes_while_the_files_are_copied_does_not_damage_the_database_that_was_saved(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    copied = tmp_path / "backup"
    url = f"sqlite:///{home / 'ft.db'}"
    migrate(url)
    store = open_store(url)
    for number in range(20):
        store.projects.ensure_project(f"before-{number}", "local")
    with (
        closing(sqlite3.connect(home / "ft.db")) as live,
        closing(sqlite3.connect(tmp_path / "ft.bak")) as saved,
    ):
        live.backup(saved)
        for number in range(200):
            store.projects.ensure_project(f"between-{number}", "local")
        # The log begins anew, with changes of a database that was not saved.
        live.execute("PRAGMA wal_checkpoint(RESTART)")
    store.projects.ensure_project("after", "local")
    (rsync,) = re.findall(r"^    rsync .*", PAGE.read_text(), re.MULTILINE)
    excluded = [word.strip("'") for word in re.findall(r"--exclude (\S+)", rsync)]
    shutil.copytree(home, copied, ignore=shutil.ignore_patterns(*excluded))
    store.close()

    shutil.copyfile(tmp_path / "ft.bak", copied / "ft.db")
    restored = f"sqlite:///{copied / 'ft.db'}"
    migrate(restored)
    with closing(sqlite3.connect(copied / "ft.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        (count,) = database.execute(
            "SELECT count(*) FROM projects WHERE id LIKE 'before-%'"
        ).fetchone()
    assert count == 20
