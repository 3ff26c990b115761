from __future__ import annotations

from typing import Any

import pytest
import yaml

from ft_service.errors import SpecError
from ft_service.spec import (
    match_pattern,
    parse_request,
)

BODY: dict[str, Any] = {"model": "tiny", "training_file": "file-1"}


def test_yaml_numbers_are_numbers() -> None:
    assert (
        parse_request(BODY | {"training": {"learning_rate": "2e-4"}})
        .resolved_training()
        .learning_rate
        == 2e-4
    )


@pytest.mark.parametrize(
    "option",
    ["engine", "precision.fp8_products", "precision.fused_kernels", "precision.compare_served"],
)
def test_off_needs_no_quotes_in_yaml(option: str) -> None:
    """YAML 1.1 reads it as false."""
    *sections, name = option.split(".")
    said = yaml.safe_load(f"{name}: off")
    parsed: Any = parse_request(BODY | ({sections[0]: said} if sections else said))
    for part in option.split("."):
        parsed = getattr(parsed, part)
    assert parsed == "off"
    with pytest.raises(SpecError, match="must be auto or off"):
        parse_request(BODY | ({sections[0]: {name: True}} if sections else {name: True}))


def test_patterns_match_whole_names_in_linear_time() -> None:
    names = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    assert match_pattern(r".*up_proj", names) == names[:1]
    assert match_pattern(r"up_proj", names) == []
    assert match_pattern("(a*)*b", ["a" * 5000]) == []
    with pytest.raises(SpecError, match="RE2") as refused:
        parse_request(BODY | {"precision": {"overrides": {"(": "nf4"}}})
    assert (refused.value.param or "").startswith("precision.overrides")


@pytest.mark.parametrize(
    ("option", "given", "limit"),
    [
        (
            "lora.rank_pattern",
            {f"q_proj|{number}": 8 for number in range(257)},
            "256 patterns, not 257",
        ),
        (
            "lora.alpha_pattern",
            {".*l?" * 2000 + str(number): 8 for number in range(2)},
            "10000 characters",
        ),
        ("lora.target_modules", ".*l?" * 3000, "10000 characters"),
        ("lora.target_modules", ["q_proj"] * 10_001, "10,000 entries"),
        (
            "precision.overrides",
            {f"q_proj|{number}": "nf4" for number in range(257)},
            "256 patterns, not 257",
        ),
        ("distributed.ignored", ["q_proj"] * 257, "256 patterns, not 257"),
    ],
)
def test_patterns_and_names_are_limited(option: str, given: Any, limit: str) -> None:
    """A request of a megabyte of them kept the server busy for minutes."""
    section, name = option.split(".")
    with pytest.raises(SpecError, match=limit) as refused:
        parse_request(BODY | {section: {name: given}})
    assert refused.value.param == option
