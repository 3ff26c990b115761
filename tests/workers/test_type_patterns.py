"""The tests' tiny bases hold every class of modules that the layers of their types have by default:
what a small base lacks, none of the other checks has seen.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.training.causal_types import TYPES, small_values
from tests.support.training.checks import published_as, small_timm
from tests.support.training.composites import EXACT, small_config
from tests.support.training.tested_types import TESTED

SHORT = ("beam", "flint", "step3p7")
"""Types whose experts begin behind some dense layers."""
KINDS = [*(kind for kind in TYPES if kind in TESTED), *sorted(EXACT)]


def _models(kind: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The class on meta by its defaults, and as the tiny base has it."""
    default = AutoConfig.for_model(kind)
    with torch.device("meta"), small_timm():
        if kind in EXACT:
            small = small_config(kind)
            return published_as(default)._from_config(default), published_as(small)._from_config(
                small
            )
        full = AutoModelForCausalLM.from_config(default)
        return full, AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **small_values(kind, default.to_dict()))
        )


def _classes(model: PreTrainedModel) -> set[str]:
    """Of the decoder's modules: towers are neither trained nor read."""
    return {type(module).__name__ for module in (model.get_decoder() or model).modules()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in SHORT else pytest.mark.slow) for kind in KINDS]
)
def test_a_tiny_base_holds_every_class_of_modules_that_its_type_has(kind: str) -> None:
    try:
        full, tiny = _models(kind)
    except Exception as error:  # a config that says nothing by itself, such as of its rotations
        pytest.skip(f"the defaults of {kind} make no model: {error}")
    assert not _classes(full) - _classes(tiny)
