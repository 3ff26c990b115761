"""Continuous batching: every step computes the next token of every running answer, and a part of the waiting prompts.

All of that is one row of one forward, whatever the adapters. A new answer joins at the next step, and a long prompt is read in
parts, so that no request delays the others. Several answers to one prompt read it once.
"""

from __future__ import annotations

import contextlib
import queue
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from torch import Tensor

from ft_service.errors import FtError, SpecError
from workers.serving.answers import Answer, ChatAnswer, Say, TokenAnswer
from workers.serving.batched_adapters import Adapter
from workers.serving.cached_attention import KeyValueCache, Span
from workers.serving.chat_tokens import Chats, ChatTokenizer
from workers.serving.model import ServedModel, TokenSpan
from workers.serving.requests import ChatRequest, TextRequest, TokenRequest
from workers.serving.room import Room, same_errors
from workers.serving.sampling import Sampling, choose, scores

MOST_SEQUENCES = 32
"""Most answers at a time; more wait."""
MOST_OF_REQUEST = MOST_SEQUENCES // 2
"""Most answers of one request at a time while others wait."""
PROMPT_TOKENS = 512
"""Most tokens of prompts that are read in one step."""
SCORED_LOGITS = 2**24
"""Most logits of prompts' tokens in one step: 64 MiB in fp32, and as much for their log-probabilities."""
PROMPT_SECONDS = 0.01
"""Wait for a prompt that is being rendered, before it is looked for new requests again."""
DEFAULT_MAX_TOKENS = 2048
"""Most tokens of an answer whose request names no limit, if the base's context has room."""


@dataclass(eq=False)
class _Sequence:
    """One answer of a request."""

    request_id: str
    ids: list[int]
    """Prompt and answer; while it waits, the prompt that all answers of its request share."""
    prompt: int
    limit: int
    """Tokens of the answer at most."""
    adapter: Adapter | None
    sampling: Sampling
    generator: torch.Generator
    answer: Answer
    scored: int = 0
    """Tokens at the prompt's end whose log-probabilities are to be reported."""
    top: int = 0
    """Likeliest tokens to report at each of their places."""
    name: Callable[[int], str] | None = None
    """Text of a token, to report these by; None: by their numbers."""
    others: list[_Sequence] = field(default_factory=list)
    """Answers to the same prompt, which wait until this one has read it."""
    memory: KeyValueCache = field(default_factory=KeyValueCache)
    read: int = 0
    """Tokens that the memory knows."""
    rotation: int = 0
    """Set of rotary frequencies by which it knows them (ServedModel.rotation)."""
    first: Tensor | None = None
    """Logits of the first token, fp32 [words], and `memory` is to be forked, if another answer has read the prompt."""

    @property
    def answered(self) -> int:
        return len(self.ids) - self.prompt

    @property
    def unscored(self) -> int:
        """Place of the token whose logits give the next log-probability to report; the last of the prompt: there is none."""
        return self.prompt - 1 - self.scored


class Engine:
    """Answers requests step by step and reports their answers. For one thread."""

    def __init__(self, model: ServedModel, chats: Chats, say: Say) -> None:
        self._model, self._chats, self._say = model, chats, say
        self._rendering: dict[str, tuple[ChatRequest, ChatTokenizer]] = {}
        """Requests whose prompts are being rendered."""
        self._rendered: queue.SimpleQueue[tuple[str, Future[str]]] = queue.SimpleQueue()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        """In the order in which they began."""
        self._tokens: dict[str, int] = {}
        """Request → tokens of its finished answers."""
        self._probed: set[str] = set()
        """Folders of adapters."""

    @property
    def busy(self) -> bool:
        return bool(self._rendering or self._waiting or self._running)

    def add(self, request: ChatRequest) -> None:
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

    def add_tokens(self, request: TokenRequest) -> None:
        """Queue a request of tokens, whose prompt needs no rendering."""
        try:
            self._queue(request, self._continuations(request))
        except FtError as error:
            self._fail(request.id, error)

    def add_text(self, request: TextRequest) -> None:
        """Queue a request to continue a text."""
        plain, top = self._chats.plain, request.top_logprobs
        try:
            prompt = plain.tokens(request.prompt) if isinstance(request.prompt, str) else request.prompt
            if not prompt:
                raise SpecError("prompt: has no token.", param="prompt")
            self._require_known("prompt", prompt)
            self._room(prompt, request.max_tokens, "prompt", "the prompt")
            answers = [ChatAnswer.of(request, index, plain, self._say) for index in range(request.n)]
            sequences = self._sequences(request, prompt, request.max_tokens, answers)
            if request.echo and top is not None:
                sequences[0].scored, sequences[0].top, sequences[0].name = len(prompt) - 1, top, plain.text
            self._queue(request, sequences)
        except FtError as error:
            self._fail(request.id, error)
            return
        if request.echo:
            text = request.prompt if isinstance(request.prompt, str) else plain.tokenizer.decode(prompt)
            self._say({"id": request.id, "kind": "prompt", "text": text, "tokens": [plain.text(token) for token in prompt]})

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

    def _begin(self, request: ChatRequest, chat: ChatTokenizer, prompt: Future[str]) -> None:
        try:
            self._queue(request, self._answers(request, chat, chat.tokens(prompt.result())))
        except FtError as error:
            self._fail(request.id, error)

    def _queue(self, request: ChatRequest | TextRequest | TokenRequest, sequences: list[_Sequence]) -> None:
        """Queue the answers of a request: the first of them reads the prompt for all."""
        first, *others = sequences
        first.others = others
        self._say({"id": request.id, "kind": "begun", "prompt_tokens": first.prompt})
        self._tokens[request.id] = 0
        self._waiting.append(first)

    def drop(self, request_id: str) -> None:
        """Cancel a request."""
        self._rendering.pop(request_id, None)
        self._waiting = deque(one for one in self._waiting if one.request_id != request_id)
        self._running = [one for one in self._running if one.request_id != request_id]
        self._tokens.pop(request_id, None)

    def prepare(self, adapter: str, probes: Sequence[Sequence[int]]) -> None:
        """Load an adapter in advance; requests get the error if it does not fit."""
        with contextlib.suppress(FtError):
            self._chats.of(adapter)
            self._adapter(adapter, probes)

    def step(self) -> None:
        """Run one forward, or wait a little for a prompt if nothing else is to be done."""
        self.take_rendered(0.0 if self._waiting or self._running else PROMPT_SECONDS)
        self._admit()
        self._hold_back()
        for group in self._groups():
            try:
                with same_errors():
                    self._forward(group)
            except torch.OutOfMemoryError:
                self._make_room(group)

    def _make_room(self, group: Sequence[_Sequence]) -> None:
        """Fail the request with most tokens of a forward that memory did not suffice for. Tokens of the others are read anew,
        since some layers know the newest and others do not."""
        held = Counter[str]()
        for one in group:
            if one.request_id in self._tokens:  # else it has ended in this step
                held[one.request_id] += len(one.ids)
                one.memory, one.read = KeyValueCache(), 0
        for largest, _ in held.most_common(1):
            text = "The device's memory is full: ask for a shorter answer, or for fewer at once."
            self._fail(largest, SpecError(text, code="out_of_memory"))

    def _admit(self) -> None:
        """Let waiting answers run while there are places."""
        while self._waiting and len(self._running) < MOST_SEQUENCES:
            one = self._next()
            if self._running and not self._has_room(one):
                return
            self._waiting.remove(one)
            one.ids = list(one.ids)
            self._running.append(one)
            if one.first is not None:
                first, one.first = one.first, None
                one.memory = _forked(one.memory)
                self._advance(one, first)

    def _next(self) -> _Sequence:
        """The first that waits, unless its request has many places already and another one waits."""
        places = Counter(one.request_id for one in self._running)
        for one in self._waiting:
            if places[one.request_id] < MOST_OF_REQUEST:
                return one
        return self._waiting[0]

    def _has_room(self, one: _Sequence) -> bool:
        """Whether there is memory for one more answer, and for some tokens more than it has."""
        room = self._model.room
        return room is None or self._held(room) + room.taken(len(one.ids) * 5 // 4) <= room.bytes

    def _held(self, room: Room) -> int:
        """Bytes of what is known of all sequences; answers that wait share what is known of their prompt."""
        tokens = {id(one.memory): one.read for one in self._waiting if one.first is not None}
        tokens |= {id(one.memory): len(one.ids) for one in self._running}
        return sum(map(room.taken, tokens.values()))

    def _hold_back(self) -> None:
        """Where memory does not suffice any more, let the answers that began last wait, and read their tokens anew then."""
        if (room := self._model.room) is None:
            return
        holders = [*self._running[1:], *(one for one in self._waiting if one.first is not None)]
        while holders and self._held(room) > room.bytes:
            one = holders.pop()
            one.memory, one.read, one.first = KeyValueCache(), 0, None
            if one in self._running:
                self._running.remove(one)
                self._waiting.appendleft(one)

    def _answers(self, request: ChatRequest, chat: ChatTokenizer, prompt: list[int]) -> list[_Sequence]:
        room = self._room(prompt, request.max_tokens, "messages", "the messages")
        limit = request.max_tokens or min(room, DEFAULT_MAX_TOKENS)
        answers = [ChatAnswer.of(request, index, chat, self._say) for index in range(request.n)]
        return self._sequences(request, prompt, limit, answers)

    def _continuations(self, request: TokenRequest) -> list[_Sequence]:
        room = self._room(request.prompt, request.max_tokens, "prompt", "the prompt")
        self._require_known("prompt", request.prompt)
        self._require_known("stop", request.stop_tokens)
        answers = [TokenAnswer.of(request, index, self._chats, self._say) for index in range(request.n)]
        sequences = self._sequences(request, request.prompt, request.max_tokens or room, answers)
        sequences[0].scored, sequences[0].top = request.scored, request.top_prompt_logprobs
        return sequences

    def _require_known(self, name: str, tokens: Sequence[int]) -> None:
        for place, token in enumerate(tokens):
            if not 0 <= token < self._model.vocabulary:
                known = f"the base's tokens are 0 to {self._model.vocabulary - 1}"
                raise SpecError(f"{name}[{place}] = {token}: {known}. Use the base's own tokenizer.", param=name)

    def _room(self, prompt: Sequence[int], wanted: int | None, param: str, which: str) -> int:
        """Tokens that fit behind a prompt. Raises SpecError if there are not as many as are wanted."""
        context, memory = self._model.context, self._model.room
        most = context if memory is None else min(context, memory.most_tokens)
        room = most - len(prompt)
        if room < (wanted or 1):
            more = f" and {wanted} were requested" if wanted else ""
            limit = f"The base's context is {context} tokens"
            if most < context:
                limit = f"The memory of the preview's host suffices for {most} tokens of an answer with its prompt"
            raise SpecError(
                f"{limit}: the prompt has {len(prompt)}{more}. Shorten {which}{' or max_tokens' if wanted else ''}.",
                param=param,
                code="context_length_exceeded",
            )
        return room

    def _sequences(
        self, request: ChatRequest | TextRequest | TokenRequest, prompt: list[int], limit: int, answers: Sequence[Answer]
    ) -> list[_Sequence]:
        """The sequences of a request's answers, each with a generator of its own: what is drawn depends on the seed and the
        place of the answer alone."""
        adapter = None if request.adapter is None else self._adapter(request.adapter, request.probes)
        seed = random.getrandbits(48) if request.seed is None else request.seed
        return [
            _Sequence(
                request.id,
                prompt,
                len(prompt),
                limit,
                adapter,
                request.sampling,
                torch.Generator().manual_seed(random.Random(f"{seed}/{index}").getrandbits(63)),
                answer,
            )
            for index, answer in enumerate(answers)
        ]

    def _adapter(self, folder: str, probes: Sequence[Sequence[int]]) -> Adapter:
        """Load an adapter, and report its log-probabilities of the probes once. Raises SpecError for one that is not there,
        does not fit the base, or cannot be read, and where memory is short."""
        unprobed = [] if folder in self._probed else probes
        try:
            with same_errors():
                adapter = self._model.adapters.get(folder)
                logprobs = [self._model.logprobs(tokens, adapter) for tokens in unprobed]
        except torch.OutOfMemoryError as error:
            raise SpecError(
                "The device's memory is full, so that the adapter could not be loaded: ask again when other answers have "
                "ended, or serve it with an inference server (FT_INFERENCE_URL).",
                param="model",
                code="out_of_memory",
            ) from error
        except (OSError, SafetensorError) as error:
            raise SpecError(
                f"The adapter's files cannot be read ({type(error).__name__}): look with ft verify whether they are damaged; "
                "if they are not, ask again.",
                param="model",
                code="model_not_served",
            ) from error
        if unprobed:
            self._say({"kind": "probed", "adapter": folder, "logprobs": logprobs})
            self._probed.add(folder)
        return adapter

    def _groups(self) -> list[list[_Sequence]]:
        """The sequences of each forward of this step, those of one adapter side by side."""
        ordered = sorted(self._running, key=lambda one: id(one.adapter))
        return [ordered] if self._model.mixes and ordered else [[one] for one in ordered]

    def _forward(self, sequences: Sequence[_Sequence]) -> None:
        taken = self._taken(sequences)
        pieces: list[TokenSpan] = []
        ran: list[_Sequence] = []
        place = 0
        for one in (one for one in sequences if id(one) in taken):
            count = taken[id(one)]
            end = one.read + count
            rows = max(0, end - one.unscored) if one.scored else 0
            span = Span(one.memory, place, place + count)
            pieces.append(TokenSpan(one.ids[one.read : end], span, one.read, one.adapter, max(1, rows), len(one.ids)))
            ran.append(one)
            place += count
        if not pieces:
            return
        if self._model.by_state and pieces[0].rows > self._scored_at_once:
            self._forward_in_parts(ran[0], pieces[0])
            return
        logits = self._model.forward(pieces).split([piece.rows for piece in pieces])
        last = torch.stack([own[-1] for own in logits]).cpu()
        for one, piece, own, row in zip(ran, pieces, logits, last, strict=True):
            self._take(one, piece, own, row)

    def _forward_in_parts(self, one: _Sequence, piece: TokenSpan) -> None:
        """A forward of a prompt that is read whole, of which more log-probabilities are wanted than are computed at once."""
        place = len(one.ids) - piece.rows
        with closing(self._model.forward_in_parts(piece, self._scored_at_once)) as parts:
            for logits in parts:
                if place + len(logits) == len(one.ids):
                    self._take(one, piece, logits, logits[-1].cpu())
                elif not self._score(one, logits, place):
                    return
                place += len(logits)

    def _taken(self, sequences: Sequence[_Sequence]) -> dict[int, int]:
        """Id of each sequence that runs in this forward → its next tokens that are read. Prompts are read in the order in which
        they came, whatever their adapters: else those of one adapter could keep another's waiting for as long as more come.
        """
        taken: dict[int, int] = {}
        budget, scored = PROMPT_TOKENS, self._scored_at_once
        by_arrival = {id(one): place for place, one in enumerate(self._running)}
        for one in sorted(sequences, key=lambda one: by_arrival.get(id(one), 0)):
            self._turn(one)
            unread = len(one.ids) - one.read
            count = unread
            if unread > 1 and not self._model.by_state:
                count = min(unread, budget, one.unscored + scored - one.read if one.scored else unread)
            if count == 0:
                continue
            budget -= count if unread > 1 else 0
            scored -= max(0, one.read + count - one.unscored) if one.scored else 0
            taken[id(one)] = count
        return taken

    def _turn(self, one: _Sequence) -> None:
        """Read a sequence anew that has become so long that all its tokens are rotated by other frequencies (longrope)."""
        rotation = self._model.rotation(len(one.ids))
        if rotation != one.rotation:
            one.memory, one.read, one.rotation = KeyValueCache(), 0, rotation

    @property
    def _scored_at_once(self) -> int:
        return max(1, SCORED_LOGITS // self._model.words)

    def _take(self, one: _Sequence, piece: TokenSpan, logits: Tensor, last: Tensor) -> None:
        """Continue with a sequence after a forward of its next tokens. `last`: the logits of the last one, on the CPU."""
        if one.request_id not in self._tokens:  # another of its answers has failed in this step
            return
        one.read = piece.first + len(piece.ids)
        if one.scored and one.read > one.unscored and not self._score(one, logits, one.read - len(logits)):
            return
        if one.read == len(one.ids):
            self._share(one, last)
            self._advance(one, last)

    def _score(self, one: _Sequence, logits: Tensor, place: int) -> bool:
        """Report the log-probabilities of a prompt's tokens behind those from `place` on, whose logits these are, fp32 [tokens,
        words]. False: the request has failed."""
        after = one.ids[place + 1 : min(place + 1 + len(logits), one.prompt)]
        try:
            logprobs, top = scores(logits[: len(after)], after, one.top)
        except FtError as error:
            self._fail(one.request_id, error)
            return False
        one.scored -= len(after)
        said = {"id": one.request_id, "kind": "scores", "place": place + 1, "logprobs": logprobs}
        named = [[(one.name(token), logprob) for token, logprob in own] for own in top] if one.name else top
        self._say({**said, "top": named} if one.top else said)
        return True

    def _share(self, one: _Sequence, last: Tensor) -> None:
        """Queue the other answers to a prompt that is read now, ahead of what waits: so few prompts are kept for answers."""
        others, one.others = one.others, []
        kept = _forked(one.memory) if others else one.memory
        for other in others:
            other.memory, other.read, other.rotation, other.first = kept, one.read, one.rotation, last
        self._waiting.extendleft(reversed(others))

    def _advance(self, one: _Sequence, logits: Tensor) -> None:
        """Draw a sequence's next token."""
        try:
            choice = choose(logits, one.sampling, one.generator)
        except FtError as error:
            self._fail(one.request_id, error)
            return
        one.ids.append(choice.token)
        if one.answer.push(choice):
            self._finish(one, "stop")
        elif one.answered >= one.limit:
            self._finish(one, "length")

    def _finish(self, one: _Sequence, reason: str) -> None:
        one.answer.end(reason)
        self._running.remove(one)
        self._tokens[one.request_id] += one.answered
        if not any(other.request_id == one.request_id for other in (*self._running, *self._waiting)):
            self._say({"id": one.request_id, "kind": "done", "completion_tokens": self._tokens.pop(one.request_id)})

    def _fail(self, request_id: str, error: FtError) -> None:
        self.drop(request_id)
        said = {"message": error.message, "code": error.code, "param": error.param}
        self._say({"id": request_id, "kind": "error", "wrong": isinstance(error, SpecError), **said})


@torch.inference_mode()
def _forked(memory: KeyValueCache) -> KeyValueCache:
    return memory.fork()
