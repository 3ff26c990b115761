"""Failed imports in workers, by their last output line, and the package to install.

A retry cannot help.
"""

from __future__ import annotations

import re

CODE = "missing_package"
"""`error.code` of a job whose workers cannot import a package."""
WORKER_PACKAGES = frozenset(
    {
        *(
            "bitsandbytes",
            "gguf",
            "greenlet",
            "numpy",
            "nvidia-cudnn-frontend",
            "nvidia-ml-py",
            "peft",
            "pillow",
            "protobuf",
            "pyarrow",
            "rapidfuzz",
        ),
        *("sacrebleu", "safetensors", "tensorboardX", "torch", "transformers", "zstandard"),
    }
)
"""Packages that the extra `workers` installs, by import name, but for protobuf, which is imported
as `google`, cuDNN's and NVML's, without which jobs go on.
"""
_FAILED = re.compile(r"\b(?:ModuleNotFoundError|ImportError): |^\S*python\S*: No module named ")
_MISSING = re.compile(r"No module named '?(\w+)")
_SHORT_OF_MEMORY = "annot allocate memory"
_INSTALL = "Install what workers need: pip install 'ft-service[workers]'."


def failed_import(words: str) -> str | None:
    """Return a message for the user about the failed import; None: no import has failed for good.

    `words`: last line of a process, or an error with its type.
    """
    if not _FAILED.search(words) or _SHORT_OF_MEMORY in words:
        return None
    missing = _MISSING.search(words)
    if missing is None:
        return (
            f"The workers cannot import a package that they need: {' '.join(words.split())}. "
            f"{_INSTALL}"
        )
    name = missing[1]
    advice = _INSTALL if name in WORKER_PACKAGES or name == "google" else f"Install {name} there."
    return f"The package {name} is not installed where the workers run. {advice}"
