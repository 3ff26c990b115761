"""The chat template of a job in a model that is merged of its adapter, and the tokens that end the
answers which it writes.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

from ft_service.bases.base_files import document_or_none
from ft_service.data.template_process import TemplateProcess
from ft_service.data.tokenizer_files import stops_of
from ft_service.data.tokens.answer_ends import answer_ends
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.tokenize import load_tokenizer

FILE = "chat_template.jinja"
"""Goes before what a tokenizer's configuration holds, and before a processor's
chat_template.json.
"""
_GENERATION = "generation_config.json"
_SPECIAL = ("bos_token_id", "pad_token_id")


def take_template(adapter: Path, folder: Path) -> None:
    """Put an adapter's chat template into a folder that holds the base's files, and have whatever
    generates end an answer where training did: at one of the base's ends, or at what the template
    writes behind an answer.

    Raises SpecError for a tokenizer that cannot be loaded.
    """
    own = adapter / FILE
    there = folder / FILE
    if own.is_file():
        shutil.copyfile(own, there)
    if (generation := own_generation(folder)) is not None:
        (folder / _GENERATION).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def own_generation(base: Path, chat_template: str = "") -> dict[str, Any] | None:
    """The base's generation_config.json with all tokens that end answers by its chat template, or
    by another one. None: it names them, or the tokenizer does, or there is no template. Raises
    SpecError as `take_template` does.
    """
    if not any(base.glob("tokenizer*")):
        return None
    tokenizer: Any = load_tokenizer(str(base), chat_template)
    template = ChatTemplate.of(tokenizer)
    if template is None:
        return None
    with closing(TemplateProcess(template.sources, template.special_tokens)) as process:

        def write(
            messages: list[dict[str, Any]], tools: list[Any] | None = None, *, prompt: bool = False
        ) -> str:
            return process.write(messages, tools, date.today(), prompt=prompt)

        ends = answer_ends(write, tokenizer, base)
    if ends <= {tokenizer.eos_token_id, *stops_of(base)}:
        return None
    config = document_or_none(base / "config.json") or {}
    generation = document_or_none(base / _GENERATION) or {
        name: config[name] for name in _SPECIAL if name in config
    }
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    first = [end for end in (given if isinstance(given, list) else [given]) if isinstance(end, int)]
    return {**generation, "eos_token_id": [*first, *sorted(ends - set(first))]}
