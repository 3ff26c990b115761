"""Values of "auto": plan, job and ranks say the same, and the job keeps what was used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_service.control.admission.job_admission import LateAdmission
from ft_service.control.jobs.reconciler import Reconciler, ReconcilerOptions
from ft_service.rundir.directory import RunDir
from ft_service.rundir.events import Event, SettledOption, write_segment
from ft_service.spec import JobSpec
from ft_service.storage.locations import Places
from tests.support.describing import at_once
from tests.support.fake_launcher import FakeLauncher
from tests.support.rest.service import LINE, Service, run_dir, wait_until

BUDGET = "training.tokens_per_micro_batch"


def told(client: openai.OpenAI, job_id: str) -> list[str]:
    return [event.message for event in client.fine_tuning.jobs.list_events(job_id).data][::-1]


def test_plan_job_and_ranks_agree_and_what_was_used_is_kept(
    service: Service,
    client: openai.OpenAI,
    ft: Callable[..., str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "data.jsonl").write_text(LINE * 12)
    spec = tmp_path / "job.yaml"
    spec.write_text("model: tiny\ntraining_file: data.jsonl\n")
    monkeypatch.setenv("FT_HOME", str(tmp_path))
    monkeypatch.setenv("FT_MODELS", str(tmp_path / "models"))
    planned = ft("plan", str(spec), "--json")
    plan = json.loads(planned[planned.index("{") : planned.rindex("}") + 1])
    [sentence] = [sentence for sentence in plan["chosen"] if sentence.startswith(BUDGET)]
    number = int(sentence.split(": ")[1].split()[0])

    ft("submit", str(spec))
    job_id = client.fine_tuning.jobs.list().data[0].id
    assert not any(BUDGET in message for message in told(client, job_id)), (
        "before it is counted it is not told"
    )
    launcher = FakeLauncher(4)
    admission = LateAdmission(service.store, service.settings, at_once())
    reconciler = Reconciler(
        service.store,
        launcher,
        Places.of(service.settings),
        ReconcilerOptions(admission=admission, idle_seconds=0.0),
    )
    request.addfinalizer(reconciler.close)
    wait_until(
        lambda: (
            reconciler.step()
            and client.fine_tuning.jobs.retrieve(job_id).status != "validating_files"
        )
    )
    [chosen] = [message for message in told(client, job_id) if BUDGET in message]
    assert sentence in chosen, "the very sentence of the plan"
    shown: Any = client.fine_tuning.jobs.retrieve(job_id)
    assert shown.training["tokens_per_micro_batch"] == number
    assert shown.chosen[BUDGET] in sentence
    planned_now = service.http("GET", f"/v1/fine_tuning/jobs/{job_id}/plan").json()
    assert sentence in planned_now["chosen"]

    wait_until(lambda: reconciler.step() and bool(launcher.started))
    run = RunDir(run_dir(service, job_id).root)
    begun = run.read("spec.json", JobSpec)
    assert begun is not None
    assert begun.training.tokens_per_micro_batch == number, "ranks begin with it"
    used = {
        BUDGET: SettledOption(value=2 * number, why="another GPU"),
        "precision.default": SettledOption(value="nf4", why="no"),
        "seed.all": SettledOption(value=1, why="no such option"),
    }
    write_segment(run, 1, 0, [Event(time=1.0, message="Training starts.", settled=used)])
    wait_until(lambda: reconciler.step() and "Training starts." in told(client, job_id))
    shown = client.fine_tuning.jobs.retrieve(job_id)
    assert (shown.training["tokens_per_micro_batch"], shown.chosen[BUDGET]) == (
        2 * number,
        "another GPU",
    )
    assert shown.precision["default"] == "bf16", "results depend on it: no rank changes it"
    write_segment(
        run,
        1,
        1,
        [Event(time=1.0, message="odd", settled={BUDGET: SettledOption(value="x", why="")})],
    )
    wait_until(lambda: reconciler.step() and "odd" in told(client, job_id))
    shown = client.fine_tuning.jobs.retrieve(job_id)
    assert shown.training["tokens_per_micro_batch"] == 2 * number, (
        "what no option can be is left out"
    )
    assert f"{2 * number} (another GPU)" in ft("get", job_id)
