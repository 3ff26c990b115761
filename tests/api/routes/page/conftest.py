"""A browser that is signed in."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from tests.support.rest.service import Service


@pytest.fixture
def browser(service: Service) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=service.url, trust_env=False, timeout=60.0) as browser:
        browser.post("/sign-in", data={"key": service.key})
        yield browser
