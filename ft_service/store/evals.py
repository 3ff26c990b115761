"""Evals, their runs and what came of the runs' items.

A process carries a run out while it owns it; ownership that is not renewed lapses, and another
process goes on with the items that are not stored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sqlalchemy import Connection, Table, delete, func, insert, select, update

from ft_service.errors import LimitError, SpecError
from ft_service.evals.item_results import ItemOutcome, Tally
from ft_service.ids import new_id
from ft_service.store.database import StorePart, database_time, is_over
from ft_service.store.records import Order, Page
from ft_service.store.rows import Listing, columns_of, not_found, page
from ft_service.store.tables import UNFINISHED_RUN, eval_items, eval_runs, evals
from ft_service.store.tenants.audit import record
from ft_service.store.tenants.projects import refuse_bytes_beyond, refuse_deleted

MOST_EVALS = 1000
MOST_RUNS = 1000
MOST_UNFINISHED = 100
"""Limits of a project."""
OWNED_SECONDS = 30.0
"""Time after which a run whose process gives no sign of life is another's."""
ROW_BYTES = 512
"""Bytes that an eval, a run and an item count for besides their texts."""
RunStatus = Literal["queued", "in_progress", "completed", "canceled", "failed"]


@dataclass(frozen=True, kw_only=True)
class Eval:
    """An eval. Times are seconds since the epoch on the database's clock."""

    id: str
    project_id: str
    data_source_config: Mapping[str, Any]
    testing_criteria: Sequence[Mapping[str, Any]]
    name: str | None = None
    metadata: Mapping[str, str] | None = None
    created_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EvalRun:
    """A run of an eval."""

    id: str
    project_id: str
    eval_id: str
    key_id: str
    data_source: Mapping[str, Any]
    name: str | None = None
    metadata: Mapping[str, str] | None = None
    status: RunStatus = "queued"
    error: Mapping[str, Any] | None = None
    total: int | None = None
    tally: Mapping[str, Any] = field(default_factory=lambda: asdict(Tally()))
    created_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EvalItem:
    """What came of an item."""

    id: str
    run_id: str
    number: int
    status: str
    item: Mapping[str, Any]
    sample: Mapping[str, Any]
    results: Sequence[Mapping[str, Any]]
    created_at: float


_EVAL = columns_of(Eval, evals)
_RUN = columns_of(EvalRun, eval_runs)
_ITEM = columns_of(EvalItem, eval_items)


class EvalStore(StorePart):
    """Evals: for their users, and for the loop that carries runs out."""

    # For users

    def create_eval(self, new: Eval) -> Eval:
        """Raises LimitError if the project has too many, or may not keep the bytes."""
        row = _row(new)
        with self._database.writing() as connection:
            refuse_deleted(connection, new.project_id)
            _refuse_more(connection, evals, new.project_id, MOST_EVALS, "evals")
            refuse_bytes_beyond(connection, new.project_id, row["bytes"], what="The eval has")
            connection.execute(insert(evals).values(row))
            return _read_eval(connection, new.project_id, new.id)

    def get_eval(self, project_id: str, eval_id: str) -> Eval:
        with self._database.reading() as connection:
            return _read_eval(connection, project_id, eval_id)

    def update_eval(self, project_id: str, eval_id: str, **changes: Any) -> Eval:
        """Change `name` or `metadata`."""
        mine = evals.c.id == eval_id, evals.c.project_id == project_id
        with self._database.writing() as connection:
            if changes:
                connection.execute(update(evals).where(*mine).values(**changes))
            return _read_eval(connection, project_id, eval_id)

    def list_evals(
        self, project_id: str, *, after: str | None, limit: int, order: Order
    ) -> Page[Eval]:
        mine = (evals.c.project_id == project_id,)
        listing = Listing(evals.c.position, evals.c.id, mine, order == "desc")
        with self._database.reading() as connection:
            query = listing.apply(connection, select(*_EVAL).where(*mine), after)
            return page(connection, query, limit, lambda row: Eval(**row))

    def delete_eval(self, project_id: str, eval_id: str) -> None:
        """Delete an eval with its runs, one after the other."""
        mine = evals.c.id == eval_id, evals.c.project_id == project_id
        self.get_eval(project_id, eval_id)
        while True:
            with self._database.writing(makes_room=True) as connection:
                query = select(eval_runs.c.id).where(eval_runs.c.eval_id == eval_id).limit(1)
                run_id = connection.scalars(query).one_or_none()
                if run_id is None:
                    connection.execute(delete(evals).where(*mine))
                    record(connection, project_id, "eval.deleted", eval_id)
                    return
                _delete_run(connection, run_id)

    def create_run(self, new: EvalRun) -> EvalRun:
        """Raises LimitError if the project has too many, or may not keep the bytes."""
        row: dict[str, Any] = {**_row(new), "owned_until": 0.0}
        with self._database.writing() as connection:
            _read_eval(connection, new.project_id, new.eval_id)
            _refuse_more(connection, eval_runs, new.project_id, MOST_RUNS, "runs of evals")
            mine = eval_runs.c.project_id == new.project_id, UNFINISHED_RUN
            going = connection.scalar(select(func.count()).select_from(eval_runs).where(*mine))
            if (going or 0) >= MOST_UNFINISHED:
                raise LimitError(
                    f"{MOST_UNFINISHED} runs of evals of this project are not over. Wait until "
                    "some are, or cancel them.",
                    code="too_many_at_once",
                    retry_after=10.0,
                )
            refuse_bytes_beyond(connection, new.project_id, row["bytes"], what="The run has")
            connection.execute(insert(eval_runs).values(row))
            run = _read_run(connection, new.project_id, new.eval_id, new.id)
        self._database.changed.set()
        return run

    def get_run(self, project_id: str, eval_id: str, run_id: str) -> EvalRun:
        with self._database.reading() as connection:
            return _read_run(connection, project_id, eval_id, run_id)

    def list_runs(
        self,
        project_id: str,
        eval_id: str,
        *,
        status: RunStatus | None,
        after: str | None,
        limit: int,
        order: Order,
    ) -> Page[EvalRun]:
        mine = eval_runs.c.project_id == project_id, eval_runs.c.eval_id == eval_id
        listing = Listing(eval_runs.c.position, eval_runs.c.id, mine, order == "desc")
        query = select(*_RUN).where(*mine)
        if status is not None:
            query = query.where(eval_runs.c.status == status)
        with self._database.reading() as connection:
            _read_eval(connection, project_id, eval_id)
            query = listing.apply(connection, query, after)
            return page(connection, query, limit, lambda row: EvalRun(**row))

    def cancel_run(self, project_id: str, eval_id: str, run_id: str) -> EvalRun:
        """Cancel a run; repeating it changes nothing. Raises SpecError if it is over otherwise."""
        with self._database.writing(makes_room=True) as connection:
            run = _read_run(connection, project_id, eval_id, run_id)
            if run.status in ("completed", "failed"):
                raise SpecError(
                    f"Run {run_id} is {run.status}: there is nothing to cancel.",
                    code="invalid_state",
                )
            connection.execute(
                update(eval_runs).where(eval_runs.c.id == run_id).values(status="canceled")
            )
            return _read_run(connection, project_id, eval_id, run_id)

    def delete_run(self, project_id: str, eval_id: str, run_id: str) -> None:
        """Delete a run with its items; one that goes on ends."""
        with self._database.writing(makes_room=True) as connection:
            _read_run(connection, project_id, eval_id, run_id)
            _delete_run(connection, run_id)
            record(connection, project_id, "eval_run.deleted", run_id)

    def get_item(self, run_id: str, item_id: str) -> EvalItem:
        """An item of a run that was read."""
        query = select(*_ITEM).where(eval_items.c.run_id == run_id, eval_items.c.id == item_id)
        with self._database.reading() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise not_found("output item", item_id)
        return EvalItem(**row)

    def list_items(
        self, run_id: str, *, status: str | None, after: str | None, limit: int, order: Order
    ) -> Page[EvalItem]:
        """Items of a run that was read."""
        mine = (eval_items.c.run_id == run_id,)
        listing = Listing(eval_items.c.position, eval_items.c.id, mine, order == "desc")
        query = select(*_ITEM).where(*mine)
        if status is not None:
            query = query.where(eval_items.c.status == status)
        with self._database.reading() as connection:
            query = listing.apply(connection, query, after)
            return page(connection, query, limit, lambda row: EvalItem(**row))

    # For the loop

    def claim_run(self, owner: str, busy: Collection[str]) -> EvalRun | None:
        """Take the oldest run that nobody carries out. `busy`: projects that have to wait."""
        lapsed = is_over(eval_runs.c.owned_until, OWNED_SECONDS)
        free = UNFINISHED_RUN, lapsed, eval_runs.c.project_id.not_in(list(busy))
        query = select(eval_runs.c.id).where(*free).order_by(eval_runs.c.position).limit(1)
        with self._database.reading() as connection:  # most looks find nothing
            run_id = connection.scalars(query).one_or_none()
        if run_id is None:
            return None
        values = {
            "status": "in_progress",
            "owner": owner,
            "owned_until": database_time() + OWNED_SECONDS,
        }
        with self._database.writing() as connection:
            mine = eval_runs.c.id == run_id, UNFINISHED_RUN, lapsed
            if not connection.execute(update(eval_runs).where(*mine).values(**values)).rowcount:
                return None
            row = connection.execute(select(*_RUN).where(eval_runs.c.id == run_id)).mappings().one()
        return EvalRun(**row)

    def renew_runs(self, owner: str, run_ids: Collection[str]) -> set[str]:
        """Own runs for longer. Returns those that are still this process's and not over."""
        mine = eval_runs.c.owner == owner, eval_runs.c.id.in_(list(run_ids)), UNFINISHED_RUN
        with self._database.writing() as connection:
            values = {"owned_until": database_time() + OWNED_SECONDS}
            connection.execute(update(eval_runs).where(*mine).values(**values))
            return set(connection.scalars(select(eval_runs.c.id).where(*mine)))

    def release_runs(self, owner: str) -> None:
        """Let other processes go on at once."""
        with self._database.writing() as connection:
            connection.execute(
                update(eval_runs).where(eval_runs.c.owner == owner).values(owned_until=0.0)
            )

    def numbers_of(self, run_id: str) -> set[int]:
        """Numbers of a run's items that are stored."""
        with self._database.reading() as connection:
            query = select(eval_items.c.number).where(eval_items.c.run_id == run_id)
            return set(connection.scalars(query))

    def begin_run(self, run_id: str, owner: str, total: int) -> bool:
        """Store the number of items. False: the run is over, or another process's."""
        with self._database.writing() as connection:
            return _change(connection, run_id, owner, total=total)

    def add_items(self, run: EvalRun, owner: str, outcomes: Sequence[ItemOutcome]) -> bool:
        """Store what came of items, and count it. False: the run is over, or another process's.

        Raises LimitError if the project may not keep the bytes.
        """
        rows = [
            {
                "id": new_id("outputitem_"),
                "project_id": run.project_id,
                "run_id": run.id,
                "created_at": database_time(),
                "number": outcome.number,
                "status": outcome.status,
                "item": outcome.item,
                "sample": outcome.sample,
                "results": outcome.results,
            }
            for outcome in outcomes
        ]
        size = sum(
            ROW_BYTES + len(json.dumps([row[name] for name in ("item", "sample", "results")]))
            for row in rows
        )
        with self._database.writing() as connection:
            refuse_bytes_beyond(connection, run.project_id, size, what="Answers of the run have")
            query = select(eval_runs.c.tally).where(eval_runs.c.id == run.id)
            stored = connection.scalars(query).one_or_none()
            if stored is None:
                return False
            tally = Tally(**stored)
            tally.add(outcomes)
            changes = {"tally": asdict(tally), "bytes": eval_runs.c.bytes + size}
            if not _change(connection, run.id, owner, **changes):
                return False
            for row in rows:
                connection.execute(insert(eval_items).values(row))
        return True

    def end_run(
        self, run_id: str, owner: str, status: RunStatus, error: Mapping[str, Any] | None = None
    ) -> bool:
        """Store how a run ended. False: it was over, or is another process's."""
        with self._database.writing(makes_room=True) as connection:
            return _change(connection, run_id, owner, status=status, error=error)


def _row(new: Eval | EvalRun) -> dict[str, Any]:
    row: dict[str, Any] = asdict(new)
    size = ROW_BYTES + len(json.dumps(list(row.values())))
    return row | {"created_at": database_time(), "bytes": size}


def _change(connection: Connection, run_id: str, owner: str, **values: Any) -> bool:
    mine = eval_runs.c.id == run_id, eval_runs.c.owner == owner, UNFINISHED_RUN
    return connection.execute(update(eval_runs).where(*mine).values(**values)).rowcount > 0


def _delete_run(connection: Connection, run_id: str) -> None:
    connection.execute(delete(eval_items).where(eval_items.c.run_id == run_id))
    connection.execute(delete(eval_runs).where(eval_runs.c.id == run_id))


def _read_eval(connection: Connection, project_id: str, eval_id: str) -> Eval:
    query = select(*_EVAL).where(evals.c.id == eval_id, evals.c.project_id == project_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise not_found("eval", eval_id)
    return Eval(**row)


def _read_run(connection: Connection, project_id: str, eval_id: str, run_id: str) -> EvalRun:
    mine = eval_runs.c.id == run_id, eval_runs.c.eval_id == eval_id
    query = select(*_RUN).where(*mine, eval_runs.c.project_id == project_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise not_found("run of an eval", run_id)
    return EvalRun(**row)


def _refuse_more(
    connection: Connection, table: Table, project_id: str, most: int, what: str
) -> None:
    """Raise LimitError if a project has as many rows as it may have."""
    query = select(func.count()).select_from(table).where(table.c.project_id == project_id)
    if (connection.scalar(query) or 0) >= most:
        raise LimitError(
            f"This project has {most:,} {what}, as many as it may have. Delete those that are not "
            "needed.",
            code="too_many_evals",
        )
