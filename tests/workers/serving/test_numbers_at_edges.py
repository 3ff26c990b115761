"""Every number of every body that reaches the sampler, at the edges of doubles, int64 and fp32:
refused by its name, or answered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from api.wire.chat_request import _REFUSED as CHAT_REFUSED
from api.wire.chat_request import ChatCompletion, parse_chat_completion
from api.wire.completion_request import _REFUSED as TEXT_REFUSED
from api.wire.completion_request import Completion, parse_completion
from ft_service.errors import SpecError
from ft_service.serving.server_samples import bodies_of
from ft_service.spec import PrecisionOptions, parse_request
from ft_service.spec.methods import ReinforcementHyperparameters
from ft_service.tinker.sample_calls import (
    ModelInput,
    SampleRequest,
    SamplingParams,
    TextChunk,
    parse_sample_request,
)
from tests.support.bases import SAMPLE
from workers.serving.chat_tokens import Chats
from workers.serving.engine import Engine
from workers.serving.model import ServedModel
from workers.serving.requests import ChatRequest, TextRequest, TokenRequest

EDGES = [0, -0.0, 5e-324, 1e-320, 1e-46, 1e-5, 1, 1 + 2**-52, 1e308, math.inf, -math.inf, math.nan]
EDGES += [-1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400]

Order = dict[str, Any]


def numbers_of(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Where a body of this model holds numbers; "0": in a list."""
    schema = model.model_json_schema()

    def walk(part: Mapping[str, Any], place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        name = part.get("$ref", "").rpartition("/")[2]
        part = schema["$defs"][name] if name else part
        if part.get("type") in ("integer", "number"):
            yield place
        for other in (*part.get("anyOf", ()), *part.get("allOf", ()), *part.get("oneOf", ())):
            yield from walk(other, place)
        for field, inner in part.get("properties", {}).items():
            yield from walk(inner, (*place, field))
        if isinstance(part.get("items"), dict):
            yield from walk(part["items"], (*place, "0"))

    yield from dict.fromkeys(walk(schema, ()))


def put(body: Any, place: tuple[str, ...], value: Any) -> Any:
    """The body with a value at a place; a list has this one."""
    if not place:
        return value
    name, *rest = place
    if name == "0":
        return [put({}, tuple(rest), value)]
    return {
        **body,
        name: put(body.get(name, {}) if isinstance(body, dict) else {}, tuple(rest), value),
    }


def names(error: SpecError, place: tuple[str, ...]) -> bool:
    """Whether an error names a field, or what is made of it: learning_rate of
    learning_rate_multiplier.
    """
    first = error.message.split()[0]
    return any(
        part in (error.param or "") or part in error.message or part.startswith(first)
        for part in place
        if part != "0"
    )


def chat_order(body: Any) -> Order:
    return {"op": "complete", **parse_chat_completion(body).order(None)}


def text_order(body: Any) -> Order:
    completion = parse_completion(body)
    return completion.order(completion.prompts[0], None)


def tinker_order(body: Any) -> Order:
    return parse_sample_request(body).order(None)


def reinforcement_order(body: Any) -> Order:
    """As RolloutLoop asks for a prompt's answers."""
    grader = {
        "type": "string_check",
        "name": "g",
        "input": "a",
        "reference": "a",
        "operation": "eq",
    }
    method = {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": body}}
    given = parse_request({"model": "m", "training_file": "file-1", "method": method}).method
    assert given is not None
    assert given.reinforcement is not None
    options = given.reinforcement.hyperparameters
    count = 2 if options.num_generations == "auto" else options.num_generations
    params = SamplingParams(max_tokens=2, seed=1, temperature=options.temperature)
    prompt = ModelInput(chunks=[TextChunk(tokens=[5, 6])])
    return SampleRequest(num_samples=min(count, 2), prompt=prompt, sampling_params=params).order(
        None
    )


CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 2,
    "temperature": 1.5,
    "seed": 1,
}
TEXT = {"model": "m", "prompt": "hello", "max_tokens": 2, "temperature": 1.5, "seed": 1}
DRAWN = {"max_tokens": 2, "temperature": 1.5, "seed": 1}
TINKER = {
    "prompt": {"chunks": [{"tokens": [5, 6]}]},
    "sampling_params": DRAWN,
    "prompt_logprobs": True,
}

Bodies = list[tuple[str, Callable[[Any], Order], Any, list[tuple[str, ...]]]]
BODIES: Bodies = [
    ("chat", chat_order, CHAT, [*numbers_of(ChatCompletion), *((name,) for name in CHAT_REFUSED)]),
    ("text", text_order, TEXT, [*numbers_of(Completion), *((name,) for name in TEXT_REFUSED)]),
    ("tinker", tinker_order, TINKER, list(numbers_of(SampleRequest))),
    ("reinforcement", reinforcement_order, {}, list(numbers_of(ReinforcementHyperparameters))),
]


@pytest.fixture(scope="module")
def base() -> ServedModel:
    return ServedModel(str(SAMPLE), PrecisionOptions(compute="fp32"), torch.device("cpu"), None)


def test_the_places_of_numbers_are_found() -> None:
    found = {name: set(places) for name, _, _, places in BODIES}
    assert {
        ("temperature",),
        ("top_p",),
        ("n",),
        ("seed",),
        ("max_tokens",),
        ("logit_bias",),
    } <= found["chat"]
    assert {("prompt", "0"), ("prompt", "0", "0"), ("logprobs",), ("presence_penalty",)} <= found[
        "text"
    ]
    inner = ("max_tokens", "seed", "temperature", "top_k", "top_p")
    assert {("sampling_params", name) for name in inner} <= found["tinker"]
    assert {
        ("sampling_params", "stop", "0"),
        ("prompt", "chunks", "0", "tokens", "0"),
        ("num_samples",),
    } <= found["tinker"]
    assert ("temperature",) in found["reinforcement"]


@pytest.mark.parametrize(
    ("kind", "order_of", "body", "places"), BODIES, ids=[name for name, *_ in BODIES]
)
def test_a_number_at_an_edge_is_refused_by_its_name_or_answered(
    kind: str,
    order_of: Callable[[Any], Order],
    body: Any,
    places: list[tuple[str, ...]],
    base: ServedModel,
) -> None:
    said: list[dict[str, Any]] = []
    engine = Engine(base, Chats(str(SAMPLE)), said.append)
    asked: list[str] = []
    refused: list[tuple[tuple[str, ...], SpecError]] = []
    for place in places:
        for edge in EDGES:
            given = json.loads(json.dumps(put(body, place, edge)))  # as the wire has it
            try:
                order = order_of(given)
            except SpecError as error:
                refused.append((place, error))
                continue
            name = f"{'.'.join(place)} = {edge}"
            asked.append(name)
            op = order.pop("op")
            order = json.loads(json.dumps(order))  # as the process reads it
            if op == "complete":
                engine.add(ChatRequest(name, **order))
            elif op == "text":
                engine.add_text(TextRequest(name, **order))
            else:
                # As an inference server reads it.
                json.dumps(bodies_of(order, "m", 2), allow_nan=False)
                engine.add_tokens(TokenRequest(name, **order))
    while engine.busy:
        engine.step()
    assert [(place, error.message) for place, error in refused if not names(error, place)] == []
    ends = {message["id"]: message for message in said if message["kind"] in ("done", "error")}
    assert ends.keys() == set(asked)
    failed = {name: end for name, end in ends.items() if end["kind"] == "error"}
    assert all(end["wrong"] for end in failed.values()), failed
    assert not [name for name in failed if "top_p" in name or "temperature" in name]
