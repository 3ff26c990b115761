"""JSON bodies that cannot be read."""

from __future__ import annotations

import pytest

from tests.support.rest.refusals import UNREADABLE, check_error
from tests.support.rest.service import Service


def test_a_body_that_cannot_be_read_is_a_400(service: Service, subtests: pytest.Subtests) -> None:
    for body in UNREADABLE:
        with subtests.test(body=body[:40]):
            check_error(service.http("POST", "/v1/fine_tuning/jobs", content=body), 400)
    assert service.store.jobs.list_jobs("default").data == []
