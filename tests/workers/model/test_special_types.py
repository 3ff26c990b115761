"""Model types are named in one module of the product, and few of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from workers.model import special_types

ROOT = Path(__file__).parents[3]
ROOMS = ("ft_service", "workers", "api")
MOST = 30
"""Names in the module of exceptions: fewer than these."""
KINDS = frozenset(CONFIG_MAPPING) | {"phi4mm", "neobert"}
CLASSES = frozenset(
    name for mapping in (modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for name in map(str, mapping.values())
)  # fmt: skip
NAMES = KINDS | CLASSES
OTHER_TOOLS = {
    "workers/exports/gguf_layout.py": "architectures that llama.cpp knows, by the types that they "
    "are in transformers",
    "workers/exports/gguf_vocabulary.py": "llama.cpp's names of vocabularies and of ways to cut "
    "text",
    "ft_service/spec/auto_hyperparameters.py": "the families of which LoRA Without Regret "
    "measured a power",
    "ft_service/spec/templates.py": "names of chat templates that a spec may ask for",
}
"""Files that hold data about another tool's formats, or about a paper → which data."""
OTHER_WORDS = {
    "workers/model/attention.py": {"mamba"},  # a value of `layer_types`
    "ft_service/version.py": {"git"},  # a program
}
"""Strings that are called like a model type, and are none."""


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and value of every string of a module that is not documentation."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
        ):
            yield node.lineno, node.value


def named(path: Path) -> list[str]:
    """Model types and classes of transformers that a module names, with their lines.

    A type of three letters or an English word counts like any other: `led`, `sam` and such are not
    in the product either.
    """
    if NAMES.isdisjoint(re.findall(r"[\w-]+", path.read_text())):  # quicker than to parse it
        return []
    return [f"{line}: {value}" for line, value in strings(path) if value in NAMES]


def test_no_other_module_names_a_model_type() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if path == Path(special_types.__file__) or place in OTHER_TOOLS:
            continue
        names = [
            name
            for name in named(path)
            if name.partition(": ")[2] not in OTHER_WORDS.get(place, set())
        ]
        found.update({place: names} if names else {})
    assert not found


def test_a_name_is_found_wherever_it_stands(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""llama"""\nKIND = {"mamba2": 1}\nif x.endswith("LlamaForCausalLM") or kind in '
        '("qwen3", "other"):\n    pass\n'
    )
    assert named(module) == ["2: mamba2", "3: LlamaForCausalLM", "3: qwen3"]


def test_the_files_that_may_name_them_do() -> None:
    for place in (*OTHER_TOOLS, *OTHER_WORDS):
        assert named(ROOT / place), place


def test_exceptions_are_few_and_each_has_a_reason_and_a_source() -> None:
    source = Path(special_types.__file__).read_text()
    names = [
        *special_types.NOT_TUNED,
        *special_types.NOT_PREVIEWED,
        special_types.INPUT_SCALED_EXPERTS,
    ]
    assert len(set(names)) == len(names) < MOST
    assert all(name in KINDS for name in (*special_types.NOT_TUNED, *special_types.NOT_PREVIEWED))
    assert all(special_types.NOT_TUNED.values())
    reasons = len(set(special_types.NOT_TUNED.values())) + 2
    assert len(re.findall(r"Source:\s", source)) == reasons
