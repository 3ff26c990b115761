"""Dependencies of routes: the service's parts, and a request's body and list parameters."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query, Request
from pydantic import ValidationError

from api.http.batching import Batched
from api.http.curve_cache import CurveCache
from api.http.key_cache import Holders
from api.http.rates import Rates
from api.http.watching import Watches
from ft_service.bases.catalogue import Catalogue
from ft_service.control.admission import Asked, create
from ft_service.control.checks.file_checks import FileChecks
from ft_service.control.forecasts import Forecasts
from ft_service.control.webhook_delivery import Sender
from ft_service.errors import SpecError
from ft_service.jobs.states import Job
from ft_service.meters import Meters
from ft_service.serving.preview import Preview
from ft_service.settings import Settings
from ft_service.spec import Strict, spec_error
from ft_service.storage.locations import Places
from ft_service.store.sql import Store

Body = TypeVar("Body", bound=Strict)
SCHEMAS = "#/components/schemas/{model}"
MAX_JSON_BYTES = 1024**2
"""Largest JSON body."""
_EXACT = 2**53
"""Whole numbers below this are exact as floats."""
LARGE_JSON_BYTES = 8 * 1024
"""A body above this is read by a thread, not by the event loop: it may hold thousands of patterns."""
MAX_DEPTH = 100
"""Objects and lists within each other in one: what is deeper can be read and not be written again."""
TESTS = 32
"""Of webhook endpoints, under way at once."""
TESTS_OF_PROJECT = 4
_DRAINED_BYTES = 64 * 1024**2
"""How much of a refused body is read and thrown away, so that the client gets to read the refusal."""


@dataclass(frozen=True)
class Services:
    """The parts of one service, built in `main` and passed down."""

    settings: Settings
    store: Store
    catalogue: Catalogue
    meters: Meters = field(default_factory=Meters)
    preview: Preview | None = None
    """None: chat completions are not answered here."""

    @cached_property
    def holders(self) -> Holders:
        """The holders of keys."""
        return Holders(self.store)

    @cached_property
    def rates(self) -> Rates:
        """How many requests projects send."""
        return Rates.of(self.store)

    @cached_property
    def remembered(self) -> dict[Any, Any]:
        """For whoever answers the same to many within a moment."""
        return {}

    @cached_property
    def watches(self) -> Watches:
        """What is followed, and by how many."""
        return Watches(self.settings.max_streams)

    @cached_property
    def curves(self) -> CurveCache:
        """The curves of jobs."""
        return CurveCache(self.store)

    @cached_property
    def file_checks(self) -> FileChecks:
        """Reports on data files without a base."""
        return FileChecks()

    @cached_property
    def create_job(self) -> Batched[Asked, Job]:
        """Check and store a job from its parsed body, in a batch with those that arrive at the same time."""
        return self._creating()

    @cached_property
    def create_large_job(self) -> Batched[Asked, Job]:
        """The same for bodies over LARGE_JSON_BYTES, whose patterns may take long: the others do not wait for them."""
        return self._creating()

    def _creating(self) -> Batched[Asked, Job]:
        work = partial(create, store=self.store, settings=self.settings, catalogue=self.catalogue)
        return Batched(work, lambda asked: asked.principal.project_id)

    @cached_property
    def webhook_tests(self) -> Sender:
        """What sends samples to users' receivers."""
        return Sender(allow_private=self.settings.webhook_allow_private, at_once=TESTS, at_once_of_project=TESTS_OF_PROJECT)

    @cached_property
    def forecasts(self) -> Forecasts:
        """Where jobs stand in the queue."""
        return Forecasts(self.store)

    @cached_property
    def places(self) -> Places:
        """The places where the settings keep files."""
        return Places.of(self.settings)


async def services(request: Request) -> Services:  # async: it waits for nothing, and needs no thread
    return request.app.state.services


async def json_body(request: Request) -> Any:
    """The body as JSON. Raises SpecError if it is too large or no JSON; the core checks its contents."""
    return parse_json(await _read(request))


async def optional_json_body(request: Request) -> Any:
    """The same; None without a body."""
    body = await _read(request)
    return parse_json(body) if body else None


async def _read(request: Request) -> bytes:
    body = b""
    stream = request.stream()
    async for chunk in stream:
        body += chunk
        if len(body) > MAX_JSON_BYTES:
            await drain(stream, _DRAINED_BYTES)
            raise SpecError(f"The body is larger than {MAX_JSON_BYTES} bytes.", code="request_too_large")
    request.state.body_is_large = len(body) > LARGE_JSON_BYTES
    return body


async def drain(stream: AsyncIterator[bytes], limit: int) -> None:
    """Read what the client still sends, up to a limit: a connection closed on unread data loses the answer."""
    async for chunk in stream:
        limit -= len(chunk)
        if limit < 0:
            return


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN, no number beyond those of a float, no key twice in an object. Raises SpecError."""
    if not body:
        raise SpecError("The body is empty: send a JSON object.", code="invalid_json")
    try:
        found = json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors too
        raise SpecError(f"The body is not JSON: {error}.", code="invalid_json") from None
    if _is_deeper(found, MAX_DEPTH):
        raise _too_deep()
    return found


def parse_body(body: Any, model: type[Body]) -> Body:
    """A JSON body as a strict model. Raises SpecError naming the field, its value and the limit."""
    if not isinstance(body, dict):
        raise SpecError(f"The body must be an object, not {type(body).__name__}.")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise spec_error(error, model) from None


def body_schema(model: type[Strict], *, required: bool = True) -> dict[str, Any]:
    """A route's `openapi_extra`: its JSON body is not checked by FastAPI, so `app.py` adds the schema that this refers to."""
    schema = {"$ref": SCHEMAS.format(model=model.__name__)}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def binary(*media_types: str) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: its answer is not JSON, or not always."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}} for media_type in media_types}}}


def server_sent() -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: its answer may be server-sent events, whose schema is that of one event."""
    schema = {"type": "object", "properties": {"id": {"type": "string"}, "data": {"type": "string"}}}
    return {200: {"content": {"text/event-stream": {"schema": schema}}}}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise SpecError(f"{key} is given twice in one object: keep one.", param=key, code="invalid_json")
        members[key] = value
    return members


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float | int:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:80]} is a number larger than any that can be kept")
    # JSON has one kind of number: 3.0 is as whole as 3, and its schemas say so.
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether more objects and lists than that are within each other."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [inner for outer in layer for inner in _members(outer)]
        if not layer:
            return False
    return True


def _members(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> SpecError:
    message = f"The body is not usable JSON: nested too deeply, at most {MAX_DEPTH} objects and lists within each other."
    return SpecError(message, code="invalid_json")


Svc = Annotated[Services, Depends(services)]
After = Annotated[str | None, Query(min_length=1, description="Id of the last item of the page before.")]
"""A list's cursor."""
JsonBody = Annotated[Any, Depends(json_body)]
OptionalJsonBody = Annotated[Any, Depends(optional_json_body)]
