"""Continuations of texts in the wire's shape: tokens and log-probabilities are those of plain
transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from api.transfer.completion_answer import choice_of
from api.wire.completion_request import parse_completion
from ft_service.errors import SpecError
from ft_service.spec import PrecisionOptions
from tests.support.bases import SAMPLE
from workers.serving.chat_tokens import Chats
from workers.serving.engine import Engine
from workers.serving.model import ServedModel
from workers.serving.requests import TextRequest

TEXT = "The red radio was delivered yesterday, but"
LIMIT = 6


@pytest.fixture(scope="module")
def chats() -> Chats:
    return Chats(str(SAMPLE))


@pytest.fixture(scope="module")
def base() -> ServedModel:
    return ServedModel(str(SAMPLE), PrecisionOptions(compute="fp32"), torch.device("cpu"), None)


def parts_of(
    base: ServedModel, chats: Chats, prompt: Any, **options: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """The parsed completion, and what the engine says of it."""
    completion = parse_completion(
        {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": LIMIT, **options}
    )
    said: list[dict[str, Any]] = []
    engine = Engine(base, chats, said.append)
    order = completion.order(completion.prompts[0], None)
    assert order.pop("op") == "text"
    engine.add_text(TextRequest("one", **order))
    while engine.busy:
        engine.step()
    return completion, said


def test_a_text_and_its_tokens_are_continued_alike_with_every_log_probability(
    base: ServedModel, chats: Chats
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    ids = chats.tokenizer(TEXT)["input_ids"]
    out = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=LIMIT, do_sample=False)[
        0
    ].tolist()
    with torch.no_grad():
        logs = model(torch.tensor([out])).logits[0].log_softmax(dim=-1)
    answers = [
        choice_of(*parts_of(base, chats, prompt, echo=True, logprobs=2), 0, 0)
        for prompt in (TEXT, ids)
    ]
    assert out[-1] in chats.ends, "the token that ends it is no text, but has a log-probability"
    assert answers[0] == answers[1]
    found = answers[0]["logprobs"]
    assert answers[0]["text"] == TEXT + chats.tokenizer.decode(out[len(ids) : -1])
    assert found["tokens"] == [chats.tokenizer.decode([token]) for token in out]
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    expected = [float(logs[place - 1, out[place]]) for place in range(1, len(out))]
    assert found["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    assert [max(top.values()) for top in found["top_logprobs"][1:]] == pytest.approx(
        logs[:-1].amax(dim=-1).tolist(), abs=1e-4
    )
    assert found["text_offset"][:2] == [0, len(found["tokens"][0])]


def test_the_prompt_alone_is_scored_without_a_continuation(base: ServedModel, chats: Chats) -> None:
    answer = choice_of(*parts_of(base, chats, TEXT, echo=True, logprobs=0, max_tokens=0), 0, 0)
    tokens = chats.tokenizer(TEXT)["input_ids"]
    assert answer["text"] == TEXT
    assert len(answer["logprobs"]["token_logprobs"]) == len(tokens)
    assert all(isinstance(logprob, float) for logprob in answer["logprobs"]["token_logprobs"][1:])


def test_without_echo_only_the_continuation_is_answered(base: ServedModel, chats: Chats) -> None:
    answer = choice_of(*parts_of(base, chats, TEXT, n=2, max_tokens=1), 1, 3)
    assert (answer["index"], answer["logprobs"], answer["finish_reason"]) == (3, None, "length")
    assert TEXT not in answer["text"]


def test_the_tokens_of_a_choice_are_told(base: ServedModel, chats: Chats) -> None:
    ids = chats.tokenizer(TEXT)["input_ids"]
    parts = parts_of(base, chats, TEXT, return_token_ids=True, max_tokens=16, logprobs=0)
    found = choice_of(*parts, 0, 0)
    assert found["prompt_token_ids"] == ids
    assert found["token_ids"][-1] in chats.ends, "also the one that ends it"
    assert found["text"] == chats.tokenizer.decode(found["token_ids"][:-1])
    (end,) = (part for part in parts[1] if part["kind"] == "end")
    assert end["logprobs"] == found["logprobs"]["token_logprobs"]
    scored = parts_of(base, chats, TEXT, return_token_ids=True, max_tokens=0, echo=True)
    assert choice_of(*scored, 0, 0)["token_ids"] == []


def test_a_recorded_text_and_its_continuation_stay_within_their_window(
    base: ServedModel, chats: Chats
) -> None:
    length = len(chats.tokenizer(TEXT)["input_ids"])
    said: list[dict[str, Any]] = []
    engine = Engine(base, chats, said.append)
    order: dict[str, Any] = {"temperature": 0.0, "recorded": True, "logprobs_at": 0.5}
    for more in (0, 1):
        engine.add_text(TextRequest(f"{more}", TEXT, 9, window=length + more, **order))
    while engine.busy:
        engine.step()
    (refused,) = (own for own in said if own["kind"] == "error")
    assert (refused["id"], refused["param"]) == ("0", "prompt")
    assert (refused["code"], f"may be {length} " in refused["message"]) == (
        "context_length_exceeded",
        True,
    )
    (end,) = (own for own in said if own["kind"] == "end")
    assert (end["id"], len(end["tokens"]), end["truncated"]) == ("1", 1, True)
    assert (end["prompt_text"], end["drawn_text"]) == (TEXT, chats.tokenizer.decode(end["tokens"]))
    ids = torch.tensor([chats.tokenizer(TEXT)["input_ids"]])
    model: Any = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype=torch.float32)
    with torch.no_grad():
        logs = (model(ids).logits[0, -1] / 0.5).log_softmax(-1)
    assert end["logprobs"] == pytest.approx([float(logs[end["tokens"][0]])], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 33}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"suffix": "end"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_completion({"model": "m", "prompt": "Hi", **change})
    assert str(caught.value.param).startswith(param)


def test_a_token_that_the_base_has_not_is_refused(base: ServedModel, chats: Chats) -> None:
    _, (said,) = parts_of(base, chats, [5, 10**6])
    assert (said["kind"], said["param"]) == ("error", "prompt")
    assert "prompt[1] = 1000000" in said["message"]
