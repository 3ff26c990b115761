"""Chats with images by the preview's own process: answers, usage, and refusals that name a part."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_service.bases.description import Description, ImageFacts
from ft_service.data.tokens.image_processor import ImageProcessor
from ft_service.serving.preview import Preview
from ft_service.settings import Settings
from tests.support.describing import small_description
from tests.support.image_bases import drawn, encoded, image_part, text_part
from tests.support.rest.service import Service
from tests.support.training.pictures import save_whole_base

BASE = "sees"
LIMIT = 4
PNG = encoded(drawn())


@pytest.fixture
def settings(settings: Settings) -> Settings:
    save_whole_base("qwen 3 vl", settings.home / "models" / BASE)
    return settings


@pytest.fixture
def describe(service: Service, monkeypatch: pytest.MonkeyPatch) -> dict[str, Description]:
    """Name of a base → its description."""
    processor = ImageProcessor.of(str(service.settings.home / "models" / BASE))
    known = {BASE: replace(small_description(), images=ImageFacts(processor.token_id, 2, 1000))}
    descriptions = service.app.state.services.catalogue.descriptions

    def description(folder: Path) -> Description:
        return known[folder.name]

    monkeypatch.setattr(descriptions, "description", description)
    return known


def bomb() -> bytes:
    """A small PNG of a billion pixels."""
    side = 32_000

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(9999)))


def data_url(data: bytes) -> dict[str, Any]:
    encoded_ = base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded_}"}}


def test_images_are_answered_and_those_that_cannot_be_are_named(
    client: openai.OpenAI, preview: Preview, describe: dict[str, Description]
) -> None:
    def ask(*parts: Any, **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": [text_part("What?"), *parts]}]
        return client.chat.completions.create(
            model=BASE,
            messages=messages,
            temperature=0,
            max_tokens=LIMIT,
            **options,
        )

    large = "x" * 2**20
    for broken, reason in [
        (data_url(b""), "is empty"),
        (data_url(b"<html>no picture</html>"), "is no PNG, JPEG, WEBP or GIF"),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "the service has no such file"),
        (text_part(large), "without its images"),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(image_part(PNG), broken)
        assert reason in refused.value.message
    assert preview.pid is None, "nothing was asked of it"

    answer = ask(image_part(PNG), logprobs=True)
    assert answer.usage.completion_tokens == LIMIT
    blind = ask()
    assert answer.usage.prompt_tokens - blind.usage.prompt_tokens > 2
    low = ask(image_part(PNG, detail="low"), logprobs=True)
    told = [entry.logprob for entry in answer.choices[0].logprobs.content]
    assert [entry.logprob for entry in low.choices[0].logprobs.content] == pytest.approx(
        told, abs=1e-4
    ), "it is small already"
    chunks = list(
        ask(image_part(PNG), stream=True, stream_options={"include_usage": True}, logprobs=True)
    )
    assert chunks[-1].usage == answer.usage
    pid = preview.pid

    for broken, reason in [
        (data_url(bomb()), "a picture may have 64,000,000: make it smaller."),
        (data_url(PNG[: len(PNG) // 2]), "The file is damaged or cut off: save the picture again."),
        (
            {"type": "image_url", "image_url": {"url": "https://127.0.0.1/a.png"}},
            "127.0.0.1 is not a public address",
        ),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(image_part(PNG), broken)
        assert refused.value.param == "messages"
        assert "messages.0.content.2.image_url" in refused.value.message
        assert reason in refused.value.message
    assert preview.pid == pid

    describe[BASE] = replace(small_description(), no_images_because="its tower is odd")
    with pytest.raises(openai.BadRequestError, match="sees no images here: its tower is odd") as no:
        ask(image_part(PNG))
    assert (no.value.code, no.value.param) == ("no_images", "messages")
