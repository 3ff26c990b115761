"""Single sign-on in a real browser, through a provider that runs here and is another site to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr
from selenium import webdriver
from selenium.webdriver.common.keys import Keys
from sqlalchemy import text

from tests.support.page.browser import axe_faults, click, find, sized, text_of, until
from tests.support.page.place import Place
from tests.support.page.provider import CLIENT_ID, SECRET, Provider, foreign_key, providing

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::authlib.deprecate.AuthlibDeprecationWarning"
    ),  # how the provider uses Authlib
    pytest.mark.filterwarnings("ignore:get_jwt_config:DeprecationWarning"),
]

GROUPS = """\
platform: {default: admin}
support: {default: read, PROJECT: submit}
nowhere: {proj_none: admin}
"""


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with providing() as provider:
        yield provider


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> Iterator[Place]:
    home = tmp_path_factory.mktemp("home")
    groups = home / "groups.yaml"
    groups.write_text(GROUPS.replace("PROJECT", "team"))
    settings = {
        "oidc_issuer": provider.url,
        "oidc_client_id": CLIENT_ID,
        "oidc_client_secret": SecretStr(SECRET),
        "oidc_groups": groups,
    }
    place = Place(home, moves=False, more_settings=settings)
    place.store.projects.ensure_project("team", "local")
    yield place
    place.close()


@pytest.fixture(autouse=True)
def nobody(driver: webdriver.Chrome, place: Place) -> None:
    """Every test begins with a browser that nobody has used."""
    sized(driver, 1400, "light")
    driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    driver.execute_cdp_cmd("Network.enable", {})
    # The style of the provider's page.
    driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["https://*"]})


def go(driver: webdriver.Chrome, place: Place, to: str = "/jobs") -> None:
    """Go to the provider by the page's button."""
    driver.get(f"{place.url}/sign-in?to={to}")
    click(driver, "#sign-on")


def agree(driver: webdriver.Chrome, subject: str) -> None:
    """Sign in at the provider."""
    find(driver, "input[name=sub]").send_keys(subject, Keys.ENTER)


def fault(driver: webdriver.Chrome, place: Place) -> str:
    """Return why the page has refused a sign-in, after which there is no session."""
    said = text_of(driver, ".fault")
    assert session(driver, place) is None
    return said


def session(driver: webdriver.Chrome, place: Place) -> str | None:
    return cookies(driver).get(f"ft_session_{place.port}", {}).get("value")


def cookies(driver: webdriver.Chrome) -> dict[str, Any]:
    return {
        cookie["name"]: cookie
        for cookie in driver.execute_cdp_cmd("Storage.getCookies", {})["cookies"]
    }


def sql(place: Place, statement: str) -> None:
    with place.store.writing() as connection:
        connection.execute(text(statement))


def test_in_and_out(driver: webdriver.Chrome, place: Place, provider: Provider) -> None:
    provider.person("ada", email="ada@example.com", groups=["support", "unknown"])
    driver.get(f"{place.url}/sign-in")
    assert axe_faults(driver) == []
    go(driver, place, "/models")
    assert driver.current_url.startswith(f"{provider.url}/oauth2/authorize")
    agree(driver, "ada")
    until(lambda: driver.current_url == f"{place.url}/models")
    assert text_of(driver, ".who") == "default read"
    used = provider.exchanged[-1]
    assert used["authorization"].startswith("Basic ")
    assert "client_secret" not in used
    kept = cookies(driver)[f"ft_session_{place.port}"]
    assert (kept["httpOnly"], kept["sameSite"]) == (True, "Strict")

    # Her other project, with the scope that she has there; a name in the list of keys that nobody
    # can use or rotate
    click(driver, ".who a")
    assert axe_faults(driver) == []
    click(driver, "[hx-post='/project']")
    until(lambda: driver.current_url == f"{place.url}/jobs")
    until(lambda: text_of(driver, ".who") == "team submit")
    driver.get(f"{place.url}/keys")
    assert "ada@example.com" not in driver.page_source, "submit sees no keys"
    (mine,) = [key for key in place.store.keys.list_keys("team") if key.identity is not None]
    assert (mine.name, mine.scope, mine.identity) == (
        "ada@example.com",
        "submit",
        f"{provider.url} ada",
    )

    # Away, here and there
    click(driver, "[hx-post='/sign-out']")
    until(lambda: driver.current_url.startswith(f"{provider.url}/oauth2/end_session"))
    asked = provider.ended[-1]
    assert asked["id_token_hint"].count(".") == 2
    assert (asked["client_id"], asked["post_logout_redirect_uri"]) == (
        CLIENT_ID,
        f"{place.url}/sign-in",
    )
    click(driver, "form button")
    until(lambda: driver.current_url == f"{place.url}/sign-in")
    assert not [name for name in cookies(driver) if name.startswith("ft_")]
    driver.get(f"{place.url}/jobs")
    assert driver.current_url.endswith("/sign-in")
    # The project where she was last
    go(driver, place)
    agree(driver, "ada")
    until(lambda: driver.current_url == f"{place.url}/jobs")
    assert text_of(driver, ".who") == "team submit"


def test_a_session_that_is_over_is_renewed_where_the_browser_is(
    driver: webdriver.Chrome, place: Place, provider: Provider
) -> None:
    provider.person("ada", groups=["platform"])
    go(driver, place)
    agree(driver, "ada")
    until(lambda: text_of(driver, ".who") == "default admin")
    before = session(driver, place)
    driver.get("about:blank")  # the list of jobs refreshes itself, and could be the first to notice
    sql(place, "UPDATE sessions SET expires_at = 1")
    driver.get(f"{place.url}/models?sort=name")
    assert driver.current_url.startswith(provider.url)
    agree(driver, "ada")
    until(lambda: driver.current_url == f"{place.url}/models?sort=name")
    assert session(driver, place) not in (None, before)
    # Parts of the page that refresh themselves notice it too
    driver.get(f"{place.url}/jobs")
    sql(place, "UPDATE sessions SET expires_at = 1")
    until(lambda: driver.current_url.startswith(provider.url))
    agree(driver, "ada")
    until(lambda: driver.current_url == f"{place.url}/jobs")


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": int(time.time()) - 3600}, "expired"),
        ({"aud": "another-client"}, "Audience"),
        ({"aud": [CLIENT_ID, "another-client"], "azp": "another-client"}, "for another client"),
        ({"aud": [CLIENT_ID, "another-client"]}, "for which of several"),
        ({"iss": "http://localhost:1"}, "issuer"),
        ({"nonce": "of another sign-in"}, "belongs to another sign-in"),
        ({"iat": int(time.time()) + 3600}, "not yet valid"),
    ],
)
def test_a_token_that_is_wrong_opens_nothing(
    driver: webdriver.Chrome, place: Place, provider: Provider, claims: dict[str, Any], why: str
) -> None:
    provider.person("eve", groups=["platform"], **claims)
    go(driver, place)
    agree(driver, "eve")
    assert why in fault(driver, place)


def test_a_token_by_another_key_opens_nothing(
    driver: webdriver.Chrome, place: Place, provider: Provider
) -> None:
    provider.person("eve", groups=["platform"])
    with foreign_key():
        go(driver, place)
        agree(driver, "eve")
        assert "ignature verification failed" in fault(driver, place)


def test_an_answer_works_once_and_in_one_browser(
    driver: webdriver.Chrome, place: Place, provider: Provider
) -> None:
    provider.person("ada", groups=["platform"])
    go(driver, place)
    (begun,) = [
        cookie for name, cookie in cookies(driver).items() if name.startswith("ft_sign_in_")
    ]
    assert (begun["httpOnly"], begun["sameSite"], begun["path"]) == (
        True,
        "Lax",
        "/sign-in/oidc/callback",
    )
    agree(driver, "ada")
    until(lambda: driver.current_url == f"{place.url}/jobs")
    answer = provider.led_to[-1]
    exchanged = len(provider.exchanged)
    driver.get(answer)
    assert "not begun in this browser" in text_of(driver, ".fault")
    # With the cookie of the sign-in, too
    driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    given = {name: begun[name] for name in ("name", "value", "path", "httpOnly", "sameSite")}
    driver.execute_cdp_cmd("Network.setCookie", {**given, "url": place.url})
    driver.get(answer)
    assert "carried out before" in fault(driver, place)
    assert len(provider.exchanged) == exchanged, "the provider is not even asked"
    # A state that belongs to another sign-in of this browser
    go(driver, place)
    agree(driver, "ada")
    until(lambda: driver.current_url == f"{place.url}/jobs")
    driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    go(driver, place)
    driver.get(provider.led_to[-1])
    assert "not begun in this browser" in fault(driver, place)


def test_a_group_that_is_taken_away_closes_every_door(
    driver: webdriver.Chrome, place: Place, provider: Provider
) -> None:
    provider.person("bob", email="bob@example.com", groups=["platform", "support"])
    go(driver, place)
    agree(driver, "bob")
    until(lambda: text_of(driver, ".who") == "default admin")
    elsewhere = session(driver, place)
    assert elsewhere is not None
    assert place.store.sessions.session_holder(elsewhere) is not None
    # Less than before: his other browser has less at once
    provider.person("bob", email="bob@example.com", groups=["support"])
    driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    go(driver, place)
    agree(driver, "bob")
    until(lambda: text_of(driver, ".who") == "default read")
    holder = place.store.sessions.session_holder(elsewhere)
    assert holder is not None
    assert holder.scope == "read"
    # Nothing
    for groups in (["nowhere", "unknown"], []):
        provider.person("bob", email="bob@example.com", groups=groups)
        driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
        go(driver, place)
        agree(driver, "bob")
        assert "bob@example.com: none of your groups at localhost opens a project here" in fault(
            driver, place
        )
        assert place.store.sessions.session_holder(elsewhere) is None
    told = [
        entry.type
        for entry in place.store.audit.list_audit(project_id="team").data
        if entry.type.startswith("person.")
    ]
    assert told[0] == "person.withdrawn"


def test_who_does_not_agree_is_not_signed_in(
    driver: webdriver.Chrome, place: Place, provider: Provider
) -> None:
    go(driver, place)
    click(driver, "button[value=deny]")
    assert "access_denied" in fault(driver, place)


def test_no_other_site_begins_a_sign_in(
    driver: webdriver.Chrome, place: Place, provider: Provider
) -> None:
    driver.get(f"{provider.url}/jwks")
    driver.execute_script("location = arguments[0]", f"{place.url}/sign-in/oidc?to=/models")
    assert text_of(driver, "h1") == "Sign in"
    assert not [name for name in cookies(driver) if name.startswith("ft_")]
