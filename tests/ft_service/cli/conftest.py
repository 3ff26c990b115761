from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.cli.local import job_inputs
from ft_service.client import client, connection
from ft_service.control.bases import describe_bases
from ft_service.data.data_file import Counts, DataReport, ExamineRequest, ReadProgress, check_lines
from ft_service.data.examiner import Examiner
from ft_service.data.statistics import DataStatistics, Records, without_base
from tests.support.command_line import ft, home
from tests.support.describing import described_here
from tests.support.rest.stub_server import StubServer

__all__ = ["ft", "home"]


class LinesOnly(Examiner):
    """In the place of the process that counts tokens, which takes a second to start."""

    def start(self) -> None:
        pass

    def examine(
        self, request: ExamineRequest, note: Callable[[ReadProgress], object] = print
    ) -> DataReport:
        if Path(request.path).stem == "large":
            note(ReadProgress(7, 0.5))
        report = check_lines(Path(request.path), files=request.files)
        return (
            report
            if report.faults_total
            else replace(report, counts=Counts(samples=report.examples, tokens=7))
        )

    def measure(self, request: ExamineRequest) -> DataStatistics:
        asked = request.measure
        assert asked is not None
        records = Records(asked.training_file.name)
        check_lines(
            Path(asked.training_file.path), files=asked.training_file.files, records=records
        )
        found = without_base(records, None, asked.training)
        return replace(found, training=replace(found.training, tokens=7))


@pytest.fixture
def no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are checked, and no tokens counted."""
    monkeypatch.setattr(job_inputs, "Examiner", LinesOnly)


@pytest.fixture(autouse=True)
def described_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bases are described in this process, which has torch already, and without the note for slow
    ones.
    """
    monkeypatch.setattr(job_inputs, "SILENT_SECONDS", 3600.0)
    monkeypatch.setattr(describe_bases, "describe_in_process", described_here)


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> StubServer:
    """The server that commands reach."""
    stub = StubServer()
    monkeypatch.setattr(connection, "find_connection", lambda environment, home: None)
    monkeypatch.setattr(client, "Client", lambda connection: stub.client())
    return stub
