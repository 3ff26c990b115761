"""Projects and their limits, and what needs an admin key."""

from __future__ import annotations

import re

import httpx2
import pytest

from api.http.sessions import token_of
from ft_service.store.records import NewKey, TenantLimits
from tests.support.page.sessions import new_browser, secret_of
from tests.support.rest.service import Service


@pytest.mark.parametrize("path", ["/usage", "/projects", "/keys", "/changes"])
def test_what_needs_an_admin_key_says_so(service: Service, path: str) -> None:
    _, key = service.store.keys.create_key(
        NewKey(project_id="default", name="somebody's", scope="submit")
    )
    with new_browser(service) as browser:
        browser.post("/sign-in", data={"key": key})
        answer = browser.get(path)
        assert answer.status_code == 403
        assert "needs an API key of scope admin" in answer.text
        assert f'href="{path}"' not in browser.get("/jobs").text


def test_limits_of_a_project_are_written_in_words_and_kept(
    service: Service, browser: httpx2.Client
) -> None:
    token = {"x-csrf-token": token_of(secret_of(browser)), "hx-request": "true"}
    made = browser.post("/projects", data={"name": "Team & <co>"}, headers=token).headers[
        "hx-redirect"
    ]
    form = {
        "max_slots": "4",
        "max_bytes": "1.5 GiB",
        "bases": "tiny, other",
        "max_priority": "-2",
        "name": "Team",
    }
    assert browser.post(f"{made}/limits", data=form, headers=token).headers["hx-redirect"] == made
    project = service.store.projects.get_project(made.rpartition("/")[2])
    assert (project.name, project.limits) == (
        "Team",
        TenantLimits(max_slots=4, max_bytes=3 * 2**29, bases=("tiny", "other"), max_priority=-2),
    )
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', browser.get(made).text))
    assert {name: fields[name] for name in form} == form | {
        "max_bytes": "1536 MiB",
        "bases": "tiny, other",
    }
    for value in ("many", "--5", "5" * 5000):
        wrong = browser.post(f"{made}/limits", data={"max_slots": value}, headers=token)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "limits.max_slots")
        wrong = browser.post(
            f"{made}/keys", data={"name": "mine", "expires_days": value}, headers=token
        )
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "expires_in_seconds")
    fields["bases"] = "none"
    for _ in range(2):  # the second time as the page has it
        browser.post(f"{made}/limits", data={"bases": fields["bases"]}, headers=token)
        assert service.store.projects.get_project(project.id).limits == TenantLimits(bases=())
        fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', browser.get(made).text))
    assert browser.post(f"{made}/archive", headers=token).headers["hx-redirect"] == "/projects"
    assert "archived" in browser.get("/projects").text
