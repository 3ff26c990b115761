"""Traces of requests and of jobs, sent by OpenTelemetry (extra `otel`) if its own environment
variables switch it on.

A job's trace begins with the request that created it, whose W3C traceparent is stored with the job.
Workers know nothing of it, and need neither the package nor the network: the reconciler makes the
spans of attempts and steps from what the ranks report in the run directory. So a trace costs a step
nothing, and pods that reach nothing but their volume are in it.

    POST /v1/fine_tuning/jobs        the request
      job ftjob-…                    from its creation to its end
        check files                  until it is queued
        queue                        until it holds slots
        attempt 1                    while it holds them: supervisor and ranks, from their start to
                                     their end
          launch                     until the ranks report: processes, base, adapters
          steps 1 to 12                what one report of the ranks holds
          checkpoint step-12-a1
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ft_service.errors import SpecError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of which one switches traces on."""
_CLOSE_SECONDS = 3.0
_NAME = "ft-service"
_current: ContextVar[str | None] = ContextVar("traceparent", default=None)

Value = str | int | float | bool | None


def current_traceparent() -> str | None:
    """Return the traceparent of the request that is being answered; None: it is not traced."""
    return _current.get()


@dataclass(frozen=True, kw_only=True)
class Timespan:
    """A part of a job that is over. Times are seconds since the epoch."""

    key: str
    """Names it within the job, from which its id follows; "": the job itself."""
    parent: str | None
    """Key of the part that it belongs to; None: the request."""
    name: str = ""
    """Empty: the key."""
    began: float
    ended: float
    failed: str | None = None
    """What went wrong."""
    attributes: Mapping[str, Value] = field(default_factory=dict)


class RequestSpan:
    """The span of a request, which is sent when it was told how the request ended."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, route: str, status: int, job_id: str | None) -> None:
        """`route`: its template. `job_id`: None: it is about no job."""
        if job_id:
            self._span.set_attribute("ft.job.id", job_id)
        self._span.update_name(f"{self._span.attributes['http.request.method']} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            self._set_failed()
        self._span.end()

    def _set_failed(self) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR)


class Traces:
    """Sends spans in the background.

    Safe to share between threads. Made in `main`, and closed there.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        """`exporter`: where spans go.

        What else OTEL_… variables say (resource, sampler, batches) is read by the SDK.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME", _NAME)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name}), shutdown_on_exit=False
        )
        self._batches = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(self._batches)
        self._tracer = self._provider.get_tracer(_NAME)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Traces | None:
        """Return what the environment switches on; None: nothing.

        Raises SpecError if the extra `otel` is not installed.
        """
        named = next((name for name in ENDPOINTS if environment.get(name)), None)
        if named is None or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            message = (
                f"{named} needs packages that are not installed: pip install "
                "'ft-service[otel]', or unset it."
            )
            raise SpecError(message, param=named, code="missing_package") from None
        return cls(OTLPSpanExporter())

    def close(self) -> None:
        """Send what waits, for a few seconds: a collector that does not answer must not keep the
        service from ending.
        """
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(_CLOSE_SECONDS)

    @contextlib.contextmanager
    def request(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> Iterator[RequestSpan]:
        """Trace a request while it is answered, as part of its client's trace if it names one."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        sent = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name.startswith(b"trace")
        }
        span = self._tracer.start_span(
            method,
            propagator.extract(sent),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": method},
        )
        carrier: dict[str, str] = {}
        propagator.inject(carrier, trace.set_span_in_context(span))
        before = _current.set(carrier.get("traceparent"))
        try:
            yield RequestSpan(span)
        finally:
            _current.reset(before)

    def job_parts(self, job_id: str, traceparent: str | None, parts: Iterable[Timespan]) -> None:
        """Send parts of a job that are over.

        Nothing is sent of a job whose request was not traced, or not sampled.
        """
        from opentelemetry import trace
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        from opentelemetry.trace.status import Status, StatusCode

        context = TraceContextTextMapPropagator().extract({"traceparent": traceparent or ""})
        request = trace.get_current_span(context).get_span_context()
        if not request.is_valid or not request.trace_flags.sampled:
            return

        def context_of(key: str) -> trace.SpanContext:
            # Not random: another process may send the parent, hours later.
            number = int.from_bytes(hashlib.sha256(f"{job_id}/{key}".encode()).digest()[:8], "big")
            return trace.SpanContext(
                request.trace_id, number or 1, is_remote=False, trace_flags=request.trace_flags
            )

        for part in parts:
            span = ReadableSpan(
                part.name or part.key,
                context_of(part.key),
                request if part.parent is None else context_of(part.parent),
                self._provider.resource,
                {name: value for name, value in part.attributes.items() if value is not None}
                | {"ft.job.id": job_id},
                status=Status(StatusCode.ERROR, part.failed) if part.failed else Status(),
                start_time=int(part.began * 1e9),
                end_time=int(max(part.began, part.ended) * 1e9),
                instrumentation_scope=InstrumentationScope(_NAME),
            )
            self._batches.on_end(span)
