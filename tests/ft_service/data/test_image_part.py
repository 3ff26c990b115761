import json
from dataclasses import replace
from typing import Any

import pytest

from ft_service.data import image_part
from ft_service.data.chat_line import parse_conversation, parse_line
from ft_service.data.formats.detect_format import Format
from ft_service.data.formats.normalize import as_record
from ft_service.data.formats.writing import line_of
from ft_service.data.image_limits import BYTES
from ft_service.data.image_part import as_json, of_json
from ft_service.data.line_errors import LineError
from ft_service.data.prompt_line import parse_prompt
from ft_service.data.sample_kinds import IMAGE, Conversation, Pair, Picture, images_of
from ft_service.data.sensitive_text import sensitive_kinds
from ft_service.data.statistics import Records
from tests.support.image_bases import drawn, encoded, text_part
from tests.support.image_bases import image_part as part

ANSWER = {"role": "assistant", "content": "A gauge."}
PNG = encoded(drawn())
FILES = {
    "image/png": PNG,
    "image/jpeg": encoded(drawn(), "JPEG"),
    "image/webp": encoded(drawn(), "WEBP"),
    "image/gif": encoded(drawn(), "GIF"),
}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def parsed(*messages: dict[str, Any], **more: Any) -> Conversation:
    return parse_line(json.dumps({"messages": messages, **more}))


def refused(*messages: dict[str, Any]) -> LineError:
    with pytest.raises(LineError) as refusal:
        parsed(*messages)
    return refusal.value


def test_pictures_stand_in_their_places() -> None:
    other = encoded(drawn(seed=2))
    chat = parsed(
        user(text_part("Read "), part(PNG, detail="low"), text_part(" and "), part(other)),
        ANSWER,
        user(part(PNG)),
        ANSWER,
    )
    assert [message["content"] for message in chat.messages] == [
        f"Read {IMAGE} and {IMAGE}",
        "A gauge.",
        IMAGE,
        "A gauge.",
    ]
    assert chat.images == (Picture.of(PNG, "low"), Picture.of(other), Picture.of(PNG))
    assert [picture.data for picture in chat.images] == [PNG, other, PNG]
    assert len({picture.key for picture in chat.images}) == 3  # detail is part of the key
    assert chat.image_places == (
        "messages.0.content.1.image_url",
        "messages.0.content.3.image_url",
        "messages.2.content.0.image_url",
    )


@pytest.mark.parametrize("mime", FILES)
def test_the_bytes_say_what_a_picture_is(mime: str) -> None:
    chat = parsed(user(part(FILES[mime], "image/tiff")), ANSWER)
    assert image_part.type_of(chat.images[0].data) == mime
    (written,) = line_of(chat)["messages"][0]["content"]
    assert written == part(FILES[mime], mime)


def test_no_detail_is_auto() -> None:
    details: list[dict[str, Any]] = [{}, {"detail": None}, {"detail": "auto"}]
    for detail in details:
        assert parsed(user(part(PNG, **detail)), ANSWER).images == (Picture.of(PNG, "auto"),)


def test_an_answer_alone_keeps_the_pictures_before_it() -> None:
    chat = parsed(user(part(PNG)), ANSWER, user(part(PNG, detail="high")), ANSWER)
    first, second = chat.by_answers()
    assert (len(first.messages), first.images) == (2, chat.images[:1])
    assert (len(second.messages), second.images, second.weights) == (4, chat.images, (0, 0, 0, 1))


def test_a_system_prompt_of_its_own_keeps_the_pictures() -> None:
    given = {"messages": [user(part(PNG)), ANSWER], "system": "Be brief."}
    chat = as_record(Format.CHAT, given)
    assert isinstance(chat, Conversation)
    assert chat.messages[0] == {"role": "system", "content": "Be brief."}
    assert chat.images == (Picture.of(PNG),)


def test_a_conversation_is_written_as_it_was_given() -> None:
    given = [
        user(text_part("Read "), part(PNG, detail="low"), text_part("."), part(PNG)),
        ANSWER,
        {"role": "user", "content": "Again?"},
        ANSWER,
    ]
    assert line_of(parsed(*given))["messages"] == given


def test_pictures_are_neither_secrets_nor_alike() -> None:
    chat = parsed(user(text_part("Read."), part(PNG)), ANSWER)
    other = replace(chat, images=(Picture.of(encoded(drawn(seed=2))),))
    assert sensitive_kinds(replace(chat, images=(Picture("4" * 16, b"a@b.org"),))) == []
    records = Records()
    for number, record in enumerate((chat, other, chat)):
        records.add(number, record)
    assert records.duplicates.first == (2,)


def test_the_character_of_pictures_is_a_text_like_others_where_there_are_none() -> None:
    chat = parsed({"role": "user", "content": f"a{IMAGE}b"}, ANSWER)
    assert (chat.messages[0]["content"], chat.images) == (f"a{IMAGE}b", ())
    assert line_of(chat)["messages"][0]["content"] == f"a{IMAGE}b"
    error = refused(user(part(PNG)), ANSWER, {"role": "user", "content": f"a{IMAGE}b"}, ANSWER)
    assert (error.field, "U+FDD0" in error.reason) == ("messages.2.content", True)


@pytest.mark.parametrize(
    ("given", "place", "reason"),
    [
        (part(b""), ".image_url.url", "is empty"),
        (part(b"<!DOCTYPE html>"), ".image_url.url", "begins with b'<!DOCTYPE ht'"),
        (part(b"<svg xmlns='x'/>"), ".image_url.url", "no PNG, JPEG, WEBP or GIF"),
        (part(PNG, detail="best"), ".image_url.detail", "auto, low, high, not 'best'"),
        (part(PNG, size=1), ".image_url.size", "not a known key"),
        ({"type": "image_url"}, ".image_url", "is required"),
        ({"type": "image_url", "image_url": "data:"}, ".image_url", "not a string"),
        ({"type": "image_url", "image_url": {}}, ".image_url.url", "is required"),
        (
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            ".image_url.url",
            "nor a data: URL in base64",
        ),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO*"}},
            ".image_url.url",
            "is not base64",
        ),
        ({"type": "input_audio"}, ".type", "no audio, films or files"),
        ({"type": "video_url"}, ".type", "no audio, films or files"),
        ({"type": "file"}, ".type", "no audio, films or files"),
    ],
)
def test_a_part_that_is_no_picture_is_told(given: dict[str, Any], place: str, reason: str) -> None:
    error = refused(user(text_part("Read."), given), ANSWER)
    assert (error.field, reason in error.reason) == (f"messages.0.content.1{place}", True), error


def test_a_picture_on_the_web_is_left_there_until_it_is_needed() -> None:
    url = "https://example.org/a.png"
    given = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    assert parsed(user(given), ANSWER).images == (Picture.on_web(url, "low"),)


def test_a_picture_may_be_as_large_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BYTES, str(len(PNG)))
    assert parsed(user(part(PNG)), ANSWER).images == (Picture.of(PNG),)
    for longer in (PNG + b"0", PNG * 2):
        error = refused(user(part(longer)), ANSWER)
        assert error.field == "messages.0.content.0.image_url.url"
        assert f"of {len(longer):,} bytes, and one may have {len(PNG):,}" in error.reason


def test_a_line_may_have_ten_pictures() -> None:
    small = encoded(drawn(8, 8))
    assert len(parsed(user(*[part(small)] * 10), ANSWER).images) == 10
    error = refused(user(*[part(small)] * 6), ANSWER, user(*[part(small)] * 6), ANSWER)
    assert error.field == "messages.2.content.4.image_url"
    assert "one of 12 images, and a line may have 10" in error.reason


def test_only_users_show_pictures() -> None:
    for role, more in (("system", {}), ("assistant", {}), ("tool", {"tool_call_id": "a"})):
        error = refused(
            {"role": role, "content": [part(PNG)], **more}, user(text_part("Read.")), ANSWER
        )
        assert error.field == "messages.0.content.0.type"
        assert "only messages of the role user take images" in error.reason


@pytest.mark.parametrize("form", ["openai", "trl"])
def test_prompts_of_pairs_have_pictures(form: str) -> None:
    other = {**ANSWER, "content": "A clock."}
    shown = [user(part(PNG), text_part("Read."))]
    pair = (
        as_record(
            Format.OPENAI_PAIRS,
            {
                "input": {"messages": shown},
                "preferred_output": [ANSWER],
                "non_preferred_output": [other],
            },
        )
        if form == "openai"
        else as_record(Format.TRL_PAIRS, {"prompt": shown, "chosen": [ANSWER], "rejected": [other]})
    )
    assert isinstance(pair, Pair)
    assert images_of(pair) == 1
    for own in (pair.preferred, pair.rejected):
        assert own.images == (Picture.of(PNG),)
        assert own.messages[0]["content"] == f"{IMAGE}Read."
    written = line_of(pair)
    assert written["input"]["messages"][0]["content"][0]["type"] == "image_url"


def test_prompts_to_grade_have_no_pictures() -> None:
    with pytest.raises(LineError) as refusal:
        parse_prompt({"messages": [user(part(PNG))]})
    assert refusal.value.field == "messages.0.content.0.type"
    assert image_part.SUPERVISED_ONLY in refusal.value.reason


def test_a_request_has_pictures_with_their_places_and_as_json() -> None:
    web = {"type": "image_url", "image_url": {"url": "https://a.example/b.png", "detail": "low"}}
    messages, _, images = parse_conversation([user(part(PNG), web)], [])
    assert messages == [{"role": "user", "content": IMAGE * 2}]
    assert images.places == [f"messages.0.content.{n}.image_url" for n in (0, 1)]
    assert images.pictures[1].url == "https://a.example/b.png"
    assert [of_json(as_json(own)) for own in images.pictures] == images.pictures


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "system", "content": [part(PNG)]}], "messages.0.content.0.type"),
        ([user({"type": "image"})], "messages.0.content.0"),
        ([user({"type": "image", "path": "a.png"})], "messages.0.content.0.path"),
        ([user(*[part(PNG)] * 11)], "messages.0.content.10.image_url"),
    ],
)
def test_pictures_of_a_request_are_the_users_and_in_it(messages: list[Any], field: str) -> None:
    with pytest.raises(LineError) as refusal:
        parse_conversation(messages, [])
    assert refusal.value.field == field
