"""A base's tokenizer, without code from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ft_service.bases.base_files import (
    TOKENIZER_FILE,
    document_or_none,
    is_base_file,
    require_openable,
    shown,
    tokenizer_fault,
)
from ft_service.data.tokens.patches.auto_tokenizer import AutoTokenizer
from ft_service.errors import SpecError


def load_tokenizer(model_path: str, chat_template: str = "") -> PreTrainedTokenizerBase:
    """The base's tokenizer.

    `chat_template`: used in place of its own template. Raises SpecError if it cannot be loaded, or
    is not a fast tokenizer. Templates are neither compiled nor rendered.
    """
    if not Path(
        model_path
    ).is_dir():  # else transformers takes it for a name on the hub, and its error is about that
        raise SpecError(
            f"The base is gone from {model_path}. Put it back.",
            param="model",
            code="model_unreadable",
        )
    folder = Path(model_path)
    require_openable(folder)
    fault = tokenizer_fault(path.name for path in folder.iterdir())
    if fault is not None:
        raise SpecError(f"The base cannot be trained on: {fault}.", param="model")
    tokenizer: Any = _tokenizer_of(folder)
    if not tokenizer.is_fast:
        raise SpecError(
            f"The base's tokenizer has no {TOKENIZER_FILE}, which is needed to find the "
            "assistant's tokens.",
            param="model",
        )
    if chat_template:
        tokenizer.chat_template = chat_template
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = _template_of_processor(Path(model_path))
    return tokenizer


def _tokenizer_of(folder: Path) -> Any:
    """The tokenizer as transformers has it; where that would be code from the folder, the one in
    its tokenizer.json.
    """
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # any class of error, depending on the files
        code = _code_of_tokenizer(folder)
        if code is None:
            raise SpecError(
                f"The base's tokenizer cannot be loaded: {error}", param="model"
            ) from error
        if not is_base_file(folder / TOKENIZER_FILE):
            raise SpecError(
                f"The base's tokenizer is code in its folder ({code}), which is never run, and "
                f"there is no {TOKENIZER_FILE} "
                "beside it. Put one into the folder that gives the publisher's tokens, or take "
                "another base.",
                param="model",
            ) from None
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise SpecError(
            f"The base's {TOKENIZER_FILE} cannot be loaded: {error}", param="model"
        ) from error


def _code_of_tokenizer(folder: Path) -> str | None:
    """The class in the folder's own code that its files name as their tokenizer; None: they name
    none.
    """
    for name in ("tokenizer_config.json", "config.json"):
        named = (document_or_none(folder / name) or {}).get("auto_map")
        named = named.get("AutoTokenizer") if isinstance(named, dict) else named
        classes = named if isinstance(named, list) else [named]
        found = next((one for one in classes if isinstance(one, str)), None)
        if found is not None:
            return shown(found)
    return None


def _template_of_processor(folder: Path) -> str | None:
    """The chat template in the processor's file, where multimodal bases have it and which
    tokenizers do not read.
    """
    template = (document_or_none(folder / "chat_template.json") or {}).get("chat_template")
    return template if isinstance(template, str) else None
