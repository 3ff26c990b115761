"""Workers that cannot import what they need: their last words, and the package to install. Trying again cannot help."""

from __future__ import annotations

import re

CODE = "missing_package"
"""`error.code` of a job that such a worker ends."""
WORKER_PACKAGES = frozenset(
    {
        *("bitsandbytes", "gguf", "numpy", "peft", "pyarrow", "rapidfuzz", "sacrebleu", "safetensors", "tensorboardX", "torch"),
        *("transformers", "zstandard"),
    }
)
"""What the extra `workers` installs, by the names of imports."""
_FAILED = re.compile(r"\b(?:ModuleNotFoundError|ImportError): |^\S*python\S*: No module named ")
_MISSING = re.compile(r"No module named '?(\w+)")
_SHORT_OF_MEMORY = "annot allocate memory"
_INSTALL = "Install what workers need: pip install 'ft-service[workers]'."


def failed_import(words: str) -> str | None:
    """A sentence for the user on the failed import. None: no import has failed for good.

    `words`: the last line of a process, or an error with its type.
    """
    if not _FAILED.search(words) or _SHORT_OF_MEMORY in words:
        return None
    missing = _MISSING.search(words)
    if missing is None:
        return f"The workers cannot import a package that they need: {' '.join(words.split())}. {_INSTALL}"
    name = missing[1]
    advice = _INSTALL if name in WORKER_PACKAGES else f"Install {name} beside them."
    return f"The package {name} is not installed where the workers run. {advice}"
