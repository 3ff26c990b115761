"""Every causal model type of transformers as a tiny base: refused by plan and worker alike, or trained as its class trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from ft_service.bases.families.acceptance import BOTH_WAYS, untested
from ft_service.bases.families.tested import TESTED
from ft_service.errors import SpecError
from tests.support.training.causal_types import REFUSED_HERE, TYPES, save_type, small_values
from tests.support.training.checks import check_here, refusal, refused_by_config
from tests.support.training.composites import EXACT, small_config
from tests.support.training.models import spec_for
from tests.support.training.parity import CPU
from tests.support.training.published import BASES
from workers.base.load import load
from workers.model import build as building
from workers.training.packing import settle_attention

SHORT = ("nemotron_h", "bert")
NOISY = ("gemma4_unified_text", "qwen4_exp_text")
"""Types whose own gradients in fp32 are further than 1e-5 from those in fp64."""


def _params() -> list[object]:
    return [pytest.param(kind, marks=() if kind in SHORT else pytest.mark.slow) for kind in TYPES]


@pytest.mark.filterwarnings("ignore")  # of architectures that nobody trains here
@pytest.mark.parametrize("kind", _params())
def test_a_type_is_refused_or_trains_as_its_class_with_plain_peft(kind: str, tmp_path: Path) -> None:
    """Sizes and names as planned; loss, every gradient, and the exported adapter on the published class."""
    made = save_type(kind, tmp_path / "base")
    if kind in REFUSED_HERE:
        with pytest.raises((SpecError, AssertionError), match=REFUSED_HERE[kind]):
            check_here(tmp_path / "base", tmp_path)
        return
    found = check_here(tmp_path / "base", tmp_path)
    assert made or refused_by_config(tmp_path / "base")
    assert found.refused or found.exact, found.faults()
    assert found.exact == (kind in TESTED), found.refused
    assert found.noise == 0 or kind in NOISY


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(BOTH_WAYS & set(TYPES)))
def test_what_is_refused_for_reading_both_ways_does(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    made = save_type(kind, folder)
    assert "see those behind them" in refusal(folder)
    if not made:
        pytest.skip("no small model of this type")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if hasattr(model, "set_default_language"):
        model.set_default_language(next(iter(model.config.languages)))
    ids = torch.arange(3, 17)[None]
    with torch.no_grad():
        one, other = (model(input_ids=own).logits[0, :4] for own in (ids, ids.masked_fill(ids > 12, 99)))
    assert (one - other).abs().max() > 1e-3 * (one - one.mean()).abs().max()


NO_MODEL: list[dict[str, Any]] = [
    *({key: "none such"} for key in ("hidden_act", "hidden_activation", "activation_function", "dtype", "tie_word_embeddings")),
    *(
        {key: "many"}
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts")
    ),
    *({key: "many"} for key in ("vocab_size", "head_dim", "intermediate_size", "sliding_window", "max_position_embeddings")),
    *({key: "small"} for key in ("rms_norm_eps", "layer_norm_eps", "initializer_range", "rope_theta", "pad_token_id")),
    {"attention_bias": "yes"},
    {"vocab_size": -1},
    {"head_dim": -2},
    {"num_attention_heads": 0},
    {"pad_token_id": 10**6},
    {"layer_types": "all"},
    *({"layer_types": kinds} for kinds in (["full_attention"] * 9, ["full_attention"], ["none such"] * 2)),
    {"rope_scaling": "linear"},
    *({"rope_scaling": {"rope_type": kind}} for kind in ("none such", "linear", "yarn", "longrope", "llama3")),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(TESTED & set(TYPES)))
def test_what_a_class_cannot_be_built_with_is_refused_by_the_config_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that transformers takes no model from is no surprise to the worker."""
    monkeypatch.setattr(building, "refuse_untunable", lambda _: None)
    AutoConfig.for_model(kind, **small_values(kind, AutoConfig.for_model(kind).to_dict())).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not refused_by_config(tmp_path)
    for values in NO_MODEL:
        if not values.keys() <= config.keys() | {"rope_scaling", "dtype"}:
            continue
        older = {} if "rope_scaling" not in values else {"rope_parameters": None}
        (tmp_path / "config.json").write_text(json.dumps({**config, **older, **values}))
        try:
            building.base_on_meta(str(tmp_path))
        except SpecError:
            assert refused_by_config(tmp_path), values


@pytest.mark.parametrize("packed", [True, False])
def test_a_type_that_nobody_knows_is_tried_before_training(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its config.json says: tokens that see those behind them are found with the base's own weights."""
    folder = tmp_path / "base"
    assert save_type("bert", folder)
    assert "No test of this version knows" in str(untested({"model_type": "bert"}))
    monkeypatch.setattr(building, "refuse_untunable", lambda _: None)
    if not packed:
        monkeypatch.setattr(building, "takes_segments", lambda *_: False)
    spec = spec_for(folder, precision={"default": "bf16", "compute": "fp32"}, lora={"r": 2})
    model = building.build(spec, CPU).peft_model
    load(model, folder, seed=1, compute_dtype=torch.float32, device=CPU)
    with pytest.raises(SpecError, match="tokens see those behind them"):
        settle_attention(model, CPU, torch.float32)


def test_the_types_that_are_said_to_be_tested_are() -> None:
    """Those of this module's list that work; and decoders inside bases of several models, which other tests have."""
    known = set(CONFIG_MAPPING)  # earlier versions of transformers have not all of them
    inner = {small_config(kind).get_text_config(decoder=True).model_type for kind in EXACT & known}
    inner |= {
        str(base.config["text_config"].get("model_type", f"{base.kind}_text"))
        for base in BASES.values()
        if "text_config" in base.config
    }
    assert (TESTED & known) - set(TYPES) <= inner
    assert inner <= TESTED
    assert not TESTED & BOTH_WAYS
