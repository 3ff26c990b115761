"""Tells at which tokens a tuned model ends its answers, if its base's files do not: `python -m
workers.tasks.end_tokens ADAPTER BASE`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ft_service.host.quick_imports import begin_imports, end_imports

if __name__ == "__main__":
    begin_imports()
from workers.exports.own_template import FILE, own_generation
from workers.tasks import print_result


def end_tokens(adapter: Path, base: Path) -> list[int]:
    """All tokens that end answers by the adapter's chat template, or by the base's if it has none;
    empty: an inference server knows them by the base's files. Raises SpecError for a tokenizer that
    cannot be loaded.
    """
    own = adapter / FILE
    generation = own_generation(base, own.read_text(encoding="utf-8") if own.is_file() else "")
    return [] if generation is None else generation["eos_token_id"]


def main(arguments: list[str]) -> int:
    """Print one line of JSON: the tokens, or the error. Exit code 0 or 64."""
    adapter, base = map(Path, arguments)
    return print_result(lambda: {"ends": end_tokens(adapter, base)})


if __name__ == "__main__":
    end_imports()
    sys.exit(main(sys.argv[1:]))
