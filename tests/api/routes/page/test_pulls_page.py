"""Fetching a base on the page: who is offered it, and what is told of each."""

from __future__ import annotations

import re
from typing import Any

import httpx2

from ft_service.store.records import NewKey
from tests.support.pulled import looked_up
from tests.support.rest.service import Service


def test_the_list_of_bases_offers_to_fetch_one_to_who_may(
    service: Service, browser: httpx2.Client
) -> None:
    page = browser.get("/models?show=bases").text
    assert 'hx-post="/models/pulls"' in page
    service.store.projects.ensure_project("team", "local")
    _, key = service.store.keys.create_key(NewKey(project_id="team", name="k", scope="admin"))
    with httpx2.Client(base_url=service.url, trust_env=False) as other:
        other.post("/sign-in", data={"key": key})
        assert "/models/pulls" not in other.get("/models?show=bases").text
        assert "whoever runs this service can fetch one" in other.get("/new").text
    assert "/models?show=bases#fetch" in browser.get("/new").text


def test_what_is_known_of_a_base_is_told_before_its_weights_come(
    service: Service, browser: httpx2.Client
) -> None:
    token = re.findall(r"x-csrf-token[^,}]*?([0-9a-f]{16,})", browser.get("/jobs").text)[0]
    sent: Any = {"headers": {"x-csrf-token": token}}
    refused = browser.post("/models/pulls", data={"model": "tiny"}, **sent)
    assert (refused.status_code, "names no model" in refused.text) == (400, True)
    waits = browser.post("/models/pulls", data={"model": " org/new "}, **sent).text
    [pull_id] = re.findall(r"stop-(pull-[A-Za-z0-9]+)", waits)
    assert "waits" in waits
    assert 'hx-get="/page/live/pulls' in waits, "it refreshes itself"
    looked_up(service.settings.models[0], pull_id)
    found = browser.get("/page/live/pulls").text
    assert "can be tuned" in found
    assert "licence: apache-2.0" in found
    assert "A job without options" in found, found
    assert 'hx-trigger="every 2s"' not in found
    assert "/page/live/bases" in found, "the bases are listed again"
    assert f'id="fetch-{pull_id}"' in found
    assert f"stop-{pull_id}" in browser.post(f"/models/pulls/{pull_id}/fetch", **sent).text
    stopped = browser.post(f"/models/pulls/{pull_id}/stop", **sent).text
    assert "Go on" in stopped
    assert pull_id not in browser.post(f"/models/pulls/{pull_id}/remove", **sent).text
