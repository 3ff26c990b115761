"""`model: ft:…` for jobs without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.errors import NotFoundError, SpecError
from ft_service.rundir.directory import RunDir
from ft_service.serving import worker_tasks
from ft_service.settings import Settings
from ft_service.spec import JobSpec
from ft_service.spec_files.parent import find_local, prepare_local
from ft_service.spec_files.spec_file import load_spec_file, resolve_spec_file
from tests.support.run_directories import CHAT, finished_run

NAME = "ft:tiny:local::1"


@pytest.fixture
def home(tmp_path: Path) -> Settings:
    """FT_HOME with one finished job in it."""
    settings = Settings(home=tmp_path, models=[tmp_path / "models"])
    settings.runs_dir.mkdir()
    finished_run(tmp_path).root.rename(settings.runs_dir / "ftjob-1")
    return settings


def resolved(settings: Settings, text: str) -> JobSpec:
    (settings.home / "train.jsonl").write_text(CHAT)
    (settings.home / "job.yaml").write_text(text + "training_file: train.jsonl\n")
    return resolve_spec_file(
        load_spec_file(settings.home / "job.yaml"), settings, job_id="ftjob-2", seed=1
    )


def test_a_spec_goes_on_from_an_outcome_with_its_base_shape_and_precision(home: Settings) -> None:
    spec = resolved(home, f"model: {NAME}\n")
    assert spec.parent is not None
    assert (spec.parent.job_id, spec.parent.path) == (
        "ftjob-1",
        str(home.runs_dir / "ftjob-1/adapter"),
    )
    assert (spec.model.name, spec.model.path) == ("tiny", str(home.home / "base"))
    assert (spec.lora.r, spec.precision.default) == (4, "nf4")
    assert spec.tuned_name == "ft:tiny:local::2"
    with pytest.raises(SpecError, match=r"lora\.r = 8: ft:tiny.* has 4"):
        resolved(home, f"model: {NAME}\nlora: {{r: 8}}\n")


def test_an_adapter_of_a_checkpoint_is_made_when_the_job_starts(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, parent = find_local(f"{NAME}:ckpt-step-3", home)
    assert parent.path == str(home.runs_dir / "ftjob-1/adapters/step-3-a1")
    made: list[list[str]] = []

    def make(module: str, arguments: list[str]) -> None:
        made.append(arguments)
        RunDir(Path(arguments[2])).put("adapter_config.json", b"{}")

    monkeypatch.setattr(worker_tasks, "run_worker", make)
    prepare_local(parent)
    prepare_local(parent)
    assert made == [[str(home.runs_dir / "ftjob-1"), "step-3-a1", parent.path]]


def test_an_adapter_that_cannot_be_made_is_the_models_fault(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(module: str, arguments: list[str]) -> None:
        raise NotFoundError("Checkpoint step-3-a1 is damaged.")

    monkeypatch.setattr(worker_tasks, "run_worker", fail)
    with pytest.raises(SpecError, match=r"ckpt-step-3': Checkpoint step-3-a1 is damaged") as caught:
        prepare_local(find_local(f"{NAME}:ckpt-step-3", home)[1])
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ft:tiny:local::2", r"no job in .*/runs has trained it\. `ft submit`"),
        ("ft:tiny:other::1", "has trained it"),
        ("ft:tiny:local::../../base", "has trained it"),
        ("ft:", "has trained it"),
        (
            f"{NAME}:ckpt-step-4",
            "no complete checkpoint of step 4. There are checkpoints of steps: 3",
        ),
        (f"{NAME}:ckpt-step-x", "'x' is no step"),
    ],
)
def test_what_is_not_there_is_refused_with_what_to_do(home: Settings, name: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        find_local(name, home)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_a_job_without_an_outcome_has_checkpoints(home: Settings) -> None:
    (home.runs_dir / "ftjob-1/adapter").rename(home.home / "away")
    with pytest.raises(SpecError, match=r"left no adapter in .*Name one of its checkpoints"):
        find_local(NAME, home)


def test_a_spec_goes_on_from_a_job_by_any_word_that_names_it(home: Settings) -> None:
    for word in ("last", "ftjob-1", "'1'"):
        parent = resolved(home, f"model: {word}\n").parent
        assert parent is not None
        assert parent.name == NAME
    with pytest.raises(SpecError, match="there is no such base model"):
        resolved(home, "model: gone\n")
    (home.runs_dir / "ftjob-1").rename(home.runs_dir / "ftjob-12")
    finished_run(home.home / "again").root.rename(home.runs_dir / "ftjob-13")
    spec = (home.runs_dir / "ftjob-12/spec.json").read_text()
    named = spec.replace('"job_id":"ftjob-1"', '"job_id":"ftjob-12"').replace(
        "ft:tiny:local::1", "ft:tiny:local:mine:12"
    )
    (home.runs_dir / "ftjob-12/spec.json").write_text(named)
    again = spec.replace('"job_id":"ftjob-1"', '"job_id":"ftjob-13"').replace(
        "ft:tiny:local::1", "ft:tiny:local::13"
    )
    (home.runs_dir / "ftjob-13/spec.json").write_text(again)
    parent = resolved(home, "model: mine\n").parent
    assert parent is not None
    assert parent.name == "ft:tiny:local:mine:12"
    with pytest.raises(SpecError, match=r"'ftjob-1' matches 2 jobs: give more of the id\."):
        resolved(home, "model: ftjob-1\n")
