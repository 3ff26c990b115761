"""A base's tokenizer as the preview uses it: conversations to prompts, and tokens to what the wire
shows of them.

Prompts are rendered by a process for each chat template, under limits
(ft_service/data/template_process.py), while the engine continues with other answers: a slow
template or conversation delays only requests with the same template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from ft_service.data.answer_format import AnswerFormat
from ft_service.data.image_process import ImageProcess, SeenPictures
from ft_service.data.limited_process import RenderLimits
from ft_service.data.line_errors import OF_FILES, LineError
from ft_service.data.sample_kinds import Picture
from ft_service.data.template_process import TemplateProcess
from ft_service.data.token_options import NO_BOUNDS, PixelBounds, TokenOptions
from ft_service.data.tokenizer_files import stops_of
from ft_service.data.tokens.answer_ends import answer_ends, answer_format
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.image_processor import bounds_of
from ft_service.data.tokens.sample import Tokens
from ft_service.data.tokens.tokenize import load_tokenizer, with_pictures, with_uses
from ft_service.errors import SpecError, UnavailableError
from workers.serving.pictures import ChatPictures, PromptPictures, RenderedChat

LIMITS = RenderLimits(seconds=2.0, memory_bytes=256 * 1024**2)
"""Limits of rendering one conversation."""
_TEMPLATE = "chat_template.jinja"
"""File in an adapter's folder with the chat template of its job, where the job had its own."""
_TEMPLATES = 8
"""Chat templates of jobs whose processes are kept."""
LOOKING = 2
"""Requests whose pictures are fetched and decoded at a time, each in a process of about 200 MB."""


class Chats:
    """A base's conversations, by its own chat template and by those that jobs have trained with."""

    def __init__(self, path: str) -> None:
        """Raises SpecError for a base without a usable tokenizer."""
        self.tokenizer: Any = load_tokenizer(path)
        named = {self.tokenizer.eos_token_id, *stops_of(Path(path))}
        self.ends = frozenset(token for token in named if isinstance(token, int))
        """Tokens that end an answer whatever the chat template: the tokenizer's and those of
        generation_config.json.
        """
        self.plain = PlainTokenizer(self.tokenizer, self.ends)
        of_base = partial(ChatTokenizer, path, self.tokenizer)
        # apart, so that no number of others takes its place.
        self._own = lru_cache(maxsize=1)(of_base)
        self._by = lru_cache(maxsize=_TEMPLATES)(of_base)
        self._lookers = ThreadPoolExecutor(LOOKING, "images")
        self._image_processes = SimpleQueue[ImageProcess]()
        for _ in range(LOOKING):  # none is started before it is needed
            self._image_processes.put(ImageProcess(path))

    def of(self, adapter: str | None) -> ChatTokenizer:
        """The chat tokenizer by which this adapter, a PEFT folder, was trained; None: the base's.

        Raises SpecError.
        """
        try:
            template = (
                (Path(adapter) / _TEMPLATE).read_text(encoding="utf-8")
                if adapter is not None
                else ""
            )
        except OSError:
            template = ""
        return self._by(template) if template else self._own()

    def pictured_prompt(
        self,
        chat: ChatTokenizer,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any],
        pictures: ChatPictures,
        adapter: str | None,
    ) -> Future[RenderedChat]:
        """The prompt of a conversation with pictures, once they are looked at as in the training of
        the adapter, a PEFT folder. At most LOOKING are asked for at a time.

        The result raises SpecError and UnavailableError, as of `ChatTokenizer.prompt`.
        """
        bounds = NO_BOUNDS if adapter is None else bounds_of(Path(adapter))
        look = partial(self._seen, pictures, bounds)
        return self._lookers.submit(self._pictured, chat, messages, tools, look)

    def seen(self, pictures: ChatPictures, adapter: str | None) -> Future[RenderedChat]:
        """Pictures of a prompt of tokens, likewise, without a text."""
        bounds = NO_BOUNDS if adapter is None else bounds_of(Path(adapter))
        return self._lookers.submit(lambda: RenderedChat("", self._seen(pictures, bounds)))

    def _pictured(
        self,
        chat: ChatTokenizer,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any],
        look: Callable[[], SeenPictures],
    ) -> RenderedChat:
        seen = look()
        return RenderedChat(chat.prompt(messages, tools, images=True).result().text, seen)

    def _seen(self, pictures: ChatPictures, bounds: PixelBounds) -> SeenPictures:
        process = self._image_processes.get()
        try:
            return process.look(pictures.pictures, pictures.places, bounds)
        except LineError as error:
            raise _at_fault(error) from None
        finally:
            self._image_processes.put(process)


class PlainTokenizer:
    """A base's tokenizer for texts without a chat template."""

    def __init__(self, tokenizer: Any, ends: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.ends = ends
        self.token = lru_cache(maxsize=65536)(partial(_token, tokenizer))

    def tokens(
        self, text: str, seen: Sequence[Sequence[int]] = (), *, special: bool = True
    ) -> list[int]:
        """The tokens of a text, with `special` those that the tokenizer begins texts with.

        `seen`: as of `ChatTokenizer.tokens`.
        """
        begin: list[int] = self.tokenizer("")["input_ids"] if special else []
        behind = [own[len(begin) :] for own in seen if list(own[: len(begin)]) == begin]
        known = _begun_with(self.tokenizer, text, behind)
        if known is None:
            return self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return [*begin, *known]

    def text(self, token: int) -> str:
        return self.token(token)["token"]


class ChatTokenizer:
    """One chat template of one base."""

    def __init__(self, path: str, tokenizer: Any, chat_template: str = "") -> None:
        """`tokenizer`: the base's.

        `chat_template`: in place of its own. Raises SpecError for a base without chat template.
        """
        self.tokenizer = tokenizer
        template = ChatTemplate.of(tokenizer, chat_template)
        if template is None:
            raise SpecError(
                "The base's tokenizer has no chat template, so it cannot be talked to. Models "
                "that a job with a chat_template "
                "has tuned can.",
                param="model",
            )
        self.takes_tools = "tools" in template.text
        """Whether the template has a place for definitions of tools: others leave them out without
        a word.
        """
        self._process = TemplateProcess(template.sources, template.special_tokens, LIMITS)
        self._path = Path(path)
        self._queue = ThreadPoolExecutor(1, "chat-template")
        self._known = self._queue.submit(self._ask_template)
        self.token = lru_cache(maxsize=65536)(partial(_token, tokenizer))

    @property
    def answers(self) -> AnswerFormat:
        """How answers are written. Known once a prompt is."""
        return self._told()[0]

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer. Known once a prompt is."""
        return self._told()[1]

    def prompt(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], *, images: bool = False
    ) -> Future[RenderedChat]:
        """The text that an answer follows, once it is rendered: one conversation after the other.

        `images`: IMAGE in it stands for pictures, and the text has the base's sign there.

        The result raises SpecError for a conversation that the template refuses, or that exceeds
        its limits; UnavailableError if the host lets no process render it.
        """
        return self._queue.submit(self._prompt, list(messages), list(tools), images)

    def tokens(self, prompt: str, seen: Sequence[Sequence[int]] = ()) -> list[int]:
        """The tokens of a rendered prompt.

        `seen`: tokens of earlier prompts with their answers; the longest with whose text the prompt
        begins is its beginning, however its text is tokenised else.
        """
        known = _begun_with(self.tokenizer, prompt, seen)
        return _plain_tokens(self.tokenizer, prompt) if known is None else known

    def pictured_tokens(self, text: str, seen: SeenPictures, token_id: int) -> PromptPictures:
        """The tokens of a rendered prompt with pictures. `token_id`: of placeholders.

        Raises SpecError.
        """
        written = [(Picture(own.key, b""), own.text) for own in seen.pictures]
        try:
            whole, images = with_pictures(text, seen.image_token, written, len(written))
            encoding = self.tokenizer([whole], add_special_tokens=False).encodings[0]
            ids = np.asarray(encoding.ids, np.int32)
            tokens = Tokens(ids, np.zeros(len(ids), np.bool_))
            return PromptPictures(with_uses(images, encoding, tokens, token_id), seen)
        except LineError as error:
            raise _at_fault(error) from None

    def _prompt(
        self, messages: list[dict[str, Any]], tools: list[Any], images: bool
    ) -> RenderedChat:
        try:
            return RenderedChat(self._write(messages, tools, prompt=True, images=images))
        except LineError as error:
            raise _at_fault(error) from None

    def _told(self) -> tuple[AnswerFormat, frozenset[int]]:
        """What the template says of itself.

        If the host killed its process, the next request finds it asked again.
        """
        known = self._known
        try:
            return known.result()
        except UnavailableError:
            self._known = self._queue.submit(self._ask_template)
            raise

    def _ask_template(self) -> tuple[AnswerFormat, frozenset[int]]:
        return answer_format(self._write, self.tokenizer), answer_ends(
            self._write, self.tokenizer, self._path
        )

    def _write(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        prompt: bool = False,
        images: bool = False,
    ) -> str:
        """Raises LineError."""
        day = TokenOptions().day
        return self._process.write(messages, tools, day, prompt=prompt, images=images)


def _begun_with(tokenizer: Any, text: str, seen: Sequence[Sequence[int]]) -> list[int] | None:
    """The tokens of a text that begins with the text of earlier tokens, the longest of which are
    its beginning; None: it begins with none.
    """
    for earlier in sorted(seen, key=len, reverse=True):
        known = tokenizer.decode(earlier)
        if not text.startswith(known):
            continue
        whole = [*earlier, *_plain_tokens(tokenizer, text.removeprefix(known))]
        # Some tokenizers begin every text with a space, which this one would have within.
        if tokenizer.decode(whole) == text:
            return whole
    return None


def _plain_tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _at_fault(error: LineError) -> SpecError:
    """The error of a request whose messages are at fault."""
    reason = error.reason.removesuffix(OF_FILES).rstrip(".")
    if error.field:
        return SpecError(f"{error.field}: {reason}.", param="messages")
    return SpecError(f"{reason[:1].upper()}{reason[1:]}.", param="messages")


def _token(tokenizer: Any, token: int) -> dict[str, Any]:
    """A token as the wire's log-probabilities name it."""
    text = tokenizer.decode([token])
    return {"token": text, "bytes": None if "\ufffd" in text else list(text.encode())}
