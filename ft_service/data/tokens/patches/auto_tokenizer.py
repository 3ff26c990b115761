"""transformers' AutoTokenizer, imported without reading the sources of all models a second time.

`import transformers` reads some 3,000 source files for the names that its models export, and the
first name taken from one of them reads them all again: what is kept in between holds 128 folders,
and there are 500. It is a third of a second at the start of every process that examines files,
describes a base, or trains.

Replaces: `transformers.utils.import_utils.define_import_structure`, while `transformers.models` is
imported.
Written for: transformers 5.23
Fails when upstream changes: tests/ft_service/data/tokens/patches/test_auto_tokenizer.py
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import import_utils

_read = import_utils.define_import_structure
_PREFIX = "models"


def _read_before(file: str) -> dict[Any, Any]:
    """The structure of `transformers.models`, from that of transformers, in which its names have a
    prefix.
    """
    known = _read(Path(file).parent, prefix=_PREFIX)
    parts = {needs: _without_prefix(modules) for needs, modules in known.items()}
    return {needs: modules for needs, modules in parts.items() if modules}


def _without_prefix(modules: dict[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(f"{_PREFIX}."): own
        for name, own in modules.items()
        if name.startswith(f"{_PREFIX}.")
    }


import_utils.define_import_structure = _read_before  # pyright: ignore[reportAttributeAccessIssue]
try:
    importlib.import_module(f"{transformers.__name__}.{_PREFIX}")
finally:
    import_utils.define_import_structure = _read

from transformers import AutoTokenizer as AutoTokenizer  # noqa: E402
