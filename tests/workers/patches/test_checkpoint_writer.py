"""DCP writes its files by the file system of its writer, and a full disk is an OSError with the
path.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from workers.patches import checkpoint_writer as patch
from workers.patches.checkpoint_writer import checkpoint_writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_shards_are_written_by_the_file_system_that_is_put_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    stock = patch._Files.create_stream

    def watched(self: Any, path: Any, mode: str) -> Any:
        written.append(Path(path).name)
        return stock(self, path, mode)

    monkeypatch.setattr(patch._Files, "create_stream", watched)
    save({"x": torch.arange(5)}, storage_writer=checkpoint_writer(tmp_path / "done"), no_dist=True)
    assert any(name.endswith(".distcp") for name in written)


def test_an_error_of_the_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what fails is the archive around it."""

    def full(*_: Any, **__: Any) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904 - as torch's archive does it

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointException) as failed:
        save(
            {"x": torch.arange(5)},
            storage_writer=checkpoint_writer(tmp_path / "done"),
            no_dist=True,
        )
    (error, _), *_ = failed.value.failures.values()
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert str(error.filename).endswith(".distcp")
