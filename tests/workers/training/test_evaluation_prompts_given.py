"""A job's own prompts as questions, and which questions a job asks."""

from __future__ import annotations

from contextlib import closing, nullcontext
from datetime import date
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ft_service.data.line_errors import ImageError, LineError
from ft_service.data.tokens.sample import ImageUse, Picture, Tokens
from ft_service.errors import DataError
from ft_service.spec import Prompt
from workers.training import evaluation_prompts as module

PICTURE = ImageUse(0, 1, Picture.of(b"picture"))
CHAT: Any = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "you"}]},
]
SHOWN = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi you"}]


class Letters:
    """A tokenizer of one letter a token, which adds a token to texts of which it is not told."""

    name_or_path = "/base"
    eos_token_id = 2

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [*[1] * add_special_tokens, *map(ord, text)]}

    def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
        return " ".join(map(chr, ids)) + (" " if skip_special_tokens else "!")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "bare_prompt", lambda tokenizer, text: f"<{text}>")
    monkeypatch.setattr(module, "closing_of", lambda text: f"closes {text}")


def write(messages: Any, tools: Any = None, *, prompt: bool = False, images: bool = False) -> str:
    assert prompt
    assert not images
    return "|".join(f"{turn['role']}={turn['content']}" for turn in messages)


@pytest.mark.parametrize(
    ("given", "text", "messages"),
    [
        ({"prompt": "hi"}, "<hi>", None),
        ({"messages": CHAT}, "system=be brief|user=hi you", SHOWN),
    ],
)
def test_a_prompt_is_a_question_as_it_is_rendered(given: Any, text: str, messages: Any) -> None:
    prompt = Prompt(**given, reference="r", item={"wanted": 1})
    options: Any = (write, None)
    own = module._question_of(3, prompt, Letters(), *options)
    assert own.ids.tolist() == list(map(ord, text))
    assert own.ids.dtype == np.int32
    assert (own.prompt, own.closing) == (" ".join(text), f"closes {text}")
    assert (own.reference, own.item, own.messages) == ("r", {"wanted": 1}, messages)
    assert (own.tools, own.ends, own.images) == (False, frozenset(), ())


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (LineError("messages", "no template"), "prompt 3: messages: no template."),
        (LineError("", "it is refused"), "prompt 3: it is refused."),
        (None, "prompt 3 has no token."),
    ],
)
def test_a_prompt_that_cannot_be_asked_is_named(
    error: LineError | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*given: Any) -> Any:
        if error is not None:
            raise error
        return module._tokens("", Letters()), ""

    monkeypatch.setattr(module, "_asked", asked)
    options: Any = (None, None)
    with pytest.raises(DataError) as refused:
        module._question_of(3, Prompt(prompt="hi"), Letters(), *options)
    assert refused.value.message == f"evaluation.prompts: {says}"
    assert refused.value.code == "invalid_prompt"


def test_a_conversation_needs_a_template() -> None:
    options: Any = (None, None)
    with pytest.raises(LineError, match="has no chat template") as refused:
        module._asked(Prompt(messages=CHAT), Letters(), *options)
    assert refused.value.field == "messages"
    processor: Any = SimpleNamespace(replacement=_refuse)
    with pytest.raises(ImageError) as refused:
        module._replacement(processor, PICTURE.picture, "messages.0")
    assert (refused.value.field, refused.value.reason) == ("messages.0", "it is broken")


def _refuse(picture: Any) -> str:
    raise ImageError("", "it is broken")


def test_a_conversation_with_pictures_is_rendered_with_what_stands_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = SimpleNamespace(placed=[(PICTURE.picture, "messages.0")], pictures=[PICTURE.picture])
    parsed: list[Any] = []
    monkeypatch.setattr(
        module, "parse_conversation", lambda *given: parsed.append(given) or (["turn"], None, shown)
    )
    processor = SimpleNamespace(image_token="@", token_id=64, replacement=lambda picture: "@@")
    asked_for: list[Any] = []
    monkeypatch.setattr(
        module.ImageProcessor, "of", lambda *given: asked_for.append(given) or processor
    )
    monkeypatch.setattr(
        module,
        "with_pictures",
        lambda text, token, written, count: (f"{text}{token}{list(written)}{count}", "places"),
    )
    monkeypatch.setattr(
        module,
        "with_uses",
        lambda places, encoding, tokens, token: (places, encoding, tokens, token),
    )

    class Encoding(Letters):
        def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Any:
            if isinstance(text, str):
                return super().__call__(text, add_special_tokens=add_special_tokens)
            return SimpleNamespace(encodings=[(text[0], add_special_tokens)])

    def write(
        messages: Any, tools: Any = None, *, prompt: bool = False, images: bool = False
    ) -> str:
        return f"{messages}{prompt}{images}"

    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    prompt = Prompt(messages=[{"role": "user", "content": [part]}])  # type: ignore[list-item]
    options: Any = (write, "pixels")
    found, whole = module._asked(prompt, Encoding(), *options)
    assert whole == f"['turn']TrueTrue@{[(PICTURE.picture, '@@')]}1"
    places, encoding, tokens, token = found  # type: ignore[misc]
    assert (places, encoding, token) == ("places", (whole, False), 64)
    assert tokens.ids.tolist() == list(map(ord, whole))
    assert asked_for == [("/base", "pixels")]
    ((given, tools),) = parsed
    assert (given[0]["role"], tools, "name" in given[0]) == ("user", [], False)
    assert module._shown(prompt.messages[0].content if prompt.messages else "") == "[image]"


class Process:
    """A process that renders, and is closed."""

    closed = 0

    def write(self, messages: Any, tools: Any, day: Any, *, prompt: bool, images: bool) -> str:
        return f"{messages} {tools} {day} {prompt} {images}"

    def close(self) -> None:
        Process.closed += 1


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("given", ["none", "own", "off"])
def test_a_job_asks_its_own_prompts_or_its_samples(
    template: bool, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = date(2026, 1, 2)
    options: Any = SimpleNamespace(day=day, pixels="pixels")
    monkeypatch.setattr(module.TokenOptions, "of", lambda spec: options)
    monkeypatch.setattr(
        module, "rendering", lambda tokenizer: closing(Process()) if template else nullcontext()
    )
    writers: list[Any] = []
    monkeypatch.setattr(
        module, "answer_format", lambda write, tokenizer: writers.append(write) or "format"
    )
    learned: Any = SimpleNamespace(ends=frozenset({5}))
    monkeypatch.setattr(module, "_question", lambda *given: writers.append(given[3]) or learned)
    asked: list[Any] = []
    monkeypatch.setattr(
        module, "_question_of", lambda *given: asked.append(given) or f"q{given[0]}"
    )
    monkeypatch.setattr(
        module, "answer_ends", lambda write, tokenizer, folder: {6, len(str(folder))}
    )
    monkeypatch.setattr(module, "stops_of", lambda folder: {7, len(str(folder))})
    evaluation = None if given == "off" else SimpleNamespace(given=["a", "b"] * (given == "own"))
    spec: Any = SimpleNamespace(model=SimpleNamespace(path="/base"), evaluation=evaluation)
    samples: Any = ["sample"]
    tokenizer: Any = Letters()
    before = Process.closed
    found = module.asked_of(spec, samples, tokenizer)
    assert Process.closed == before + template
    assert found.questions == (["q1", "q2"] if given == "own" else [learned])
    assert (found.answers, found.ends) == ("format", {2, 5, 6 if template else 7})
    assert (writers[0] is not None, writers[1] is writers[0]) == (template, True)
    if template:
        assert writers[0](["m"], ["t"], prompt=True) == f"['m'] ['t'] {day} True False"
        assert writers[0](["m"], images=True) == f"['m'] None {day} False True"
    assert [own[:2] + own[4:] for own in asked] == [
        (number, own, "pixels")
        for number, own in enumerate(evaluation.given if evaluation else (), 1)
    ]
    prompts: Any = ["c", "d"]
    assert module.questions_of_prompts(prompts, tokenizer, options) == ["q1", "q2"]
    assert (Process.closed, asked[-1][1]) == (before + 2 * template, "d")
    assert (asked[-1][3] is not None, asked[-1][4]) == (template, "pixels")


@pytest.mark.parametrize("shows", [[], [False], [False, True]])
def test_pictures_of_prompts_are_computed_with_the_others(
    shows: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SimpleNamespace(chat_template="template")
    monkeypatch.setattr(module.TokenOptions, "of", lambda spec: options)
    loaded: list[Any] = []
    monkeypatch.setattr(module, "load_tokenizer", lambda *given: loaded.append(given))
    own = Tokens(np.array([4, 5], np.int32), np.zeros(2, np.bool_), images=(PICTURE,))
    questions = [SimpleNamespace(ids=own.ids, images=(PICTURE,) * show) for show in shows]
    monkeypatch.setattr(module, "questions_of_prompts", lambda *given: questions)
    given = [SimpleNamespace(shows_images=show) for show in shows]
    spec: Any = SimpleNamespace(
        model=SimpleNamespace(path="/base"), evaluation=SimpleNamespace(given=given)
    )
    found = module.pictured_prompts(spec)
    assert len(found) == sum(shows)
    assert loaded == [("/base", "template")] * any(shows)
    if shows and any(shows):
        assert (found[0].ids.tolist(), found[0].targets.any()) == ([4, 5], False)
        assert [use.begin for use in found[0].images] == [0]
    spec.evaluation = None
    assert len(module.pictured_prompts(spec)) == 0
