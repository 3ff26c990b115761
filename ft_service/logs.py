"""Log of the service: JSON lines (or text on a terminal), each with its request and job.

Modules use the standard library's loggers. `about` binds fields (`request_id`, `job_id`, `attempt`)
once, and they are added to every line logged inside it.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import structlog
from structlog.types import EventDict, Processor

Format = Literal["auto", "json", "text"]
Level = Literal["debug", "info", "warning", "error"]

about = structlog.contextvars.bound_contextvars
"""`with about(job_id=…):` adds fields to every line that this thread or task logs inside."""

_QUIET = ("alembic", "httpx2", "httpcore2", "uvicorn.error", "asyncio")
"""Libraries that log only warnings and errors."""


def configure(level: Level, format: Format, stream: TextIO | None = None) -> None:
    """Send every logger's lines to `stream` (None: stderr). Only for a process's main function."""
    target = sys.stderr if stream is None else stream
    as_json = format == "json" or (format == "auto" and not target.isatty())
    handler = logging.StreamHandler(target)
    handler.setFormatter(_formatter(as_json))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def fields(**values: Any) -> dict[str, Any]:
    """Return fields of one line in addition to its message: `log.info("…",
    extra=fields(seconds=0.1))`.
    """
    return {"ft": values}


def _formatter(as_json: bool) -> logging.Formatter:
    return (
        _JsonFormatter() if as_json else structlog.stdlib.ProcessorFormatter(processors=_FOR_PEOPLE)
    )


class _JsonFormatter(logging.Formatter):
    """Formatter with one JSON object per line.

    It is on the path of every request, and structlog's chain takes three times as long.
    """

    def format(self, record: logging.LogRecord) -> str:
        event: EventDict = {
            **structlog.contextvars.get_contextvars(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": datetime.fromtimestamp(record.created, UTC)
            .isoformat()
            .replace("+00:00", "Z"),
            **getattr(record, "ft", {}),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(
            {**event, "message": record.getMessage()}, ensure_ascii=False, default=str
        )


def _add_fields(logger: Any, method: str, event: EventDict) -> EventDict:
    record: logging.LogRecord = event["_record"]
    event.update(getattr(record, "ft", {}))
    return event


def _printable(logger: Any, method: str, event: EventDict) -> EventDict:
    """Escape control characters in the message, which a client may have sent; JSON and the renderer
    escape fields anyway.
    """
    event["event"] = "".join(
        char if char.isprintable() else repr(char)[1:-1] for char in str(event["event"])
    )
    return event


_FOR_PEOPLE: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    _add_fields,
    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
    _printable,
    structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
]
