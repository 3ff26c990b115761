"""Continuous batching: every step computes the next token of every running answer, and a part of the waiting prompts.

All of that is one row of one forward, whatever the adapters. A new answer joins at the next step, and a long prompt is read in
parts, so that no request delays the others.
"""

from __future__ import annotations

import contextlib
import queue
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ft_service.errors import FtError, SpecError
from workers.serving.answer_text import AnswerText
from workers.serving.batched_adapters import Adapter
from workers.serving.cached_attention import KeyValueCache, Span
from workers.serving.chat_tokens import Chats, ChatTokenizer
from workers.serving.model import ServedModel, TokenSpan

MOST_SEQUENCES = 32
"""Most answers at a time; more requests wait."""
PROMPT_TOKENS = 512
"""Most tokens of prompts that are read in one step."""
PROMPT_SECONDS = 0.01
"""Wait for a prompt that is being rendered, before it is looked for new requests again."""
DEFAULT_MAX_TOKENS = 2048
"""Most tokens of an answer whose request names no limit, if the base's context has room."""

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Request:
    """A request as it arrives (ft_service/serving/chat_request.py makes it)."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    adapter: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    top_logprobs: int | None = None
    probes: list[list[int]] = field(default_factory=list)
    """Tokens whose log-probabilities show that the adapter's model answers."""
    parallel_tool_calls: bool = True


@dataclass
class _Sequence:
    """One answer of a request."""

    request: Request
    chat: ChatTokenizer
    index: int
    ids: list[int]
    """Prompt and answer."""
    prompt: int
    limit: int
    """Tokens of the answer at most."""
    adapter: Adapter | None
    text: AnswerText
    generator: torch.Generator
    memory: KeyValueCache = field(default_factory=KeyValueCache)
    read: int = 0
    """Tokens that the memory knows."""
    unsaid: list[dict[str, Any]] = field(default_factory=list)
    """Log-probabilities of tokens whose text is kept back."""

    @property
    def answered(self) -> int:
        return len(self.ids) - self.prompt


class Engine:
    """Answers requests step by step and reports their answers. For one thread."""

    def __init__(self, model: ServedModel, chats: Chats, say: Say) -> None:
        self._model, self._chats, self._say = model, chats, say
        self._rendering: dict[str, tuple[Request, ChatTokenizer]] = {}
        """Requests whose prompts are being rendered."""
        self._rendered: queue.SimpleQueue[tuple[str, Future[str]]] = queue.SimpleQueue()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._tokens: dict[str, int] = {}
        """Request → tokens of its finished answers."""
        self._probed: set[str] = set()
        """Folders of adapters."""

    @property
    def busy(self) -> bool:
        return bool(self._rendering or self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Start to render a request's prompt, while current answers continue."""
        try:
            chat = self._chats.of(request.adapter)
            if request.tools and not chat.takes_tools:
                raise SpecError("tools: the chat template has no place for tools, so they would be left out.", param="tools")
        except FtError as error:
            self._fail(request.id, error)
            return
        self._rendering[request.id] = request, chat
        prompt = chat.prompt(request.messages, request.tools)
        prompt.add_done_callback(lambda rendered: self._rendered.put((request.id, rendered)))

    def take_rendered(self, seconds: float = 0.0) -> None:
        """Queue the requests whose prompts are rendered, and report errors. `seconds`: wait so long for the first."""
        while True:
            try:
                request_id, prompt = self._rendered.get(timeout=seconds) if seconds else self._rendered.get_nowait()
            except queue.Empty:
                return
            seconds = 0.0
            if (request := self._rendering.pop(request_id, None)) is not None:  # else it was cancelled
                self._begin(*request, prompt)

    def _begin(self, request: Request, chat: ChatTokenizer, prompt: Future[str]) -> None:
        try:
            sequences = self._sequences(request, chat, chat.tokens(prompt.result()))
        except FtError as error:
            self._fail(request.id, error)
            return
        self._say({"id": request.id, "kind": "begun", "prompt_tokens": sequences[0].prompt})
        self._tokens[request.id] = 0
        self._waiting.extend(sequences)

    def drop(self, request_id: str) -> None:
        """Cancel a request."""
        self._rendering.pop(request_id, None)
        self._waiting = deque(one for one in self._waiting if one.request.id != request_id)
        self._running = [one for one in self._running if one.request.id != request_id]
        self._tokens.pop(request_id, None)

    def prepare(self, adapter: str, probes: Sequence[Sequence[int]]) -> None:
        """Load an adapter in advance; requests get the error if it does not fit."""
        with contextlib.suppress(FtError):
            self._chats.of(adapter)
            self._adapter(adapter, probes)

    def step(self) -> None:
        """Run one forward, or wait a little for a prompt if nothing else is to be done."""
        self.take_rendered(0.0 if self._waiting or self._running else PROMPT_SECONDS)
        while self._waiting and len(self._running) < MOST_SEQUENCES:
            self._running.append(self._waiting.popleft())
        for group in self._groups():
            try:
                self._forward(group)
            except torch.OutOfMemoryError:
                for one in group:
                    text = "The device's memory is full: ask for a shorter answer, or for fewer at once."
                    self._fail(one.request.id, SpecError(text, code="out_of_memory"))

    def _sequences(self, request: Request, chat: ChatTokenizer, prompt: list[int]) -> list[_Sequence]:
        room = self._model.context - len(prompt)
        wanted = request.max_tokens
        if room < (wanted or 1):
            more = f" and {wanted} were requested" if wanted else ""
            raise SpecError(
                f"The base's context is {self._model.context} tokens: the prompt has {len(prompt)}{more}. Shorten the messages"
                f"{' or max_tokens' if wanted else ''}.",
                param="messages",
                code="context_length_exceeded",
            )
        adapter = None if request.adapter is None else self._adapter(request.adapter, request.probes)
        calls = chat.calls if request.tools else None
        seed = random.getrandbits(48) if request.seed is None else request.seed
        return [
            _Sequence(
                request,
                chat,
                index,
                list(prompt),
                len(prompt),
                wanted or min(room, DEFAULT_MAX_TOKENS),
                adapter,
                AnswerText(chat.tokenizer, request.stop, calls.prefix if calls else None, keep_special=calls is not None),
                torch.Generator().manual_seed(random.Random(f"{seed}/{index}").getrandbits(63)),
            )
            for index in range(request.n)
        ]

    def _adapter(self, folder: str, probes: Sequence[Sequence[int]]) -> Adapter:
        """Load an adapter, and report its log-probabilities of the probes once."""
        adapter = self._model.adapters.get(folder)
        if probes and folder not in self._probed:
            self._probed.add(folder)
            logprobs = [self._model.logprobs(tokens, adapter) for tokens in probes]
            self._say({"kind": "probed", "adapter": folder, "logprobs": logprobs})
        return adapter

    def _groups(self) -> list[list[_Sequence]]:
        """The sequences of each forward of this step, those of one adapter side by side."""
        ordered = sorted(self._running, key=lambda one: id(one.adapter))
        return [ordered] if self._model.mixes and ordered else [[one] for one in ordered]

    def _forward(self, sequences: Sequence[_Sequence]) -> None:
        pieces, ends, place, budget = [], [], 0, PROMPT_TOKENS
        for one in sequences:
            unread = len(one.ids) - one.read
            taken = unread if unread == 1 or self._model.by_state else min(unread, budget)
            if taken == 0:
                continue
            budget -= taken if unread > 1 else 0
            span = Span(one.memory, place, place + taken)
            pieces.append(TokenSpan(one.ids[one.read : one.read + taken], span, one.read, one.adapter))
            ends.append(one)
            one.read += taken
            place += taken
        logits = self._model.forward(pieces).cpu()
        for one, row in zip(ends, logits, strict=True):
            if one.read == len(one.ids):
                self._advance(one, choose(row, _sampling(one.request), one.generator))

    def _advance(self, one: _Sequence, choice: Choice) -> None:
        one.ids.append(choice.token)
        if choice.token in one.chat.ends:
            self._finish(one, "stop")
            return
        if choice.logprob is not None:
            one.unsaid.append(_shown(one.chat, choice))
        self._tell(one, one.text.push(choice.token))
        if one.text.stopped:
            self._finish(one, "stop")
        elif one.answered >= one.limit:
            self._finish(one, "length")

    def _tell(self, one: _Sequence, text: str, *, last: bool = False) -> None:
        if not text and not (last and one.unsaid):
            return
        said: dict[str, Any] = {"id": one.request.id, "kind": "text", "index": one.index, "text": text}
        if one.request.top_logprobs is not None:
            said["logprobs"], one.unsaid = one.unsaid, []
        self._say(said)

    def _finish(self, one: _Sequence, reason: str) -> None:
        rest = one.text.end()
        calls: list[dict[str, Any]] = []
        if one.request.tools and one.chat.calls is not None:
            found = one.chat.calls.parse(one.text.whole)
            if found is not None:
                reason, calls = "tool_calls", found[1] if one.request.parallel_tool_calls else found[1][:1]
                rest = ""
        self._tell(one, rest, last=True)
        self._running.remove(one)
        self._say({"id": one.request.id, "kind": "end", "index": one.index, "reason": reason, "calls": calls})
        self._tokens[one.request.id] += one.answered
        if not any(other.request.id == one.request.id for other in (*self._running, *self._waiting)):
            self._say({"id": one.request.id, "kind": "done", "completion_tokens": self._tokens.pop(one.request.id)})

    def _fail(self, request_id: str, error: FtError) -> None:
        self.drop(request_id)
        said = {"message": error.message, "code": error.code, "param": error.param}
        self._say({"id": request_id, "kind": "error", "wrong": isinstance(error, SpecError), **said})


def _sampling(request: Request) -> Sampling:
    return Sampling(request.temperature, request.top_p, request.top_logprobs)


def _shown(chat: ChatTokenizer, choice: Choice) -> dict[str, Any]:
    top = [{**chat.token(token), "logprob": logprob} for token, logprob in choice.top]
    return {**chat.token(choice.token), "logprob": choice.logprob, "top_logprobs": top}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0: the most likely token."""
    top_p: float = 1.0
    top_logprobs: int | None = None
    """Alternatives to report for each token; None: no log-probabilities at all."""


@dataclass(frozen=True)
class Choice:
    """A token, and with `top_logprobs` its log-probability in nats and the likeliest ones (token, log-probability)."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Choice:
    """`logits`: fp32 [words], on the CPU. Log-probabilities are the model's own, before temperature and top_p."""
    if sampling.temperature == 0:
        token = int(logits.argmax())
    else:
        token = _drawn(logits / sampling.temperature, sampling.top_p, generator)
    if sampling.top_logprobs is None:
        return Choice(token)
    logs = logits.log_softmax(dim=-1)
    values, tokens = logs.topk(min(sampling.top_logprobs, len(logs)))
    return Choice(token, float(logs[token]), list(zip(tokens.tolist(), values.tolist(), strict=True)))


def _drawn(logits: Tensor, top_p: float, generator: torch.Generator) -> int:
    shares = logits.softmax(dim=-1)
    if top_p >= 1:
        return int(torch.multinomial(shares, 1, generator=generator))
    ordered, tokens = shares.sort(descending=True)
    kept = ordered.cumsum(dim=-1) - ordered < top_p  # the first one always
    return int(tokens[torch.multinomial(ordered * kept, 1, generator=generator)])
