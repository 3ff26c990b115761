"""A base's tokenizer as the preview uses it: conversations to prompts, and tokens to what the wire shows of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ft_service.data.tokenizer_files import stops_of
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.errors import SpecError
from workers.serving.tool_calls import call_format

_WORDS = "ft_words"
_TEMPLATE = "chat_template.jinja"
"""Of an adapter's folder: the chat template that its job learned by, where that is a file of its own."""
_TEMPLATES = 8
"""Chat templates of jobs that are kept compiled."""


class Chats:
    """A base's conversations, by its own chat template and by those that jobs have trained with."""

    def __init__(self, path: str) -> None:
        """Raises SpecError for a base without a usable tokenizer."""
        load_tokenizer(path)
        self._by = lru_cache(maxsize=_TEMPLATES)(partial(Chat, path))

    def of(self, adapter: str | None) -> Chat:
        """As the model that is the base with this adapter, a PEFT folder, was trained; None: the base. Raises SpecError."""
        try:
            template = (Path(adapter) / _TEMPLATE).read_text(encoding="utf-8") if adapter is not None else ""
        except OSError:
            template = ""
        return self._by(template)


class Chat:
    """One chat template of one base."""

    def __init__(self, path: str, chat_template: str = "") -> None:
        """`chat_template`: in place of the base's own. Raises SpecError for a base without tokenizer or chat template."""
        self.tokenizer: Any = load_tokenizer(path, chat_template)
        if self.tokenizer.chat_template is None:
            raise SpecError(
                "The base's tokenizer has no chat template, so it cannot be talked to. Models that a job with a chat_template "
                "has tuned can.",
                param="model",
            )
        self.calls = call_format(self.tokenizer)
        self.ends = _ends(self.tokenizer, Path(path))
        """Tokens that end an answer."""
        self.token = lru_cache(maxsize=65536)(self._token)

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[int]:
        """The tokens that an answer follows. Raises SpecError for a conversation that the template refuses."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # templates raise what they like, to refuse roles and orders
            raise SpecError(f"The base's chat template refuses this conversation: {error}", param="messages") from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def takes_tools(self) -> bool:
        """Whether the template has a place for definitions of tools: others leave them out without a word."""
        given = self.tokenizer.chat_template
        return "tools" in (given if isinstance(given, str) else " ".join(given.values()))

    def _token(self, token: int) -> dict[str, Any]:
        """A token as the wire's log-probabilities name it."""
        text = self.tokenizer.decode([token])
        return {"token": text, "bytes": None if "\ufffd" in text else list(text.encode())}


def _ends(tokenizer: Any, folder: Path) -> frozenset[int]:
    """The tokenizer's end, those that generation_config.json names, and what the template writes behind an answer if that is
    one special token: what training taught the model to end with.
    """
    ends = {tokenizer.eos_token_id, *stops_of(folder)}
    try:
        talk = [{"role": "user", "content": "ft_question"}, {"role": "assistant", "content": _WORDS}]
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        after = tokenizer(text.rpartition(_WORDS)[2], add_special_tokens=False)["input_ids"]
        if after and after[0] in set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values()):
            ends.add(after[0])
    except Exception:  # the template may refuse it, and then has no say
        pass
    return frozenset(token for token in ends if isinstance(token, int))
