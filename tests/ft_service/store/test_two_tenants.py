"""Every call of the store with two tenants' rows side by side: what it returns, and exactly which
rows it changes, by the transcripts in `two_tenants/`.

A line is a call and what it returns, or the code (!) of what it raises; the lines below it, further
in, are the rows that it adds (+), changes (~) and removes (-). Each call begins with the same rows
(tests/support/two_tenants.py). To write the transcripts anew after a change, which is then to be
read: `python -m tests.ft_service.store.test_two_tenants`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import TextWrapper
from typing import Any

import pytest

from ft_service.errors import FtError
from ft_service.jobs.estimates import Paces
from ft_service.jobs.queue_snapshot import Host, QueuedJob
from ft_service.jobs.states import Job, State
from ft_service.jobs.user_actions import Verb
from ft_service.store.chats import ChatFilter
from ft_service.store.erasure import DeletedJob
from ft_service.store.evals import EvalRun
from ft_service.store.records import (
    Claim,
    Delivery,
    JobChange,
    JobIntegration,
    NewEvent,
    NewJob,
    NewKey,
    NewSweep,
    TenantLimits,
    Upload,
    UploadPart,
)
from ft_service.store.sql import Store
from ft_service.store.tenants.keys import KeyStore
from ft_service.store.tenants.people import SignOn
from ft_service.store.tenants.usage import UsageQuery
from tests.support.records import new_chat, new_file, new_job
from tests.support.two_tenants import (
    NOW,
    changes,
    rows_of,
    shown,
    two_tenants,
    two_tenants_on_postgresql,
    without_random,
)

TRANSCRIPTS = sorted((Path(__file__).parent / "two_tenants").glob("*.txt"))
_WORDS = (
    *(Paces, Host, State, Verb, ChatFilter, DeletedJob, JobChange, NewEvent, NewJob, NewKey),
    *(NewSweep, TenantLimits, SignOn, UsageQuery, replace, new_chat, new_file, new_job, vars),
)
_OF_CHANGE = {field.name for field in fields(JobChange)}
_WRAPPED = TextWrapper(100, subsequent_indent=8 * " ", break_long_words=False)
_WRAPPED.break_on_hyphens = False


def each(call: Callable[..., Any], *given: Any, **options: Any) -> list[Any]:
    """What each of several calls returns or raises, for the last argument's words or items."""
    first, last = given[:-1], given[-1]
    found: list[Any] = []
    for one in last.split() if isinstance(last, str) else last:
        try:
            found.append(call(*first, one, **options))
        except FtError as error:
            found.append(error)
    return found


class _Walk:
    """Calls of a store that begin with the same rows each."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ft.db"
        self._store = two_tenants(self._path)
        self._before = rows_of(self._store)

    def close(self) -> None:
        self._store.close()

    def told(self, call: str) -> str:
        """A call's part of a transcript."""
        returned = _returned(self._store, call)
        after = rows_of(self._store)
        lines = changes(self._before, after)
        if lines:
            self._store.close()
            self._store = two_tenants(self._path)
        return _part(call, returned, lines)


def _returned(store: Store, call: str) -> str:
    try:
        # The calls are those of the repository's own files.
        found = shown(eval(call, _words(store)))
    except FtError as error:
        found = shown(error)
    store.keys.close()
    return without_random(found)


def _part(call: str, returned: str, lines: list[str]) -> str:
    parts = [f"{call} -> {returned}", *(f"    {line}" for line in lines)]
    return "\n".join(line for part in parts for line in _wrapped(part))


def _wrapped(text: str) -> list[str]:
    indent = "    " if text.startswith("    ") else ""
    _WRAPPED.initial_indent = indent
    return _WRAPPED.wrap(text.strip())


def _words(store: Store) -> dict[str, Any]:
    """What a call may name."""
    rows = rows_of(store)

    def job(job_id: str) -> Job:
        return store.jobs.jobs_by_id([job_id])[0]

    def held(job_id: str, **values: Any) -> Claim:
        """The claim of a job. `token`: None: nobody has one."""
        version = values.pop("version", 1)
        token = values.get("token", rows["jobs"][job_id]["lease_token"])
        return Claim(job=replace(job(job_id), version=version), token=token, now=NOW - 1)

    def delivery(name: str) -> Delivery:
        found = store.webhooks.claim_deliveries(limit=99, lease_seconds=0)
        return next(one for one in found if one.id == name)

    def integration(job_id: str, number: int) -> JobIntegration:
        row = rows["integrations"][f"{job_id}/{number}"]
        return JobIntegration(
            job_id=job_id, number=number, project_id=job_id[0], settings={}, tries=row["tries"]
        )

    def run(run_id: str) -> EvalRun:
        return store.evals.get_run(run_id[0], rows["eval_runs"][run_id]["eval_id"], run_id)

    def change(job_id: str, **values: Any) -> JobChange:
        own = {name: values.pop(name) for name in _OF_CHANGE & values.keys()}
        return JobChange(job=replace(job(job_id), **values), **own)

    def limited(days: int) -> KeyStore:
        store.keys.max_days = days
        return store.keys

    ours = (job, held, change, delivery, integration, run, limited, each)
    upload = Upload(id="n", project_id="", filename="f", purpose="p", bytes=5, file_seconds=None)
    part = UploadPart(id="n", project_id="", upload_id="", bytes=1, sha256="s")
    head = QueuedJob(id="a-first", project="a", number=2, slots=2, priority=1)
    parts = {name: value for name, value in vars(store).items() if not name.startswith("_")}
    return {
        **{word.__name__: word for word in (*_WORDS, *ours)},
        **parts,
        **{"store": store, "upload": upload, "part": part, "head": head, "NOW": NOW},
        "me": {"owner": "me", "lease_seconds": 60},
        "tuned": "ft:some-base:acme::a-done",
    }


def _calls(text: str) -> dict[str, str]:
    """Call → its part of a transcript."""
    found: dict[str, str] = {}
    part: list[str] = []
    for line in [*text.splitlines(), "end -> "]:
        if not line.startswith(" ") and part:
            whole = " ".join(one.strip() if one.startswith(8 * " ") else f"\n{one}" for one in part)
            found[whole.strip().split("\n")[0].partition(" ->")[0]] = "\n".join(part)
            part = []
        part.append(line)
    return found


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_a_call_returns_and_changes_what_is_its_tenants(path: Path, tmp_path: Path) -> None:
    walk = _Walk(tmp_path)
    expected = _calls(path.read_text())
    told = {call: walk.told(call) for call in expected}
    walk.close()
    assert told == expected


def test_what_is_only_read_is_the_same_on_postgresql(emptied_postgres_url: str) -> None:
    expected = {
        call: part
        for path in TRANSCRIPTS
        for call, part in _calls(path.read_text()).items()
        if not any(line.startswith("    ") and line[4] in "+~-" for line in part.splitlines())
    }
    store = two_tenants_on_postgresql(emptied_postgres_url)
    before = rows_of(store)
    told = {call: _part(call, _returned(store, call), []) for call in expected}
    assert changes(before, rows_of(store)) == []
    store.close()
    assert _in_any_order(told) == _in_any_order(expected)


def _in_any_order(parts: dict[str, str]) -> dict[str, list[str]]:
    """The words of each part: where no order was asked for, every database has its own."""
    return {call: sorted(re.findall(r"[\w.-]+", part)) for call, part in parts.items()}


def _write_anew() -> None:
    for path in TRANSCRIPTS:
        with TemporaryDirectory() as folder:
            walk = _Walk(Path(folder))
            told = [walk.told(call) for call in _calls(path.read_text())]
            walk.close()
        path.write_text("\n".join(told) + "\n")


if __name__ == "__main__":
    _write_anew()
