"""A collector of traces on a port of this host: OTLP over HTTP, as OpenTelemetry's exporter sends
it.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    url: str = ""
    spans: list[Any] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def named(self, name: str) -> Any:
        """Return the one span of a name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def children(self, span: Any) -> list[Any]:
        return [
            one
            for one in self.spans
            if one.parent_span_id == span.span_id and one.trace_id == span.trace_id
        ]

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.services |= {
                one.value.string_value
                for one in resource.resource.attributes
                if one.key == "service.name"
            }
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


def attributes(span: Any) -> dict[str, Any]:
    """Return a span's attributes as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(
                gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
