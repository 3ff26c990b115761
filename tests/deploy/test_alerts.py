"""Alerts ring when they should, by Prometheus' own `promtool`, and each leads to what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_service.jobs.reasons import USERS
from tests.support.kustomize import KUBERNETES

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "alerts.yaml"


@pytest.fixture(scope="module")
def groups() -> list[dict[str, Any]]:
    path = KUBERNETES / "components/monitoring/rules.yaml"
    return yaml.safe_load(path.read_text())["spec"]["groups"]


@pytest.fixture(scope="module")
def alerts(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    rules = [rule for group in groups for rule in group["rules"]]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def test_each_rings_when_it_should_and_none_when_nothing_is_wrong(
    groups: list[dict[str, Any]], tmp_path: Path
) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (.ci/promtool)")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    shutil.copy(CASES, tmp_path)
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / CASES.name],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_is_tested(alerts: dict[str, dict[str, Any]]) -> None:
    text = CASES.read_text()
    assert [name for name in alerts if name not in text] == []


def test_each_leads_to_what_to_do(alerts: dict[str, dict[str, Any]]) -> None:
    runbook = (ROOT / "docs/runbook.md").read_text()
    headings = re.findall(r"^### (Ft\w+)$", runbook, re.MULTILINE)
    assert headings == list(alerts)
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_what_users_mend_wakes_nobody(alerts: dict[str, dict[str, Any]]) -> None:
    own = re.search(r'reason!~"([^"]+)"', alerts["FtJobsFail"]["expr"])
    users = re.search(r'reason=~"([^"]+)"', alerts["FtUsersJobsFail"]["expr"])
    assert own is not None
    assert users is not None
    assert own[1].split("|") == users[1].split("|")
    assert set(users[1].split("|")) == {reason.value for reason in USERS}
    assert alerts["FtUsersJobsFail"]["labels"]["severity"] == "info"
