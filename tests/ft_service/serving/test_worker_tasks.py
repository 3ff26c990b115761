from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from ft_service.errors import NotFoundError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import CheckpointMarker
from ft_service.rundir.file_digest import NamedFile
from ft_service.rundir.verified_files import adapter_faults
from ft_service.serving import worker_tasks
from ft_service.serving.worker_tasks import WorkersMissingError, make_checkpoint_adapter, run_worker
from tests.support.run_directories import finished_run, flip_a_bit


def test_a_worker_that_cannot_start_says_what_to_install() -> None:
    with pytest.raises(
        WorkersMissingError,
        match=r"workers\.absent ended with code 1.*No module named workers\.absent",
    ):
        run_worker("workers.absent", [])


def test_what_a_worker_reports_as_the_users_mistake_is_raised_as_that(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    with pytest.raises(NotFoundError, match="no complete checkpoint 'step-9-a1'") as caught:
        run_worker("workers.tasks.consolidate", [str(run.root), "step-9-a1", str(tmp_path / "out")])
    assert (caught.value.code, caught.value.param) == ("no_checkpoint", "checkpoint")


def test_an_adapter_is_made_once_and_outlives_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run(tmp_path)
    calls = []

    def make(module: str, arguments: list[str]) -> dict[str, object]:
        calls.append((module, arguments[1]))
        Path(arguments[2]).mkdir(parents=True)
        Path(arguments[2], "adapter_config.json").touch()
        return {}

    monkeypatch.setattr(worker_tasks, "run_worker", make)
    folder = make_checkpoint_adapter(run.root, 3)
    run.path("checkpoints/step-3-a1/COMPLETE").unlink()
    assert (
        make_checkpoint_adapter(run.root, 3)
        == make_checkpoint_adapter(run.root, "step-3-a1")
        == folder
    )
    assert folder == run.path("adapters/step-3-a1")
    assert calls == [("workers.tasks.consolidate", "step-3-a1")]


@pytest.mark.parametrize("checkpoint", [4, "../../etc", "step-3-a1/.."])
def test_a_checkpoint_that_does_not_exist(tmp_path: Path, checkpoint: str | int) -> None:
    with pytest.raises(NotFoundError) as caught:
        make_checkpoint_adapter(finished_run(tmp_path).root, checkpoint)
    assert caught.value.code == "no_checkpoint"


def torchless(module: str, arguments: list[str]) -> None:
    raise WorkersMissingError("No module named 'torch'")


def exported(tmp_path: Path) -> RunDir:
    """A run whose checkpoint holds its adapter."""
    run = finished_run(tmp_path)
    run.put("checkpoints/step-3-a1/adapter/adapter_config.json", b"{}")
    marker = run.read("checkpoints/step-3-a1/COMPLETE", CheckpointMarker)
    assert marker is not None
    file = NamedFile(
        name="adapter/adapter_config.json", bytes=2, sha256=hashlib.sha256(b"{}").hexdigest()
    )
    run.write(
        "checkpoints/step-3-a1/COMPLETE", marker.model_copy(update={"files": [*marker.files, file]})
    )
    return run


def test_an_adapter_that_the_checkpoint_holds_is_taken_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = exported(tmp_path)
    monkeypatch.setattr(worker_tasks, "run_worker", torchless)
    folder = make_checkpoint_adapter(run.root, 3)
    assert folder == run.path("adapters/step-3-a1")
    assert [path.name for path in folder.iterdir()] == ["adapter_config.json"]


def test_an_adapter_that_is_damaged_is_not_given_out(tmp_path: Path) -> None:
    run = exported(tmp_path)
    run.put("checkpoints/step-3-a1/adapter/adapter_config.json", b"[]")
    with pytest.raises(NotFoundError, match=r"adapter_config\.json has other contents") as caught:
        make_checkpoint_adapter(run.root, 3)
    assert caught.value.code == "checkpoint_damaged"
    assert not run.path("adapters/step-3-a1").exists()


def test_without_torch_and_without_an_adapter_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_tasks, "run_worker", torchless)
    with pytest.raises(NotFoundError, match="FT_CHECKPOINT_ADAPTERS") as caught:
        make_checkpoint_adapter(finished_run(tmp_path).root, 3)
    assert caught.value.code == "no_adapter"


def test_a_damaged_adapter_of_a_checkpoint_is_made_anew_while_the_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run(tmp_path)

    def make(module: str, arguments: list[str]) -> dict[str, object]:
        shutil.copytree(run.path("adapter"), arguments[2])
        return {}

    monkeypatch.setattr(worker_tasks, "run_worker", make)
    folder = make_checkpoint_adapter(run.root, 3)
    flip_a_bit(folder / "adapter_model.safetensors")
    assert adapter_faults(make_checkpoint_adapter(run.root, 3)) == []
    run.path("checkpoints/step-3-a1/COMPLETE").unlink()
    flip_a_bit(folder / "adapter_model.safetensors")
    assert adapter_faults(make_checkpoint_adapter(run.root, 3)), (
        "it is all that there is; who gives it away says so"
    )
