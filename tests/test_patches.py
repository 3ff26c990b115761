"""Functions, classes and forwards of other packages are replaced in ROOMS alone, and each patch
says why.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch  # noqa: F401 - before transformers, as the workers have it
from transformers import PreTrainedModel

ROOT = Path(__file__).parents[1]
PACKAGES = ("ft_service", "api", "workers")
ROOMS = ("workers/patches", "ft_service/data/tokens/patches")
PATCHES = sorted(
    f"{room}/{path.name}"
    for room in ROOMS
    for path in (ROOT / room).glob("*.py")
    if path.name != "__init__.py"
)


@cache
def methods() -> frozenset[str]:
    """Names of what can be called on every model of transformers, and so on every module of
    torch.
    """
    return frozenset(
        name for name in dir(PreTrainedModel) if callable(getattr(PreTrainedModel, name))
    )


def replacements(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and target of each assignment to an attribute of an imported package, to a method of a
    model, or to `sys.modules` (but by a process in its own main block).
    """
    nodes = [node for own in tree.body if not isinstance(own, ast.If) for node in ast.walk(own)]
    others = {name for node in nodes for name in _bound(node)}
    for node in nodes:
        for target in _assigned(node):
            text = ast.unparse(target)
            if text.startswith("sys.modules["):
                yield target.lineno, text
            elif isinstance(target, ast.Attribute) and not re.search(
                r"\.(config|backends)\.", text
            ):  # of a package: settings
                root = text.split(".")[0]
                if root in others or (root != "self" and target.attr in methods()):
                    yield target.lineno, text


def _bound(node: ast.AST) -> list[str]:
    """Names that an import binds to something of another package."""
    if isinstance(node, ast.Import):
        return [
            alias.asname or alias.name.split(".")[0]
            for alias in node.names
            if alias.name.split(".")[0] not in PACKAGES
        ]
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in PACKAGES:
        return [alias.asname or alias.name for alias in node.names]
    return []


def _assigned(node: ast.AST) -> Sequence[ast.expr]:
    """The targets of an assignment; of `setattr` with a known name the attribute."""
    if isinstance(node, ast.Assign):
        return [
            part
            for target in node.targets
            for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        owner, name, *_ = node.args
        known = (
            name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "_"
        )
        return [ast.Attribute(owner, known, lineno=node.lineno)]
    return []


@pytest.mark.parametrize(
    "line",
    [
        "layer.forward = compiled",
        "module.__class__ = nn.Linear",
        "torch.compile, x = x, None",
        "import torch.cuda as c\nc.is_available = bool",
        "AutoModel.from_config = made",
        "model.get_output_embeddings = other.get_output_embeddings",
        "setattr(block, 'forward', own)",
        "setattr(torch, name, own)",
        "def act():\n    sys.modules['torchao'] = None",
    ],
)
def test_a_replacement_is_seen(line: str) -> None:
    assert list(
        replacements(ast.parse(f"import sys, torch\nfrom transformers import AutoModel\n{line}"))
    )


@pytest.mark.parametrize(
    "line",
    [
        *("self.forward = 1", "layer.weight = w", "config.use_cache = False", "x = torch"),
        *("torch._dynamo.config.limit = 3", "torch.backends.cuda.matmul.allow_tf32 = False"),
    ],
)
def test_an_attribute_of_our_own_is_none(line: str) -> None:
    assert not list(
        replacements(ast.parse(f"import torch\nfrom workers.model import config\n{line}"))
    )


def test_nothing_of_another_package_is_replaced_outside_of_the_rooms() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {target}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.parent.relative_to(ROOT).as_posix() not in ROOMS
        for line, target in replacements(ast.parse(path.read_text()))
    ]
    assert found == [], f"{' or '.join(ROOMS)} is the place for these"


@pytest.mark.parametrize("path", PATCHES)
def test_a_patch_says_what_it_replaces_for_which_version_and_which_test_fails(path: str) -> None:
    said = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    room, name = path.rsplit("/", 1)
    test = f"tests/{room}/test_{name}"
    assert re.search(r"^Replaces: \S", said, re.MULTILINE)
    assert re.search(r"^Written for: (\w+ \d+\.\d+(, )?)+$", said, re.MULTILINE)
    assert f"Fails when upstream changes: {test}" in said
    assert (ROOT / test).is_file()
