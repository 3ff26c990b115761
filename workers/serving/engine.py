"""Continuous batching: every step computes the next token of every running answer, and a part of
the waiting prompts.

All of that is one row of one forward, whatever the adapters. A new answer joins at the next step,
and a long prompt is read in parts, so that no request delays the others. Several answers to one
prompt read it once.

Projects have places, the reading of prompts, and memory in turn. A request whose tokens cannot be
computed fails alone: if that is not known of a forward of several requests, these run one by one
from then on.
"""

from __future__ import annotations

import queue
import random
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from torch import Tensor

from ft_service.bases.description import ImageFacts
from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.shared_work.turns import Turn, Turns
from workers.serving.answers import Answer, ChatAnswer, Say, TokenAnswer
from workers.serving.batched_adapters import Adapter
from workers.serving.cached_attention import KeyValueCache, Span
from workers.serving.chat_tokens import LOOKING, Chats, ChatTokenizer
from workers.serving.model import ServedModel, TokenSpan
from workers.serving.pictures import (
    ChatPictures,
    PromptImages,
    PromptPictures,
    RenderedChat,
    TokenPictures,
)
from workers.serving.requests import ChatRequest, TextRequest, TokenRequest
from workers.serving.room import Room, same_errors
from workers.serving.sampling import Sampling, choose, scores

MOST_SEQUENCES = 40
"""Most answers at a time; more wait."""
MOST_OF_PROJECT = 32
"""Most answers of one project at a time: others find a place whenever they come."""
MOST_OF_REQUEST = 16
"""Most answers of one request at a time while others wait."""
PROMPT_TOKENS = 512
"""Most tokens of prompts that are read in one step."""
SCORED_LOGITS = 2**24
"""Most logits of prompts' tokens in one step: 64 MiB in fp32, and as much for their
log-probabilities.
"""
PROMPT_SECONDS = 0.01
"""Wait for a prompt that is being rendered, before it is looked for new requests again."""
DEFAULT_MAX_TOKENS = 2048
"""Most tokens of an answer whose request names no limit, if the base's context has room."""


@dataclass(eq=False)
class _Sequence:
    """One answer of a request."""

    project: str
    request_id: str
    ids: list[int]
    """Prompt and answer; while it waits, the prompt that all answers of its request share."""
    prompt: int
    limit: int
    """Tokens of the answer at most."""
    folder: str | None
    """Folder of the adapter."""
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
    images: PromptImages | None = None
    """Those of the prompt; None: there are none."""
    others: list[_Sequence] = field(default_factory=list)
    """Answers to the same prompt, which wait until this one has read it."""
    memory: KeyValueCache = field(default_factory=KeyValueCache)
    read: int = 0
    """Tokens that the memory knows."""
    rotation: int = 0
    """Set of rotary frequencies by which it knows them (ServedModel.rotation)."""
    first: Tensor | None = None
    """Logits of the first token, fp32 [words], and `memory` is to be forked, if another answer has
    read the prompt.
    """
    turn: Turn[_Sequence] | None = None
    """Its place while it runs."""
    work: int = 0
    """Tokens that were read since it has that place."""

    @property
    def answered(self) -> int:
        return len(self.ids) - self.prompt

    @property
    def unread(self) -> int:
        return len(self.ids) - self.read

    def forget(self) -> None:
        """Read all tokens anew: some layers may know the newest, and others not."""
        self.memory = KeyValueCache()
        self.read = 0
        self.first = None

    @property
    def unscored(self) -> int:
        """Place of the token whose logits give the next log-probability to report; the last of the
        prompt: there is none.
        """
        return self.prompt - 1 - self.scored


Pictured = ChatRequest | TokenRequest
"""A request that may show pictures."""


@dataclass(eq=False)
class _Unseen:
    """A request some of whose pictures have no features yet."""

    request: Pictured
    chat: ChatTokenizer | None
    """None: it is a prompt of tokens."""
    text: str
    facts: ImageFacts
    pictures: PromptPictures


class Engine:
    """Answers requests step by step and reports their answers. For one thread."""

    def __init__(self, model: ServedModel, chats: Chats, say: Say) -> None:
        self._model = model
        self._chats = chats
        self._say = say
        self._rendering: dict[str, tuple[Pictured, ChatTokenizer | None]] = {}
        """Requests whose prompts are being rendered, or of tokens whose pictures are looked at."""
        self._rendered: queue.SimpleQueue[tuple[str, Future[RenderedChat]]] = queue.SimpleQueue()
        self._looks = Turns[str](LOOKING, of_project=1)
        """Requests whose pictures are fetched and decoded, or are to be."""
        self._looking: dict[str, Turn[str]] = {}
        self._towers = Turns[_Unseen](1)
        """Requests whose pictures wait for the base's towers."""
        self._turns = Turns[_Sequence](MOST_SEQUENCES, MOST_OF_PROJECT)
        """The places of answers.

        What waits costs the tokens that it reads, and more at its end, when more were read.
        """
        self._running: list[_Sequence] = []
        """In the order in which they began."""
        self._tokens: dict[str, int] = {}
        """Request → tokens of its finished answers."""
        self._probed: set[str] = set()
        """Folders of adapters."""
        self._apart: set[str] = set()
        """Requests that run in forwards of their own, since one with others has failed, or ended
        the process.
        """
        self._told: set[str] = set()
        """Those of them of which it is told when the engine is at them."""

    @property
    def busy(self) -> bool:
        return bool(self._rendering or len(self._towers) or self._running or len(self._turns))

    @property
    def requests(self) -> list[str]:
        """Requests without a whole answer."""
        unseen = [turn.item.request.id for turn in self._towers]
        return [*self._rendering, *unseen, *self._tokens]

    def add(self, request: ChatRequest) -> None:
        """Start to render a request's prompt, while current answers continue."""
        with self._at(request), self._answering(request.id):
            chat = self._chats.of(request.adapter)
            if request.tools and not chat.takes_tools:
                raise SpecError(
                    "tools: the chat template has no place for tools, so they would be left out.",
                    param="tools",
                )
            self._rendering[request.id] = request, chat
            if request.images is not None:
                self._looks.put(request.project, request.id)
                self._begin_looks()
                return
            prompt = chat.prompt(request.messages, request.tools)
            prompt.add_done_callback(lambda rendered: self._rendered.put((request.id, rendered)))

    def _begin_looks(self) -> None:
        """Have pictures fetched and decoded, of each project in turn, while answers continue."""
        while (turn := self._looks.take()) is not None:
            request_id = turn.item
            request, chat = self._rendering[request_id]
            assert request.images is not None
            self._looking[request_id] = turn
            pictures = ChatPictures.of(request.images)
            if isinstance(request, TokenRequest):
                prompt = self._chats.seen(pictures, request.adapter)
            else:
                assert chat is not None
                prompt = self._chats.pictured_prompt(
                    chat, request.messages, request.tools, pictures, request.adapter
                )
            prompt.add_done_callback(
                lambda rendered, own=request_id: self._rendered.put((own, rendered))
            )

    def add_tokens(self, request: TokenRequest) -> None:
        """Queue a request of tokens, whose prompt needs no rendering."""
        with self._at(request), self._answering(request.id):
            if request.images is None:
                self._queue(request, self._continuations(request, request.prompt))
                return
            self._require_known("prompt", request.prompt)
            self._rendering[request.id] = request, None
            self._looks.put(request.project, request.id)
            self._begin_looks()

    def add_text(self, request: TextRequest) -> None:
        """Queue a request to continue a text."""
        plain = self._chats.plain
        top = request.top_logprobs
        with self._at(request), self._answering(request.id):
            prompt = (
                plain.tokens(request.prompt, request.seen, special=request.add_special_tokens)
                if isinstance(request.prompt, str)
                else request.prompt
            )
            if not prompt:
                raise SpecError("prompt: has no token.", param="prompt")
            self._require_known("prompt", prompt)
            limit = request.max_tokens
            if request.window is None:
                self._room(prompt, limit, "prompt", "the prompt")
            else:
                limit = self._within(request.window, prompt, limit, "prompt", "the prompt")
            read = plain.tokenizer.decode(prompt) if request.recorded else ""
            answers = [
                ChatAnswer.of_text(request, index, plain, read, self._say)
                for index in range(request.n)
            ]
            sequences = self._sequences(request, prompt, limit, answers)
            if request.echo and top is not None:
                sequences[0].scored = len(prompt) - 1
                sequences[0].top = top
                sequences[0].name = plain.text
            self._queue(request, sequences)
            if request.echo:
                text = (
                    request.prompt
                    if isinstance(request.prompt, str)
                    else plain.tokenizer.decode(prompt)
                )
                tokens = [plain.text(token) for token in prompt]
                self._say({"id": request.id, "kind": "prompt", "text": text, "tokens": tokens})

    def take_rendered(self, seconds: float = 0.0) -> None:
        """Queue the requests whose prompts are rendered, and report errors.

        `seconds`: wait so long for the first.
        """
        while True:
            try:
                request_id, prompt = (
                    self._rendered.get(timeout=seconds) if seconds else self._rendered.get_nowait()
                )
            except queue.Empty:
                return
            seconds = 0.0
            if (turn := self._looking.pop(request_id, None)) is not None:
                self._looks.end(turn)
                self._begin_looks()
            if (
                request := self._rendering.pop(request_id, None)
            ) is not None:  # else it was cancelled
                self._begin(*request, prompt)

    def _begin(
        self, request: Pictured, chat: ChatTokenizer | None, prompt: Future[RenderedChat]
    ) -> None:
        with self._at(request), self._answering(request.id):
            rendered = prompt.result()
            if isinstance(request, TokenRequest):
                self._begin_tokens(request, rendered)
                return
            assert chat is not None
            if rendered.seen is None:
                tokens = chat.tokens(rendered.text, request.seen)
                self._queue(request, self._answers(request, chat, rendered.text, tokens))
                return
            assert request.images is not None
            facts = ImageFacts(**request.images["facts"])
            pictures = chat.pictured_tokens(rendered.text, rendered.seen, facts.token_id)
            tokens = pictures.sample.ids.tolist()
            self._room(tokens, request.max_tokens, "messages", "the messages")
            self._wait_for_towers(_Unseen(request, chat, rendered.text, facts, pictures))

    def _begin_tokens(self, request: TokenRequest, rendered: RenderedChat) -> None:
        assert request.images is not None
        assert rendered.seen is not None
        given = TokenPictures.of(request.images)
        tokenizer = self._chats.tokenizer
        pictures = given.prompt(request.prompt, rendered.seen, tokenizer)
        self._room(pictures.sample.ids.tolist(), request.max_tokens, "prompt", "the prompt")
        self._wait_for_towers(_Unseen(request, None, "", given.facts, pictures))

    def _look(self) -> None:
        """Compute the features of one picture, of each project in turn."""
        turn = self._towers.take()
        if turn is None:
            return
        self._towers.end(turn)
        one = turn.item
        request = one.request
        with self._telling(request.id), self._answering(request.id):
            with same_errors():
                images = self._model.look(one.pictures, one.facts)
            if images is None:
                self._wait_for_towers(one, first=True)
                return
            tokens = one.pictures.sample.ids.tolist()
            if isinstance(request, TokenRequest):
                self._queue(request, self._continuations(request, tokens, images))
                return
            assert one.chat is not None
            self._queue(request, self._answers(request, one.chat, one.text, tokens, images))

    def _wait_for_towers(self, one: _Unseen, *, first: bool = False) -> None:
        picture = one.pictures.next()
        cost = 1 if picture is None else len(picture.tokens)
        self._towers.put(one.request.project, one, cost, first=first)

    def _queue(
        self, request: ChatRequest | TextRequest | TokenRequest, sequences: list[_Sequence]
    ) -> None:
        """Queue the answers of a request: the first of them reads the prompt for all."""
        first, *others = sequences
        first.others = others
        recorded = not isinstance(request, TokenRequest) and request.recorded
        prompt = {"prompt": list(first.ids)} if recorded else {}
        self._say({"id": request.id, "kind": "begun", "prompt_tokens": first.prompt, **prompt})
        self._tokens[request.id] = 0
        self._wait(first)

    def drop(self, request_id: str) -> None:
        """Cancel a request."""
        self._rendering.pop(request_id, None)
        for turn in [turn for turn in self._looks if turn.item == request_id]:
            self._looks.drop(turn.item)
        for turn in [turn for turn in self._towers if turn.item.request.id == request_id]:
            self._towers.drop(turn.item)
        for turn in [turn for turn in self._turns if turn.item.request_id == request_id]:
            self._turns.drop(turn.item)
        for one in [one for one in self._running if one.request_id == request_id]:
            self._leave(one)
        self._tokens.pop(request_id, None)
        self._apart.discard(request_id)
        self._told.discard(request_id)

    def prepare(self, adapter: str, probes: Sequence[Sequence[int]]) -> None:
        """Load an adapter in advance; requests get the error if it does not fit."""
        try:
            self._chats.of(adapter)
            self._adapter(adapter, probes)
        except FtError:
            pass
        except Exception as error:
            self._failure(error)

    def park(self) -> None:
        """Let go of the base. What waits or runs goes on after `resume`, where it was: its tokens
        are read anew then.
        """
        for one in self._running[::-1]:
            self._put_back(one)
        for one in self._all_waiting():
            one.forget()
            one.adapter = None
        del self._model

    def resume(self, model: ServedModel) -> None:
        """Go on with the same base, loaded again."""
        self._model = model
        for one in self._all_waiting():
            if one.folder is not None and one.request_id in self._tokens:
                with self._answering(one.request_id):
                    one.adapter = self._adapter(one.folder, ())

    def _all_waiting(self) -> list[_Sequence]:
        return [one for turn in self._turns for one in (turn.item, *turn.item.others)]

    def step(self) -> None:
        """Run one forward, or wait a little for a prompt if nothing else is to be done."""
        busy = self._running or len(self._turns) or len(self._towers)
        self.take_rendered(0.0 if busy else PROMPT_SECONDS)
        self._look()
        self._admit()
        self._hold_back()
        for group in self._groups():
            with self._telling(group[0].request_id):
                self._run(group)

    def _run(self, group: Sequence[_Sequence]) -> None:
        """Run one forward. An error fails a request of it."""
        try:
            with same_errors():
                self._forward(group)
        except torch.OutOfMemoryError:
            self._make_room(group)
        except Exception as error:
            self._part(group, error)

    def _make_room(self, group: Sequence[_Sequence]) -> None:
        """Fail the request with most tokens of a forward that memory did not suffice for."""
        held = Counter[str]()
        for one in self._left(group):
            held[one.request_id] += len(one.ids)
            one.forget()
        for largest, _ in held.most_common(1):
            self._fail(largest, _no_memory())

    def _part(self, group: Sequence[_Sequence], error: Exception) -> None:
        """Fail the request of a forward that has failed; of several, one is at fault, so that each
        runs alone from now on.
        """
        failure = self._failure(error)
        left = self._left(group)
        requests = {one.request_id for one in left}
        if len(requests) == 1:
            self._fail(requests.pop(), failure)
            return
        self._apart |= requests
        for one in left:
            one.forget()

    def _left(self, group: Sequence[_Sequence]) -> list[_Sequence]:
        """Those of a forward whose requests have not ended in it."""
        return [one for one in group if one.request_id in self._tokens]

    @contextmanager
    def _at(self, request: ChatRequest | TextRequest | TokenRequest) -> Iterator[None]:
        """While it is entered, the engine works on nothing but this new request."""
        if request.apart:
            self._apart.add(request.id)
            self._told.add(request.id)
        with self._telling(request.id):
            yield

    @contextmanager
    def _telling(self, request_id: str) -> Iterator[None]:
        """Tell that the engine is at a request while it is entered, if that is to be told.

        What leaves it by an error ends the process.
        """
        told = request_id in self._told
        if told:
            self._say({"kind": "at", "id": request_id})
        yield
        if told:
            self._say({"kind": "at", "id": None})

    @contextmanager
    def _answering(self, request_id: str) -> Iterator[None]:
        """While it is entered, an error is the answer to a request."""
        try:
            yield
        except FtError as error:
            self._fail(request_id, error)
        except torch.OutOfMemoryError:
            self._fail(request_id, _no_memory())
        except Exception as error:
            self._fail(request_id, self._failure(error))

    def _failure(self, error: Exception) -> FtError:
        """What is said of an error that nobody thought of.

        Raises the device's own if it cannot compute any more.
        """
        traceback.print_exception(error)
        self._model.require_device()
        return FtError(
            f"The answer has failed ({type(error).__name__}); the service's log says how.",
            code="preview_failed",
        )

    def _wait(self, one: _Sequence, *, first: bool = False) -> None:
        self._turns.put(one.project, one, one.unread + 1, first=first)

    def _admit(self) -> None:
        """Give free places to waiting answers, to each project's in turn."""
        full: set[str] = set()
        while (turn := self._next(full)) is not None:
            one = turn.item
            if not self._has_place(one):
                self._turns.end(turn, cost=0.0)
                self._wait(one, first=True)
                full.add(one.project)
                continue
            one.turn = turn
            one.work = 0
            one.ids = list(one.ids)
            self._running.append(one)
            if one.first is not None:
                first = one.first
                one.first = None
                one.memory = _forked(one.memory)
                with self._telling(one.request_id), self._answering(one.request_id):
                    self._advance(one, first)

    def _next(self, full: Collection[str]) -> Turn[_Sequence] | None:
        """Take the turn of an answer whose request has few places, or else of any.

        `full`: projects that have their part of the memory.
        """
        places = Counter(one.request_id for one in self._running)
        few = self._turns.take(
            lambda one: one.project not in full and places[one.request_id] < MOST_OF_REQUEST
        )
        return few or self._turns.take(lambda one: one.project not in full)

    def _has_place(self, one: _Sequence) -> bool:
        """Whether there is memory for one more answer.

        Projects that know more than its own would then give some back.
        """
        while self._running and not self._has_room(one):
            known = self._known()
            own = len(one.ids)
            largest = max(known, key=lambda project: known[project])
            if known[largest] <= known[one.project] + own:
                return False
            self._put_back(self._holders(largest)[-1])
        return True

    def _has_room(self, one: _Sequence) -> bool:
        """Whether there is memory for one more answer, and for some tokens more than it has."""
        room = self._model.room
        return room is None or self._held(room) + room.taken(len(one.ids) * 5 // 4) <= room.bytes

    def _held(self, room: Room) -> int:
        """Bytes of what is known of all sequences; answers that wait share what is known of their
        prompt.
        """
        tokens = {id(one.memory): one.read for one in self._holders() if one.turn is None}
        tokens |= {id(one.memory): len(one.ids) for one in self._running}
        return sum(map(room.taken, tokens.values()))

    def _holders(self, project: str | None = None) -> list[_Sequence]:
        """The sequences of which something is known, the last to be forgotten first.

        `project`: only its own.
        """
        read = [turn.item for turn in self._turns if turn.item.first is not None]
        return [one for one in (*self._running, *read) if project in (None, one.project)]

    def _known(self) -> Counter[str]:
        """Tokens that are known of each project's sequences."""
        tokens = {id(one.memory): (one.project, len(one.ids)) for one in self._holders()}
        known = Counter[str]()
        for project, count in tokens.values():
            known[project] += count
        return known

    def _hold_back(self) -> None:
        """Where memory does not suffice any more, let answers wait, and read their tokens anew
        then: the newest of the project of which most is known. The oldest of all goes on.
        """
        if (room := self._model.room) is None:
            return
        while len(self._holders()) > 1 and self._held(room) > room.bytes:
            known = self._known()
            oldest = self._running[:1]
            most = max(
                (one for one in self._holders() if one not in oldest),
                key=lambda one: known[one.project],
            )
            self._put_back(self._holders(most.project)[-1])

    def _put_back(self, one: _Sequence) -> None:
        """Let a sequence wait without what is known of it, before the others of its project."""
        one.forget()
        if one.turn is not None:
            self._leave(one)
            self._wait(one, first=True)

    def _leave(self, one: _Sequence) -> None:
        """Give the place of a running sequence back."""
        assert one.turn is not None
        self._running.remove(one)
        self._turns.end(one.turn, cost=max(one.work, 1))
        one.turn = None

    def _answers(
        self,
        request: ChatRequest,
        chat: ChatTokenizer,
        text: str,
        prompt: list[int],
        images: PromptImages | None = None,
    ) -> list[_Sequence]:
        if request.window is None:
            room = self._room(prompt, request.max_tokens, "messages", "the messages")
            limit = request.max_tokens or min(room, DEFAULT_MAX_TOKENS)
        else:
            limit = self._within(
                request.window, prompt, request.max_tokens, "messages", "the messages"
            )
        answers = [
            ChatAnswer.of(request, index, chat, text, self._say) for index in range(request.n)
        ]
        return self._sequences(request, prompt, limit, answers, images)

    def _continuations(
        self, request: TokenRequest, prompt: list[int], images: PromptImages | None = None
    ) -> list[_Sequence]:
        room = self._room(prompt, request.max_tokens, "prompt", "the prompt")
        self._require_known("prompt", prompt)
        self._require_known("stop", request.stop_tokens)
        answers = [
            TokenAnswer.of(request, index, self._chats, self._say) for index in range(request.n)
        ]
        limit = request.max_tokens or room
        sequences = self._sequences(request, prompt, limit, answers, images)
        sequences[0].scored = request.scored
        sequences[0].top = request.top_prompt_logprobs
        return sequences

    def _require_known(self, name: str, tokens: Sequence[int]) -> None:
        for place, token in enumerate(tokens):
            if not 0 <= token < self._model.vocabulary:
                known = f"the base's tokens are 0 to {self._model.vocabulary - 1}"
                raise SpecError(
                    f"{name}[{place}] = {token}: {known}. Use the base's own tokenizer.", param=name
                )

    def _within(
        self, window: int, prompt: Sequence[int], wanted: int | None, param: str, which: str
    ) -> int:
        """Tokens of an answer that may have `window` tokens with its prompt.

        Raises SpecError if there is room for none.
        """
        room = min(window - len(prompt), self._room(prompt, None, param, which))
        if room < 1:
            raise SpecError(
                f"{param}: {len(prompt)} tokens, and with the answer there may be {window} "
                f"(training.max_length). Shorten {which}.",
                param=param,
                code="context_length_exceeded",
            )
        return min(room, wanted or room)

    def _room(self, prompt: Sequence[int], wanted: int | None, param: str, which: str) -> int:
        """Tokens that fit behind a prompt.

        Raises SpecError if there are not as many as are wanted.
        """
        context = self._model.context
        memory = self._model.room
        most = context if memory is None else min(context, memory.most_tokens)
        room = most - len(prompt)
        if room < (wanted or 1):
            more = f" and {wanted} were requested" if wanted else ""
            limit = f"The base's context is {context} tokens"
            if most < context:
                limit = (
                    f"The memory of the preview's host suffices for {most} tokens of an "
                    "answer with its prompt"
                )
            raise SpecError(
                f"{limit}: the prompt has {len(prompt)}{more}. Shorten "
                f"{which}{' or max_tokens' if wanted else ''}.",
                param=param,
                code="context_length_exceeded",
            )
        return room

    def _sequences(
        self,
        request: ChatRequest | TextRequest | TokenRequest,
        prompt: list[int],
        limit: int,
        answers: Sequence[Answer],
        images: PromptImages | None = None,
    ) -> list[_Sequence]:
        """The sequences of a request's answers, each with a generator of its own: what is drawn
        depends on the seed and the place of the answer alone.
        """
        adapter = (
            None if request.adapter is None else self._adapter(request.adapter, request.probes)
        )
        seed = random.getrandbits(48) if request.seed is None else request.seed
        return [
            _Sequence(
                request.project,
                request.id,
                prompt,
                len(prompt),
                limit,
                request.adapter,
                adapter,
                request.sampling,
                torch.Generator().manual_seed(random.Random(f"{seed}/{index}").getrandbits(63)),
                answer,
                images=images,
            )
            for index, answer in enumerate(answers)
        ]

    def _adapter(self, folder: str, probes: Sequence[Sequence[int]]) -> Adapter:
        """Load an adapter, and report its log-probabilities of the probes once.

        Raises SpecError for one that is not there, does not fit the base, or cannot be read, and
        where memory is short.
        """
        unprobed = [] if folder in self._probed else probes
        try:
            with same_errors():
                adapter = self._model.adapters.get(folder)
                logprobs = [self._model.logprobs(tokens, adapter) for tokens in unprobed]
        except torch.OutOfMemoryError as error:
            raise SpecError(
                "The device's memory is full, so that the adapter could not be loaded: ask again "
                "when other answers have "
                "ended, or serve it with an inference server (FT_INFERENCE_URL).",
                param="model",
                code="out_of_memory",
            ) from error
        except (OSError, SafetensorError) as error:
            raise SpecError(
                f"The adapter's files cannot be read ({type(error).__name__}): look with ft "
                "verify whether they are damaged; "
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
        if not self._model.mixes:
            return [[one] for one in ordered]
        groups: dict[str, list[_Sequence]] = {}
        for one in ordered:
            groups.setdefault(one.request_id if one.request_id in self._apart else "", []).append(
                one
            )
        return list(groups.values())

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
            pieces.append(
                TokenSpan(
                    one.ids[one.read : end],
                    span,
                    one.read,
                    one.adapter,
                    max(1, rows),
                    len(one.ids),
                    one.images,
                )
            )
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
        """A forward of a prompt that is read whole, of which more log-probabilities are wanted than
        are computed at once.
        """
        place = len(one.ids) - piece.rows
        parts = self._model.forward_in_parts(piece, self._scored_at_once)
        with self._answering(one.request_id), same_errors(), closing(parts):
            for logits in parts:
                if place + len(logits) == len(one.ids):
                    self._take(one, piece, logits, logits[-1].cpu())
                else:
                    self._score(one, logits, place)
                place += len(logits)

    def _taken(self, sequences: Sequence[_Sequence]) -> dict[int, int]:
        """Id of each sequence that runs in this forward → its next tokens that are read.

        Each project's prompts have their share. They are read in the order in which they came,
        whatever their adapters: else those of one adapter could keep another's waiting for as long
        as more come.
        """
        taken: dict[int, int] = {}
        by_arrival = {id(one): place for place, one in enumerate(self._running)}
        ordered = sorted(sequences, key=lambda one: by_arrival.get(id(one), 0))
        tokens = Counter[str]()
        rows = Counter[str]()
        for one in ordered:
            self._rotate(one)
            tokens[one.project] += one.unread if one.unread > 1 else 0
            rows[one.project] += one.scored
        budget = shares(tokens, PROMPT_TOKENS)
        scored = shares(rows, self._scored_at_once)
        for one in ordered:
            count = unread = one.unread
            if unread > 1 and not self._model.by_state:
                most = one.unscored + scored[one.project] - one.read if one.scored else unread
                count = min(unread, budget[one.project], most)
                if one.images is not None and count:
                    count = one.images.whole_to(one.read + count) - one.read
            if count == 0:
                continue
            budget[one.project] -= count if unread > 1 else 0
            scored[one.project] -= max(0, one.read + count - one.unscored) if one.scored else 0
            taken[id(one)] = count
        return taken

    def _rotate(self, one: _Sequence) -> None:
        """Read a sequence anew that has become so long that all its tokens are rotated by other
        frequencies (longrope).
        """
        rotation = self._model.rotation(len(one.ids))
        if rotation != one.rotation:
            one.memory = KeyValueCache()
            one.read = 0
            one.rotation = rotation

    @property
    def _scored_at_once(self) -> int:
        return max(1, SCORED_LOGITS // self._model.words)

    def _take(self, one: _Sequence, piece: TokenSpan, logits: Tensor, last: Tensor) -> None:
        """Continue with a sequence after a forward of its next tokens.

        `last`: the logits of the last one, on the CPU.
        """
        if one.request_id not in self._tokens:  # another of its answers has failed in this step
            return
        one.read = piece.first + len(piece.ids)
        one.work += len(piece.ids)
        with self._answering(one.request_id):
            if one.scored and one.read > one.unscored:
                self._score(one, logits, one.read - len(logits))
            if one.read == len(one.ids):
                self._share(one, last)
                self._advance(one, last)

    def _score(self, one: _Sequence, logits: Tensor, place: int) -> None:
        """Report the log-probabilities of a prompt's tokens behind those from `place` on, whose
        logits these are, fp32 [tokens, words]. Raises SpecError.
        """
        after = one.ids[place + 1 : min(place + 1 + len(logits), one.prompt)]
        logprobs, top = scores(logits[: len(after)], after, one.top, one.sampling.logprobs_at)
        one.scored -= len(after)
        said = {"id": one.request_id, "kind": "scores", "place": place + 1, "logprobs": logprobs}
        named = (
            [[(one.name(token), logprob) for token, logprob in own] for own in top]
            if one.name
            else top
        )
        self._say({**said, "top": named} if one.top else said)

    def _share(self, one: _Sequence, last: Tensor) -> None:
        """Queue the other answers to a prompt that is read now, before the others of its project:
        so few prompts are kept.
        """
        others = one.others
        one.others = []
        kept = _forked(one.memory) if others else one.memory
        for other in others:
            other.memory = kept
            other.read = one.read
            other.rotation = one.rotation
            other.first = last
        for other in reversed(others):
            self._wait(other, first=True)

    def _advance(self, one: _Sequence, logits: Tensor) -> None:
        """Draw a sequence's next token. Raises SpecError."""
        choice = choose(logits, one.sampling, one.generator)
        one.ids.append(choice.token)
        if one.answer.push(choice):
            self._finish(one, "stop")
        elif one.answered >= one.limit:
            self._finish(one, "length")

    def _finish(self, one: _Sequence, reason: str) -> None:
        one.answer.end(reason)
        self._leave(one)
        self._tokens[one.request_id] += one.answered
        waiting = (turn.item for turn in self._turns)
        if not any(other.request_id == one.request_id for other in (*self._running, *waiting)):
            self._say(
                {
                    "id": one.request_id,
                    "kind": "done",
                    "completion_tokens": self._tokens.pop(one.request_id),
                }
            )
            self._apart.discard(one.request_id)
            self._told.discard(one.request_id)

    def _fail(self, request_id: str, error: FtError) -> None:
        self.drop(request_id)
        said = {"message": error.message, "code": error.code, "param": error.param}
        later = error.retry_after if isinstance(error, UnavailableError) else None
        wrong = isinstance(error, SpecError)
        self._say({"id": request_id, "kind": "error", "wrong": wrong, "later": later, **said})


@torch.inference_mode()
def _forked(memory: KeyValueCache) -> KeyValueCache:
    return memory.fork()


def _no_memory() -> SpecError:
    text = "The device's memory is full: ask for a shorter answer, or for fewer at once."
    return SpecError(text, code="out_of_memory")


def shares(wanted: Mapping[str, int], budget: int) -> dict[str, int]:
    """What each project gets of a budget: as much as it wants, or as any other gets, and at least
    1.
    """
    given: dict[str, int] = {}
    for place, (project, most) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        given[project] = min(most, max(1, (budget - sum(given.values())) // (len(wanted) - place)))
    return given
