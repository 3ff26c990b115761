"""A tuned model's adapter in place of the student's, layer by layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ft_service.errors import SpecError
from ft_service.spec import JobSpec
from ft_service.spec.teachers import PLACE, TeacherRef
from tests.support.ranks import run_on_ranks
from tests.support.training.models import save_tiny_llama, spec_for
from tests.support.training.parity import CPU, constructed
from workers.training.teachers import factors_of


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> TeacherRef:
    folder = tmp_path_factory.mktemp("tuned")
    config = LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "down_proj"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    get_peft_model(model, config).save_pretrained(str(folder))
    return TeacherRef(kind="adapter", name="tuned", path=str(folder), job_id="ftjob-1")


def spec_of(base: Path, *modules: str) -> JobSpec:
    return spec_for(base, lora={"r": 4, "target_modules": list(modules)})


def factors_on_rank(
    rank: int, world: int, spec: JobSpec, ref: TeacherRef
) -> tuple[set[str], set[tuple[int, float, torch.dtype]]]:
    model = constructed(spec, world).peft_model
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    found = factors_of(model, ref, torch.bfloat16, CPU)
    assert all(own.a.shape[0] == own.b.shape[1] == 3 for own in found.values())
    return {names[layer] for layer in found}, {
        (own.a.shape[0], own.scale, own.b.dtype) for own in found.values()
    }


def test_a_teacher_may_adapt_fewer_layers_than_the_student(base: Path, tuned: TeacherRef) -> None:
    spec = spec_of(base, "q_proj", "down_proj", "v_proj")
    ((layers, kinds),) = run_on_ranks(factors_on_rank, 1, spec, tuned)
    assert layers == {"q_proj", "down_proj"}
    assert kinds == {(3, 3.0, torch.bfloat16)}


def refused_on_rank(
    rank: int, world: int, spec: JobSpec, ref: TeacherRef
) -> tuple[str, str | None]:
    model = constructed(spec, world).peft_model
    with pytest.raises(SpecError) as refused:
        factors_of(model, ref, torch.float32, CPU)
    return refused.value.code, refused.value.param


def test_a_teacher_that_adapts_other_layers_than_the_student_is_refused(
    base: Path, tuned: TeacherRef
) -> None:
    spec = spec_of(base, "q_proj")
    assert run_on_ranks(refused_on_rank, 1, spec, tuned) == [("not_available", PLACE)]
