"""Every causal model type of transformers as a tiny base: refused by plan and worker alike, or
trained as its class trains.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from ft_service.errors import SpecError
from tests.support.training.causal_types import REFUSED_HERE, TYPES, save_type
from tests.support.training.checks import check_here
from tests.support.training.composites import EXACT, small_config
from tests.support.training.models import spec_for
from tests.support.training.parity import CPU
from tests.support.training.published import BASES
from tests.support.training.tested_types import TESTED
from workers.base.load import load
from workers.model import build as building
from workers.training.packing import settle_attention

SHORT = ("nemotron_h", "bert")
NOISY = ("gemma4_unified_text", "qwen4_exp_text")
"""Types whose own gradients in fp32 are further than 1e-5 from those in fp64."""


def _params() -> list[object]:
    return [pytest.param(kind, marks=() if kind in SHORT else pytest.mark.slow) for kind in TYPES]


@pytest.mark.filterwarnings("ignore")  # of architectures that are not trained here
@pytest.mark.parametrize("kind", _params())
def test_a_type_is_refused_or_trains_as_its_class_with_plain_peft(
    kind: str, tmp_path: Path
) -> None:
    """Sizes and names as planned; loss, every gradient, and the exported adapter on the published
    class.
    """
    made = save_type(kind, tmp_path / "base")
    if kind in REFUSED_HERE:
        with pytest.raises((SpecError, AssertionError), match=REFUSED_HERE[kind]):
            check_here(tmp_path / "base", tmp_path)
        return
    found = check_here(tmp_path / "base", tmp_path)
    assert made or found.refused
    assert found.refused or found.exact, found.faults()
    assert found.exact == (kind in TESTED), found.refused
    assert found.noise == 0 or kind in NOISY


@pytest.mark.parametrize("packed", [True, False])
def test_a_class_whose_tokens_see_those_behind_them_is_refused_before_training(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No list names it: tokens that see those behind them are found with the base's own weights."""
    folder = tmp_path / "base"
    assert save_type("bert", folder)
    if not packed:
        monkeypatch.setattr(building, "takes_segments", lambda *_: False)
    spec = spec_for(folder, precision={"default": "bf16", "compute": "fp32"}, lora={"r": 2})
    model = building.build(spec, CPU).peft_model
    load(model, folder, seed=1, compute_dtype=torch.float32, device=CPU)
    with pytest.raises(SpecError, match="tokens see those behind them"):
        settle_attention(model, CPU, torch.float32)


def test_the_types_that_are_said_to_be_tested_are() -> None:
    """Those of this module's list that work; and decoders inside bases of several models, which
    other tests have.
    """
    known = set(CONFIG_MAPPING)  # earlier versions of transformers have not all of them
    inner = {small_config(kind).get_text_config(decoder=True).model_type for kind in EXACT & known}
    inner |= {
        str(base.config["text_config"].get("model_type", f"{base.kind}_text"))
        for base in BASES.values()
        if "text_config" in base.config
    }
    assert (TESTED & known) - set(TYPES) <= inner
    assert inner <= TESTED
