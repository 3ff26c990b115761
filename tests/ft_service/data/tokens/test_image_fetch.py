"""Pictures by URL, from a server that does whatever it likes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ft_service.data.image_limits import BYTES
from ft_service.data.line_errors import LineError
from ft_service.data.sample_kinds import IMAGE, Conversation, Picture
from ft_service.data.tokens import image_fetch
from ft_service.data.tokens.image_fetch import ImageFetcher
from tests.support.image_servers import ASKED, PNG, serving_images


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving_images() as url:
        yield url


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    ASKED.clear()
    monkeypatch.setenv(image_fetch.ALLOW_PRIVATE, "true")
    monkeypatch.setenv(BYTES, "4000")


def chat(*urls: str) -> Conversation:
    messages = (
        {"role": "user", "content": IMAGE * len(urls)},
        {"role": "assistant", "content": "a"},
    )
    places = tuple(f"messages.0.content.{i}.image_url" for i in range(len(urls)))
    return Conversation(
        messages,
        (0, 1),
        images=tuple(Picture.on_web(url, "low") for url in urls),
        image_places=places,
    )


def test_pictures_are_fetched_once_and_through_a_redirect(server: str) -> None:
    fetcher = ImageFetcher()
    found = fetcher.fetched(chat(f"{server}/good.png", f"{server}/there"))
    again = fetcher.fetched(chat(f"{server}/good.png"))
    assert found.images == (Picture.of(PNG, "low"),) * 2
    assert again.images == (Picture.of(PNG, "low"),)
    assert ASKED == {"/good.png": 2, "/there": 1}


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/missing", "answered 404"),
        ("/loop", "redirected more than 3 times"),
        ("/file", "must begin with"),
        ("/large", "more than 4,000 bytes"),
        ("/page", "no PNG, JPEG, WEBP or GIF"),
        ("/endless", "too slowly"),
    ],
)
def test_what_cannot_be_fetched_is_a_fault_of_its_place(
    path: str, reason: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "/endless":
        monkeypatch.setattr(image_fetch, "FETCH_SECONDS", 1.0)
    with pytest.raises(LineError, match=reason) as caught:
        ImageFetcher().fetched(chat(f"{server}/good.png", f"{server}{path}"))
    assert caught.value.field == "messages.0.content.1.image_url.url"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/a.png", "https://127.0.0.1:1/a.png", "https://localhost:1/a.png"]
)
def test_private_addresses_are_not_asked_without_the_operator_s_setting(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(image_fetch.ALLOW_PRIVATE)
    with pytest.raises(LineError, match=r"https|public") as caught:
        ImageFetcher().fetched(chat(url))
    assert caught.value.field == "messages.0.content.0.image_url.url"


def test_a_file_of_slow_pictures_ends(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "MOST_FETCH_SECONDS", 0.0)
    fetcher = ImageFetcher()
    fetcher.fetched(chat(f"{server}/good.png"))
    with pytest.raises(LineError, match="by URL") as caught:
        fetcher.fetched(chat(f"{server}/there"))
    assert caught.value.field == "messages"
    assert ASKED["/there"] == 0
