"""A tuned model's adapter in place of the student's, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ft_service.errors import SpecError
from ft_service.spec import AdapterRef, JobSpec
from ft_service.spec.teachers import PLACE, TeacherRef
from tests.support.ranks import run_on_ranks
from tests.support.training.looked_up import LookedUp
from tests.support.training.models import save_tiny_llama, spec_for
from tests.support.training.parity import CPU, constructed
from workers.training import teachers
from workers.training.teachers import Teacher, adapter_as_teacher, factors_of


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


@pytest.mark.parametrize("training", [True, False])
def test_a_teacher_speaks_at_rest_with_its_own_factors_and_leaves_the_student_as_it_was(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[Any] = []
    monkeypatch.setattr(teachers, "reshard", freed.append)
    switched: list[Any] = []

    @contextmanager
    def without(model: Any) -> Iterator[None]:
        switched.append(model)
        yield
        switched.append("back")

    monkeypatch.setattr(teachers, "without_adapter", without)
    layer: Any = torch.nn.Identity()
    layer.instead = None
    factors: Any = object()
    student = LookedUp()
    student.train(training)
    own = Teacher({layer: factors})
    with suppress(ValueError), own.speaking(student) as speaker:
        assert (speaker is student, student.training, layer.instead) == (True, False, factors)
        assert (torch.is_grad_enabled(), switched) == (False, [student])
        raise ValueError("it fails")
    assert (student.training, layer.instead, switched, freed) == (training, None, [student], [])
    base = LookedUp(torch.full((4, 3), 0.25))
    other = Teacher(base=base)
    with other.speaking(student) as speaker:
        assert (speaker is base, torch.is_grad_enabled(), freed) == (True, False, [])
        assert student.training is training
    assert (freed, len(switched)) == ([base], 1)
    assert (own.words(student), other.words(student), other.words(base)) == (4, 3, 3)


@pytest.mark.parametrize("digest", ["of the base", "other"])
def test_a_teacher_was_trained_on_the_base_of_the_job(
    digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    manifest = SimpleNamespace(base=SimpleNamespace(digest="of the base"))
    monkeypatch.setattr(teachers, "intact_manifest", lambda *given: asked.append(given) or manifest)
    monkeypatch.setattr(teachers, "factors_of", lambda *given: {"layer": given})
    ref = TeacherRef(kind="adapter", name="tuned", path="/tuned", job_id="ftjob-1")
    model: Any = object()
    if digest == "of the base":
        found: Any = adapter_as_teacher(model, ref, digest, torch.bfloat16, CPU)
        assert found.factors == {"layer": (model, ref, torch.bfloat16, CPU)}
    else:
        with pytest.raises(SpecError, match="tuned: it was trained on other files") as refused:
            adapter_as_teacher(model, ref, digest, torch.bfloat16, CPU)
        assert (refused.value.code, refused.value.param) == ("base_changed", PLACE)
    assert asked == [(AdapterRef(name="tuned", job_id="ftjob-1", path="/tuned"), PLACE)]


@pytest.mark.parametrize("replaced", [{}, {"lm_head": 1}])
def test_factors_are_those_of_the_layers_of_the_same_name(
    replaced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = SimpleNamespace(a=torch.ones(2, 4).t(), b=torch.zeros(3, 2), scaling=1.5)
    adapter = SimpleNamespace(
        modules=["base_model.model.one"], update=lambda name: update, replaced=replaced
    )
    monkeypatch.setattr(teachers, "PeftAdapter", lambda path: adapter)
    monkeypatch.setattr(teachers, "LoraLinear", torch.nn.Linear)
    model: Any = torch.nn.ModuleDict({"one": torch.nn.Linear(1, 1), "two": torch.nn.Linear(1, 1)})
    ref = TeacherRef(kind="adapter", name="tuned", path="/tuned", job_id="ftjob-1")
    if replaced:
        with pytest.raises(SpecError, match="it replaces lm_head"):
            factors_of(model, ref, torch.bfloat16, CPU)
        return
    found: Any = factors_of(model, ref, torch.bfloat16, CPU)
    assert list(found) == [model["one"]]
    own = found[model["one"]]
    assert (own.scale, own.a.is_contiguous(), own.a.dtype) == (1.5, True, torch.bfloat16)
    assert (own.a.tolist(), own.b.tolist()) == (update.a.tolist(), update.b.tolist())
