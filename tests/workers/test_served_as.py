"""Jobs that are trained for the form in which they are served: on ranks, resumed, and merged to
exactly what they have multiplied by.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ft_service.errors import SpecError
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Outcome, OutcomeKind
from ft_service.spec import JobSpec, inherit, parse_request
from tests.support.ranks import run_on_ranks
from tests.support.training import parity
from tests.support.training.attempts import adapter as trained_adapter
from tests.support.training.attempts import losses, messages, run_attempt, table, trained
from tests.support.training.models import (
    reference,
    save_chat_base,
    save_chats,
    save_pairs,
    save_tiny,
    save_tiny_llama,
    spec_for,
)
from tests.support.training.parity import CPU, MIXED, assert_parity, reference_steps, train_steps
from workers.model.build import build
from workers.quant.served_forms import rounded, served_inputs, values_of
from workers.tasks.export import export
from workers.tasks.merge import merge_and_measure


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base") / "base")


def served(base: Path, world: int = 1, form: str = "int4_g32", **options: Any) -> JobSpec:
    precision = {**MIXED, "compute": "fp32", "served_as": form, **options.pop("precision", {})}
    return spec_for(
        base, ranks=world, lora={"r": 4, "lora_alpha": 8}, precision=precision, **options
    )


def straight_through(model: Path, spec: JobSpec, dtype: torch.dtype) -> nn.Module:
    """The unsharded truth: PEFT's layers, whose forward multiplies by the rounded sum."""
    peft_model = reference(model, spec, dtype)
    form = spec.precision.served_as
    assert form is not None

    def forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        sums = layer.base_layer.weight.double() + layer.scaling["default"] * (
            b.double() @ a.double()
        )
        sums = sums.float()
        values = values_of(*rounded(sums.detach(), form))
        x = x + (served_inputs(x, form) - x).detach()
        return F.linear(x, sums + (values - sums).detach(), layer.base_layer.bias)

    for module in peft_model.modules():
        if hasattr(module, "lora_A"):
            module.forward = functools.partial(forward, module)
    return peft_model


@pytest.mark.parametrize(
    ("world", "form", "distributed"),
    [
        (1, "int4_g32", {"activation_checkpointing": "full"}),
        (2, "int4_g32", {"ignored": [r".*(q|o|down)_proj\.weight"]}),
        pytest.param(1, "fp8", {"activation_checkpointing": "selective"}, marks=pytest.mark.slow),
        pytest.param(2, "int4_g64", {"keep_unsharded": True}, marks=pytest.mark.slow),
        pytest.param(3, "fp8", {}, marks=pytest.mark.slow),
        (3, "nvfp4", {}),
        pytest.param(1, "nvfp4", {}, marks=pytest.mark.slow),
        pytest.param(2, "nvfp4", {}, marks=pytest.mark.slow),
        pytest.param(2, "mxfp4", {}, marks=pytest.mark.slow),
        pytest.param(3, "8da4w", {}, marks=pytest.mark.slow),
        pytest.param(2, "int8", {}, marks=pytest.mark.slow),
        pytest.param(2, "int4_g32", {"compile": True}, marks=pytest.mark.slow),
    ],
)
def test_loss_and_every_gradient_are_those_of_autograd_straight_through_the_rounding(
    world: int,
    form: str,
    distributed: dict[str, Any],
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parity, "reference", straight_through)
    truth = reference_steps(base, served(base, form=form))
    monkeypatch.undo()
    for ours in run_on_ranks(
        train_steps, world, served(base, world, form, distributed=distributed)
    ):
        assert_parity(ours, truth)


def losses_from_step(folder: Path, world: int, **options: Any) -> RunDir:
    base = save_chat_base(folder / "base")
    spec = served(
        base,
        world,
        "nvfp4",
        data=save_chats(folder / "train.jsonl", 12),
        training={
            "max_steps": 4,
            "batch_size": 4,
            "learning_rate": 2e-2,
            "optim": "adamw_8bit",
        },
        checkpoint={"save_steps": 1, "save_total_limit": 10},
        **options,
    )
    return trained(spec, folder / "run", world)


@pytest.mark.slow
def test_rounding_begins_at_its_step(tmp_path: Path) -> None:
    late = losses(losses_from_step(tmp_path / "late", 2, precision={"served_from_step": 0.5}))
    never = losses(losses_from_step(tmp_path / "never", 2, precision={"served_as": None}))
    always = losses(losses_from_step(tmp_path / "always", 2))
    assert [late[step] for step in (1, 2)] == [never[step] for step in (1, 2)]
    assert late[3] != never[3]
    assert late[1] != always[1]


def test_a_job_resumes_bit_for_bit_across_the_step_from_which_it_rounds(tmp_path: Path) -> None:
    """With moments in 8 bits, on two ranks."""
    late = losses_from_step(tmp_path / "late", 2, precision={"served_from_step": 0.5})
    found = losses(late)
    told = [text for text in messages(late) if "served_from_step" in text]
    assert len(told) == 1
    assert told[0].startswith("From step 3 of 4 on")
    run = RunDir(tmp_path / "resumed")
    shutil.copytree(late.path("attempts"), run.path("attempts"))
    shutil.copytree(late.path("checkpoints/step-1-a1"), run.path("checkpoints/step-1-a1"))
    for file in ("spec.json", "origins.json"):
        shutil.copy(late.path(file), run.path(file))
    assert run_attempt(run, 2, 2, "step-1-a1") == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert losses(run) == found
    for key, matrix in trained_adapter(late).items():
        assert torch.equal(trained_adapter(run)[key], matrix), key


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A job on pairs, on two ranks."""
    folder = tmp_path_factory.mktemp("job")
    spec = served(
        save_chat_base(folder / "base"),
        2,
        data=save_pairs(folder / "train.jsonl", 11),
        valid=save_pairs(folder / "valid.jsonl", 4),
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.5, "batch_size": 5}}},
        training={"max_steps": 3, "tokens_per_micro_batch": 128, "learning_rate": 5e-3},
        checkpoint={"save_steps": 2, "save_total_limit": 10},
    )
    return trained(spec, tmp_path_factory.mktemp("finished"), 2)


def test_a_resumed_job_ends_with_the_same_bits_and_its_reference_is_the_rounded_base(
    finished: RunDir, tmp_path: Path
) -> None:
    rows = table(finished)
    assert float(rows[0]["rewards/margins"]) == pytest.approx(0, abs=1e-6)
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"]) - 0.02
    assert any("trained to be merged and served in int4_g32" in text for text in messages(finished))
    run = RunDir(tmp_path / "resumed")
    shutil.copytree(finished.path("attempts"), run.path("attempts"))
    shutil.copytree(finished.path("checkpoints/step-2-a1"), run.path("checkpoints/step-2-a1"))
    for name in ("spec.json", "origins.json", "reference.json", "reference.bin"):
        shutil.copy(finished.path(name), run.path(name))
    assert run_attempt(run, 2, 2, "step-2-a1") == Outcome(kind=OutcomeKind.SUCCEEDED)
    assert losses(run) == losses(finished)
    for name, matrix in trained_adapter(finished).items():
        assert torch.equal(trained_adapter(run)[name], matrix), name


def test_other_forms_than_its_own_are_refused_by_every_export(
    finished: RunDir, tmp_path: Path
) -> None:
    adapter = finished.path("adapter")
    for to in ("bf16", "fp8"):
        with pytest.raises(SpecError, match="use ft merge --to int4, or") as refused:
            merge_and_measure(adapter, tmp_path / to, to, None, 0)
        assert refused.value.param == "to"
    for to in ("vllm", "gguf", "gguf-adapter", "merged-fp8"):
        with pytest.raises(SpecError, match="--format merged-int4"):
            export(adapter, tmp_path / to, to, None, 0)
        assert not (tmp_path / to).exists()


@pytest.mark.slow
def test_the_loss_of_what_is_exported_is_that_of_training(finished: RunDir, tmp_path: Path) -> None:
    report = export(finished.path("adapter"), tmp_path / "out", "merged-int4", None, 4)
    found = report["validation_loss"]
    assert found["merged"] == pytest.approx(found["adapter_on_base_as_trained"], rel=1e-3)
    apart = abs(found["merged"] - found["adapter_on_base_as_trained"])
    assert abs(found["adapter_on_bf16_base"] - found["merged"]) > 5 * apart
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32


REINFORCEMENT = {
    "reinforcement": {
        "grader": {
            "type": "string_check",
            "name": "same",
            "operation": "eq",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
        }
    }
}


def body(**options: Any) -> dict[str, Any]:
    return {"model": "tiny", "training_file": "file", **options}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora": {"use_dora": True}}, "lora.use_dora"),
        ({"lora": {"lora_dropout": 0.1}}, "lora.lora_dropout"),
        ({"lora": {"target_parameters": ["mlp.experts.down_proj"]}}, "lora.target_parameters"),
        ({"lora": {"target_modules": ["q_proj"]}}, "lora.target_modules"),
        ({"method": {"type": "reinforcement", **REINFORCEMENT}}, "method.type"),
        ({"precision": {"served_as": "nf4"}}, "nf4"),
    ],
)
def test_what_cannot_be_rounded_together_is_refused_by_name(
    options: dict[str, Any], named: str
) -> None:
    given = {"precision": {"served_as": "fp8"}, **options}
    with pytest.raises(SpecError) as refused:
        parse_request(body(**given))
    assert "precision.served_as" in str(refused.value)
    assert named in str(refused.value)


def test_a_parent_s_form_goes_on_and_is_refused_where_it_does_not_fit(base: Path) -> None:
    parent = served(base, form="fp8")
    assert inherit(parse_request(body()), parent, "ft:parent").precision.served_as == "fp8"
    never = body(precision={"served_as": "fp8", "served_from_step": 1.0})
    with pytest.raises(SpecError, match=r"served_from_step = 1\.0: must be less than 1"):
        parse_request(never)
    late = served(base, form="fp8", precision={"served_from_step": 0.5})
    assert inherit(parse_request(body()), late, "ft:parent").precision.served_from_step == 0
    with pytest.raises(SpecError, match=r"without precision\.served_as") as alone:
        spec_for(base, precision={"served_from_step": 0.5})
    assert alone.value.param == "precision.served_from_step"
    plain = body(precision={"served_as": None})
    assert inherit(parse_request(plain), parent, "ft:parent").precision.served_as is None
    sampled = parse_request(body(method={"type": "reinforcement", **REINFORCEMENT}))
    with pytest.raises(SpecError, match="without rounding the sum") as refused:
        inherit(sampled, parent, "ft:parent")
    assert refused.value.param == "precision.served_as"
    dora = spec_for(base, lora={"r": 4, "use_dora": True})
    request = parse_request(body(precision={"served_as": "fp8"}))
    with pytest.raises(SpecError, match=r"with lora\.use_dora"):
        inherit(request, dora, "ft:parent")
    with pytest.raises(SpecError, match="without rounding the sum") as served_too:
        spec_for(base, precision={"served_as": "fp8"}, serve="vllm")
    assert served_too.value.code == "not_served"


def test_a_base_that_is_not_merged_to_the_form_is_refused_before_training(
    base: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=r"192 columns, .* int4_g64 and int4_g32 and fp8 and nvfp4"):
        build(served(base, form="int4_g128"), CPU)
    mixture = save_tiny("mixtral", tmp_path / "mixture")
    with pytest.raises(SpecError, match=r"leave precision\.served_as out") as refused:
        build(spec_for(mixture, precision={"served_as": "fp8"}), CPU)
    assert refused.value.param == "precision.served_as"
