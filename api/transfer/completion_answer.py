"""The preview's continuations of texts in the shape of OpenAI's older completions: one object, or
server-sent events, when they are whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from api.http.gone_clients import DISCONNECTED
from api.transfer.chat_answer import Part, Submit, all_events, parts_of
from api.wire.completion_request import Completion
from ft_service.ids import new_id
from ft_service.serving.preview import Preview

Named = tuple[str, float | None, Mapping[str, float] | None]
"""A token's text, its log-probability in nats, and the likeliest tokens with theirs."""


async def answer(
    request: Request,
    completion: Completion,
    preview: Preview,
    submit: Callable[[str | list[int]], Submit],
) -> Response:
    """Return the answer to a request, whose prompts are read one after the other.

    Raises the FtError that one ends with.
    """
    answered: list[Sequence[Part]] = []
    for prompt in completion.prompts:
        parts = await parts_of(request, preview, submit(prompt))
        if parts is None:
            return Response(status_code=DISCONNECTED)
        answered.append(parts)
    return whole(completion, answered)


def whole(completion: Completion, answered: Sequence[Sequence[Part]]) -> Response:
    """Return the answer to a request whose parts have all come: one object, or server-sent events
    at once.

    `answered`: all parts of each prompt.
    """
    choices = [
        choice_of(completion, parts, index, number * completion.n + index)
        for number, parts in enumerate(answered)
        for index in range(completion.n)
    ]
    read = sum(part["prompt_tokens"] for own in answered for part in own if _begins(part))
    written = sum(own[-1]["completion_tokens"] for own in answered) if completion.max_tokens else 0
    body = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": completion.model,
    }
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    if not completion.stream:
        return JSONResponse({**body, "choices": choices, "usage": usage})
    if not completion.counts_usage:
        return all_events([{**body, "choices": [choice]} for choice in choices])
    chunks = [{**body, "choices": [choice], "usage": None} for choice in choices]
    return all_events([*chunks, {**body, "choices": [], "usage": usage}])


def _begins(part: Part) -> bool:
    return part["kind"] == "begun"


def choice_of(
    completion: Completion, parts: Sequence[Part], index: int, number: int
) -> dict[str, Any]:
    """Return continuation `index` of a prompt, as choice `number` of the answer.

    `parts`: all of the prompt's.
    """
    own = [part for part in parts if part.get("index") == index]
    texts = [part for part in own if part["kind"] == "text" and completion.max_tokens]
    text = "".join(part["text"] for part in texts)
    named = [
        _named(token, completion.logprobs) for part in texts for token in part.get("logprobs", ())
    ]
    if completion.echo:
        (prompt,) = (part for part in parts if part["kind"] == "prompt")
        text = prompt["text"] + text
        named = [*_of_prompt(prompt["tokens"], parts), *named]
    (end,) = (part for part in own if part["kind"] == "end")
    ids = _ids(parts, end if completion.max_tokens else {}) if completion.return_token_ids else {}
    return {
        "index": number,
        "text": text,
        "logprobs": _logprobs(named) if completion.logprobs is not None else None,
        "finish_reason": end["reason"],
        **ids,
    }


def _ids(parts: Sequence[Part], end: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens of a prompt and its continuation, with vLLM's names."""
    (begun,) = filter(_begins, parts)
    return {"prompt_token_ids": begun["prompt"], "token_ids": end.get("tokens", [])}


def _of_prompt(tokens: Sequence[str], parts: Sequence[Part]) -> list[Named]:
    """The first token of a prompt follows nothing, so nothing is known of it."""
    found: list[Named] = [(token, None, None) for token in tokens]
    for part in parts:
        if part["kind"] == "scores":
            tops = part.get("top") or [[] for _ in part["logprobs"]]
            for place, (logprob, top) in enumerate(
                zip(part["logprobs"], tops, strict=True), part["place"]
            ):
                found[place] = tokens[place], logprob, _likeliest(top)
    return found


def _named(token: Mapping[str, Any], top: int | None) -> Named:
    likeliest = [(own["token"], own["logprob"]) for own in token["top_logprobs"]] if top else []
    return token["token"], token["logprob"], _likeliest(likeliest)


def _likeliest(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    """By text; of several tokens with the same text the likeliest."""
    found: dict[str, float] = {}
    for text, logprob in pairs:
        found.setdefault(text, logprob)
    return found


def _logprobs(named: Sequence[Named]) -> dict[str, Any]:
    offsets: list[int] = []
    length = 0
    for text, _, _ in named:
        offsets.append(length)
        length += len(text)
    tokens, logprobs, top = ([own[field] for own in named] for field in range(3))
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": offsets,
    }
