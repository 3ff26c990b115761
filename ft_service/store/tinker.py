"""Sessions, samplers and samples of Tinker clients.

A model is a job; its commands are files of its run directory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, delete, func, insert, or_, select, update

from ft_service.errors import LimitError, SpecError
from ft_service.jobs.states import TERMINAL
from ft_service.store.database import StorePart, database_time, is_over, upsert
from ft_service.store.rows import columns_of, not_found
from ft_service.store.tables import (
    TINKER_ROW_BYTES,
    UNANSWERED,
    jobs,
    tinker_samplers,
    tinker_samples,
    tinker_sessions,
)
from ft_service.store.tenants.audit import record
from ft_service.store.tenants.projects import refuse_bytes_beyond

R = TypeVar("R")

MOST_UNANSWERED = 4096
"""Limit of a project's samples that wait."""
MOST_SESSIONS = 4096
MOST_SAMPLERS = 65_536
"""Limits of a project."""
KEEP_FINISHED_SECONDS = 24 * 3600.0
KEEP_UNUSED_SECONDS = 7 * 24 * 3600.0
"""Time after which sessions that are finished, and sessions and samplers that are not used, are
removed.
"""


@dataclass(frozen=True, kw_only=True)
class TinkerSession:
    """A client's session. Times are seconds since the epoch on the database's clock."""

    id: str
    project_id: str
    created_at: float
    used_at: float
    finished_at: float | None
    finish_reason: str | None
    display_name: str | None
    user_metadata: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class TinkerSampler:
    """What a session samples from."""

    id: str
    project_id: str
    session_id: str
    base: str
    model_path: str | None
    owns_weights: bool = False
    created_at: float = 0.0
    used_at: float = 0.0
    logprob_gap: float | None = None


@dataclass(frozen=True, kw_only=True)
class TinkerSample:
    """A request for samples."""

    id: str
    project_id: str
    sampler_id: str
    request: dict[str, Any]
    answer: bytes | None = None
    error: dict[str, Any] | None = None
    answered_at: float | None = None


_SESSION = columns_of(TinkerSession, tinker_sessions)
_SAMPLER = columns_of(TinkerSampler, tinker_samplers)
_SAMPLE = columns_of(TinkerSample, tinker_samples)


class TinkerStore(StorePart):
    """Sessions, samplers and samples of Tinker clients."""

    def create_session(
        self, session_id: str, project_id: str, name: str | None, metadata: Mapping[str, Any] | None
    ) -> None:
        """Raises LimitError if the project has too many sessions, or may not keep the bytes of the
        metadata.
        """
        now = {"created_at": database_time(), "used_at": database_time()}
        values = {
            "id": session_id,
            "project_id": project_id,
            "display_name": name,
            "user_metadata": metadata,
        }
        size = TINKER_ROW_BYTES + len(json.dumps(metadata or {}))
        with self._database.writing() as connection:
            if metadata:  # without, a client that is about to delete weights could not begin
                refuse_bytes_beyond(
                    connection, project_id, size, what="The session and its metadata have"
                )
            _refuse_more(connection, tinker_sessions, project_id, MOST_SESSIONS, "sessions")
            connection.execute(insert(tinker_sessions).values(**values, **now, bytes=size))

    def _read(self, record: type[R], table: Table, noun: str, project_id: str, row_id: str) -> R:
        """A project's own record. Raises NotFoundError."""
        query = select(*columns_of(record, table)).where(
            table.c.id == row_id, table.c.project_id == project_id
        )
        with self._database.reading() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise not_found(noun, row_id)
        return record(**row)

    def get_session(self, project_id: str, session_id: str) -> TinkerSession:
        return self._read(TinkerSession, tinker_sessions, "session", project_id, session_id)

    def open_session(self, project_id: str, session_id: str) -> TinkerSession:
        """A session in which something may be created.

        Raises SpecError if its client has finished it.
        """
        session = self.get_session(project_id, session_id)
        if session.finished_at is not None:
            raise SpecError(
                f"Session {session_id} is finished: begin another one.",
                param="session_id",
                code="session_finished",
            )
        return session

    def list_sessions(self, project_id: str, limit: int, offset: int) -> list[str]:
        """Ids of a project's sessions, the newest first."""
        query = select(tinker_sessions.c.id).where(tinker_sessions.c.project_id == project_id)
        with self._database.reading() as connection:
            newest = query.order_by(tinker_sessions.c.position.desc()).limit(limit).offset(offset)
            return list(connection.scalars(newest))

    def touch_session(self, project_id: str, session_id: str) -> None:
        """Note a sign of life of the client."""
        self._change_session(project_id, session_id, used_at=database_time())

    def finish_session(self, project_id: str, session_id: str, reason: str) -> bool:
        """Note that the client has finished.

        The first reason stays. Returns whether it is the first.
        """
        return (
            self._change_session(
                project_id, session_id, finished_at=database_time(), finish_reason=reason
            )
            > 0
        )

    def _change_session(self, project_id: str, session_id: str, **values: Any) -> int:
        mine = tinker_sessions.c.id == session_id, tinker_sessions.c.project_id == project_id
        is_open = tinker_sessions.c.finished_at.is_(None)
        with self._database.writing() as connection:
            changed = connection.execute(
                update(tinker_sessions).where(*mine, is_open).values(**values)
            ).rowcount
        if not changed:
            self.get_session(project_id, session_id)
        return changed

    def put_sampler(self, sampler: TinkerSampler) -> TinkerSampler:
        """Store a sampler unless its id has one.

        Returns the one that is stored. Raises NotFoundError if it is another project's, LimitError
        if the project has too many.
        """
        row = {
            "id": sampler.id,
            "project_id": sampler.project_id,
            "session_id": sampler.session_id,
            "base": sampler.base,
        }
        row |= {
            "model_path": sampler.model_path,
            "owns_weights": sampler.owns_weights,
            "clients": 1,
        }
        now = {"created_at": database_time(), "used_at": database_time()}
        with self._database.writing() as connection:
            if (
                connection.scalars(
                    select(tinker_samplers.c.id).where(tinker_samplers.c.id == sampler.id)
                ).one_or_none()
                is None
            ):
                _refuse_more(
                    connection, tinker_samplers, sampler.project_id, MOST_SAMPLERS, "samplers"
                )
            statement = upsert(connection, tinker_samplers).values(**row, **now)
            connection.execute(statement.on_conflict_do_nothing(index_elements=["id"]))
        return self.get_sampler(sampler.project_id, sampler.id)

    def get_sampler(self, project_id: str, sampler_id: str) -> TinkerSampler:
        return self._read(TinkerSampler, tinker_samplers, "sampler", project_id, sampler_id)

    def samplers_of(self, session_id: str) -> list[str]:
        """Ids of a session's samplers, the oldest first."""
        query = select(tinker_samplers.c.id).where(tinker_samplers.c.session_id == session_id)
        with self._database.reading() as connection:
            return list(connection.scalars(query.order_by(tinker_samplers.c.position)))

    def join_sampler(self, project_id: str, sampler_id: str) -> int:
        """The number of one more client of a sampler."""
        mine = tinker_samplers.c.id == sampler_id, tinker_samplers.c.project_id == project_id
        values = {"clients": tinker_samplers.c.clients + 1, "used_at": database_time()}
        statement = update(tinker_samplers).where(*mine).values(values)
        with self._database.writing() as connection:
            number = connection.scalars(
                statement.returning(tinker_samplers.c.clients)
            ).one_or_none()
        if number is None:
            raise not_found("sampler", sampler_id)
        return number - 1

    def record_weights(self, project_id: str, change: str, path: str) -> None:
        """Write into the audit log what is done to saved weights, which are files.

        `change`: such as published.
        """
        with self._database.writing() as connection:
            record(connection, project_id, f"weights.{change}", path)

    def ended(self, job_ids: Collection[str]) -> set[str]:
        """Those of some models' jobs that have ended, or are not there."""
        going = select(jobs.c.id).where(jobs.c.id.in_(list(job_ids)), jobs.c.state.not_in(TERMINAL))
        with self._database.reading() as connection:
            return set(job_ids) - set(connection.scalars(going))

    def note_gap(self, sampler_id: str, gap: float) -> None:
        """Store how far a sampler is from the trainer."""
        with self._database.writing() as connection:
            connection.execute(
                update(tinker_samplers)
                .where(tinker_samplers.c.id == sampler_id)
                .values(logprob_gap=gap)
            )

    def unused_samplers(self, seconds: float) -> list[TinkerSampler]:
        """Samplers with weights of their own that were not used for so long."""
        unused = (
            tinker_samplers.c.owns_weights,
            is_over(tinker_samplers.c.used_at + seconds, seconds),
        )
        with self._database.reading() as connection:
            return [
                TinkerSampler(**row)
                for row in connection.execute(select(*_SAMPLER).where(*unused)).mappings()
            ]

    def delete_sampler(self, sampler_id: str) -> None:
        """Delete a sampler whose own weights are removed."""
        with self._database.writing() as connection:
            connection.execute(delete(tinker_samplers).where(tinker_samplers.c.id == sampler_id))

    def forget_unused(self) -> None:
        """Delete sessions that were finished, and sessions and samplers that were used, long ago;
        samplers with weights of their own go with these.
        """
        tables = tinker_sessions, tinker_samplers
        unused = [
            is_over(table.c.used_at + KEEP_UNUSED_SECONDS, KEEP_UNUSED_SECONDS) for table in tables
        ]
        finished = is_over(
            tinker_sessions.c.finished_at + KEEP_FINISHED_SECONDS, KEEP_FINISHED_SECONDS
        )
        with self._database.writing() as connection:
            connection.execute(delete(tinker_sessions).where(or_(unused[0], finished)))
            connection.execute(
                delete(tinker_samplers).where(unused[1], ~tinker_samplers.c.owns_weights)
            )

    def put_sample(self, sample: TinkerSample) -> None:
        """Store a request unless its id has one.

        Raises LimitError if too many of the project wait.
        """
        waiting = select(tinker_samples.c.id).where(
            UNANSWERED, tinker_samples.c.project_id == sample.project_id
        )
        row = {
            "id": sample.id,
            "project_id": sample.project_id,
            "sampler_id": sample.sampler_id,
            "request": sample.request,
        }
        with self._database.writing() as connection:
            if len(connection.scalars(waiting.limit(MOST_UNANSWERED)).all()) >= MOST_UNANSWERED:
                text = (
                    f"{MOST_UNANSWERED} requests for samples of this project wait already. "
                    "Send this one later."
                )
                raise LimitError(text, code="too_many_at_once", retry_after=1.0)
            statement = upsert(connection, tinker_samples).values(**row, created_at=database_time())
            connection.execute(statement.on_conflict_do_nothing(index_elements=["id"]))
            used = update(tinker_samplers).where(tinker_samplers.c.id == sample.sampler_id)
            connection.execute(used.values(used_at=database_time()))
        self._database.changed.set()

    def get_sample(self, project_id: str, sample_id: str) -> TinkerSample:
        return self._read(TinkerSample, tinker_samples, "request", project_id, sample_id)

    def answered(self, sample_ids: Collection[str]) -> set[str]:
        """Those of some samples that are answered, or are not there."""
        query = select(tinker_samples.c.id).where(
            tinker_samples.c.id.in_(list(sample_ids)), UNANSWERED
        )
        with self._database.reading() as connection:
            return set(sample_ids) - set(connection.scalars(query))

    def unanswered(
        self,
        most: int,
        without: Collection[str],
        *,
        projects: Collection[str],
        samplers: Collection[str],
    ) -> Sequence[TinkerSample]:
        """Samples that wait, the oldest first.

        Ids of those that are not meant: `without` of samples, `projects` and `samplers` of all
        theirs.
        """
        others = (
            tinker_samples.c.project_id.not_in(projects),
            tinker_samples.c.sampler_id.not_in(samplers),
        )
        query = (
            select(*_SAMPLE)
            .where(UNANSWERED, *others)
            .order_by(tinker_samples.c.position)
            .limit(most + len(without))
        )
        with self._database.reading() as connection:
            found = [TinkerSample(**row) for row in connection.execute(query).mappings()]
        return [sample for sample in found if sample.id not in without][:most]

    def answer_samples(self, answers: Mapping[str, bytes | dict[str, Any]]) -> None:
        """Store answers: the client's message, or {error, category}.

        An answer that is there stays.
        """
        with self._database.writing() as connection:
            for sample_id, answer in answers.items():
                values = {"answer": answer} if isinstance(answer, bytes) else {"error": answer}
                statement = update(tinker_samples).where(
                    tinker_samples.c.id == sample_id, UNANSWERED
                )
                connection.execute(statement.values(**values, answered_at=database_time()))
        self._database.changed.set()

    def forget_samples(self, seconds: float) -> None:
        """Delete samples that were answered so long ago."""
        with self._database.writing() as connection:
            connection.execute(
                delete(tinker_samples).where(
                    is_over(tinker_samples.c.answered_at + seconds, seconds)
                )
            )


def _refuse_more(
    connection: Connection, table: Table, project_id: str, most: int, what: str
) -> None:
    """Raise LimitError if a project has as many rows as it may have."""
    own = select(table.c.id).where(table.c.project_id == project_id).limit(most).subquery()
    if (connection.scalar(select(func.count()).select_from(own)) or 0) >= most:
        days = int(KEEP_UNUSED_SECONDS / 86400)
        text = (
            f"This project has {most:,} {what} of Tinker's clients, as many as it may have. "
            "Unused ones are removed after "
            f"{days} days, and sessions that are finished (service.close) after one."
        )
        raise LimitError(text, code=f"too_many_{what}")
