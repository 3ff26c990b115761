"""The audit log as lines of JSON, for what collects them (FT_AUDIT_LOG)."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from ft_service.errors import SpecError

log = logging.getLogger(__name__)

STDOUT = "stdout"


class AuditStream:
    """A writer of entries. An entry that cannot be written is logged, and stays in the database:
    its change is stored already.
    """

    def __init__(self, target: str) -> None:
        """`target`: a file, which is created for its owner alone, or `stdout`. Raises SpecError if
        the file cannot be opened.
        """
        self._target = target
        if target != STDOUT:
            try:
                os.close(self._opened())
            except OSError as error:
                raise SpecError(
                    f"FT_AUDIT_LOG = {target}: {error.strerror}. Name a file that this process may "
                    "write, or stdout.",
                    param="FT_AUDIT_LOG",
                ) from None

    def __call__(self, entry: Mapping[str, Any]) -> None:
        """Write an entry: its time in seconds since the epoch, by this host's clock."""
        line = json.dumps({"object": "organization.audit_log", **entry}, default=str) + "\n"
        try:
            if self._target == STDOUT:
                sys.stdout.write(line)
                sys.stdout.flush()
                return
            # Opened for each entry, so that the file may be renamed (logrotate); one write, so that
            # lines of several processes do not mix.
            descriptor = self._opened()
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            log.error(
                "an entry of the audit log was not written to FT_AUDIT_LOG: %s",
                error,
                extra={"audit_id": entry.get("id")},
            )

    def _opened(self) -> int:
        return os.open(self._target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
