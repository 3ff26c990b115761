"""What is read for somebody to see ends in time."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from ft_service.control.checks import file_views
from ft_service.control.checks.file_views import examining
from ft_service.data.examiner import Examiner, ExaminerLost
from ft_service.data.sample_request import RecordRange
from ft_service.data.token_options import TokenOptions
from ft_service.errors import FtError, SpecError, is_lost
from ft_service.spec import DataFileRef
from ft_service.storage.locations import Places
from tests.support.bases import save_base


@pytest.mark.parametrize(
    ("does", "limit", "kind", "code"),
    [
        ("while True: pass", "READ_SECONDS", SpecError, "takes_too_long"),
        ("import time; time.sleep(600)", "GONE_SECONDS", ExaminerLost, "data_check_failed"),
    ],
)
def test_what_takes_too_long_in_all_is_ended_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    does: str,
    limit: str,
    kind: type[FtError],
    code: str,
) -> None:
    """Though the process is never at one sample for too long.

    Without processor time the request may be repeated.
    """
    monkeypatch.setattr(
        file_views, "Examiner", partial(Examiner, command=(sys.executable, "-c", does))
    )
    monkeypatch.setattr(file_views, limit, 0.05)
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    ref = DataFileRef(name=data.name, path=str(data), sha256="0" * 64)
    base = str(save_base(tmp_path / "base"))
    with pytest.raises(kind) as caught:
        file_views.file_samples(
            ref, base, TokenOptions(""), 64, RecordRange(0, 10), Places(tmp_path)
        )
    assert caught.value.code == code
    assert is_lost(caught.value) is (kind is ExaminerLost)


def test_a_process_that_ends_by_itself_is_not_said_to_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        file_views,
        "Examiner",
        partial(Examiner, command=(sys.executable, "-c", "raise SystemExit(3)")),
    )
    with pytest.raises(ExaminerLost), examining() as examiner:
        raise ExaminerLost(str(examiner.pid))
