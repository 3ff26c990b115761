from __future__ import annotations

import json
from typing import Any

import pytest

from ft_service.cli.output import local_time
from ft_service.client.responses import RemoteJob
from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer, event_body, job_body


def test_jobs(ft: Ft, server: StubServer) -> None:
    assert ft("jobs").out == "No jobs yet. Create one: ft submit SPEC\n"
    server.jobs["ftjob-1"] = job_body()
    server.jobs["ftjob-2"] = job_body(
        "ftjob-2", "running", progress={"step": 4, "total_steps": 10, "train_loss": 1.5}
    )
    server.jobs["ftjob-3"] = job_body(
        "ftjob-3",
        "failed",
        suffix="mine",
        finished_at=1_700_000_065,
        error={"message": "Line 3 is no chat."},
    )
    server.jobs["ftjob-2"]["progress"]["valid_loss"] = 1.25
    title, newest, second, oldest = ft("jobs").out.splitlines()
    assert title.split() == ["ID", "SUFFIX", "BASE", "STATUS", "STEP", "VALID", "TOOK", "WHY"]
    assert newest.split() == [
        "ftjob-3",
        "mine",
        "tiny",
        "failed",
        "1:05",
        "Line",
        "3",
        "is",
        "no",
        "chat.",
    ]
    assert second.split()[:5] == ["ftjob-2", "tiny", "running", "4/10", "1.250"]
    assert oldest.split()[:3] == ["ftjob-1", "tiny", "queued"]
    assert [job["id"] for job in json.loads(ft("jobs", "--json", "--limit", "1").out)] == [
        "ftjob-3"
    ]


def test_jobs_are_asked_for_by_state_base_and_name(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body()
    assert "ftjob-1" in ft("jobs", "--state", "queued", "--base", "tiny", "--name", "mine").out
    asked = server.requests[-1].url.params
    assert {name: asked[name] for name in ("status", "base", "suffix")} == {
        "status": "queued",
        "base": "tiny",
        "suffix": "mine",
    }
    assert ft("jobs", "--state", "finished").code == 64


def test_get(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(
        status="failed", error={"code": "x", "message": "Line 3 is no chat.", "param": None}
    )
    shown = dict(line.split("  ", 1) for line in ft("get", "ftjob-1").out.splitlines())
    assert {name: value.strip() for name, value in shown.items()}["error"] == "Line 3 is no chat."
    assert json.loads(ft("get", "ftjob-1", "--json").out)["status"] == "failed"
    assert "pending reason" not in shown


def test_get_says_why_a_job_waits(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(
        status="queued", phase="waiting", pending_reason="no node has 8 GPUs"
    )
    shown = dict(line.split("  ", 1) for line in ft("get", "ftjob-1").out.splitlines())
    assert shown["status"].strip() == "queued: no node has 8 GPUs"


def test_get_says_what_was_chosen_and_why(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(
        training={"tokens_per_micro_batch": 8192},
        chosen={"training.tokens_per_micro_batch": "the longest sample"},
    )
    shown = dict(line.split("  ", 1) for line in ft("get", "ftjob-1").out.splitlines())
    assert shown["training.tokens_per_micro_batch"].strip() == "8192 (the longest sample)"


def test_the_engine_of_a_job_is_named(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(status="running", phase="training", engine_id="engine-1")
    assert ft("jobs").out.splitlines()[1].endswith("in engine-1")
    shown = dict(line.split("  ", 1) for line in ft("get", "ftjob-1").out.splitlines())
    assert shown["engine"].strip() == "engine-1"


def test_a_job_in_an_engine_says_since_when_with_which_share_and_beside_whom(
    ft: Ft, server: StubServer
) -> None:
    server.jobs["ftjob-1"] = job_body(status="running", phase="training", engine_id="engine-1")
    seats = [
        {"id": f"ftjob-{number}", "since": 1_700_000_000, "slot_seconds": 10.0 * number}
        for number in (1, 3)
    ]
    server.engines = [
        {"id": "engine-1", "created_at": 1_700_000_000, "ranks": 2, "most_jobs": 8, "jobs": seats}
    ]
    shown = dict(line.split("  ", 1) for line in ft("get", "ftjob-1").out.splitlines())
    assert (
        shown["engine"].strip()
        == f"engine-1 since {local_time(1_700_000_000)}, 25% of its time, beside ftjob-3"
    )


def test_an_unknown_job_is_one_line(ft: Ft, server: StubServer) -> None:
    ended = ft("get", "ftjob-9")
    assert (ended.code, ended.err) == (1, "ft: There are no jobs yet. Create one: ft submit SPEC\n")
    server.jobs["ftjob-1"] = job_body()
    assert "There is no job 'ftjob-9'. Give an id that `ft jobs` shows" in ft("get", "ftjob-9").err


TUNED = "ft:tiny:local:mine:1"


def test_events_and_checkpoints_are_listed(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body()
    assert ft("checkpoints", "last").out == "No checkpoints yet.\n"
    server.events = [event_body(number, f"event {number}") for number in range(4)] + [
        event_body(4, "careful", level="warn")
    ]
    assert [line[21:] for line in ft("events", "last", "-n", "2").out.splitlines()] == [
        "event 3",
        "warn: careful",
    ]
    point = {
        "fine_tuning_job_id": "ftjob-1",
        "created_at": 0,
        "metrics": {"train_loss": 1.5, "valid_loss": None},
    }
    server.checkpoints = [
        {
            **point,
            "id": f"ftckpt-{step}",
            "step_number": step,
            "fine_tuned_model_checkpoint": f"{TUNED}:ckpt-step-{step}",
        }
        for step in (20, 10)
    ]
    _, newest, _ = ft("checkpoints", "ftjob-1").out.splitlines()
    assert newest.split()[:2] == ["20", "1.500"]
    assert newest.split()[-1] == f"{TUNED}:ckpt-step-20"
    assert "at steps 10, 20" in ft("get", "last").out


def test_get_shows_the_method_its_own_options_and_the_seed(ft: Ft, server: StubServer) -> None:
    own = {"beta": 0.2, "loss_type": "ipo", "rpo_alpha": None, "batch_size": 4}
    server.jobs["ftjob-1"] = job_body(
        method={"type": "dpo", "dpo": {"hyperparameters": own}}, seed=7
    )
    shown = dict(line.split(maxsplit=1) for line in ft("get", "last").out.splitlines())
    assert shown["seed"] == "7"
    assert {name: value for name, value in shown.items() if name.startswith("method.")} == {
        "method.type": "dpo",
        "method.dpo.hyperparameters.beta": "0.2",
        "method.dpo.hyperparameters.loss_type": "ipo",
    }
    grader = {"type": "string_check", "name": "right"}
    server.jobs["ftjob-1"] = job_body(
        method={"type": "reinforcement", "reinforcement": {"grader": grader}}
    )
    assert "right (string_check)" in ft("get", "last").out
    server.jobs["ftjob-1"] = job_body(
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}}
    )
    assert "method." not in ft("get", "last").out


def test_get_shows_what_was_asked_for_and_not_every_default(ft: Ft, server: StubServer) -> None:
    server.jobs["ftjob-1"] = job_body(
        lora={"r": 8, "lora_dropout": 0.0}, training={"packing": False}, suffix="mine"
    )
    server.files = [{"id": "file-0", "filename": "train.jsonl", "bytes": 5}]
    shown = dict(line.split("  ", 1) for line in ft("get", "mine").out.splitlines())
    assert (shown["lora.r"].strip(), shown["training.packing"].strip()) == ("8", "false")
    assert "lora.lora_dropout" not in shown
    assert shown["training file"].strip() == "train.jsonl (file-0)"
    server.files = []
    assert "file-0 (removed)" in ft("get", "mine").out


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        (
            {"queue": {"position": 1, "reason": "It is next.", "estimated_start": None}},
            "number 1. It is next.",
        ),
        (
            {
                "queue": {
                    "position": 3,
                    "reason": "2 of this project.",
                    "estimated_start": 86_400 * 365,
                }
            },
            "number 3, starts about 197",
        ),
        ({"queue": {"position": 1}, "pending_reason": "It needs 9 slots."}, "It needs 9 slots."),
    ],
)
def test_a_queued_job_says_what_it_waits_for(
    ft: Ft, server: StubServer, queue: dict[str, Any], said: str
) -> None:
    server.jobs["ftjob-1"] = job_body(**queue)
    assert (RemoteJob.model_validate(server.jobs["ftjob-1"]).state_text or "").startswith(
        f"queued: {said}"
    )
    assert said in ft("jobs").out
    assert f"queued: {said}" in ft("get", "last").out


def test_a_terminal_shows_short_ids_and_the_reason_below(
    ft: Ft, server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = "ftjob-" + "abcdefgh" * 3
    server.jobs[whole] = job_body(
        whole, "failed", suffix="a-rather-long-suffix", error={"message": "The disk is full. " * 9}
    )
    monkeypatch.setattr("ft_service.cli.output.is_terminal", lambda: True)
    monkeypatch.setattr("ft_service.cli.jobs.list_commands.is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    _, row, reason = ft("jobs").out.splitlines()
    assert row.split()[0] == "abcdefgh"
    assert (len(reason), reason[:21], reason[-1]) == (80, "    The disk is full.", "…")
