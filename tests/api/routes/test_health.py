"""Health needs no key."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft_service.errors import UnavailableError
from ft_service.meters import STALLED_SECONDS, Meters
from tests.support.rest.refusals import check_error
from tests.support.rest.service import Service


def test_health_needs_no_key_and_readiness_asks_the_database(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_server_whose_reconciler_hangs_is_not_ready(service: Service) -> None:
    now = 0.0
    meters = Meters(lambda: now)
    service.app.state.services = replace(service.app.state.services, meters=meters)
    now = STALLED_SECONDS
    assert service.http("GET", "/readyz").status_code == 200, "this process moves no jobs"
    meters.turn("this host")
    now = 2 * STALLED_SECONDS
    assert check_error(service.http("GET", "/readyz"), 503)["code"] == "reconciler_stalled"
    meters.turn("this host")
    assert service.http("GET", "/readyz").status_code == 200
