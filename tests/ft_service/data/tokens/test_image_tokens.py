"""Samples with images: their tokens are those of the base's published processor, called with the
same conversation.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ft_service.data.chat_line import parse_line
from ft_service.data.formats.detect_format import Format
from ft_service.data.formats.normalize import as_record
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import IMAGE, Conversation
from ft_service.data.token_options import DEFAULT, TokenOptions
from ft_service.data.tokens import tokenize as tokenizing
from ft_service.data.tokens.image_processor import ImageProcessor, decoded
from ft_service.data.tokens.tokenize import load_tokenizer, tokenize
from ft_service.errors import SpecError
from tests.support.image_bases import (
    FAMILIES,
    drawn,
    encoded,
    image_part,
    save_image_base,
    text_part,
)
from tests.support.tokenized import tokenized

SMALL = image_part(encoded(drawn(30, 30)))
WIDE = image_part(encoded(drawn(90, 30, 3)))
TALL = image_part(encoded(drawn(28, 64, 9)), detail="high")
WORDS = ("The left one.", "Grey.")


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    content = [text_part(part) if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CONVERSATIONS = {
    "an image behind the words": (user("Read this: ", SMALL), answer(WORDS[0])),
    "an image before the words": (user(SMALL, "Read this."), answer(WORDS[0])),
    "an image alone": (user(SMALL), answer(WORDS[0])),
    "images side by side": (user(SMALL, WIDE, "Which?"), answer(WORDS[0])),
    "the same image twice": (user("One:\n", SMALL, "\nother:\n", SMALL), answer(WORDS[0])),
    "white space around": (user("Read\n\n", SMALL, "\n\nnow\n"), answer(WORDS[0])),
    "several turns": (
        user("Compare ", SMALL, " and ", WIDE, "."),
        answer(WORDS[0]),
        user("Why?"),
        answer("It is."),
        user(TALL, "And this?"),
        answer(WORDS[1]),
    ),
}


def bases(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for family in FAMILIES:
        base: Any = load_tokenizer(str(save_image_base(folder / family, family)))
        if family == "llava 1.5":  # as published, its answers have no end
            own = "{{ content['text'] + ' '}}{% endgeneration %}"
            assert own in base.chat_template
            ended = own.replace("' '", "eos_token")
            base.chat_template = base.chat_template.replace(own, ended)
        made[family] = base
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return bases(tmp_path_factory.mktemp("bases"))


def chat(*messages: dict[str, Any]) -> Conversation:
    return parse_line(json.dumps({"messages": messages}))


def plain(messages: tuple[dict[str, Any], ...], *, only_parts: bool) -> list[dict[str, Any]]:
    """Messages as the published processors' users write them."""
    given: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = [text_part(content)] if only_parts else content
        else:
            content = [{"type": "image"} if "image_url" in part else part for part in content]
        given.append({**message, "content": content})
    return given


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_published_processor(
    family: str, name: str, made: dict[str, Any]
) -> None:
    base = made[family]
    messages = CONVERSATIONS[name]
    record = chat(*messages)
    tokens = tokenized(base, record)
    assert not isinstance(tokens, Fault), tokens
    processor = ImageProcessor.of(base.name_or_path)
    only_parts = family in ("llava 1.5", "smolvlm")
    text = base.apply_chat_template(plain(messages, only_parts=only_parts), tokenize=False)
    published = processor._processor(
        images=[decoded(picture) for picture in record.images],
        text=[text],
        add_special_tokens=False,
        padding=False,
        return_tensors=None,
    )
    ids = list(published["input_ids"][0])
    assert ids[: len(tokens.ids)] == tokens.ids.tolist()
    assert base.decode(ids[len(tokens.ids) :]).strip() == ""

    assert [use.picture for use in tokens.images] == list(record.images)
    held = tokens.ids == processor.token_id
    assert held.any()
    for use in tokens.images:
        text = base.decode(tokens.ids[use.begin : use.end].tolist())
        whole = processor.replacement(use.picture)
        assert text.strip() == whole.strip()
        held[use.begin : use.end] = False
        assert not tokens.targets[use.begin : use.end].any()
    assert not held.any()
    learned = base.decode(tokens.ids[tokens.targets].tolist())
    end = base.eos_token
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert [part.strip() for part in learned.split(end)] == [*answers, ""]


def test_inputs_are_those_of_the_published_processor(made: dict[str, Any]) -> None:
    record = chat(*CONVERSATIONS["several turns"])
    for family, base in made.items():
        processor = ImageProcessor.of(base.name_or_path)
        for picture in record.images:
            published = processor._processor(
                images=[decoded(picture)],
                text=[processor.image_token],
                padding=False,
                return_tensors="np",
            )
            inputs = processor.inputs(picture)
            assert "pixel_values" in inputs
            for name, array in inputs.items():
                if name == "num_patches":  # of InternVL, which is counted already
                    continue
                assert np.array_equal(array, np.asarray(published[name])), (family, name)


def test_lines_of_text_alone_have_the_tokens_that_they_had(made: dict[str, Any]) -> None:
    given = (
        {"role": "user", "content": f"a{IMAGE}b"},
        answer("One."),
        {"role": "user", "content": "And?"},
        answer("Two."),
    )
    for base in made.values():
        tokens = tokenized(base, chat(*given))
        assert not isinstance(tokens, Fault)
        assert tokens.images == ()
        assert IMAGE in base.decode(tokens.ids.tolist())


def test_the_base_s_own_sign_in_words_is_told(made: dict[str, Any]) -> None:
    base = made["qwen 2.5 vl"]
    for words, also in (("What is <|image_pad|>?", SMALL), ("<|image_pad|><|image_pad|>", WIDE)):
        fault = tokenized(base, chat(user(words, also), answer("A token.")))
        assert isinstance(fault, Fault)
        assert (fault.field, "the base's own sign for an image" in fault.reason) == (
            "messages",
            True,
        )
    gemma = made["gemma 3"]
    fault = tokenized(gemma, chat(user("<image_soft_token>", SMALL), answer("A token.")))
    assert isinstance(fault, Fault)
    assert "the base's own sign for an image" in fault.reason


def test_a_template_that_leaves_images_out_is_told(made: dict[str, Any], tmp_path: Path) -> None:
    folder = save_image_base(tmp_path, "qwen 2.5 vl")
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
    source += "{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    source += (
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    base: Any = load_tokenizer(str(folder), source)
    fault = tokenized(base, chat(user("Read ", SMALL, WIDE), answer("A.")))
    assert isinstance(fault, Fault)
    assert fault.field == "messages"
    assert "has 2 images, of which the base's chat template writes 0" in fault.reason


def test_a_damaged_image_is_told_with_its_place(made: dict[str, Any]) -> None:
    broken = image_part(encoded(drawn(200, 200), "JPEG")[:400])
    fault = tokenized(
        made["qwen 2.5 vl"], chat(user("a", SMALL), answer("b"), user("c", broken), answer("d"))
    )
    assert isinstance(fault, Fault)
    assert fault.field == "messages.2.content.1.image_url"
    assert "cannot be decoded" in fault.reason
    messages = [user("a"), answer("b")]
    given = {"messages": messages, "images": [broken["image_url"]["url"]]}
    fault = tokenized(made["qwen 2.5 vl"], as_record(Format.CHAT, given))
    assert isinstance(fault, Fault)
    assert (fault.field, "cannot be decoded" in fault.reason) == ("images.0", True)


def test_everything_is_not_learned_of_images(made: dict[str, Any]) -> None:
    base = made["qwen 2.5 vl"]
    options = TokenOptions(train_on="everything")
    (fault,) = tokenize(base, [(1, chat(user("a", SMALL), answer("b")))], options=options)
    assert isinstance(fault, Fault)
    assert fault.field == "messages.0.content.1.image_url"
    assert "training.train_on = 'everything'" in fault.reason


def test_samples_of_one_conversation_have_the_images_before_their_answers(tmp_path: Path) -> None:
    folder = save_image_base(tmp_path, "qwen 2.5 vl")
    # An answer is written otherwise once more follows, so that each is a sample.
    source = (folder / "chat_template.jinja").read_text()
    own = "{{ message['content'] }}<|im_end|>"
    assert own in source
    source = source.replace(
        own, "{% if message.role == 'assistant' and not loop.last %}…{% endif %}" + own
    )
    base: Any = load_tokenizer(str(folder), source)
    record = chat(user("a", SMALL), answer("b"), user("c", WIDE, SMALL), answer("d"))
    (samples,) = tokenize(base, [(1, record)])
    assert not isinstance(samples, Fault)
    assert [[use.picture for use in sample.images] for sample in samples] == [
        list(record.images[:1]),
        list(record.images),
    ]


def test_an_image_is_processed_once_for_all_samples(
    made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = made["qwen 2.5 vl"]
    processor = ImageProcessor.of(base.name_or_path)
    seen: list[str] = []
    processed = processor._processed
    monkeypatch.setattr(
        processor,
        "_processed",
        lambda picture: (seen.append(picture.key), processed(picture))[1],
    )
    other = image_part(encoded(drawn(40, 80, 77)))
    record = chat(user(other, other), answer("b"), user("c", other), answer("d"))
    found = list(tokenize(base, [(1, record), (2, record)]))
    assert all(isinstance(own, list) for own in found)
    assert seen == [record.images[0].key]


def test_a_base_without_a_processor_refuses_files_with_images(tmp_path: Path) -> None:
    folder = save_image_base(tmp_path, "qwen 2.5 vl")
    (folder / "preprocessor_config.json").unlink()
    base = load_tokenizer(str(folder))
    assert not isinstance(tokenized(base, chat(user("a"), answer("b"))), Fault)
    with pytest.raises(SpecError) as refusal:
        tokenized(base, chat(user("a", SMALL), answer("b")))
    assert (refusal.value.param, "reads no images" in refusal.value.message) == ("model", True)


def test_chunks_are_bounded_by_their_images(
    made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = made["qwen 2.5 vl"]
    record = chat(user("a", SMALL), answer("b"))
    monkeypatch.setattr(tokenizing, "CHUNK_IMAGE_BYTES", len(record.images[0].data) + 1)
    sizes: list[int] = []
    encode = tokenizing.encode
    monkeypatch.setattr(
        tokenizing, "encode", lambda *given: (sizes.append(len(given[1])), encode(*given))[1]
    )
    assert len(list(tokenize(base, [(number, record) for number in range(1, 6)]))) == 5
    assert sizes == [2, 2, 1]


def test_an_image_within_an_answer_is_refused(made: dict[str, Any]) -> None:
    base = made["qwen 2.5 vl"]
    (sample,) = tokenizing.as_texts(base, DEFAULT, chat(user("a", SMALL), answer("b")))
    (encoding,) = tokenizing.encode(base, [(1, sample)], None)
    wider = sample._replace(spans=[(sample.images[0].begin, len(sample.text))])
    check = tokenizing.SampleCheck(base, DEFAULT)
    assert check.tokens(sample, encoding).images
    with pytest.raises(tokenizing.LineError, match="an image would be learned"):
        check.tokens(wider, encoding)
    other = replace(sample.images[0].picture, detail="low")
    changed = sample._replace(images=(sample.images[0]._replace(begin=0, end=2, picture=other),))
    with pytest.raises(tokenizing.LineError, match="an image has no token"):
        check.tokens(changed, encoding)
