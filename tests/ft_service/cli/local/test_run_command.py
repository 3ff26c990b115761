from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ft_service.cli.local import run_command
from ft_service.control.tracking import integration_check
from ft_service.errors import ConflictError
from ft_service.rundir.attempt_outcome import exit_of
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import ErrorInfo, Exit, ExitReason
from ft_service.rundir.events import Event, Metrics
from ft_service.spec import JobSpec
from tests.support.bases import save_base
from tests.support.command_line import Ft
from tests.support.run_directories import CHAT

Trainer = Callable[[JobSpec, Path, Callable[[Event], None]], Exit]


pytestmark = pytest.mark.usefixtures("no_tokens")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_base(tmp_path / "models/tiny")
    monkeypatch.setenv("FT_MODELS", str(tmp_path / "models"))
    (tmp_path / "train.jsonl").write_text(CHAT)
    path = tmp_path / "job.yaml"
    path.write_text("model: tiny\ntraining_file: train.jsonl\n")
    return path


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trainer], None]:
    """Put something else in the place of the training processes; it finds spec.json written, as
    they do.
    """

    def replace(trainer: Trainer) -> None:
        def run_local(
            spec: JobSpec, run_dir: Path, on_event: Callable[[Event], None], **_: Any
        ) -> Exit:
            RunDir(run_dir).write_if_absent("spec.json", spec)
            return trainer(spec, run_dir, on_event)

        monkeypatch.setattr(run_command, "run_local", run_local)

    return replace


def succeed(spec: JobSpec, run_dir: Path, on_event: Callable[[Event], None]) -> Exit:
    on_event(Event(time=0.0, message="Training starts."))
    for step in (1, 2):
        on_event(
            Event(
                time=0.0,
                kind="metrics",
                message="",
                metrics=Metrics(step=step, total_steps=2, train_loss=1.0 / step),
            )
        )
    return exit_of(ExitReason.SUCCEEDED, "Done.")


def test_integrations_need_a_server(ft: Ft, spec: Path, train: Any) -> None:
    train(succeed)
    spec.write_text(spec.read_text() + "integrations: [{type: wandb, wandb: {project: p}}]\n")
    ended = ft("run", spec)
    assert ended.code == 64
    assert (
        "integrations: metrics are sent by a server only. Submit the job to one (ft submit)"
        in ended.err
    )
    assert ft("plan", spec, "--hardware", "cpu").code == 0, "planning sends nothing"


def test_event_files_that_nothing_can_write_are_refused_by_name(
    ft: Ft, spec: Path, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(succeed)
    spec.write_text(spec.read_text() + "integrations: [{type: tensorboard}]\n")
    monkeypatch.setattr(integration_check, "find_spec", lambda name: None)
    ended = ft("run", spec)
    assert ended.code == 64
    assert "integrations: type tensorboard needs the package tensorboardX" in ended.err
    assert "pip install tensorboardX" in ended.err


def test_a_run_shows_its_progress_and_where_the_adapter_is(
    ft: Ft, spec: Path, train: Any, tmp_path: Path
) -> None:
    train(succeed)
    ended = ft("run", spec, "--run-dir", tmp_path / "run")
    assert (ended.code, ended.err) == (0, "")
    shown = [line[10:] for line in ended.out.splitlines()]
    assert shown.index("starting") == 0 < shown.index("running")
    assert shown[1].startswith("Plan: at most ")
    assert shown[2].startswith("train.jsonl: 1 sample of 7 tokens, ")
    assert any(line.endswith(" of all tokens are learned, in 3 steps.") for line in shown)
    warning = "warn: train.jsonl: only 1 sample to train on. Give at least 10, better hundreds."
    assert shown.index(warning) < shown.index("running")
    assert {"Training starts.", "step 1/2 · loss 1.000", "step 2/2 · loss 0.500"} <= set(shown)
    assert ended.out.splitlines()[-1] == f"The adapter is in {tmp_path / 'run/adapter'}"


def test_a_time_limit_stops_a_run_at_a_checkpoint(
    ft: Ft, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_local(*_: Any, stop: threading.Event, **__: Any) -> Exit:
        assert stop.wait(30)
        return exit_of(ExitReason.STOPPED, "Stopped.")

    monkeypatch.setattr(run_command, "run_local", run_local)
    spec.write_text(f"{spec.read_text()}max_seconds: 1\n")
    assert ft("run", spec).code == 75


def test_a_run_shows_how_far_a_large_file_was_read(
    ft: Ft, spec: Path, train: Any, tmp_path: Path
) -> None:
    train(succeed)
    (tmp_path / "large.jsonl").write_text(CHAT)
    spec.write_text(f"{spec.read_text()}validation_file: large.jsonl\n")
    ended = ft("run", spec, "--run-dir", tmp_path / "run")
    assert "Validating validation file: 7 lines (50 %)." in ended.out
    assert "Validating training file" not in ended.out


def test_without_a_run_dir_it_is_a_new_one_in_ft_home(
    ft: Ft, home: Path, spec: Path, train: Any
) -> None:
    train(succeed)
    folders = {json.loads(ft("run", spec, "--json").out)["run_dir"] for _ in range(2)}
    assert len(folders) == 2
    assert {Path(folder).parent for folder in folders} == {home / "runs"}


def test_a_folder_with_checkpoints_of_others_is_refused(
    ft: Ft, spec: Path, train: Any, tmp_path: Path
) -> None:
    """The worker removes what it finds in `checkpoints` and does not keep."""
    train(succeed)
    (tmp_path / "mine" / "checkpoints" / "best").mkdir(parents=True)
    ended = ft("run", spec, "--run-dir", tmp_path / "mine")
    assert ended.code == 64
    assert "holds checkpoints, and no run that wrote them" in ended.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["checkpoints"]


def test_running_again_keeps_the_id_and_the_drawn_seed(
    ft: Ft, spec: Path, train: Any, tmp_path: Path
) -> None:
    seen: list[JobSpec] = []

    def remember(spec: JobSpec, run_dir: Path, on_event: Callable[[Event], None]) -> Exit:
        seen.append(spec)
        return exit_of(ExitReason.STOPPED, "Stopped.")

    train(remember)
    ended = ft("run", spec, "--run-dir", tmp_path / "run")
    ft("run", spec, "--run-dir", tmp_path / "run")
    changed = ft(
        "run",
        spec,
        "--set",
        "lora.target_modules=.*q_proj",
        "--suffix",
        "b",
        "--run-dir",
        tmp_path / "other",
    )
    options = "--set 'lora.target_modules=.*q_proj' --suffix b"
    assert changed.err.endswith(
        f"To continue: ft run {spec} {options} --run-dir {tmp_path / 'other'}\n"
    )
    assert ended.code == 75
    assert (
        ended.err
        == f"Stopped at a checkpoint. To continue: ft run {spec} --run-dir {tmp_path / 'run'}\n"
    )
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("reason", "code"), [("permanent_error", 64), ("worker_error", 1), ("cancelled", 1)]
)
def test_a_failure_is_told_with_the_exit_code_of_the_attempt(
    ft: Ft, spec: Path, train: Any, reason: Any, code: int
) -> None:
    error = ErrorInfo(
        code="x", message="precision.overrides: 'q' matches no module.\nMore.", traceback="long"
    )
    train(lambda *_: exit_of(reason, "It ended.", error))
    ended = ft("run", spec)
    assert ended.code == exit_of(reason, "It ended.", error).code == code
    assert ended.err.startswith(
        "ft: precision.overrides: 'q' matches no module.\n  More.\n  The logs are in "
    )


def test_a_killed_run_says_how_it_goes_on(ft: Ft, spec: Path, train: Any, tmp_path: Path) -> None:
    train(lambda *_: exit_of(ExitReason.WORKER_KILLED, "torchrun was killed by SIGKILL."))
    ended = ft("run", spec, "--run-dir", tmp_path / "run")
    assert ended.code == 1
    assert ended.err.endswith(
        f"  To continue from its last checkpoint: ft run {spec} --run-dir {tmp_path / 'run'}\n"
    )


def test_a_directory_in_use_is_one_line(ft: Ft, spec: Path, train: Any) -> None:
    def refuse(*_: object) -> Exit:
        raise ConflictError("Attempt 1 is running in /run: wait for its end, or stop it.")

    train(refuse)
    ended = ft("run", spec)
    assert (ended.code, ended.err) == (
        1,
        "ft: Attempt 1 is running in /run: wait for its end, or stop it.\n",
    )


def test_bad_data_is_found_before_anything_runs(ft: Ft, spec: Path, train: Any, home: Path) -> None:
    (spec.parent / "train.jsonl").write_text(CHAT + "nonsense\n")
    train(succeed)
    ended = ft("run", spec)
    assert ended.code == 64
    assert "line 2" in ended.err
    assert not (home / "runs").exists()


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda base: save_base(base, vocab_size=1000),
            "token ids up to 1023, the embedding model.embed_tokens.weight has 1000",
        ),
        (
            lambda base: (base / "model.safetensors").write_bytes(bytes(64)),
            "it does not begin with a safetensors header",
        ),
    ],
)
def test_a_base_that_can_never_work_is_refused_before_anything_starts(
    ft: Ft, spec: Path, train: Any, command: str, damage: Callable[[Path], Any], said: str
) -> None:
    train(lambda *_: pytest.fail("a process would have been started"))
    damage(spec.parent / "models/tiny")
    ended = ft(command, spec)
    assert ended.code == 64
    assert said in ended.err


def test_without_pytorch_a_run_names_the_package_to_install(
    ft: Ft, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_command, "torch_build", lambda: None)
    ended = ft("run", spec)
    assert ended.code != 0
    assert "pip install 'ft-service[workers]'" in ended.err
