from __future__ import annotations

from pathlib import Path

import pytest

from ft_service import offline
from ft_service.errors import FtError, NotFoundError
from ft_service.offline import checkpoint_adapter, run_worker
from tests.run_directories import finished_run


def test_a_worker_that_cannot_start_says_what_to_install() -> None:
    with pytest.raises(FtError, match=r"workers\.absent has failed: .*No module named workers\.absent"):
        run_worker("workers.absent", [])


def test_what_a_worker_reports_as_the_users_mistake_is_raised_as_that(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    with pytest.raises(NotFoundError, match="no complete checkpoint 'step-9-a1'") as caught:
        run_worker("workers.consolidate", [str(run.root), "step-9-a1", str(tmp_path / "out")])
    assert (caught.value.code, caught.value.param) == ("no_checkpoint", "checkpoint")


def test_an_adapter_is_made_once_and_outlives_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = finished_run(tmp_path), []

    def make(module: str, arguments: list[str]) -> dict[str, object]:
        calls.append((module, arguments[1]))
        Path(arguments[2]).mkdir(parents=True)
        Path(arguments[2], "adapter_config.json").touch()
        return {}

    monkeypatch.setattr(offline, "run_worker", make)
    folder = checkpoint_adapter(run.root, 3)
    run.path("checkpoints/step-3-a1/COMPLETE").unlink()
    assert checkpoint_adapter(run.root, 3) == checkpoint_adapter(run.root, "step-3-a1") == folder
    assert folder == run.path("adapters/step-3-a1")
    assert calls == [("workers.consolidate", "step-3-a1")]


@pytest.mark.parametrize("checkpoint", [4, "../../etc", "step-3-a1/.."])
def test_a_checkpoint_that_does_not_exist(tmp_path: Path, checkpoint: str | int) -> None:
    with pytest.raises(NotFoundError) as caught:
        checkpoint_adapter(finished_run(tmp_path).root, checkpoint)
    assert caught.value.code == "no_checkpoint"
