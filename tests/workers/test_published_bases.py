"""The bases that people tune, tiny and in the layout in which they are published, and the tables that say how well they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.bases.families.acceptance import untested
from ft_service.bases.wrapped import text_section
from tests.support.training import table
from tests.support.training.checks import check, check_here
from tests.support.training.published import BASES, save_published

SHORT = ("gemma-4-e4b", "qwen-3-moe")
"""Of several models, with more adapters than PEFT keeps by their full names; shared experts and stacks."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHORT)
def test_a_base_trains_as_it_is_published(name: str, tmp_path: Path) -> None:
    found = check_here(save_published(name, tmp_path / "base"), tmp_path)
    assert found.exact, found.faults()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # the reference takes values in place of codes
def test_every_base_works_as_the_tables_say(tmp_path: Path) -> None:
    """On two ranks, reloaded and resumed too."""
    found = check({name: save_published(name, tmp_path / "bases" / name) for name in BASES}, tmp_path)
    known = table.read()
    assert {name: one.works for name, one in found.items()} == {name: one.works for name, one in known.items()}
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


@pytest.mark.parametrize("name", BASES)
def test_no_base_of_the_table_is_said_to_be_untested(name: str) -> None:
    config = {"model_type": BASES[name].kind, **BASES[name].config}
    section = text_section(config)
    if section is not None and "model_type" not in section:
        config["text_config"] = {**section, "model_type": f"{BASES[name].kind}_text"}
    assert untested(config) is None
