"""Probes: each finds its defect in a decoder that nothing of ours names, and none in one without
it; and the types of transformers against what training finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ft_service.bases.module_rules import choose_targets
from ft_service.errors import SpecError
from tests.support.training.causal_types import OF_SEVERAL, TYPES, save_type
from tests.support.training.composites import save_composite
from tests.support.training.models import save_tiny, spec_for
from tests.support.training.odd_types import DEFECTS, odd_types, save_odd
from tests.support.training.parity import CPU
from workers.base.load import load
from workers.layers.segments import CURRENT
from workers.model import build as building
from workers.model import probes
from workers.model.build import base_on_meta, build
from workers.model.head import works_in_chunks
from workers.model.multimodal import causal_model
from workers.model.packed_trial import NotCausalError
from workers.model.probes import NO_EFFECT, Probed, probe
from workers.model.small_copy import SmallCopy
from workers.training.packing import settle_attention


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(probes, "PROBED", {})
    with odd_types():
        yield


def probed(folder: Path) -> Probed:
    return probe(base_on_meta(str(folder)))


ROW_WISE = tuple(f"model.layers.{number}.mlp" for number in range(3))
EXPECTED = {
    "none": Probed(causal=True, loss_in_chunks=True, row_wise=ROW_WISE),
    "mixes": Probed(
        True,
        "its packed samples are not computed as they are apart",
        loss_in_chunks=True,
        row_wise=ROW_WISE,
    ),
    "scales logits": Probed(causal=True, row_wise=ROW_WISE),
    "caps logits": Probed(causal=True, row_wise=ROW_WISE),
    **dict.fromkeys(
        ("past the layer", "chooses"),
        Probed(
            True,
            None,
            True,
            {f"model.layers.{number}.extra": NO_EFFECT for number in range(3)},
            ROW_WISE,
        ),
    ),
}


@pytest.mark.parametrize("defect", EXPECTED)
def test_a_defect_of_a_decoder_that_nobody_knows_is_found_and_nothing_else(
    defect: str, tmp_path: Path
) -> None:
    assert probed(save_odd(tmp_path, defect)) == EXPECTED[defect]


def test_every_defect_has_a_test() -> None:
    assert {*EXPECTED, "sees behind", "raises"} == set(DEFECTS)


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    found = probed(save_odd(tmp_path, "sees behind"))
    assert found.causal is False
    assert "odd_decoder model whose tokens see those behind them" in str(found.refused)


def test_a_base_that_cannot_be_run_on_text_alone_is_refused(tmp_path: Path) -> None:
    found = probed(save_odd(tmp_path, "raises"))
    assert (
        "odd_decoder model that cannot be run on text alone (NotImplementedError: no forward "
        "without an image)" in str(found.refused)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "why"),
    [("xmod", "ValueError: Input language unknown"), ("voxtral_realtime", "TypeError")],
)
def test_types_that_need_more_than_tokens_are_refused_in_words(
    kind: str, why: str, tmp_path: Path
) -> None:
    assert (save_composite if kind in OF_SEVERAL else save_type)(kind, tmp_path)
    assert f"cannot be run on text alone ({why}" in str(probed(tmp_path).refused)


def test_a_copy_without_some_kinds_of_layers_that_does_not_run_takes_nothing_for_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SmallCopy, "leaves_out", True)
    found = probed(save_odd(tmp_path, "raises"))
    assert (found.causal, found.loss_in_chunks, found.refused) == (None, False, None)
    assert found.padded_because is not None
    [warning] = found.warnings
    assert "NotImplementedError: no forward without an image" in warning


def test_what_stands_behind_the_head_counts_as_the_config_sets_it(tmp_path: Path) -> None:
    assert probed(
        save_tiny("granitemoehybrid", tmp_path / "plain", logits_scaling=1.0)
    ).loss_in_chunks
    assert not probed(
        save_tiny("granitemoehybrid", tmp_path / "scaled", logits_scaling=2.0)
    ).loss_in_chunks
    assert probed(
        save_tiny("gemma2", tmp_path / "capped", final_logit_softcapping=3.0)
    ).loss_in_chunks, "a cap that is known"


def test_a_build_takes_the_loss_and_the_adapters_as_the_probes_say(tmp_path: Path) -> None:
    folder = save_odd(tmp_path, "past the layer")
    model = build(spec_for(folder, lora={"r": 2, "target_modules": "all-linear"}), CPU).peft_model
    assert works_in_chunks(causal_model(model))
    assert not [name for name, _ in model.named_modules() if "extra.lora" in name]
    with pytest.raises(
        SpecError,
        match=r"layers.0.extra' cannot have an adapter: an adapter on it would change nothing",
    ):
        build(spec_for(folder, lora={"r": 2, "target_modules": ["extra"]}), CPU)
    other = spec_for(save_odd(tmp_path / "other", "scales logits"), lora={"r": 2})
    assert not works_in_chunks(causal_model(build(other, CPU).peft_model))
    known = Probed(causal=True, loss_in_chunks=True)
    assert works_in_chunks(causal_model(build(other, CPU, known).peft_model)), (
        "what is known is not probed again"
    )


def test_a_layer_that_cannot_have_an_adapter_is_left_out_or_refused_by_name() -> None:
    names = ["a.q", "a.u", "b.u"]
    why = {"a.u": "it is never called"}
    assert choose_targets(names, [], "all-linear", not_adapted=why) == ["a.q", "b.u"]
    assert choose_targets(names, [], ["b.u"], not_adapted=why) == ["b.u"]
    with pytest.raises(SpecError, match=r"'a.u' cannot have an adapter: it is never called"):
        choose_targets(names, [], ["u"], not_adapted=why)


def test_layers_that_peft_refuses_are_left_out(tmp_path: Path) -> None:
    found = probed(save_tiny("nemotron_h", tmp_path))
    assert found.refused is None
    [(name, why)] = found.not_adapted.items()
    assert name == "model.layers.0.mixer.out_proj"
    assert "incompatible with Mamba-based models" in why


def test_a_probe_leaves_no_trace_and_says_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_on_meta(str(save_tiny("qwen3_next", tmp_path)))
    before = repr(base.config)
    drawn = torch.get_rng_state()
    first = probe(base)
    monkeypatch.setattr(probes, "PROBED", {})
    torch.manual_seed(1)
    assert probe(base) == first
    torch.set_rng_state(drawn)
    assert repr(base.config) == before
    assert all(parameter.is_meta for parameter in base.parameters())
    assert not CURRENT.packed
    assert CURRENT.faults is None


def of_training(folder: Path) -> tuple[PreTrainedModel, str | None]:
    """The tiny base with its own weights, and what training finds of it. Raises NotCausalError."""
    spec = spec_for(
        folder,
        precision={"default": "bf16", "compute": "fp32"},
        lora={"r": 2, "target_modules": "all-linear"},
    )
    model = build(spec, CPU).peft_model
    load(model, folder, seed=1, compute_dtype=torch.float32, device=CPU)
    return causal_model(model), settle_attention(model, CPU, torch.float32)


UNREAD = ("inkling2_text", "ernie4_5_vl_moe", "shieldgemma2")
"""Types that transformers saves in layouts which are refused: nothing can be compared."""
SHORT = ("llama", "cohere", "deepseek_v32", "gemma3n_text", "jamba", "qwen3_next")


@pytest.mark.filterwarnings("ignore")  # of architectures that are not trained here
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in SHORT else pytest.mark.slow)
        for kind in (*TYPES, *OF_SEVERAL)
    ],
)
def test_a_random_copy_tells_what_training_finds_with_the_weights(
    kind: str, tmp_path: Path
) -> None:
    made = (save_composite if kind in OF_SEVERAL else save_type)(kind, tmp_path)
    if not made:
        return
    try:
        base = base_on_meta(str(tmp_path))
    except SpecError:  # its config.json says enough
        return
    found = probe(base)
    if found.refused is not None or kind in UNREAD:
        with pytest.raises(SpecError, match="layout" if kind in UNREAD else None):
            of_training(tmp_path)
        return
    _, reason = of_training(tmp_path)
    assert found.causal is True
    assert found.padded_because == reason
    assert found.warnings == ()


@pytest.mark.filterwarnings("ignore")
def test_a_type_that_reads_both_ways_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "refuse_untunable", lambda _: None)
    assert save_type("roberta", tmp_path)
    assert probed(tmp_path).causal is False
    with pytest.raises(NotCausalError):
        of_training(tmp_path)
