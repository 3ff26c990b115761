"""Samplers of tokens, and answers to many prompts from one as one blocking call."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ft_service.errors import FtError, UnavailableError
from ft_service.serving.preview import PreviewModel
from ft_service.serving.preview_process import Deliver
from ft_service.tinker.sample_calls import Sampled, SampleRequest

AT_ONCE = 32
"""Requests of one call at once."""
BUSY_SECONDS = 0.5
"""Pause before a request is sent again that the sampler had no place for."""
LOOK_SECONDS = 0.2


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
        self, model: PreviewModel, adapter: str, requests: Sequence[SampleRequest], stop: Callable[[], bool]
    ) -> list[Sampled]:
        """The answers to all requests, with their texts. `adapter`: a PEFT folder. `stop`: asked now and then.

        Requests that the sampler has no place for wait and are sent again. Raises SamplingStopped, and FtError for a model that
        cannot be sampled from.
        """
        parts: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        sampled = [Sampled(request) for request in requests]
        waiting, under_way = list(range(len(requests)))[::-1], dict[int, object]()
        not_before = 0.0
        try:
            while waiting or under_way:
                if stop():
                    raise SamplingStopped
                while waiting and len(under_way) < AT_ONCE and time.monotonic() >= not_before:
                    number = waiting.pop()
                    try:
                        under_way[number] = self._submitted(model, adapter, number, requests[number], parts)
                    except UnavailableError:
                        waiting.append(number)
                        not_before = time.monotonic() + BUSY_SECONDS
                for number in self._taken(parts, sampled, under_way):
                    sampled[number] = Sampled(requests[number])
                    waiting.append(number)
                    not_before = time.monotonic() + BUSY_SECONDS
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

    @staticmethod
    def _taken(
        parts: queue.SimpleQueue[tuple[int, dict[str, Any]]], sampled: list[Sampled], under_way: dict[int, object]
    ) -> list[int]:
        """Take the parts of answers that have come. Returns the requests to send again. Raises FtError."""
        again: list[int] = []
        try:
            number, part = parts.get(timeout=LOOK_SECONDS)
            while True:
                if number in under_way:
                    if part["kind"] == "error":
                        error: FtError = part["error"]
                        del under_way[number]
                        if not isinstance(error, UnavailableError):
                            raise error
                        again.append(number)
                    else:
                        sampled[number].take(part)
                        if sampled[number].done:
                            del under_way[number]
                number, part = parts.get_nowait()
        except queue.Empty:
            return again
