"""Signing in and out: what a session opens, what it does not, and what ends it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

from api.http.sessions import token_of
from ft_service.store.records import NewKey, Scope
from ft_service.store.tenants.people import SIGN_ON_MARK, SignOn
from tests.support.page.sessions import new_browser, secret_of
from tests.support.rest.refusals import check_error
from tests.support.rest.service import Service


@pytest.fixture
def browser(service: Service) -> Iterator[httpx2.Client]:
    """A browser that is signed in."""
    with new_browser(service) as client:
        answer = client.post("/sign-in", data={"key": service.key})
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs")
        yield client


def test_without_a_session_there_is_only_the_door(service: Service) -> None:
    with new_browser(service) as browser:
        for path, door in (
            ("/jobs", "/sign-in"),
            ("/page/live/jobs", "/sign-in"),
            ("/try?model=a", "/sign-in?to=%2Ftry%3Fmodel%3Da"),
        ):
            answer = browser.get(path)
            assert (answer.status_code, answer.headers["location"]) == (303, door)
        behind_a_proxy = {"authorization": "Bearer of-the-proxy", "accept": "text/html,*/*;q=0.8"}
        assert browser.get("/models", headers=behind_a_proxy).status_code == 303, (
            "a program asks for no page"
        )
        part = browser.get("/page/live/jobs", headers={"hx-request": "true"})
        assert (part.status_code, part.headers["hx-redirect"]) == (401, "/sign-in")


def test_a_link_to_a_page_leads_there_after_the_sign_in(service: Service) -> None:
    with new_browser(service) as browser:
        door = browser.get(browser.get("/compare?job=a&job=b").headers["location"]).text
        to = html.unescape(re.findall(r'name="to" value="([^"]*)"', door)[0])
        answer = browser.post("/sign-in", data={"key": service.key, "to": to})
        assert (answer.status_code, answer.headers["location"]) == (303, "/compare?job=a&job=b")


@pytest.mark.parametrize(
    ("site", "mode", "dest", "again"),
    [
        ("cross-site", "navigate", "document", True),
        ("same-site", "navigate", "document", True),
        (
            "same-origin",
            "navigate",
            "document",
            False,
        ),  # where it leads to, which ends at the sign-in page
        ("none", "navigate", "document", False),
        ("cross-site", "navigate", "iframe", False),
        ("cross-site", "no-cors", "image", False),
    ],
)
def test_a_link_on_another_site_is_opened_again_with_the_sessions_cookie(
    service: Service, site: str, mode: str, dest: str, again: bool
) -> None:
    """Browsers send a `SameSite=Strict` cookie only with what the page itself has caused."""
    headers = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest}
    with new_browser(service) as browser:
        answer = browser.get("/jobs/ftjob-x?a=%3C", headers=headers)
        assert (answer.status_code == 200) is again
        assert ('content="0;url=/jobs/ftjob-x?a=%3C"' in answer.text) is again
        assert browser.post("/jobs/ftjob-x/pause", headers=headers).status_code == 303


@pytest.mark.parametrize(
    ("there", "to"), [("http://x/models?a=1", "%2Fmodels%3Fa%3D1"), ("http://[", "%2Fjobs")]
)
def test_a_part_of_the_page_whose_single_sign_on_is_over_says_where_it_was(
    service: Service, there: str, to: str
) -> None:
    with new_browser(service) as browser:
        cookie = f"ft_session_{service.url.rpartition(':')[2]}={SIGN_ON_MARK}over"
        headers = {"hx-request": "true", "hx-current-url": there, "cookie": cookie}
        answer = browser.get("/page/live/jobs", headers=headers)
        assert (answer.status_code, answer.headers["hx-redirect"]) == (
            401,
            f"/sign-in/oidc?to={to}",
        )


@pytest.mark.parametrize("key", ["", "ft-not-a-key-of-anybody-here"])
def test_a_wrong_key_opens_nothing(service: Service, key: str) -> None:
    with new_browser(service) as browser:
        answer = browser.post("/sign-in", data={"key": key})
        assert answer.status_code == 401
        assert "not known here" in answer.text
        assert not browser.cookies


def test_a_key_for_metrics_cannot_sign_in(service: Service) -> None:
    _, key = service.store.keys.create_key(
        NewKey(project_id="default", name="scraper", scope="metrics")
    )
    with new_browser(service) as browser:
        assert "reads /metrics and nothing else" in browser.post("/sign-in", data={"key": key}).text
        assert not browser.cookies


def link_fields(browser: httpx2.Client, path: str) -> dict[str, str]:
    """What the button on a link's page sends."""
    answer = browser.get(path)
    assert answer.status_code == 200
    return {
        name: html.unescape(value)
        for name, value in re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', answer.text)
    }


def test_a_link_signs_in_once_by_a_button_and_leads_nowhere_else(service: Service) -> None:
    link = service.http("POST", "/v1/sign_in_links").json()["path"]
    with new_browser(service) as browser:
        fields = link_fields(browser, f"{link}&to=/models")
        assert not browser.cookies
        answer = browser.post("/sign-in", data=fields)
        assert (answer.status_code, answer.headers["location"]) == (303, "/models")
        assert browser.get("/v1/models").status_code == 200
    with new_browser(service) as browser:
        assert browser.post("/sign-in", data=link_fields(browser, link)).status_code == 401
        assert not browser.cookies
    other = service.http("POST", "/v1/sign_in_links").json()["path"]
    with new_browser(service) as browser:
        fields = link_fields(browser, f"{other}&to=//evil.example/")
        assert browser.post("/sign-in", data=fields).headers["location"] == "/jobs"


def test_to_follow_a_link_changes_no_session(service: Service, browser: httpx2.Client) -> None:
    """Any site can have a browser follow one, and would then see what is uploaded in its own
    project.
    """
    service.store.projects.ensure_project("evil", "evil")
    key = service.store.keys.create_key(NewKey(project_id="evil", name="k", scope="submit"))[1]
    link = service.http("POST", "/v1/sign_in_links", key=key).json()["path"]
    secret = secret_of(browser)
    for site in ("cross-site", "same-site", "none"):
        answer = browser.get(link, headers={"sec-fetch-site": site, "sec-fetch-mode": "navigate"})
        assert "set-cookie" not in answer.headers
    assert secret_of(browser) == secret
    assert '<button class="primary wide" autofocus>' in browser.get(link).text


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "https://[evil"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example", "sec-fetch-site": "same-origin"},
    ],
)
def test_another_sites_form_signs_nobody_in(service: Service, headers: dict[str, str]) -> None:
    with new_browser(service) as browser:
        fields = link_fields(browser, service.http("POST", "/v1/sign_in_links").json()["path"])
    for form in ({"key": service.key}, fields):
        with new_browser(service) as browser:
            answer = browser.post("/sign-in", data=form, headers=headers)
            assert answer.status_code == 403
            assert not browser.cookies
    with new_browser(service) as browser:
        own = {"origin": service.url, "sec-fetch-site": "same-origin"}
        assert browser.post("/sign-in", data=fields, headers=own).status_code == 303, (
            "refused, it was not used up"
        )


def test_a_proxy_that_replaces_the_host_is_named(service: Service) -> None:
    headers = {"origin": "https://ft.example.com", "sec-fetch-site": "same-origin"}
    with new_browser(service) as browser:
        error = check_error(
            browser.post("/sign-in", data={"key": service.key}, headers=headers), 403
        )
    assert "'https://ft.example.com', and was sent to '127.0.0.1:" in error["message"]
    assert "a proxy in between has replaced the header Host" in error["message"]


@pytest.mark.parametrize(
    "to", ["//[", "/\\evil.example", "//evil.example", "https://[evil", "/jobs\n"]
)
def test_signing_in_leads_nowhere_else(service: Service, to: str) -> None:
    with new_browser(service) as browser:
        assert 'name="to" value="/jobs"' in browser.get("/sign-in", params={"to": to}).text
        answer = browser.post("/sign-in", data={"key": service.key, "to": to})
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs")


def test_a_project_sees_nothing_of_anothers(
    service: Service, client: openai.OpenAI, training_file: str
) -> None:
    job = client.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    service.store.projects.ensure_project("other", "local")
    _, key = service.store.keys.create_key(NewKey(project_id="other", name="theirs", scope="admin"))
    with new_browser(service) as browser:
        browser.post("/sign-in", data={"key": key})
        assert job.id not in browser.get("/jobs").text
        for tab in ("", "/logs", "/settings", "/samples", "/answers", "/checkpoints", "/events"):
            answer = browser.get(f"/jobs/{job.id}{tab}")
            assert answer.status_code == 404, tab
        token = {"x-csrf-token": token_of(secret_of(browser)), "hx-request": "true"}
        assert browser.post(f"/jobs/{job.id}/cancel", headers=token).status_code == 404
        for path in (
            "/projects/default",
            f"/try?model=ft:tiny:local::{job.id.removeprefix('ftjob-')}",
        ):
            assert browser.get(path).status_code == 404, path
        assert (
            browser.post("/projects/default/keys", data={"name": "x"}, headers=token).status_code
            == 404
        )
        service.store.keys.create_key(
            NewKey(project_id="default", name="secret-name", scope="read")
        )
        for path in ("/projects", "/usage?project=default", "/keys", "/changes"):
            answer = browser.get(path)
            assert answer.status_code == 200, path
            assert not {"secret-name", "default", job.id} & set(
                re.findall(r"[\w-]+", answer.text)
            ), path
    assert client.fine_tuning.jobs.retrieve(job.id).status == "validating_files"


def test_where_nothing_answers_the_page_says_why(service: Service, browser: httpx2.Client) -> None:
    service.use(service.settings.model_copy(update={"preview": "off"}))
    for path in ("/models", "/try"):
        assert "The preview is turned off (FT_PREVIEW = off)" in browser.get(path).text
    assert "/try?" not in browser.get("/models").text
    service.use(service.settings.model_copy(update={"inference_url": "http://vllm/v1"}))
    assert "/try?model=tiny" in browser.get("/models").text
    assert browser.get("/v1/inference").json()["answered_by"] == "inference_server"


def test_every_answer_forbids_what_is_not_the_pages_own(
    service: Service, browser: httpx2.Client
) -> None:
    for path in ("/jobs", "/sign-in", "/sign-in?link=x", "/jobs/ftjob-nothing"):
        policy = browser.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_no_answer_can_be_framed(service: Service, browser: httpx2.Client) -> None:
    paths = [
        *(
            "/",
            "/jobs",
            "/sign-in",
            "/sign-in?link=x",
            "/page/static/page.css",
            "/page/static/nothing",
            "/page/live/jobs",
        ),
        *(
            "/docs",
            "/openapi.json",
            "/static-offline-docs/swagger-ui-bundle.js",
            "/static-offline-docs/nothing",
        ),
        *("/livez", "/metrics", "/nothing", "/v1/nothing", "/v1/models", "/v1/files/file-none"),
    ]
    for path in paths:
        for method in ("GET", "PUT"):
            headers = browser.request(method, path).headers
            assert "frame-ancestors 'none'" in headers["content-security-policy"], path
            assert "default-src 'none'" in headers["content-security-policy"], path
            given = [
                headers[name]
                for name in ("x-frame-options", "referrer-policy", "x-content-type-options")
            ]
            assert given == ["DENY", "same-origin", "nosniff"], path
            assert headers.get_list("x-frame-options") == ["DENY"], path
    scripts = re.findall(
        r"script-src ([^;]*)", browser.get("/docs").headers["content-security-policy"]
    )
    assert "unsafe" not in scripts[0]
    assert "'sha256-" in scripts[0]


def test_a_form_with_a_validation_file_and_a_share_is_refused_in_the_apis_words(
    browser: httpx2.Client, training_file: str
) -> None:
    token = {"x-csrf-token": token_of(secret_of(browser)), "hx-request": "true"}
    form = {
        "model": "tiny",
        "training_file": training_file,
        "validation_file": training_file,
        "validation_split": "0.1",
    }
    told = "validation_file and validation_split are both given: keep one"
    assert told in browser.post("/new/plan", data=form, headers=token).text
    refused = browser.post("/new", data=form, headers=token)
    assert refused.status_code == 400
    assert told in refused.json()["error"]["message"]


def test_a_key_that_a_person_makes_is_the_persons(service: Service) -> None:
    grants: dict[str, Scope] = {"default": "admin"}
    ada = SignOn(identity="https://login.example 7", name="ada", grants=grants, state="made")
    secret = service.store.people.sign_in(ada, 600)
    assert secret is not None
    with new_browser(service) as browser:
        browser.cookies.set(f"ft_session_{urlsplit(service.url).port}", secret)
        headers = {"x-csrf-token": token_of(secret), "hx-request": "true"}
        shown = browser.post(
            "/projects/default/keys", data={"name": "laptop", "scope": "admin"}, headers=headers
        ).text
        (value,) = re.findall(r'id="secret">(ft-[^<]+)<', shown)
        assert "It ends with your access" in shown
        assert "· of ada</span>" in shown
        assert service.store.keys.list_keys("default")[-1].ends_with is not None
        made = browser.post(
            "/v1/keys", json={"name": "by rest"}, headers={"authorization": f"Bearer {value}"}
        ).json()
        (person,) = [key for key in service.store.keys.list_keys("default") if key.identity]
        assert made["ends_with"] == person.id, "a key by a person's key"
        ours = service.http("POST", "/v1/keys", json={"name": "of no person"}).json()
        assert ours["ends_with"] is None
        browser.delete(f"/v1/keys/{person.id}", headers={"authorization": f"Bearer {service.key}"})
        left = {
            key.id
            for key in service.store.keys.list_keys("default")
            if key.ends_with and key.revoked_at is None
        }
        assert left == set()
