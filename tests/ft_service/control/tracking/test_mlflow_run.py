"""Runs of MLflow by its real client, in a store on this disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
from ft_service.control.tracking.mlflow_run import MlflowAccount, MlflowRun
from ft_service.control.tracking.metric_points import RunDescription
from ft_service.control.tracking.metric_points import RunError
from mlflow.tracking import MlflowClient

store = "file://" + sys.argv[1]
account = MlflowAccount(store, "se-cret", 3600.0)
account.enter()
config = {"lora": {"r": 4}, "seed": 7, "precision": {"overrides": {"layers.[01]": "nf4"}}}
asked = dict(kind="mlflow", id="ftjob-1", project="tuning", entity=None, group="sweep-1")
run = MlflowRun(account, RunDescription(**asked, name="mine", tags=("a/b", "c=d"), config=config))
assert run.next_step == 0
for step in range(1, 1002):
    run.log(step, {"train_loss": 1 / step, "evaluation/exact_match": 0.5, "_timestamp": 1e9 + step})
run.confirm(1001)
run.rest()
client = MlflowClient(store)
experiment = client.get_experiment_by_name("tuning").experiment_id
seen = client.search_runs([experiment])[0]
assert seen.info.status == "SCHEDULED", seen.info
again = MlflowRun(account, RunDescription(**asked, name=None, tags=None, config=None))
assert (again.next_step, again.url) == (1002, run.url)
again.log(1002, {"train_loss": 0.0})
try:
    again.confirm(1003)
    raise SystemExit("there is no step 1003")
except RunError as error:
    assert "step 1003 has not arrived" in str(error)
again.finish(0)
(found,) = client.search_runs([experiment])
assert (found.info.status, found.info.run_name) == ("FINISHED", "mine")
params = {"lora.r": "4", "seed": "7", "precision.overrides": '{"layers.[01]": "nf4"}'}
assert found.data.params == params
assert [found.data.tags[name] for name in ("a/b", "c_d", "ft_service.sweep")] == ["", "", "sweep-1"]
begun = dict(asked, id="ftjob-2", name=None, tags=None)
MlflowRun(account, RunDescription(**begun, config=None))  # as if its process had ended here
MlflowRun(account, RunDescription(**begun, config=config))
(gone_on,) = client.search_runs([experiment], "tags.`ft_service.run` = 'ftjob-2'")
assert gone_on.data.params == params
history = client.get_metric_history(found.info.run_id, "train_loss")
assert [point.step for point in history] == list(range(1, 1003)), "each step once, in order"
assert history[0].timestamp == 1_000_000_001_000
class Refusing:
    def __getattr__(self, name):
        raise OSError("401 for se-cret")
again._client = Refusing()
try:
    again.finish(1)
    raise SystemExit("it was refused")
except RunError as error:
    assert "se-cret" not in str(error) and "401" in str(error), error
print("done")
"""


@pytest.mark.slow
def test_a_run_has_every_step_once_and_is_gone_on_with(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    command = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path / "runs")]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[4]),
    }
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
