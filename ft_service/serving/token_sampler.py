"""Samplers of tokens, and answers to many prompts from one as one blocking call."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ft_service.errors import FtError, UnavailableError
from ft_service.serving.inference_server import InferenceServerError
from ft_service.serving.preview import PreviewModel
from ft_service.serving.preview_process import Deliver
from ft_service.tinker.sample_calls import Sampled, SampleRequest

AT_ONCE = 32
"""Requests of one call at once."""
BUSY_SECONDS = 0.5
"""Pause before a request is sent again that the sampler had no place for."""
LOOK_SECONDS = 0.2
NOT_NOW = (UnavailableError, InferenceServerError)
"""Errors of requests that are sent again: the sampler, or its operator, can do something about them."""


class SamplingStopped(Exception):
    """The answers are not wanted any more."""


class Sampler(Protocol):
    """What answers: `Preview` or `ServerSampler`."""

    def submit(
        self, model: PreviewModel, order: dict[str, Any], deliver: Deliver, *, project_id: str = "", on_processor: bool = False
    ) -> object:
        """Have an order answered, whose parts are delivered. Raises UnavailableError."""
        ...

    def cancel(self, ticket: Any) -> None:
        """Drop an order whose answer is not wanted any more. `ticket`: what `submit` has returned."""
        ...


@dataclass(frozen=True)
class TokenSampler:
    """A sampler for one project."""

    sampler: Sampler
    project_id: str

    def sample(
        self,
        model: PreviewModel,
        adapter: str,
        requests: Sequence[SampleRequest],
        stop: Callable[[], bool],
        refused: Callable[[FtError, float], object],
    ) -> list[Sampled]:
        """The answers to all requests, with their texts. `adapter`: a PEFT folder. `stop`: asked now and then. `refused`:
        called with each error after which a request is sent again, and the seconds since the first one behind which nothing
        was answered; what it raises ends the call.

        Raises SamplingStopped, and FtError for a model that cannot be sampled from.
        """
        parts: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        sampled = [Sampled(request) for request in requests]
        waiting, under_way = list(range(len(requests)))[::-1], dict[int, object]()
        not_before = 0.0
        refused_since: float | None = None

        def again(number: int, error: FtError) -> None:
            nonlocal not_before, refused_since
            now = time.monotonic()
            refused_since = now if refused_since is None else refused_since
            not_before = now + BUSY_SECONDS
            sampled[number] = Sampled(requests[number])
            waiting.append(number)
            refused(error, now - refused_since)

        try:
            while waiting or under_way:
                if stop():
                    raise SamplingStopped
                while waiting and len(under_way) < AT_ONCE and time.monotonic() >= not_before:
                    number = waiting.pop()
                    try:
                        under_way[number] = self._submitted(model, adapter, number, requests[number], parts)
                    except NOT_NOW as error:
                        again(number, error)
                for number, part in _taken(parts):
                    if number not in under_way:
                        continue
                    if part["kind"] != "error":
                        refused_since = None
                        sampled[number].take(part)
                        if sampled[number].done:
                            del under_way[number]
                    elif isinstance(part["error"], NOT_NOW):
                        del under_way[number]
                        again(number, part["error"])
                    else:
                        raise part["error"]
            return sampled
        finally:
            for ticket in under_way.values():
                self.sampler.cancel(ticket)

    def _submitted(
        self,
        model: PreviewModel,
        adapter: str,
        number: int,
        request: SampleRequest,
        parts: queue.SimpleQueue[tuple[int, dict[str, Any]]],
    ) -> object:
        order = request.order(adapter) | {"texts": True}
        deliver = lambda part: parts.put((number, part))  # noqa: E731
        return self.sampler.submit(model, order, deliver, project_id=self.project_id, on_processor=True)


def _taken(parts: queue.SimpleQueue[tuple[int, dict[str, Any]]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The parts that have come, after a while for the first one."""
    try:
        yield parts.get(timeout=LOOK_SECONDS)
        while True:
            yield parts.get_nowait()
    except queue.Empty:
        return
