"""The bases that people tune, tiny and in the layout in which they are published, and the tables
that say how well they are.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import often_and_slow
from tests.support.training import table
from tests.support.training.checks import check, check_here
from tests.support.training.published import BASES, NO_TOKENIZER, RELEASED_TEMPLATES, save_published

TEMPLATES = Path(__file__).parents[1] / "support/chat_templates_by_family"
SHORT = ("gemma-4-e4b", "gemma-4-31b", "phi-4-multimodal", "qwen-3-moe")
OFTEN = ("gemma-4-e4b", "qwen-3-moe")
"""Several models in one, with more adapters than PEFT keeps by their full names; layers that differ
in their heads; rotations that keep what a forward computes; shared experts and stacks.
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", often_and_slow(SHORT, set(SHORT) - set(OFTEN)))
def test_a_base_trains_as_it_is_published(name: str, tmp_path: Path) -> None:
    found = check_here(save_published(name, tmp_path / "base"), tmp_path)
    assert found.exact, found.faults()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings(
    "ignore:You passed `quantization_config`"
)  # the reference takes values in place of codes
def test_every_base_works_as_the_tables_say(tmp_path: Path) -> None:
    """On two ranks, reloaded and resumed too."""
    found = check(
        {name: save_published(name, tmp_path / "bases" / name) for name in BASES}, tmp_path
    )
    known = table.read()
    assert {name: one.works for name, one in found.items()} == {
        name: one.works for name, one in known.items()
    }
    assert {name: (one.packed, one.adapted) for name, one in found.items()} == {
        name: (one.packed, one.adapted) for name, one in known.items()
    }


def test_the_tables_are_what_was_found() -> None:
    """`python -m tests.support.training.table --write` makes them."""
    found = table.read()
    assert list(found) == list(BASES)
    for path, made in ((table.README, table.readme(found)), (table.PAGE, table.page(found))):
        assert path.read_text() == table.with_table(path.read_text(), made), path.name
    assert all(one.works for one in found.values())
    assert {*RELEASED_TEMPLATES, *NO_TOKENIZER} <= BASES.keys()
    assert {f"{name}.jinja" for name in RELEASED_TEMPLATES.values()} <= {
        path.name for path in TEMPLATES.iterdir()
    }
    for name in NO_TOKENIZER:
        assert BASES[name].title not in table.readme(found), (
            "what cannot be trained on as it is released is not offered"
        )
