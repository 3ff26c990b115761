"""Bases of several models: their text decoder against the published class with stock PEFT, and its
adapter on that class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from ft_service.errors import SpecError
from ft_service.spec import JobSpec
from tests.support.bases import describe
from tests.support.ranks import run_on_ranks
from tests.support.training.checks import REREAD_BY_PEFT
from tests.support.training.models import MIXED_IN_FAMILIES, spec_for
from tests.support.training.parity import (
    Step,
    reference_steps,
    relative_error,
    set_adapters,
    train_steps,
)
from tests.support.training.wrapped import WRAPPERS, save_wrapped
from workers.base.load import adapters, load
from workers.model.build import base_on_meta, build, decoder_layers
from workers.model.precision import precision_map
from workers.output.outcome import new_folder, write_adapter
from workers.tasks.merge import merge
from workers.training.packing import settle_attention

CPU = torch.device("cpu")
IDS = torch.arange(3, 27).view(2, 12)
IN_SHORT = ("gemma3", "mistral3", "qwen2_5_vl")
FAMILIES = [
    pytest.param(name, id=name, marks=() if name in IN_SHORT else pytest.mark.slow)
    for name in WRAPPERS
]
NOT_PACKED = ("qwen3_5",)
"""Layers that mix tokens otherwise."""
LORA = {"r": 3, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrapped")
    for family in WRAPPERS:
        save_wrapped(family, folder / family)
    return folder


def options_for(precision: dict[str, Any], family: str) -> dict[str, Any]:
    training = {"per_device_train_batch_size": 2, "packing": family not in NOT_PACKED}
    return {"precision": {**precision, "compute": "fp32"}, "lora": LORA, "training": training}


def train_all(rank: int, world: int, specs: dict[str, JobSpec]) -> dict[str, Step]:
    return {family: train_steps(rank, world, spec, steps=1)[0] for family, spec in specs.items()}


def loaded(folder: Path) -> PeftModel:
    """Base and adapters as the worker has them on one rank; B is not zero."""
    model = build(spec_for(folder, **options_for({"default": "bf16"}, folder.name)), CPU).peft_model
    load(model, folder, seed=1, compute_dtype=torch.float32, device=CPU)
    set_adapters(model)
    model.eval()
    return model


def save_adapter(model: PeftModel, base: Path, folder: Path) -> dict[str, Tensor]:
    """Write the adapter as the worker does; its tensors."""
    tensors = {
        name.replace(".default.", "."): p.detach().contiguous() for name, p in adapters(model)
    }
    with REREAD_BY_PEFT, new_folder(folder) as made:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        write_adapter(made, shapes, tensors.items(), model.peft_config["default"], spec_for(base))
    return tensors


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def check(family: str, ours: Step, truth: Step) -> None:
    assert ours.loss == pytest.approx(truth.loss, rel=1e-5), family
    assert ours.grads.keys() == truth.grads.keys()
    for name, grad in ours.grads.items():
        assert truth.grads[name].norm() > 0, (family, name)
        assert relative_error(grad, truth.grads[name]) < 1e-5, (family, name)


@pytest.mark.parametrize(
    ("precision", "worlds"),
    [
        ({"default": "nf4"}, (2,)),
        *(
            pytest.param(own, (1, 2), marks=pytest.mark.slow)
            for own in ({"default": "nf4"}, MIXED_IN_FAMILIES)
        ),
    ],
    ids=["nf4 on two", "nf4", "mixed"],
)
def test_the_text_decoder_trains_as_in_the_published_class(
    precision: dict[str, Any], worlds: tuple[int, ...], bases: Path
) -> None:
    """Loss and every gradient on any number of ranks, quantised, by the names that the published
    class gives them.
    """
    specs = {
        world: {
            family: spec_for(bases / family, ranks=world, **options_for(precision, family))
            for family in IN_SHORT
        }
        for world in worlds
    }
    ranks = [found for world in worlds for found in run_on_ranks(train_all, world, specs[world])]
    for family, spec in specs[2].items():
        (truth,) = reference_steps(Path(spec.model.path), spec, steps=1)
        for found in ranks:
            check(family, found[family], truth)


@pytest.mark.slow
def test_other_wrappers_train_as_in_the_published_class(bases: Path) -> None:
    specs = {
        family: spec_for(bases / family, **options_for(MIXED_IN_FAMILIES, family))
        for family in WRAPPERS
        if family not in IN_SHORT
    }
    (found,) = run_on_ranks(train_all, 1, specs)
    truth = {
        family: reference_steps(Path(spec.model.path), spec, steps=1)[0]
        for family, spec in specs.items()
    }
    for family, expected in truth.items():
        check(family, found[family], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_changes_the_published_class_as_it_changed_the_decoder(
    family: str, bases: Path, tmp_path: Path
) -> None:
    folder = bases / family
    model = loaded(folder)
    tensors = save_adapter(model, folder, tmp_path / "adapter")
    published = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    linears = {name for name, module in published.named_modules() if isinstance(module, nn.Linear)}
    stock = PeftModel.from_pretrained(published, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(stock), logits(model), rtol=1e-5, atol=1e-5)
    with stock.disable_adapter():
        assert (logits(stock) - logits(model)).abs().max() > 1e-2
    adapted = {
        n.removeprefix("base_model.model.")
        for n, m in stock.named_modules()
        if hasattr(m, "lora_A")
    }
    assert len(tensors) == 2 * len(adapted), "and no tower has an adapter"
    assert len(adapted) < len(linears)


def test_merging_changes_the_decoder_and_copies_the_towers(bases: Path, tmp_path: Path) -> None:
    folder = bases / "gemma3"
    save_adapter(loaded(folder), folder, tmp_path / "adapter")
    merge(folder, tmp_path / "adapter", tmp_path / "merged", to="bf16")
    before, after = (
        load_file(path / "model.safetensors") for path in (folder, tmp_path / "merged")
    )
    assert before.keys() == after.keys()
    same = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert {name for name in before if "_proj." not in name or "language_model" not in name} == same
    published = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "merged", dtype=torch.float32
    )
    difference = logits(published) - logits(loaded(folder))
    assert difference.abs().max() < 0.1 < logits(published).abs().max(), "rounded to bf16"
    with pytest.raises(SpecError, match="merge to bf16"):
        merge(folder, tmp_path / "adapter", tmp_path / "fp8", to="fp8")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.id not in NOT_PACKED])
def test_samples_of_a_wrapped_base_are_packed(family: str, bases: Path) -> None:
    assert settle_attention(loaded(bases / family), CPU, torch.float32) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_what_the_worker_loads_by_the_same_names(family: str, bases: Path) -> None:
    model = base_on_meta(str(bases / family))
    described = describe(bases / family)
    planned = {
        w.name: w.shape for w in described.weights if ".experts." not in w.name
    }  # stored in another form
    held = {
        name: tuple(tensor.shape)
        for name, tensor in model.named_parameters()
        if ".experts." not in name
    }
    assert planned == held
    spec = spec_for(bases / family)
    assert set(described.names.quantizable) == set(
        precision_map(model, decoder_layers(model), spec.precision)
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [("paligemma", "use_bidirectional_attention"), ("t5", "no causal language model")],
)
def test_what_reads_both_ways_is_refused_by_plan_and_worker(
    kind: str, words: str, bases: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(
        (bases / "gemma3" / "model.safetensors").read_bytes()
    )
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=words):
        base_on_meta(str(tmp_path))
