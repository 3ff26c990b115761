"""Health needs no key."""

from __future__ import annotations

import pytest

from ft_service.errors import UnavailableError
from tests.support.rest.refusals import check_error
from tests.support.rest.service import Service


def test_health_needs_no_key_and_readiness_asks_the_database(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    assert service.http("GET", "/livez", headers={"authorization": ""}).json() == {"status": "ok"}
    assert service.http("GET", "/readyz").status_code == 200
    for path in ("/livez", "/readyz"):
        assert service.http("HEAD", path).status_code == 200, "as monitors ask"

    def away() -> None:
        raise UnavailableError("The database is away.")

    monkeypatch.setattr(service.store, "check", away)
    check_error(service.http("GET", "/readyz"), 503)
    assert service.http("HEAD", "/readyz").status_code == 503
    assert service.http("GET", "/livez").status_code == 200
