from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page.pictures import parse


def test_a_folder_is_not_taken_for_a_view(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["out", "--only", "jobs", "job"])
    assert (options.folder, options.only) == (Path("out"), ["jobs", "job"])
    with pytest.raises(SystemExit):
        parse(["--only", "jobs", "out"])
    assert "--only out: give names of views after FOLDER." in capsys.readouterr().err
