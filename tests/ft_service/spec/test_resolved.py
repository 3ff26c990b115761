from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.spec import (
    AdapterRef,
    BaseModelRef,
    DataFileRef,
    DistributedOptions,
    JobContext,
    JobSpec,
    inherit,
    parse_request,
    resolve,
)
from ft_service.spec.options import LoraOptions
from ft_service.spec.resolved import note_served, teaching_adapter, teaching_base
from ft_service.spec.teachers import TeacherRef
from tests.support.bases import spec_on
from tests.support.reconciling import spec_of

BODY: dict[str, Any] = {"model": "tiny", "training_file": "file-1"}


def resolved(
    gpus: int = 0,
    parent: AdapterRef | None = None,
    teacher: TeacherRef | None = None,
    **more: Any,
) -> JobSpec:
    return resolve(
        parse_request(BODY | more),
        JobContext(
            job_id="ftjob-abc",
            organization="acme",
            model=BaseModelRef(name="meta/tiny", path="/models/meta/tiny"),
            training_data=DataFileRef(name="a.jsonl", path="/files/a", sha256="0"),
            validation_data=None,
            seed=99,
            gpus=gpus,
            parent=parent,
            teacher=teacher,
        ),
    )


@pytest.mark.parametrize(
    ("gpus", "distributed", "param", "says"),
    [
        (4, {"replicate": 3}, "distributed.replicate", "4 ranks cannot be divided into 3"),
        (
            4,
            {"reshard_after_forward": 3},
            "distributed.reshard_after_forward",
            "Use 2, true or false",
        ),
        (
            4,
            {"reshard_after_forward": 2, "replicate": 2},
            "distributed.reshard_after_forward",
            "Use true or false",
        ),
        (0, {"offload": True}, "distributed.offload", "has no GPU"),
        (
            0,
            {"activation_checkpointing": "offload"},
            "distributed.activation_checkpointing",
            "has no GPU",
        ),
        (1, {"offload": True}, "distributed.offload", "nothing is sharded"),
        (4, {"offload": True, "replicate": -1}, "distributed.offload", "nothing is sharded"),
        (4, {"context_parallel": 3}, "distributed.context_parallel", "nproc_per_node is 4"),
        (
            0,
            {"context_parallel": 2, "nnodes": 2},
            "distributed.context_parallel",
            "nproc_per_node is 1",
        ),
    ],
)
def test_options_of_sharding_must_fit_the_ranks(
    gpus: int, distributed: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        resolved(gpus, distributed=distributed)
    assert refused.value.param == param


def test_ranks_share_no_samples_in_reinforcement_learning() -> None:
    grader = {
        "type": "string_check",
        "name": "is",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "operation": "eq",
    }
    method = {"type": "reinforcement", "reinforcement": {"grader": grader}}
    with pytest.raises(SpecError) as refused:
        resolved(4, method=method, distributed={"context_parallel": 2})
    assert refused.value.param == "distributed.context_parallel"
    assert resolved(4, method=method).distributed.context_parallel == "auto"


def test_options_of_sharding_that_fit_are_kept() -> None:
    distributed = {
        "replicate": 2,
        "reshard_after_forward": 2,
        "prefetch": {"forward": 2},
        "wrap": {"min_params": 9},
    }
    assert resolved(8, distributed=distributed).distributed.reshard_size == 2
    assert resolved(1, distributed={"reshard_after_forward": 2}).distributed.reshard_size == 2, (
        "ignored: nothing is sharded"
    )
    assert resolved(2, distributed={"offload": True}).distributed.offload


def test_resolving_leaves_nothing_open() -> None:
    spec = resolved(suffix="mine")
    assert spec.seed == 99
    assert spec.tuned_name == "ft:tiny:acme:mine:abc"
    assert spec.world_size == 1
    assert resolved(gpus=4).world_size == 4
    assert resolved(gpus=4, distributed={"nproc_per_node": 2}).world_size == 2
    assert resolved(seed=5).seed == 5
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("distributed", "copies", "ranks"),
    [
        ({"nnodes": 2, "nproc_per_node": 4}, "auto", 8),
        ({"nnodes": 2, "nproc_per_node": 4, "replicate": 1}, 1, 8),
        ({"nnodes": 3}, "auto", 6),
        ({"nproc_per_node": 4}, "auto", 4),
    ],
)
def test_how_many_copies_there_are_is_for_the_plan_to_choose(
    distributed: dict[str, Any], copies: Any, ranks: int
) -> None:
    spec = resolved(gpus=2, distributed=distributed)
    assert (spec.distributed.replicate, spec.world_size) == (copies, ranks)


@pytest.mark.parametrize("before", [True, False])
def test_shared_experts_are_meant_by_all_linear_unless_a_parent_or_dropout_is_against_it(
    before: bool,
) -> None:
    parent = AdapterRef(name="ft:before", job_id="ftjob-0", path="/runs/0", shared_experts=before)
    assert resolved().shared_experts
    assert not resolved(lora={"lora_dropout": 0.1}).shared_experts
    assert resolved(parent=parent).shared_experts == before
    assert resolved(parent=parent, lora={"lora_dropout": 0.1}).shared_experts == before


def test_shapes_go_from_the_most_ranks_to_the_fewest_as_far_as_machines_and_options_allow() -> None:
    spec = spec_of(
        "j",
        distributed=DistributedOptions(
            nnodes=1, max_nnodes=3, nproc_per_node=2, max_nproc_per_node=4
        ),
    )
    assert spec.shapes(9, 9, 0) == [(3, 4), (2, 4), (1, 4), (1, 3), (1, 2)]
    assert spec.shapes(2, 3, 0) == [(2, 3), (1, 3), (1, 2)]
    assert spec.shapes(1, 2, 0) == [(1, 2)]
    copies = spec_of(
        "j", distributed=DistributedOptions(nproc_per_node=2, max_nproc_per_node=8, replicate=2)
    )
    assert copies.shapes(1, 8, 0) == [(1, 8), (1, 6), (1, 4), (1, 2)], (
        "what two copies cannot divide is left out"
    )
    shared = spec_of(
        "j",
        distributed=DistributedOptions(nproc_per_node=2, max_nproc_per_node=7, context_parallel=2),
    )
    assert shared.shapes(1, 8, 0) == [(1, 6), (1, 4), (1, 2)], "ranks that share samples are two"
    there = spec.on(3, 4)
    assert (there.world_size, there.distributed.max_nnodes) == (12, None)


def test_adapters_on_stacks_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    experts = {"target_parameters": ["mlp.experts.gate_up_proj"]}
    with pytest.raises(
        SpecError, match=r"stacks of experts on GPUs only.*merge the tuned model"
    ) as caught:
        spec_on(tmp_path, serve="vllm", lora=experts)
    assert caught.value.param == "lora.target_parameters"
    assert spec_on(tmp_path, lora=experts).lora.target_parameters == ["mlp.experts.gate_up_proj"]


@pytest.mark.parametrize(
    ("option", "value"), [("use_dora", True), ("modules_to_save", ["lm_head"])]
)
def test_what_is_more_than_two_matrices_is_refused_for_a_server(
    option: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match="it loads only A and B of LoRA") as caught:
        spec_on(tmp_path, serve="vllm", lora={option: value})
    assert caught.value.param == f"lora.{option}"
    assert getattr(spec_on(tmp_path, lora={option: value}).lora, option) == value


@pytest.mark.parametrize("name", ["pissa", "loftq", "olora"])
def test_an_adapter_that_changes_its_base_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=f"'{name}' is not available .* the adapter belongs to that base alone"
    ):
        spec_on(tmp_path, lora={"init_lora_weights": name})


@pytest.mark.parametrize(
    ("lora", "step", "padded"),
    [
        ({"r": 12}, 16, False),
        ({"r": 8, "rank_pattern": {"q_proj": 300}}, 320, True),
        ({"r": 512}, 512, False),
    ],
)
def test_what_the_server_needs_is_said(lora: dict[str, object], step: int, padded: bool) -> None:
    request = parse_request({"model": "m", "training_file": "f", "serve": "vllm", "lora": lora})
    text = note_served(request.lora)
    assert f"--max-lora-rank {step} or more" in text
    assert ("padded to rank 300" in text) == padded


def test_another_server_is_refused() -> None:
    with pytest.raises(SpecError, match="serve"):
        parse_request({"model": "m", "training_file": "f", "serve": "ollama"})


def test_a_job_that_goes_on_keeps_the_variables_of_its_template_and_may_set_others() -> None:
    parent = resolved(chat_template="{{ a }}{{ b }}", chat_template_kwargs={"a": 1, "b": 2})
    for given, variables in (
        ({}, {"a": 1, "b": 2}),
        ({"chat_template_kwargs": {"b": 3}}, {"a": 1, "b": 3}),
        ({"chat_template": "{{ b }}"}, None),
    ):
        assert (
            inherit(parse_request(BODY | given), parent, "ft:m").chat_template_kwargs == variables
        )


@pytest.mark.parametrize(
    ("section", "param"),
    [
        ({"teacher": "larger", "with_context": "x"}, "method.distillation.teacher"),
        ({"teacher": "ft:tiny:local::other"}, "method.distillation.teacher"),
        ({"teacher": "meta/tiny"}, "method.distillation.with_context"),
    ],
)
def test_a_teacher_is_the_base_and_reads_something_else(
    section: dict[str, str], param: str
) -> None:
    with pytest.raises(SpecError) as refused:
        resolved(method={"type": "distillation", "distillation": section})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("trained", "own", "says"),
    [
        ({}, {}, None),
        ({"lora": {"target_modules": ["q_proj"], "r": 4}}, {}, None),
        (
            {"lora": {"target_modules": ["q_proj"]}},
            {"target_modules": ["v_proj"]},
            "target_modules",
        ),
        ({"lora": {"use_dora": True}}, {}, "use_dora"),
        ({"lora": {"modules_to_save": ["lm_head"]}}, {}, "modules_to_save"),
    ],
)
def test_a_tuned_teacher_lies_beside_the_student(
    trained: dict[str, Any], own: dict[str, Any], says: str | None
) -> None:
    before = resolved(**trained)
    adapter = AdapterRef(name="ft:tiny:local::before", job_id="ftjob-0", path="/before")
    options = LoraOptions(**own)
    if says is not None:
        with pytest.raises(SpecError, match=says) as refused:
            teaching_adapter(before, adapter, options, before.model.name)
        assert refused.value.param == "method.distillation.teacher"
        return
    teacher = teaching_adapter(before, adapter, options, before.model.name)
    taught = {"type": "distillation", "distillation": {"teacher": adapter.name}}
    spec = resolved(method=taught, teacher=teacher)
    assert (spec.teacher, spec.bases_read) == (teacher, (spec.model.path,))
    assert [found.path for found in spec.adapters_read] == ["/before"]
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(SpecError, match="is on the base"):
        teaching_adapter(before, adapter, options, "another")


def test_another_base_teaches_if_it_is_another() -> None:
    own = resolved().model
    with pytest.raises(SpecError, match="it is the job's base"):
        teaching_base(own.model_copy(update={"name": "alias"}), own)
    teacher = teaching_base(own.model_copy(update={"name": "larger", "path": "/larger"}), own)
    method = {"type": "distillation", "distillation": {"teacher": "larger", "answers": "student"}}
    spec = resolved(method=method, teacher=teacher)
    assert (spec.method, spec.by_commands) == ("distillation", True)
    assert (spec.bases_read, spec.adapters_read) == ((own.path, "/larger"), ())
    assert spec.served_teacher is None


def test_ranks_read_nothing_of_a_teacher_that_a_server_answers_for() -> None:
    own = resolved().model
    larger = own.model_copy(update={"name": "larger", "path": "/larger"})
    section = {"teacher": "larger", "answers": "student", "teacher_at": "server", "top_k": 20}
    method: dict[str, Any] = {"type": "distillation", "distillation": section}
    spec = resolved(method=method, teacher=teaching_base(larger, own, "server"))
    assert (spec.bases_read, spec.adapters_read) == ((own.path,), ())
    assert spec.served_teacher == spec.teacher is not None
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    section["teacher"] = own.name
    with pytest.raises(SpecError, match="it is the job's base, which the ranks hold"):
        resolved(method=method)


def test_a_teacher_may_read_the_same_where_the_student_begins_elsewhere() -> None:
    begun = AdapterRef(name="ft:tiny:local::before", job_id="ftjob-0", path="/before")
    taught: dict[str, Any] = {"type": "distillation", "distillation": {"teacher": "meta/tiny"}}
    spec = resolved(parent=begun, method=taught)
    assert (spec.version, spec.method, spec.in_pairs) == (2, "distillation", False)
    taught["distillation"] = {"teacher": "meta/tiny", "with_context": "x"}
    spec = resolved(method=taught)
    assert (spec.context, spec.in_pairs, spec.samples_of_item) == ("x", True, 1)
    assert (resolved().version, resolved().loss) == (1, None)
