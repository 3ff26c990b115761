"""Names of adapters that PEFT finds again, found by its own conversion, for bases of any type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_service.errors import SpecError
from tests.support.training.causal_types import save_type
from tests.support.training.composites import save_composite
from tests.support.training.models import spec_for
from tests.support.training.parity import CPU
from workers.model import renamed_adapters
from workers.model.build import build
from workers.model.renamed_adapters import names_of


def renamed(folder: Path, **lora: Any) -> dict[str, str]:
    """Modules whose names in the file differ from those in the model, without what stands before
    them.
    """
    built = build(spec_for(folder, lora={"r": 2, "target_modules": "all-linear", **lora}), CPU)
    return {
        ours.removeprefix("base_model.model."): theirs.removeprefix("base_model.model.")
        for ours, theirs in names_of(built.peft_model.peft_config["default"]).renamed.items()
    }


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt_neox"])
def test_most_bases_need_no_other_names(kind: str, tmp_path: Path) -> None:
    assert save_type(kind, tmp_path)
    assert renamed(tmp_path) == {}


def test_a_name_that_a_rule_takes_for_one_of_the_files_is_written_as_the_files_have_it(
    tmp_path: Path,
) -> None:
    assert save_type("laguna", tmp_path)
    found = renamed(tmp_path)
    assert {ours.replace(".shared_experts.", ".shared_expert.") for ours in found} == set(
        found.values()
    )
    assert any(ours.endswith("shared_experts.up_proj") for ours in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_names_lose_what_a_rule_puts_before_them(tmp_path: Path) -> None:
    assert save_composite("deepseek_ocr2", tmp_path)
    found = renamed(tmp_path)
    assert found
    assert all(
        theirs == ours.replace("model.language_model.", "model.", 1)
        for ours, theirs in found.items()
    )


def test_a_base_without_such_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save_type("laguna", tmp_path)
    monkeypatch.setattr(renamed_adapters, "_backwards", lambda _: ())
    with pytest.raises(SpecError, match=r"would rename 6 tensors .*shared_experts"):
        renamed(tmp_path)
