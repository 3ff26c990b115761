"""Sessions: the cookie, the token of a change, and the end of both."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import httpx2
import pytest
from fastapi.routing import APIRoute

from api.http.sessions import token_of
from ft_service.store.records import NewKey
from ft_service.store.tenants.keys import SESSION_SECONDS
from tests.support.page.sessions import new_browser, secret_of
from tests.support.rest.service import Service


@pytest.fixture
def browser(service: Service) -> Iterator[httpx2.Client]:
    """A browser that is signed in."""
    with new_browser(service) as client:
        answer = client.post("/sign-in", data={"key": service.key})
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs")
        yield client


def test_the_cookie_is_for_no_script_and_no_other_site(service: Service) -> None:
    with new_browser(service) as browser:
        given = browser.post("/sign-in", data={"key": service.key}).headers["set-cookie"].lower()
    assert "httponly" in given
    assert "samesite=strict" in given
    assert f"max-age={SESSION_SECONDS:.0f}" in given
    assert service.key.lower() not in given


@pytest.mark.parametrize(
    ("said", "secure"),
    [("https", True), ("https, http", True), ("HTTPS", True), ("http, https", False)],
)
def test_the_cookie_is_secure_if_the_proxy_that_speaks_to_the_browser_says_so(
    service: Service, said: str, secure: bool
) -> None:
    with new_browser(service) as browser:
        answer = browser.post(
            "/sign-in", data={"key": service.key}, headers={"x-forwarded-proto": said}
        )
    assert ("; secure" in answer.headers["set-cookie"].lower()) is secure


def test_a_session_reads_what_its_key_reads(service: Service, browser: httpx2.Client) -> None:
    assert browser.get("/v1/fine_tuning/jobs").json()["data"] == []
    assert browser.get("/jobs").status_code == 200
    assert browser.get("/").headers["location"] == "/jobs"


def test_a_change_needs_the_sessions_token(
    service: Service, browser: httpx2.Client, training_file: str
) -> None:
    body = {"model": "tiny", "training_file": training_file}
    refused = browser.post("/v1/fine_tuning/jobs", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "csrf")
    wrong = browser.post(
        "/v1/fine_tuning/jobs", json=body, headers={"x-csrf-token": token_of("another session's")}
    )
    assert wrong.status_code == 403
    assert service.client().fine_tuning.jobs.list().data == []
    token = re.search(r'"x-csrf-token": "(\w+)"', html.unescape(browser.get("/jobs").text))
    assert token is not None
    made = browser.post("/v1/fine_tuning/jobs", json=body, headers={"x-csrf-token": token[1]})
    assert made.status_code == 200
    verb = f"/jobs/{made.json()['id']}/cancel"
    assert browser.post(verb).status_code == 403
    assert browser.post(verb, headers={"x-csrf-token": token[1]}).status_code == 200


def test_every_change_of_the_page_needs_the_sessions_token(
    service: Service, browser: httpx2.Client
) -> None:
    changing = [
        re.sub(r"\{[^}]*\}", "x", route.path)
        for route in service.app.router.routes
        if isinstance(route, APIRoute)
        and not route.include_in_schema
        and set(route.methods or ()) - {"GET", "HEAD"}
        and route.path != "/sign-in"
        if not route.path.startswith("/api/")  # Tinker, whose routes take a key
    ]
    assert len(changing) > 12
    for path in changing:
        form = browser.post(
            path, data={"name": "by another site"}, headers={"origin": "https://evil.example"}
        )
        assert form.status_code == 403, path
        assert "token" in form.text, path
    assert [project.id for project in service.store.projects.list_projects().data] == ["default"]


def test_a_stolen_cookie_dies_with_sign_out(service: Service, browser: httpx2.Client) -> None:
    stolen = dict(browser.cookies)
    assert browser.post("/sign-out").status_code == 403, "another site cannot sign a browser out"
    assert (
        browser.post(
            "/sign-out", headers={"x-csrf-token": token_of(secret_of(browser))}
        ).status_code
        == 303
    )
    assert not browser.cookies
    with new_browser(service) as thief:
        thief.cookies.update(stolen)
        assert thief.get("/v1/models").status_code == 401


def test_a_key_that_only_reads_can_sign_out(service: Service) -> None:
    _, key = service.store.keys.create_key(
        NewKey(project_id="default", name="reader", scope="read")
    )
    with new_browser(service) as browser:
        browser.post("/sign-in", data={"key": key})
        token = {"x-csrf-token": token_of(secret_of(browser))}
        assert browser.post("/v1/files", headers=token).status_code == 403
        assert browser.post("/sign-out", headers=token).status_code == 303
        assert not browser.cookies


def test_a_session_ends_with_its_key_and_with_its_time(
    service: Service, browser: httpx2.Client
) -> None:
    service.sql("UPDATE sessions SET expires_at = 1")
    assert browser.get("/v1/models").status_code == 401
    service.sql("UPDATE sessions SET expires_at = 1e12")
    assert browser.get("/v1/models").status_code == 200
    service.store.keys.revoke_key("default", service.store.keys.authenticate(service.key).key_id)  # type: ignore[union-attr]
    assert browser.get("/v1/models").status_code == 401


def test_a_key_in_the_header_goes_before_the_cookie(
    service: Service, browser: httpx2.Client
) -> None:
    assert (
        browser.get("/v1/models", headers={"authorization": "Bearer nobody's"}).status_code == 401
    )
