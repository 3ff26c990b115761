"""Samplers of tokens, the requests that they answer, and calls that wait for many answers."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ft_service.bases.description import ImageFacts
from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.evaluations import Probe
from ft_service.serving.inference_server import InferenceServerError
from ft_service.serving.preview import PreviewModel
from ft_service.serving.preview_process import Deliver
from ft_service.tinker.sample_calls import (
    ModelInput,
    Sampled,
    SampleRequest,
    SamplingParams,
    TextChunk,
)
from ft_service.tinker.saved_weights import PROBES, SamplerProbes

K = TypeVar("K", bound=Hashable)

AT_ONCE = 32
"""Requests of one call at once."""
BUSY_SECONDS = 0.5
"""Pause before a request is sent again that the sampler had no place for."""
LOOK_SECONDS = 0.2
NOT_NOW = (UnavailableError, InferenceServerError)
"""Errors of requests that are sent again: the sampler, or its operator, can do something about
them.
"""


class SamplingStopped(Exception):
    """The answers are not wanted any more."""


class Sampler(Protocol):
    """What answers: `Preview` or `ServerSampler`."""

    def submit(
        self,
        model: PreviewModel,
        order: dict[str, Any],
        deliver: Deliver,
        *,
        project_id: str = "",
        on_processor: bool = False,
    ) -> object:
        """Have an order answered, whose parts are delivered.

        Raises UnavailableError, or of its kind ProjectFullError.
        """
        ...

    def cancel(self, ticket: Any) -> None:
        """Drop an order whose answer is not wanted any more.

        `ticket`: what `submit` has returned.
        """
        ...


class SampleOrders(Generic[K]):
    """Requests that are under way at a sampler, by keys of the caller's. For one thread."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._parts: queue.SimpleQueue[tuple[K, dict[str, Any]]] = queue.SimpleQueue()
        self.under_way: dict[K, tuple[Sampled, object]] = {}
        """Key → the parts of the answer so far, and the sampler's ticket."""

    def submit(
        self,
        key: K,
        model: PreviewModel,
        adapter: str | None,
        request: SampleRequest,
        project_id: str,
        *,
        texts: bool = False,
        logprobs_at: float = 1.0,
        images: ImageFacts | None = None,
    ) -> None:
        """Have a request answered.

        `adapter`: a PEFT folder; None: the base alone; `logprobs_at`: the temperature of the
        log-probabilities that are told. `images`: as of SampleRequest.order. Raises
        UnavailableError.
        """
        order = {**request.order(adapter, images), "texts": texts, "logprobs_at": logprobs_at}
        deliver: Deliver = lambda part: self._parts.put((key, part))  # noqa: E731
        ticket = self._sampler.submit(
            model, order, deliver, project_id=project_id, on_processor=True
        )
        self.under_way[key] = Sampled(request), ticket

    def ended(self, seconds: float) -> Iterator[tuple[K, Sampled | FtError]]:
        """Take the parts of answers that have come, waiting for the first.  Yields each request
        that has ended: with its whole answer, or the error that came instead.
        """
        try:
            key, part = self._parts.get(timeout=seconds)
            while True:
                if key in self.under_way:
                    sampled, _ = self.under_way[key]
                    sampled.take(part)
                    if sampled.done or part["kind"] == "error":
                        del self.under_way[key]
                        yield key, part.get("error", sampled)
                key, part = self._parts.get_nowait()
        except queue.Empty:
            return

    def cancel(self) -> None:
        """Drop all that are under way."""
        for _, ticket in self.under_way.values():
            self._sampler.cancel(ticket)


@dataclass(frozen=True)
class TokenSampler:
    """A sampler for one project and one base.

    Its calls wait for their answers, by the adapter in a PEFT folder.

    They raise SamplingStopped, what `refused` raises, and FtError for a model that cannot be
    sampled from.
    """

    sampler: Sampler
    project_id: str
    model: PreviewModel
    stop: Callable[[], bool]
    """Asked now and then whether to stop."""
    refused: Callable[[FtError, float], object]
    """Called with each error after which a request is sent again, and the seconds since the first
    one behind which nothing was answered.
    """

    def sample(
        self, adapter: str | None, requests: Sequence[SampleRequest], *, logprobs_at: float = 1.0
    ) -> list[Sampled]:
        """The answers to all requests, with their texts. `adapter`: None: of the base alone.

        `logprobs_at`: the temperature of their log-probabilities.
        """
        orders = SampleOrders[int](self.sampler)
        answers: dict[int, Sampled] = {}
        waiting = list(range(len(requests)))[::-1]
        not_before = 0.0
        refused_since: float | None = None

        def again(number: int, error: FtError) -> None:
            nonlocal not_before, refused_since
            now = time.monotonic()
            refused_since = now if refused_since is None else refused_since
            not_before = now + BUSY_SECONDS
            waiting.append(number)
            self.refused(error, now - refused_since)

        try:
            while waiting or orders.under_way:
                if self.stop():
                    raise SamplingStopped
                while (
                    waiting and len(orders.under_way) < AT_ONCE and time.monotonic() >= not_before
                ):
                    number = waiting.pop()
                    try:
                        own = requests[number]
                        orders.submit(
                            number,
                            self.model,
                            adapter,
                            own,
                            self.project_id,
                            texts=True,
                            logprobs_at=logprobs_at,
                        )
                    except NOT_NOW as error:
                        again(number, error)
                for number, outcome in orders.ended(LOOK_SECONDS):
                    if isinstance(outcome, Sampled):
                        refused_since = None
                        answers[number] = outcome
                    elif isinstance(outcome, NOT_NOW):
                        again(number, outcome)
                    else:
                        raise outcome
            return [answers[number] for number in range(len(requests))]
        finally:
            orders.cancel()

    def score(
        self,
        adapter: str,
        sequences: Sequence[tuple[Sequence[int], int]],
        *,
        logprobs_at: float = 1.0,
    ) -> list[list[float]]:
        """Log-probabilities of sequences' last tokens at a temperature, in nats.

        `sequences`: tokens, and how many of them.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0)
        requests = [
            SampleRequest(
                prompt=ModelInput(chunks=[TextChunk(tokens=list(tokens))]),
                sampling_params=params,
                prompt_logprobs=True,
                prompt_logprobs_last_n=last,
            )
            for tokens, last in sequences
        ]
        found = zip(sequences, self.sample(adapter, requests, logprobs_at=logprobs_at), strict=True)
        return [
            [own.prompt[place][0] for place in range(len(tokens) - last, len(tokens))]
            for (tokens, last), own in found
        ]

    def told(
        self, answers: Sequence[tuple[Sequence[int], Sequence[int]]], top: int
    ) -> list[dict[str, Any]]:
        """What the base thinks of each token of answers, at temperature 1 in nats: `own`, its
        log-probability, and `words` and `logprobs` of the `top` likeliest ones at its place.

        `answers`: tokens of the prompt and of the answer. Raises SpecError if the sampler tells
        fewer of them.
        """
        requests = [
            SampleRequest(
                prompt=ModelInput(chunks=[TextChunk(tokens=[*prompt, *tokens])]),
                sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
                prompt_logprobs=True,
                topk_prompt_logprobs=top,
                prompt_logprobs_last_n=len(tokens),
            )
            for prompt, tokens in answers
        ]
        try:
            sampled = self.sample(None, requests)
        except SpecError as error:
            raise self._told_too_few(top, error.message) from None
        found: list[dict[str, Any]] = []
        for (prompt, tokens), said in zip(answers, sampled, strict=True):
            places = [said.prompt[len(prompt) + place] for place in range(len(tokens))]
            fewest = min(len(likeliest) for _, likeliest in places)
            if fewest < top:
                raise self._told_too_few(top, f"It tells {fewest} words of a token.")
            found.append(
                {
                    "own": [own for own, _ in places],
                    "words": [[word for word, _ in likeliest[:top]] for _, likeliest in places],
                    "logprobs": [[log for _, log in likeliest[:top]] for _, likeliest in places],
                }
            )
        return found

    def _told_too_few(self, top: int, why: str) -> SpecError:
        return SpecError(
            f"method.distillation.top_k = {top}: the server that answers for {self.model.name} does "
            f"not tell so many words. {why.removesuffix('.')}. Start vLLM with --max-logprobs of at "
            "least so many, or give another job a smaller top_k.",
            param="method.distillation.top_k",
        )

    def score_probes(self, adapter: str) -> tuple[list[Probe], list[list[float]]]:
        """The probes that the trainer has left beside its weights, and the sampler's
        log-probabilities of them. Both are empty where it has left none.
        """
        document = RunDir(Path(adapter)).readable(PROBES, SamplerProbes)
        probes = document.probes if document is not None else []
        # One by one: vLLM 0.32 on processors ends when it scores a prompt by an adapter beside
        # other requests.
        return probes, [
            self.score(adapter, [(probe.tokens, len(probe.tokens) - 1)])[0] for probe in probes
        ]
