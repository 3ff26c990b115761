from __future__ import annotations

import re

import httpx2
import openai
import pytest

from api.page.formatting import job_title
from tests.support.page.inner_requests import requests_of_page
from tests.support.rest.engines import seated_job
from tests.support.rest.service import Service


def test_the_page_says_who_shares_an_engine(
    service: Service,
    browser: httpx2.Client,
    client: openai.OpenAI,
    training_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "No engines" in browser.get("/engines").text
    created = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    stored_spec = service.store.jobs.get_job("default", created).stored_spec
    first = seated_job(service, "engine-0", slots=[0, 1], stored_spec=stored_spec)
    second = seated_job(service, "engine-0", slots=[], stored_spec=stored_spec)
    paths = requests_of_page(monkeypatch)
    listed = browser.get("/engines").text
    assert paths == ["/v1/engines", "/v1/fine_tuning/jobs"]
    assert "2 of at most 8" in listed
    for job_id in (first, second):
        called = job_title(browser.get(f"/v1/fine_tuning/jobs/{job_id}").json())
        assert re.findall(f'<a href="/jobs/{job_id}"[^>]*>([^<]+)<', listed) == [called]
    head = browser.get(f"/jobs/{first}").text
    assert "engine-0" in head
    assert f'beside <a href="/jobs/{second}"' in head
    service.store.jobs.call("default", second, {"name": "ends-now"})
    client.fine_tuning.jobs.cancel(second)
    assert "ends-now" in browser.get("/engines").text
