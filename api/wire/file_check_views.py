"""A data file's check without a base, as an answer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from ft_service.data.data_file import DataReport


class FileCheckView(BaseModel):
    object: Literal["file.check"] = "file.check"
    file_id: str
    ok: bool
    """Whether every record that was read can be trained on."""
    message: str
    """What the file is, or what is wrong with it: each reason once, with its lines. As `ft data check` says it."""
    warnings: list[str]
    """Such as columns that are left out."""
    records: int
    """Those that can be trained on."""
    whole: bool
    """Whether all of it was read; of a file that takes longer only the beginning was."""


def file_check_view(file_id: str, name: str, report: DataReport) -> FileCheckView:
    ok = not report.faults_total
    told = report.messages(name, 0) if ok else ()
    return FileCheckView(
        file_id=file_id,
        ok=ok,
        message=report.fine_text(name) if ok else report.fault_text(name),
        warnings=[text for level, text in told if level == "warn"],
        records=report.examples,
        whole=not report.unread,
    )
