"""The tables of bases in README and docs/models.md, from what the checks of published bases found.

python -m tests.support.training.table            check every base, keep what was found, write the
                                                  tables
python -m tests.support.training.table NAME ...    check these again
python -m tests.support.training.table --write     write the tables from what was found before
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tests.support.training.checks import BOUND, Found, check
from tests.support.training.published import (
    BASES,
    NO_TOKENIZER,
    RELEASED_TEMPLATES,
    Published,
    save_published,
)

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results/bases.json"
PAGE = ROOT / "docs/models.md"
README = ROOT / "README.md"
BEGIN = "<!-- bases: made by tests.support.training.table -->"
END = "<!-- /bases -->"
KINDS = ("Dense", "Mixtures of experts", "Hybrids", "The text part of")
"""How README groups them."""
IMAGES = {
    **dict.fromkeys(
        ("gemma3", "gemma4", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe"), "yes"
    ),
    "llama4": "no",
}
"""`model_type` → whether a base learns from images (tests/workers/images/), where that was tried."""
_MIXERS = ("linear_attention", "conv", "mamba", "hybrid")


def read() -> dict[str, Found]:
    """What was found when it was last looked."""
    known = {field.name for field in fields(Found)}
    return {
        name: Found(**{key: value for key, value in found.items() if key in known})
        for name, found in json.loads(RESULTS.read_text())["bases"].items()
    }


def kind_of(base: Published) -> str:
    """The group that a base is in."""
    if any(
        key.endswith("_config") and isinstance(value, Mapping) for key, value in base.config.items()
    ):
        return KINDS[3]
    layers = base.config.get("layer_types") or base.config.get("layers_block_type") or []
    if set(layers) & set(_MIXERS) or any(key.startswith("mamba_") for key in base.config):
        return KINDS[2]
    return KINDS[1] if any("expert" in key for key in base.config) else KINDS[0]


def images_of(base: Published) -> str:
    """Whether a base learns from images: yes or no; "untried"; empty for one without towers."""
    if kind_of(base) != KINDS[3]:
        return ""
    text: Mapping[str, Any] = base.config.get("text_config", {})
    each_layer = text.get("hidden_size_per_layer_input")  # its class embeds before the towers look
    return "no" if each_layer else IMAGES.get(base.kind, "untried")


def readme(found: Mapping[str, Found]) -> str:
    """The lines of README between its two marks."""
    works = [BASES[name] for name, one in found.items() if one.works and name not in NO_TOKENIZER]
    rows: list[str] = []
    for kind in KINDS:
        own = [base for base in works if kind_of(base) == kind]
        pictured = [base for base in own if images_of(base) == "yes"]
        rows.append(_row(["; ".join(base.title for base in some) for some in (own, pictured)]))
        rows[-1] = f"| {kind} {rows[-1]}"
    return "\n".join(["| | bases | learn from images too |", "| --- | --- | --- |", *rows])


def page(found: Mapping[str, Found]) -> str:
    """The tables of docs/models.md between its two marks."""
    checked = ["config", "template", "tokenizer"]
    head = [
        "base",
        "`model_type`",
        *checked,
        "rows",
        "adapters",
        "loss",
        "gradient",
        "1 = 2 ranks",
        "reloaded",
        "resumed",
        "images",
    ]
    lines = [_row(head), _row(["---"] * len(head))]
    lines += [_row(_cells(name, BASES[name], one)) for name, one in found.items()]
    return "\n".join(lines)


def _cells(name: str, base: Published, found: Found) -> Sequence[str]:
    without = NO_TOKENIZER.get(name)
    return [
        base.title,
        f"`{base.kind}`",
        "small",
        "released" if name in RELEASED_TEMPLATES else "own",
        "own" if without is None else f"own; released: `{without}`, refused",
        "packed" if found.packed else "padded",
        str(found.adapted),
        *(_error(value) for value in (found.loss, found.gradient, found.ranks)),
        "same" if found.reloaded <= 10 * BOUND else _error(found.reloaded),
        "bitwise" if found.resumed else "no",
        images_of(base),
    ]


def _error(value: float) -> str:
    """An error rounded up to a power of ten: the last digits differ from one processor to
    another.
    """
    return next((f"≤ 1e-{power}" for power in (7, 6, 5) if value <= 10.0**-power), f"{value:.0e}")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def with_table(text: str, table: str) -> str:
    """A document with this between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def write(found: Mapping[str, Found]) -> None:
    README.write_text(with_table(README.read_text(), readme(found)))
    PAGE.write_text(with_table(PAGE.read_text(), page(found)))


def main(names: Sequence[str]) -> None:
    found: dict[str, Any] = read() if RESULTS.is_file() else {}
    if list(names) != ["--write"]:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            saved = {name: save_published(name, work / "bases" / name) for name in names or BASES}
            found |= check(saved, work)
        found = {name: found[name] for name in BASES if name in found}
        RESULTS.write_text(
            json.dumps({"bases": {name: asdict(one) for name, one in found.items()}}, indent=1)
            + "\n"
        )
    write(found)
    for name, one in found.items():
        print(name, "works" if one.works else one.refused or one.faults())


if __name__ == "__main__":
    main(sys.argv[1:])
