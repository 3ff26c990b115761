"""Configs in the shapes of public ones, rewritten: what differs from them in the result is what the
docs say.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from ft_service.convert import convert_file
from ft_service.spec import parse_request
from tests.support.command_line import Ft
from tests.support.public_configs import FOLDER, names, outcome, table

EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
PAGE = Path(__file__).parents[3] / "docs" / "converted-configs.md"


def test_there_are_thirty_of_every_tool() -> None:
    assert len(names()) >= 30
    tools = {each["tool"] for each in EXPECTED.values() if "tool" in each}
    assert tools == {"Axolotl", "LLaMA-Factory", "TRL", "ms-swift", "verl", "Unsloth", "torchtune"}
    assert sum(not each.get("differs", True) for each in EXPECTED.values()) >= 10, (
        "exit code 0 is no exception"
    )


@pytest.mark.parametrize("name", names())
def test_a_config_becomes_what_the_table_says(name: str) -> None:
    assert outcome(name) == EXPECTED[name]
    if "spec" in EXPECTED[name]:
        printed = yaml.safe_load(convert_file(FOLDER / name).spec_yaml())
        parse_request(printed)


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "python -m tests.support.public_configs"


@pytest.mark.parametrize(
    ("name", "code"), [("trl-sft.sh", 0), ("unsloth-alpaca.py", 1), ("trl-kto.sh", 0)]
)
def test_the_exit_code_is_that_of_the_table(ft: Ft, name: str, code: int) -> None:
    assert ft("convert", FOLDER / name).code == code
