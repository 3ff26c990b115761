"""The dashboard names metrics and labels that /metrics has, and all that it has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.meters import Meters
from tests.support.attempts import wait_for
from tests.support.rest.service import Service, put

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/ft-service.json"
_METRIC = re.compile(r"\b((?:ft|http_server)_\w+)")
_OF_PROMETHEUS = {"le", "job", "host", "instance"}
_UNITS = {"short", "s", "percentunit", "reqps", "bytes"}


def panels() -> list[dict[str, Any]]:
    return [
        panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"
    ]


def expressions() -> Iterator[str]:
    return (target["expr"] for panel in panels() for target in panel["targets"])


def with_requests(text: str) -> str | None:
    return text if "http_server_request_duration_seconds_count{" in text else None


def test_every_metric_and_label_is_there_and_none_is_left_out(
    service: Service, client: Any, training_file: str
) -> None:
    job = client.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    put(service, job.id, state=State.FAILED, reason=Reason.WORKER_ERROR, attempt=1, finished_at=1e9)
    meters: Meters = service.app.state.services.meters
    meters.attempts_ended.labels("succeeded").inc()
    meters.count_failure("default", "worker_error")
    # A request is counted once its answer has gone: its client may be first.
    text = wait_for(lambda: with_requests(service.http("GET", "/metrics").text))
    families = list(text_string_to_metric_families(text))
    names = {sample.name for family in families for sample in family.samples} | {
        family.name for family in families
    }
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    used = {
        name
        for text in expressions()
        for name in _METRIC.findall(re.sub(r"\{[^}]*\}|by \([^)]*\)", "", text))
    }
    assert used <= names
    shown = {re.sub(r"_(bucket|count|sum|total|created)$", "", name) for name in used}
    missing = {
        family.name for family in families if re.fullmatch(r"ft_\w+(?<!_created)", family.name)
    } - shown
    assert not missing, "metrics that no panel shows"
    grouped = {
        label.strip()
        for text in expressions()
        for group in re.findall(r"by \(([^)]*)\)", text)
        for label in group.split(",")
    }
    matched = {label for text in expressions() for label in re.findall(r"[{,](\w+)=", text)}
    assert grouped | matched <= labels | _OF_PROMETHEUS


def test_failed_jobs_of_all_reasons_are_counted_once() -> None:
    (failed,) = (text for text in expressions() if 'state="failed"' in text)
    assert failed.startswith("sum(max by (reason) (increase(ft_jobs_finished_total")


def test_panels_can_be_read() -> None:
    document = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"] in _UNITS
        assert all(
            target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"]
        )
        assert panel["datasource"]["uid"] == "${datasource}", (
            "whoever imports it chooses the data source"
        )
