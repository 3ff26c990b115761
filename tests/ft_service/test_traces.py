"""Traces: off unless the environment switches them on, and what is sent of a job."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ft_service.errors import SpecError
from ft_service.traces import Timespan, Traces, current_traceparent

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def part(key: str, parent: str | None, **more: Any) -> Timespan:
    return Timespan(
        **{"key": key, "parent": parent, "name": key or "job", "began": 1.0, "ended": 2.0, **more}
    )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_they_are_off_unless_switched_on(environment: dict[str, str]) -> None:
    assert Traces.from_environment(environment) is None


def test_nothing_of_it_is_imported_while_they_are_off() -> None:
    code = (
        "import sys; import ft_service.control.jobs.reconciler, ft_service.traces;"
        "assert ft_service.traces.Traces.from_environment({}) is None;"
        "found = [name for name in sys.modules if name.startswith('opentelemetry')];"
        # FastAPI imports OpenTelemetry's interface wherever it is installed
        "import api.app, api.server;"
        "print([*found, *(name for name in sys.modules if name.startswith(('opentelemetry.sdk', "
        "'opentelemetry.exporter')))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        SpecError,
        match=r"OTEL_EXPORTER_OTLP_ENDPOINT needs packages .* pip install 'ft-service\[otel\]'",
    ):
        Traces.from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})


def test_parts_find_their_parents_whoever_sends_them() -> None:
    sent = []
    for parts in (
        [part("attempt 1 step 1", "attempt 1")],
        [part("attempt 1", "", failed="lost"), part("", None)],
    ):
        exporter = InMemorySpanExporter()
        traces = Traces(exporter)  # as after a restart
        traces.job_parts("ftjob-a", SAMPLED, parts)
        traces.close()
        sent += exporter.get_finished_spans()
    step, attempt, job = sent
    assert step.parent.span_id == attempt.context.span_id
    assert attempt.parent.span_id == job.context.span_id
    assert f"{job.parent.span_id:016x}" == SAMPLED.split("-")[2]
    assert {span.context.trace_id for span in sent} == {int(SAMPLED.split("-")[1], 16)}
    assert (attempt.status.is_ok, attempt.status.description) == (False, "lost")


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        "",
        "nonsense",
        SAMPLED[:-1] + "0",
        SAMPLED.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
    ],
)
def test_nothing_is_sent_of_a_job_that_is_not_traced(traceparent: str | None) -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    traces.job_parts("ftjob-a", traceparent, [part("", None)])
    traces.close()
    assert exporter.get_finished_spans() == ()


def test_a_request_without_an_end_is_not_sent_and_one_that_failed_says_so() -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    with traces.request("GET", [(b"traceparent", SAMPLED.encode())]) as polled:
        assert current_traceparent() is not None
        assert current_traceparent().split("-")[1] == SAMPLED.split("-")[1]  # type: ignore[union-attr]
    assert current_traceparent() is None
    with traces.request("POST", [(b"traceparent", b"\xff")]) as failed:
        failed.end("/v1/files", 503, "ftjob-a")
    del polled
    traces.close()
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.status.is_ok) == ("POST /v1/files", False)
    assert dict(span.attributes or {})["ft.job.id"] == "ftjob-a"
