"""The preview's own process behind the server of the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ft_service.serving.preview import Preview
from tests.support.rest.service import Service


@pytest.fixture
def preview(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Preview]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    preview = Preview(service.settings, service.store)
    stop = threading.Event()
    thread = threading.Thread(target=preview.run, args=(stop,))
    thread.start()
    service.app.state.services = replace(service.app.state.services, preview=preview)
    yield preview
    service.app.state.services = replace(service.app.state.services, preview=None)
    stop.set()
    thread.join()
