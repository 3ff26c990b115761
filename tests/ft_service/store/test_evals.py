"""Evals, their runs and items: whose they are, who carries them out, and what is counted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from sqlalchemy import func, select

from ft_service.errors import LimitError, NotFoundError, SpecError
from ft_service.evals.item_results import ItemOutcome, Tally
from ft_service.store import evals as evals_module
from ft_service.store.evals import OWNED_SECONDS, Eval, EvalRun
from ft_service.store.sql import Store
from ft_service.store.tables import eval_runs, evals
from tests.support.databases import set_clock
from tests.support.records import OTHER, PROJECT

GOOD = {"name": "c", "passed": True}
BAD = {"name": "c", "passed": False}


def new_eval(store: Store, eval_id: str = "eval-1", project: str = PROJECT, **values: Any) -> Eval:
    given: dict[str, Any] = {"data_source_config": {"type": "custom"}, "testing_criteria": [{}]}
    return store.evals.create_eval(Eval(id=eval_id, project_id=project, **given | values))


def new_run(
    store: Store, run_id: str, of: str = "eval-1", project: str = PROJECT, **values: Any
) -> EvalRun:
    run = EvalRun(
        id=run_id, project_id=project, eval_id=of, key_id="key", data_source={"type": "x"}, **values
    )
    return store.evals.create_run(run)


def outcome(number: int, *results: dict[str, Any], **sample: Any) -> ItemOutcome:
    return ItemOutcome(number=number, item={"n": number}, sample=sample, results=results)


def ids(page: Any) -> list[str]:
    return [one.id for one in page.data]


def runs(store: Store, of: str = "eval-1", **options: Any) -> list[str]:
    given: dict[str, Any] = {"status": None, "after": None, "limit": 9, "order": "asc"}
    return ids(store.evals.list_runs(PROJECT, of, **given | options))


def items(store: Store, run_id: str, **options: Any) -> list[str]:
    given: dict[str, Any] = {"status": None, "after": None, "limit": 9, "order": "asc"}
    return ids(store.evals.list_items(run_id, **given | options))


def kept(store: Store) -> int:
    """Bytes that the evals and runs of the project count for."""
    with store.reading() as connection:
        sums = [
            select(func.coalesce(func.sum(table.c.bytes), 0)).where(table.c.project_id == PROJECT)
            for table in (evals, eval_runs)
        ]
        return sum(int(connection.scalars(query).one()) for query in sums)


def test_runs_and_items_are_those_of_their_eval_and_run(store: Store) -> None:
    for of in ("eval-1", "eval-2"):
        new_eval(store, of)
    for name in ("run-1", "run-2"):
        new_run(store, name)
    other = new_run(store, "run-3", "eval-2")
    store.changed.clear()
    new_run(store, "run-4", name="last", metadata={"k": "v"})
    assert store.changed.is_set(), "who carries runs out looks at once"
    assert runs(store) == ["run-1", "run-2", "run-4"]
    assert runs(store, order="desc", limit=2) == ["run-4", "run-2"]
    assert runs(store, after="run-1", limit=1) == ["run-2"]
    assert runs(store, "eval-2") == ["run-3"]
    store.evals.cancel_run(PROJECT, "eval-1", "run-2")
    assert runs(store, status="canceled") == ["run-2"]
    assert runs(store, status="queued") == ["run-1", "run-4"]
    with pytest.raises(SpecError):
        runs(store, after="run-3")
    for wrong in ((PROJECT, "eval-2", "run-1"), (OTHER, "eval-1", "run-1")):
        for act in (store.evals.get_run, store.evals.cancel_run, store.evals.delete_run):
            with pytest.raises(NotFoundError):
                act(*wrong)
    assert store.evals.get_run(PROJECT, "eval-2", "run-3") == other
    first = claimed(store, "me")
    store.evals.add_items(first, "me", [outcome(1, GOOD), outcome(2, BAD), outcome(3, GOOD)])
    second = claimed(store, "me")
    store.evals.add_items(second, "me", [outcome(1, BAD)])
    assert (first.id, second.id) == ("run-1", "run-3")
    mine = items(store, "run-1")
    assert (len(mine), items(store, "run-1", order="desc")) == (3, mine[::-1])
    assert items(store, "run-1", after=mine[0], limit=1) == [mine[1]]
    assert items(store, "run-1", status="fail") == [mine[1]]
    assert store.evals.numbers_of("run-1") == {1, 2, 3}
    item = store.evals.get_item("run-1", mine[1])
    assert (item.number, item.status, item.item, item.results) == (2, "fail", {"n": 2}, [BAD])
    with pytest.raises(NotFoundError):
        store.evals.get_item("run-3", mine[1])


def claimed(store: Store, owner: str, *busy: str) -> EvalRun:
    run = store.evals.claim_run(owner, busy)
    assert run is not None
    return run


def test_a_run_is_its_process_s_until_that_gives_no_sign_of_life(store: Store) -> None:
    new_eval(store)
    new_eval(store, "eval-2", OTHER)
    for name in ("run-1", "run-2"):
        new_run(store, name)
    new_run(store, "run-3", "eval-2", OTHER)
    assert claimed(store, "me", PROJECT).id == "run-3"
    run = claimed(store, "me")
    assert (run.id, run.status) == ("run-1", "in_progress")
    assert claimed(store, "other").id == "run-2"
    assert store.evals.claim_run("other", []) is None
    assert store.evals.renew_runs("me", ["run-1", "run-2"]) == {"run-1"}
    for refused in (
        store.evals.begin_run("run-1", "other", 5),
        store.evals.add_items(run, "other", [outcome(1, GOOD)]),
        store.evals.end_run("run-1", "other", "failed"),
    ):
        assert not refused
    assert store.evals.begin_run("run-1", "me", 5)
    set_clock(store, OWNED_SECONDS - 5)
    assert store.evals.claim_run("other", []) is None
    assert store.evals.renew_runs("me", ["run-1"]) == {"run-1"}
    set_clock(store, OWNED_SECONDS + 5)
    assert {claimed(store, "third").id, claimed(store, "third").id} == {"run-2", "run-3"}
    assert store.evals.claim_run("third", []) is None
    store.evals.release_runs("me")
    again = claimed(store, "third")
    assert (again.id, again.total) == ("run-1", 5)
    assert not store.evals.begin_run("run-1", "me", 6)


@pytest.mark.parametrize("end", ["canceled", "completed", "failed", "deleted"])
def test_nothing_is_added_to_a_run_that_is_over(store: Store, end: Any) -> None:
    new_eval(store)
    new_run(store, "run-1")
    run = claimed(store, "me")
    if end == "canceled":
        assert store.evals.cancel_run(PROJECT, "eval-1", "run-1").status == "canceled"
    elif end == "deleted":
        store.evals.delete_run(PROJECT, "eval-1", "run-1")
    else:
        error = {"code": "x"} if end == "failed" else None
        assert store.evals.end_run("run-1", "me", end, error)
        assert store.evals.get_run(PROJECT, "eval-1", "run-1").error == error
        with pytest.raises(SpecError) as refused:
            store.evals.cancel_run(PROJECT, "eval-1", "run-1")
        assert refused.value.code == "invalid_state"
    if end == "canceled":
        assert store.evals.cancel_run(PROJECT, "eval-1", "run-1").status == "canceled"
    assert store.evals.renew_runs("me", ["run-1"]) == set()
    assert not store.evals.add_items(run, "me", [outcome(1, GOOD)])
    assert not store.evals.end_run("run-1", "me", "completed")
    assert store.evals.numbers_of("run-1") == set()
    store.evals.release_runs("me")
    assert store.evals.claim_run("other", []) is None


def test_a_run_counts_what_came_of_its_items_and_their_bytes(store: Store) -> None:
    new_eval(store)
    new_run(store, "run-1")
    run = claimed(store, "me")
    before = kept(store)
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    first = [outcome(1, GOOD, usage=usage), outcome(2, BAD, error={"code": "x"})]
    assert store.evals.add_items(run, "me", first)
    assert kept(store) - before > 2 * evals_module.ROW_BYTES
    between = kept(store)
    assert store.evals.add_items(run, "me", [outcome(3, BAD, text="x" * 1000)])
    assert 1000 < kept(store) - between - evals_module.ROW_BYTES < 1200
    assert store.evals.end_run("run-1", "me", "completed")
    tally = Tally(
        passed=1,
        failed=1,
        errored=1,
        criteria={"c": [1, 2]},
        asked=1,
        prompt_tokens=3,
        completion_tokens=2,
    )
    assert store.evals.get_run(PROJECT, "eval-1", "run-1").tally == asdict(tally)


def test_an_eval_goes_with_all_its_runs_and_their_bytes(store: Store) -> None:
    for of in ("eval-1", "eval-2"):
        new_eval(store, of)
    for name in ("run-1", "run-2"):
        new_run(store, name)
    new_run(store, "run-3", "eval-2")
    run = claimed(store, "me")
    store.evals.add_items(run, "me", [outcome(1, GOOD)])
    other = claimed(store, "me")
    store.evals.add_items(other, "me", [outcome(1, GOOD)])
    store.evals.delete_run(PROJECT, "eval-1", other.id)
    assert (runs(store), items(store, other.id)) == (["run-1"], [])
    assert len(items(store, run.id)) == 1
    store.evals.delete_eval(PROJECT, "eval-1")
    assert items(store, run.id) == []
    with pytest.raises(NotFoundError):
        store.evals.get_eval(PROJECT, "eval-1")
    assert runs(store, "eval-2") == ["run-3"]
    store.evals.delete_eval(PROJECT, "eval-2")
    assert kept(store) == 0
    deeds = [(one.type, one.target) for one in store.audit.list_audit(project_id=PROJECT).data]
    assert deeds == [
        ("eval.deleted", "eval-2"),
        ("eval.deleted", "eval-1"),
        ("eval_run.deleted", "run-2"),
    ]


def test_a_project_has_as_many_as_it_may_and_no_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, most in (("MOST_EVALS", 2), ("MOST_RUNS", 3), ("MOST_UNFINISHED", 2)):
        monkeypatch.setattr(evals_module, name, most)
    for name in ("eval-1", "eval-2"):
        new_eval(store, name)
    with pytest.raises(LimitError) as refused:
        new_eval(store, "eval-3")
    assert refused.value.code == "too_many_evals"
    new_eval(store, "eval-4", OTHER)
    for name in ("run-1", "run-2"):
        new_run(store, name)
    with pytest.raises(LimitError) as refused:
        new_run(store, "run-3", "eval-2")
    assert refused.value.code == "too_many_at_once"
    assert refused.value.retry_after is not None
    new_run(store, "run-4", "eval-4", OTHER)
    store.evals.cancel_run(PROJECT, "eval-1", "run-1")
    new_run(store, "run-3")
    store.evals.cancel_run(PROJECT, "eval-1", "run-3")
    with pytest.raises(LimitError) as refused:
        new_run(store, "run-5")
    assert refused.value.code == "too_many_evals"
    store.evals.delete_run(PROJECT, "eval-1", "run-1")
    new_run(store, "run-5")
