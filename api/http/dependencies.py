"""Dependencies of routes: the service's parts, JSON bodies and list parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query, Request
from pydantic import Field, ValidationError

from api.http.bodies import ArrivingBody, BodyTooLargeError
from api.http.curve_cache import CurveCache
from api.http.oidc_provider import OidcProvider
from api.http.prometheus import ReadStatistics
from api.http.request_limits import Rates
from api.http.sample_answers import SampleAnswers
from api.http.shared_polling import Watches
from api.http.threads import SharedWork, parsed_in_turn
from api.wire.chat_request import urls_of
from ft_service.agents.open_rollouts import OpenRollouts
from ft_service.bases.catalogue import Catalogue
from ft_service.control.admission.job_admission import AdmissionContext
from ft_service.control.checks.file_checks import FileChecks
from ft_service.control.jobs.forecasts import Forecasts
from ft_service.control.webhook_delivery import Sender
from ft_service.data.chat_line import MAX_LINE_BYTES
from ft_service.errors import SpecError
from ft_service.graders.limits import GraderLimits
from ft_service.meters import Meters
from ft_service.serving.preview import Preview
from ft_service.settings import Settings
from ft_service.spec import Strict, spec_error
from ft_service.storage.locations import Places
from ft_service.store.records import Principal
from ft_service.store.sql import Store
from ft_service.wording import kind

Body = TypeVar("Body", bound=Strict)
SCHEMAS = "#/components/schemas/{model}"
BODIES: list[type[Strict]] = []
"""Models of JSON bodies, whose schemas `api/openapi.py` adds to the document."""
MAX_JSON_BYTES = 1024**2
"""Largest JSON body."""
_EXACT = 2**53
"""Whole numbers below this are exact as floats."""
MAX_DEPTH = 100
"""Limit on nesting in a JSON body: deeper values could be parsed but not serialised."""
MOST_CONTAINERS = 20_000
"""Limit on objects and lists in a JSON body: the interpreter does nothing else while it makes those
of a list.
"""
MOST_TEXTS = 100_000
"""Limit on names and texts in a JSON body."""
SHORT_BYTES = 4096
"""Bodies up to this size are parsed at once, in less than 5 ms of a slow processor; larger ones in
a thread.
"""
TESTS = 32
"""Tests of webhook endpoints that run at once."""
TESTS_OF_PROJECT = 4


@dataclass(frozen=True)
class Services:
    """The parts of one service."""

    settings: Settings
    store: Store
    catalogue: Catalogue
    meters: Meters = field(default_factory=Meters)
    preview: Preview | None = None
    """None: chat completions are not answered here."""
    rollouts: OpenRollouts = field(default_factory=lambda: OpenRollouts(""))
    """Rollouts whose agents call the model here."""

    def admission(self, caller: Principal) -> AdmissionContext:
        """What a caller's jobs are checked by."""
        return AdmissionContext(
            caller,
            self.store,
            self.settings,
            self.catalogue,
            agents_call=bool(self.rollouts.base_url),
        )

    @cached_property
    def provider(self) -> OidcProvider | None:
        """The provider that people sign in through; None: there is none."""
        return OidcProvider(self.settings) if self.settings.oidc_issuer else None

    @cached_property
    def statistics(self) -> ReadStatistics:
        """Numbers over all projects, for scrapes of /metrics."""
        return ReadStatistics(self.store)

    @cached_property
    def keyless_rates(self) -> Rates:
        """Requests without a key that make this server ask another one, by address."""
        return Rates()

    @cached_property
    def rates(self) -> Rates:
        """Request limits of projects."""
        return Rates.of(self.store)

    @cached_property
    def recent_parts(self) -> dict[Any, Any]:
        """Parts of the page that were rendered within the last seconds."""
        return {}

    @cached_property
    def checkpoint_adapters(self) -> SharedWork[Path]:
        """Adapters of checkpoints that are looked for, or made, to answer with."""
        return SharedWork()

    @cached_property
    def watches(self) -> Watches:
        """Jobs that streams follow."""
        return Watches(self.settings.max_streams)

    @cached_property
    def curves(self) -> CurveCache:
        """Curves of jobs."""
        return CurveCache(self.store)

    @cached_property
    def file_checks(self) -> FileChecks:
        """Reports on data files without a base."""
        return FileChecks()

    @cached_property
    def webhook_tests(self) -> Sender:
        """The sender of samples to webhook endpoints."""
        return Sender(
            allow_private=self.settings.webhook_allow_private,
            at_once=TESTS,
            at_once_of_project=TESTS_OF_PROJECT,
        )

    @cached_property
    def grader_limits(self) -> GraderLimits:
        """What graders may use.

        Raises SpecError if FT_GRADER_MODELS is wrong, which `create_app` finds out.
        """
        return GraderLimits.from_settings(self.settings)

    @cached_property
    def forecasts(self) -> Forecasts:
        """Places of jobs in the queue."""
        return Forecasts(self.store)

    def refuse_samples(self, *, of_weights: bool = False) -> None:
        """Raise SpecError if this service answers no requests for samples; `of_weights`: of weights
        that were trained here.

        Requests wait in the database, so that any process of the service takes them, whichever
        answers.
        """
        text = None
        if not self.settings.previews and not self.settings.inference_urls:
            text = (
                "This service answers no requests for samples: its preview is off (FT_PREVIEW; it "
                "needs FT_LAUNCHER = local), and there is no inference server (FT_INFERENCE_URL)."
            )
        if of_weights and self.settings.inference_urls and self.settings.adapters is None:
            text = (
                "The inference server gets no weights from here: FT_ADAPTERS, a folder that it "
                "sees too, is not set."
            )
        if text is not None:
            raise SpecError(text, code="no_sampler")

    @cached_property
    def sample_answers(self) -> SampleAnswers:
        """Answers to requests for samples, for the requests that wait for them."""
        return SampleAnswers(self.store)

    @cached_property
    def places(self) -> Places:
        """Places of files by the settings."""
        return Places.of(self.settings)


async def services(request: Request) -> Services:  # async, since it needs no thread
    return request.app.state.services


async def json_body(request: Request) -> Any:
    """Return the body as JSON.

    Raises SpecError if it is too large or not JSON; ft_service checks its contents.
    """
    return await _parsed(request)


async def short_json_body(request: Request) -> Any:
    """Return the body as `json_body`, of a few bytes: nobody's, where no key is needed."""
    return await _parsed(request, most=SHORT_BYTES)


async def exact_json_body(request: Request) -> Any:
    """Return the body as `json_body`, with 3.0 as it is in a data file."""
    return await _parsed(request, exact=True)


async def optional_json_body(request: Request) -> Any:
    """Return the body as JSON; None without a body."""
    return await _parsed(request, optional=True)


async def chat_body(request: Request) -> Any:
    """Return the body as `json_body`, which may be as long as a line of a data file if images are
    what makes it longer.
    """
    return await _parsed(request, most=MAX_LINE_BYTES, allowed=_bytes_of_images)


def require_sendable(items: list[Any], param: str) -> None:
    """Raise SpecError, which names `param`, for a response's items that one body could not hold."""
    written = json.dumps(items, ensure_ascii=False).encode(errors="surrogatepass")
    whose = f"{param}: the whole conversation"
    _require_few(written, whose, param)
    if len(written) - _bytes_of_images({"input": items}) > MAX_JSON_BYTES:
        raise BodyTooLargeError(
            f"{whose} has more than {MAX_JSON_BYTES:,} bytes without its images. Begin another "
            "one, with what it needs of this one in input.",
            param=param,
        )


async def _parsed(
    request: Request,
    *,
    exact: bool = False,
    optional: bool = False,
    most: int = MAX_JSON_BYTES,
    allowed: Callable[[Any], int] = lambda _: 0,
) -> Any:
    """Parse a body: a large one in a thread, in its project's turn.

    `most`: bytes that it may have; more than MAX_JSON_BYTES must be `allowed` by what it holds.
    """
    async with ArrivingBody(request, most).whole() as body:
        if optional and not body:
            return None
        if len(body) <= SHORT_BYTES:
            return parse_json(body, exact=exact)
        parsed = await parsed_in_turn(parse_json, body, exact=exact)
        if len(body) > MAX_JSON_BYTES and len(body) - allowed(parsed) > MAX_JSON_BYTES:
            raise BodyTooLargeError(
                f"The body is larger than {MAX_JSON_BYTES:,} bytes without its images."
            )
        return parsed


def _bytes_of_images(body: Any) -> int:
    """Return the bytes of the images that a chat's body holds, as they are in it."""
    if not isinstance(body, dict):
        return 0
    messages = body.get("messages", body.get("input"))  # of a chat, or of a response
    return sum(len(url) for _, url in urls_of(messages) if url.startswith("data:"))


def parse_json(body: bytes | bytearray, *, exact: bool = False) -> Any:
    """Parse strict JSON: without NaN, numbers beyond a float's range, or duplicate keys.

    3.0 is a whole number, unless `exact`. Raises SpecError.

    The parser is in C, and keeps the interpreter from everything else until it calls Python: it
    does so for each number and object, and what it makes without a call is limited in number."""
    if not body:
        raise SpecError("The body is empty: send a JSON object.", code="invalid_json")
    containers = _require_few(body)
    try:
        value = json.loads(
            body,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_whole,
            parse_float=_finite if exact else _number,
        )
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors too
        raise SpecError(f"The body is not JSON: {error}.", code="invalid_json") from None
    if containers > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _require_few(body: bytes | bytearray, whose: str = "The body", param: str | None = None) -> int:
    """Return the number of objects and lists in JSON.

    Raises SpecError if they, or its texts, are too many.
    """
    parts = body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
    bare = b"".join(parts[::2])  # what is outside of texts
    containers = bare.count(b"{") + bare.count(b"[")
    texts = len(parts) // 2
    for count, most, what in (
        (containers, MOST_CONTAINERS, "objects and lists"),
        (texts, MOST_TEXTS, "names and texts"),
    ):
        if count > most:
            message = (
                f"{whose} has {count:,} {what}; at most {most:,} are possible. Send less at once."
            )
            raise SpecError(message, param=param, code="request_too_large")
    return containers


def parse_body(body: Any, model: type[Body]) -> Body:
    """Return a JSON body as a strict model.

    Raises SpecError naming the field, its value and the limit.
    """
    if not isinstance(body, dict):
        raise SpecError(f"The body must be an object, not {kind(body)}.")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise spec_error(error, model) from None


def body_schema(model: type[Strict], *, required: bool = True) -> dict[str, Any]:
    """Return a route's `openapi_extra`.

    FastAPI does not check its JSON body, so BODIES adds the schema.
    """
    BODIES.append(model)
    schema = {"$ref": SCHEMAS.format(model=model.__name__)}
    return {
        "requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}
    }


def binary(*media_types: str) -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses`, whose answer is not JSON, or not always."""
    return {
        200: {"content": {media_type: {"schema": {"type": "string"}} for media_type in media_types}}
    }


def server_sent() -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses`, whose answer may be server-sent events.

    The schema is that of one event.
    """
    schema = {
        "type": "object",
        "properties": {"id": {"type": "string"}, "data": {"type": "string"}},
    }
    return {200: {"content": {"text/event-stream": {"schema": schema}}}}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise SpecError(
                f"{key} is given twice in one object: keep one.", param=key, code="invalid_json"
            )
        members[key] = value
    return members


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:80]} is a number larger than any that can be kept")
    return value


def _whole(text: str) -> int:
    return int(text)


def _number(text: str) -> float | int:
    return with_whole_numbers(_finite(text))


def with_whole_numbers(value: Any) -> Any:
    """Return JSON with whole numbers in place of floats that are whole: it has one type of number,
    and in its schemas 3.0 is an integer.
    """
    if isinstance(value, dict):
        return {name: with_whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_whole_numbers(inner) for inner in value]
    return (
        int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
        else value
    )


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether objects and lists are nested more than `levels` deep."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [inner for outer in layer for inner in _members(outer)]
        if not layer:
            return False
    return True


def _members(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> SpecError:
    message = (
        f"The body is not usable JSON: nested too deeply, at most {MAX_DEPTH} objects and "
        "lists within each other."
    )
    return SpecError(message, code="invalid_json")


Svc = Annotated[Services, Depends(services)]
Cursor = Annotated[
    str | None, Field(min_length=1, description="Id of the last item of the page before.")
]
"""The cursor of a list, as a field of query parameters."""
After = Annotated[Cursor, Query()]
"""The cursor of a list, as a parameter of a route."""
JsonBody = Annotated[Any, Depends(json_body)]
ShortJsonBody = Annotated[Any, Depends(short_json_body)]
ChatBody = Annotated[Any, Depends(chat_body)]
ExactJsonBody = Annotated[Any, Depends(exact_json_body)]
OptionalJsonBody = Annotated[Any, Depends(optional_json_body)]
