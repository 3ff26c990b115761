"""Graders that ask a server: score_model and label_model a model of the operator's list, endpoint a
server of the user's.

Every try has a limit of time and of the answer's size, and what comes back is checked. Failures
that may pass are tried again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from ft_service.graders.grades import NO_JSON, ErrorKind, GradingError, Score, as_reward, parsed
from ft_service.graders.limits import GraderModel
from ft_service.host.signed_post import SignedMessage, signed_post
from ft_service.host.webhook_receiver import AddressError, Receiver, find_address
from ft_service.ids import new_id
from ft_service.spec.graders import EndpointGrader, LabelModel, ScoreModel

TRIES = 3
RETRY_SECONDS = 0.5
"""Wait before the second try; twice as long before the third."""
MODEL_SECONDS = 60.0
"""Time for one try of a model."""
MOST_ANSWERED = 2**20
"""Bytes of an answer, at most."""
MOST_VALUES = 65_536
"""Brackets and commas of an answer, at most: the interpreter is busy for as long as it takes to
parse them.
"""
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_ROLES = {"developer": "system"}
"""Role → the name that all servers know."""

_STEP = {
    "type": "object",
    "properties": {"description": {"type": "string"}, "conclusion": {"type": "string"}},
    "required": ["description", "conclusion"],
    "additionalProperties": False,
}


async def ask_model(
    grader: ScoreModel | LabelModel, model: GraderModel, texts: Sequence[Sequence[str]]
) -> Score:
    """Have a model of the operator's list grade a case.

    `texts`: those of each message, filled in.
    """
    try:
        body = json.dumps(_chat_request(grader, model, texts)).encode()
        status, answer = await _tried(
            "model_grader_server_error", MODEL_SECONDS, lambda: _post_chat(model, body)
        )
        if status != 200:
            raise GradingError(
                "model_grader_server_error",
                f"the model's server answered {status}{_reason(answer)}",
            )
        return _read_chat(grader, parsed(answer))
    except GradingError as error:
        return Score.failed(error)


def _chat_request(
    grader: ScoreModel | LabelModel, model: GraderModel, texts: Sequence[Sequence[str]]
) -> dict[str, Any]:
    messages = [
        {"role": _ROLES.get(message.role, message.role), "content": "\n".join(own)}
        for message, own in zip(grader.input, texts, strict=True)
    ]
    result = (
        {"type": "number"}
        if isinstance(grader, ScoreModel)
        else {"type": "string", "enum": grader.labels}
    )
    schema = {
        "type": "object",
        "properties": {"steps": {"type": "array", "items": _STEP}, "result": result},
        "required": ["steps", "result"],
        "additionalProperties": False,
    }
    request = {
        "model": model.model or grader.model,
        "messages": messages,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "grade", "strict": True, "schema": schema},
        },
    }
    sampling = grader.sampling_params if isinstance(grader, ScoreModel) else None
    given = sampling.model_dump(exclude_none=True) if sampling else {}
    if "max_completions_tokens" in given:
        given["max_completion_tokens"] = given.pop("max_completions_tokens")
    return request | given


async def _post_chat(model: GraderModel, body: bytes) -> tuple[int, bytes]:
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",
        "user-agent": "ft-service-graders",
    }
    if model.key:
        headers["authorization"] = f"Bearer {model.key}"
    async with httpx2.AsyncClient(trust_env=False, timeout=MODEL_SECONDS) as client:
        request = client.build_request(
            "POST", f"{model.base_url.rstrip('/')}/chat/completions", content=body, headers=headers
        )
        answer = await client.send(request, stream=True, follow_redirects=False)
        try:
            return await _read(answer, "model_grader_parse_error")
        finally:
            await answer.aclose()


def _read_chat(grader: ScoreModel | LabelModel, answer: Any) -> Score:
    """The score in a chat completion. Raises GradingError."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
    except (KeyError, IndexError, TypeError):
        raise GradingError("model_grader_parse_error", "the answer is no chat completion") from None
    if (
        not isinstance(message, dict)
        or message.get("refusal")
        or choice.get("finish_reason") == "content_filter"
    ):
        raise GradingError(
            "model_grader_refusal_error",
            str(message.get("refusal", "")) if isinstance(message, dict) else "",
        )
    content = message.get("content")
    given = parsed(content) if isinstance(content, str) else NO_JSON
    result = given.get("result") if isinstance(given, dict) else given
    name = answer.get("model")
    usage = answer.get("usage")
    return Score(
        _result(grader, result, content),
        model=name[:256].encode(errors="replace").decode() if isinstance(name, str) else None,
        usage=_usage(usage) if isinstance(usage, dict) else {},
    )


_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def _usage(given: dict[str, Any]) -> dict[str, int]:
    return {
        kind: given[kind]
        for kind in _USAGE
        if type(given.get(kind)) is int and 0 <= given[kind] < 2**40
    }


def _result(grader: ScoreModel | LabelModel, result: Any, content: Any) -> float:
    shown = str(content)[:200]
    if isinstance(grader, LabelModel):
        if result not in grader.labels:
            raise GradingError(
                "model_grader_parse_error",
                f"the answer holds none of the labels as `result`: {shown}",
            )
        return float(result in grader.passing_labels)
    score, (low, high) = as_reward(result), grader.range
    if score is None:
        raise GradingError(
            "model_grader_parse_error", f"the answer holds no number as `result`: {shown}"
        )
    if not low <= score <= high:
        raise GradingError(
            "model_grader_parse_error",
            f"the score {score:g} is not in the range from {low:g} to {high:g}",
        )
    return score


async def ask_endpoint(
    grader: EndpointGrader, receiver: Receiver, post: Post, cases: Sequence[bytes]
) -> list[Score]:
    """Have a user's server grade a batch of at most `batch_size` cases, each of which is JSON."""
    alone = grader.batch_size == 1
    message_id = new_id("grade_")
    body = cases[0] if alone else b'{"batch": [' + b", ".join(cases) + b"]}"
    try:
        seconds = grader.timeout_seconds
        status, answer = await _tried(
            "endpoint_grader_server_error", seconds, lambda: post(message_id, body, seconds)
        )
        if not 200 <= status < 300:
            raise GradingError("endpoint_grader_server_error", f"{receiver.host} answered {status}")
        return _read_rewards(parsed(answer), len(cases), alone=alone)
    except GradingError as error:
        return [Score.failed(error)] * len(cases)


Post = Callable[[str, bytes, float], Awaitable[tuple[int, bytes]]]
"""Sends a message (its id, its body, seconds for each wait); gives the status and the body of the
answer.
"""


@asynccontextmanager
async def signed_posts(
    receiver: Receiver,
    secrets: Sequence[str],
    *,
    allow_private: bool,
    agent: str = "ft-service-graders",
) -> AsyncIterator[Post]:
    """Give what sends messages to a receiver, whose name is looked up once. Raises GradingError.

    `agent`: the user agent.
    """
    try:
        address = await find_address(receiver, allow_private=allow_private)
    except AddressError as error:
        raise GradingError("endpoint_grader_server_error", str(error)) from None

    async def post(message_id: str, body: bytes, seconds: float) -> tuple[int, bytes]:
        message = SignedMessage(message_id, body, secrets)
        async with signed_post(receiver, address, message, agent, seconds) as answer:
            return await _read(answer, "endpoint_grader_parse_error")

    yield post


def _read_rewards(answer: Any, count: int, *, alone: bool) -> list[Score]:
    """Raises GradingError for an answer that says nothing of any case."""
    if alone:
        given = [answer.get("reward")] if isinstance(answer, dict) else None
    else:
        given = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(given, list) or len(given) != count:
        wanted = (
            '{"reward": number}'
            if alone
            else f'{{"rewards": [a number or null for each of the {count}]}}'
        )
        raise GradingError("endpoint_grader_parse_error", f"the answer is not {wanted}")
    refused = Score(error="endpoint_grader_parse_error", detail="a reward is no finite number")
    return [refused if (reward := as_reward(value)) is None else Score(reward) for value in given]


async def _tried(
    kind: ErrorKind, seconds: float, send: Callable[[], Awaitable[tuple[int, bytes]]]
) -> tuple[int, bytes]:
    """Status and body of the first try that says something.

    Raises GradingError after the last one.
    """
    why = ""
    for number in range(TRIES):
        if number:
            await asyncio.sleep(RETRY_SECONDS * 2 ** (number - 1))
        try:
            async with asyncio.timeout(seconds):
                status, answer = await send()
            if status not in _RETRIED:
                return status, answer
            why = f"the server answered {status}"
        except TimeoutError:
            why = f"there was no answer within {seconds:g} seconds"
        except GradingError:
            raise
        except (
            Exception
        ) as error:  # libraries raise many kinds of errors for addresses that users invent
            why = f"{type(error).__name__}: {error}"
    raise GradingError(kind, f"{why}, in {TRIES} tries")


async def _read(answer: httpx2.Response, kind: ErrorKind) -> tuple[int, bytes]:
    """Status and body, as it was sent: a compressed one could hold any amount.

    Raises GradingError if it is too long.
    """
    body = bytearray()
    async for part in answer.aiter_raw():
        body += part
        if len(body) > MOST_ANSWERED:
            raise GradingError(kind, f"the answer has more than {MOST_ANSWERED:,} bytes")
    if sum(map(body.count, (b"[", b"{", b","))) > MOST_VALUES:
        raise GradingError(kind, f"the answer has more than {MOST_VALUES:,} values")
    return answer.status_code, bytes(body)


def _reason(answer: bytes) -> str:
    """What a server says is wrong, if it says so in OpenAI's way."""
    given = parsed(answer)
    error = given.get("error") if isinstance(given, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f": {message[:300]}" if isinstance(message, str) else ""
