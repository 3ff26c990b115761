"""The plan's arithmetic against numbers that were worked out elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.plan.job import Plan, plan_job
from ft_service.plan.machines import GIB, MACHINES, Machine, find_machine, heap_share, machine_of_model
from ft_service.plan.memory import planned_micro_batches
from ft_service.plan.storage import Layout
from ft_service.plan.text import bytes_text, summary
from tests.support.bases import LLAMA_8B, TINY, llama_shapes, save_base, save_fp8_index, spec_on

H100 = MACHINES["H100"]


def plan_8b(tmp_path: Path, ranks: int = 1, machine: Machine = H100, **options: Any) -> Plan:
    return plan_job(spec_on(save_base(tmp_path / "8b", LLAMA_8B), ranks, **options), machine)


@pytest.mark.parametrize(("weight_format", "bits"), [("bf16", 16), ("fp8", 8.008), ("nf4", 4.13)])
def test_bits_a_parameter_of_an_8b_model(tmp_path: Path, weight_format: str, bits: float) -> None:
    plan = plan_8b(tmp_path, precision={"default": weight_format})
    linears = [module for module in plan.modules if module.kind == "linear"]
    parameters = sum(module.shape[0] * module.shape[1] for module in linears)
    assert parameters == 6_979_321_856
    assert 8 * sum(module.bytes for module in linears) / parameters == pytest.approx(bits, rel=2e-3)


@pytest.mark.parametrize(
    ("asked", "stored", "bits"), [("fp8", "fp8_blocks", 8 + 32 / 128), ("bf16", "bf16", 16), ("nf4", "nf4", 4.13)]
)
def test_a_base_in_fp8_by_blocks_keeps_them_in_fp8_and_else_takes_what_the_job_asks_for(
    asked: str, stored: str, bits: float, tmp_path: Path
) -> None:
    spec = spec_on(save_fp8_index(tmp_path, LLAMA_8B), precision={"default": asked})
    linears = [module for module in plan_job(spec, H100, to_train=False).modules if module.kind == "linear"]
    assert {module.format for module in linears} == {stored}
    parameters = sum(module.shape[0] * module.shape[1] for module in linears)
    assert 8 * sum(module.bytes for module in linears) / parameters == pytest.approx(bits, rel=2e-3)


def test_such_a_base_may_be_resharded_to_a_number_of_ranks_in_bf16(tmp_path: Path) -> None:
    spec = spec_on(save_fp8_index(tmp_path, LLAMA_8B), 4, distributed={"reshard_after_forward": 2})
    assert {module.format for module in plan_job(spec, H100, to_train=False).modules} == {"bf16"}


def test_fp8_is_proposed_first_where_the_base_is_published_so(tmp_path: Path) -> None:
    plan = plan_job(spec_on(save_fp8_index(tmp_path, LLAMA_8B)), Machine("small", 10 * GIB), to_train=False)
    of_formats = [change.options["precision.default"] for change in plan.changes if "precision.default" in change.options]
    assert of_formats[:2] == ["fp8", "nf4"]


def test_adapters_and_arithmetic_of_an_8b_model(tmp_path: Path) -> None:
    """41.9 million parameters of rank 16, and 31.88 / 46.46 GFLOP a token at 2,048 tokens without / with checkpointing."""
    plan = plan_8b(tmp_path, lora={"r": 16}, training={"max_length": 2048})
    assert plan.adapter_parameters == 41_943_040
    assert plan.flops_per_token / 1e9 == pytest.approx(31.88, rel=1e-3)
    again = plan_8b(tmp_path, lora={"r": 16}, distributed={"activation_checkpointing": "full"})
    assert again.flops_per_token / 1e9 == pytest.approx(46.46, rel=1e-3)
    assert plan.rank.adapters + plan.rank.gradients + plan.rank.optimizer == pytest.approx(16 * 41_943_040, rel=1e-5)


def test_one_micro_batch_gathers_the_layers_twice(tmp_path: Path) -> None:
    """3.15 GB of NF4 reach each of eight ranks per gather of all layers."""
    options: dict[str, Any] = {
        "precision": {"default": "nf4"},
        "training": {"batch_size": 16, "per_device_train_batch_size": 2},
    }
    plan = plan_8b(tmp_path, 8, **options)
    larger: dict[str, Any] = options | {"training": {"batch_size": 32, "per_device_train_batch_size": 2}}
    twice = plan_8b(tmp_path, 8, **larger)
    assert plan.batches.rounds == 1
    assert 2 * 3.15e9 < plan.wire.gather < 2 * 3.15e9 + 2.2e9  # and embedding, head and adapters
    assert (twice.wire.gather, twice.wire.reduce) == (2 * plan.wire.gather, plan.wire.reduce)
    assert plan_8b(tmp_path, 1, **options).wire.total == 0


def test_one_h100_trains_8b_at_about_the_published_rate(tmp_path: Path) -> None:
    """12,473 (NeMo AutoModel) to 14,875 (LoRAFusion) tokens/s."""
    speed = plan_8b(tmp_path, training={"max_length": 4096, "per_device_train_batch_size": 2}).speed
    assert speed is not None
    assert 12_000 < speed.tokens_per_second < 15_000


def test_changes_are_proposed_in_order_and_marked_when_enough(tmp_path: Path) -> None:
    plan = plan_8b(tmp_path, machine=Machine("small", 10 * GIB))
    assert plan.fits is False
    assert [next(iter(change.options)) for change in plan.changes][:5] == [
        "distributed.activation_checkpointing",
        "training.max_length",
        "precision.default",
        "distributed.nproc_per_node",
        "distributed.activation_checkpointing",
    ]
    combined = plan.changes[-1]
    assert len(combined.options) == 5
    assert combined.fits
    assert combined.total < min(change.total for change in plan.changes[:-1])


def test_copies_are_proposed_where_the_base_fits_whole(tmp_path: Path) -> None:
    options = {"precision": {"default": "nf4"}, "training": {"max_length": 1024, "per_device_train_batch_size": 1}}
    assert plan_8b(tmp_path, 4, **options).hints == (
        "The base fits whole on every rank: distributed.replicate: -1 needs no gathers and is the fastest.",
    )
    assert plan_8b(tmp_path, 1, **options).hints == ()
    assert plan_8b(tmp_path, 4, Machine("small", 13 * GIB), **options).hints == ()


def test_copies_exchange_gradients_and_no_weights(tmp_path: Path) -> None:
    spec = spec_on(save_base(tmp_path / "8b", LLAMA_8B), 4)
    whole, halves = (
        plan_job(spec.model_copy(update={"distributed": spec.distributed.model_copy(update={"replicate": copies})}), H100)
        for copies in (-1, 2)
    )
    assert (whole.wire.gather, whole.wire.reduce) == (0, 0)
    assert whole.wire.all_reduce == pytest.approx(2 * 3 / 4 * 4 * whole.adapter_parameters, rel=1e-6)
    assert (halves.layout.replicate, halves.layout.shard) == (2, 2)
    assert halves.wire.all_reduce == pytest.approx(2 * 1 / 2 * 4 * whole.adapter_parameters / 2, rel=1e-6)


def test_checkpointing_keeps_the_layers_inputs(tmp_path: Path) -> None:
    """At least the 3.3 GB for 8,192 tokens of those who count bf16 inputs and one layer alone, and at most a quarter more."""
    training = {"batch_size": 4, "per_device_train_batch_size": 4, "max_length": 2048}
    none, full, selective = (
        plan_8b(tmp_path, training=training, distributed={"activation_checkpointing": mode}).rank
        for mode in ("none", "full", "selective")
    )
    assert none.activations_by_mode == full.activations_by_mode
    assert full.activations < selective.activations < none.activations
    norms, inputs, attention = 2 * 4 * (4096 + 1), 2 * 2 * 4096, 2 * (2 * 4096 + 2 * 1024) + 4 * 32
    feed_forward, adapters = 4 * 2 * 14_336, 7 * 2 * 16
    layer = norms + inputs + attention + feed_forward + adapters
    output, casts = 8192 * 2 * 4096, 2 * 41_943_040  # of the last norm in bf16, and the adapters in bf16
    assert none.activations == 32 * 8192 * layer + output + casts
    assert full.activations == 32 * 8192 * 2 * 4096 + 8192 * 4 * 4096 + output
    in_backward = full.activations + full.workspace
    assert in_backward == 32 * 8192 * 2 * 4096 + 8192 * (layer + 2 * 4096 + 2 * 2 * 14_336) + casts // 32
    assert 3.3e9 < in_backward < 1.35 * 3.3e9
    assert none.total - full.total == none.activations + max(none.logits, none.workspace) - in_backward


def test_offloaded_weights_take_no_room_on_the_gpu(tmp_path: Path) -> None:
    here, away = (plan_8b(tmp_path, 2, distributed={"offload": offload}).rank for offload in (False, True))
    assert away.stored == here.stored
    assert here.total - away.total == here.stored


def test_what_is_ignored_is_whole_on_every_rank(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    module = {m.name: m for m in plan_job(spec_on(folder, 2, distributed={"ignored": [r".*\.0\..*q_proj.*"]}), H100).modules}
    assert (
        module["model.layers.0.self_attn.q_proj"].bytes_per_rank == 2 * module["model.layers.1.self_attn.q_proj"].bytes_per_rank
    )
    with pytest.raises(SpecError, match="'nothing' matches no weight of the base") as caught:
        plan_job(spec_on(folder, 2, distributed={"ignored": ["nothing"]}), H100)
    assert caught.value.param == "distributed.ignored"


def test_gathering_further_ahead_takes_a_layer_each(tmp_path: Path) -> None:
    usual, ahead = (plan_8b(tmp_path, 2, distributed={"prefetch": {"forward": n}}) for n in (1, 3))
    layer = sum(m.bytes for m in usual.modules if m.name.startswith("model.layers.0."))
    assert ahead.rank.gather - usual.rank.gather == pytest.approx(2 * 1050e6, rel=0.01)  # the embedding is the largest
    assert layer < 1050e6


def test_a_gpu_that_is_not_in_the_table_is_not_judged(tmp_path: Path) -> None:
    plan = plan_8b(tmp_path, machine=machine_of_model("NVIDIA Something New"))
    assert (plan.fits, plan.speed, plan.changes) == (None, None, ())
    assert summary(plan).endswith("memory of NVIDIA Something New not known.")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_gpus_are_known_by_the_names_that_the_driver_gives(model: str, name: str) -> None:
    assert machine_of_model(model) is MACHINES[name]


@pytest.mark.parametrize("model", ["NVIDIA A10G", "NVIDIA L40", "NVIDIA T400", "NVIDIA GeForce RTX 4090 Laptop GPU", ""])
def test_a_gpu_that_is_only_named_alike_has_no_figures(model: str) -> None:
    assert machine_of_model(model).flops is None


@pytest.mark.parametrize(("name", "known"), [("4090", "RTX-4090"), ("rtx 3090", "RTX-3090"), ("a100-40gb", "A100-40GB")])
def test_a_machine_is_found_by_what_it_is_called(name: str, known: str) -> None:
    assert find_machine(name) is MACHINES[known]


def test_experts_are_stored_as_one_weight_a_projection(tmp_path: Path) -> None:
    """Given one by one, or stacked: the same plan, and the router is neither quantised nor adapted."""
    config = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}
    dense = {name: shape for name, shape in llama_shapes(TINY).items() if ".mlp." not in name}
    single, stacked = dict(dense), dict(dense)
    for layer in range(2):
        before = f"model.layers.{layer}"
        single[f"{before}.block_sparse_moe.gate.weight"] = stacked[f"{before}.mlp.gate.weight"] = (4, 64)
        for expert in range(4):
            matrices = {"w1": (192, 64), "w2": (64, 192), "w3": (192, 64)}
            single |= {f"{before}.block_sparse_moe.experts.{expert}.{m}.weight": s for m, s in matrices.items()}
        stacked |= {f"{before}.mlp.experts.gate_up_proj": (4, 384, 64), f"{before}.mlp.experts.down_proj": (4, 64, 192)}
    plans = [
        plan_job(spec_on(save_base(tmp_path / name, config, shapes), 2, precision={"default": "nf4"}), H100)
        for name, shapes in (("single", single), ("stacked", stacked))
    ]
    assert {m.name: m for m in plans[0].modules} == {m.name: m for m in plans[1].modules}
    found = {module.name: module for module in plans[0].modules}
    assert (found["model.layers.0.mlp.experts.gate_up_proj"].shape, found["model.layers.1.mlp.gate"].format) == (
        (1536, 64),
        "bf16",
    )
    assert plans[0].adapter_parameters == 2 * 16 * (2 * 128 + 2 * (64 + 32))
    per_expert = 2 * (4 * 0.5 * 64 * 64 * 1.5 + 3 * 192 * 64 * 2)  # q, k, v, o; and two of four experts
    attention_and_adapters = 6 * plans[0].adapter_parameters + 6 * 2 * plans[0].batches.length * 64
    assert plans[0].flops_per_token == 4 * (per_expert + TINY["vocab_size"] * 64) + attention_and_adapters


def test_other_towers_and_their_prefix_are_left_out(tmp_path: Path) -> None:
    shapes = {f"language_model.{name}": shape for name, shape in llama_shapes(TINY).items()}
    shapes["vision_tower.encoder.layers.0.proj.weight"] = (64, 64)
    nested = save_base(tmp_path / "nested", {"text_config": TINY, "model_type": "llava"}, shapes)
    plain = save_base(tmp_path / "plain")
    published, stock = (
        spec_on(folder, precision={"overrides": {rf"{stem}\.layers\.0\..*": "nf4"}})
        for folder, stem in ((nested, r"model\.language_model"), (plain, "model"))
    )
    assert plan_job(published, H100).rank == plan_job(stock, H100).rank


def test_warnings_name_what_to_change(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    plan = plan_job(spec_on(folder, 4, lora={"r": 64}, training={"batch_size": 3, "max_length": 512}), H100)
    fields = [warning.split(" ")[0] for warning in plan.warnings]
    assert fields == ["lora.r", "training.max_length", "training.batch_size"]
    assert plan_job(spec_on(folder, lora={"r": 16}), H100).warnings == ()


@pytest.mark.parametrize(
    ("shapes", "config", "message"),
    [
        ({"encoder.weight": (4, 4)}, TINY, "not those of a decoder with numbered layers"),
        (llama_shapes(TINY), {**TINY, "hidden_size": None}, "names no hidden_size"),
        (llama_shapes(TINY), {**TINY, "quantization_config": {"quant_method": "x"}}, "published quantised by x"),
        (
            {**llama_shapes(TINY), "model.layers.0.mlp.experts.odd": (4, 4, 4)},
            TINY,
            r"experts of this base \(model.layers.0.mlp.experts.odd\) are not supported",
        ),
        (
            {**llama_shapes(TINY), "model.layers.0.mlp.experts.gate_up_proj": (4, 64, 96)},
            TINY,
            r"experts of this base \(model.layers.0.mlp.experts.gate_up_proj\) are not supported",
        ),
        (
            llama_shapes(TINY),
            {"model_type": "clip", "text_config": TINY, "architectures": ["CLIPModel"]},
            "clip model, made of",
        ),
    ],
)
def test_a_base_that_is_not_understood_is_refused(tmp_path: Path, shapes: Any, config: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        plan_job(spec_on(save_base(tmp_path / "base", config, shapes)), H100)
    assert caught.value.param == "model"


def test_memory_of_a_host_is_shared_by_its_ranks(tmp_path: Path) -> None:
    host = Machine("cpu", 8 * GIB, shared_memory=True)
    assert plan_8b(tmp_path, 4, host).memory == int(2 * GIB * 0.94)
    assert plan_8b(tmp_path, 4, replace(host, shared_memory=False)).memory == int(8 * GIB * 0.94)


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 * GIB, "5.00 GiB")])
def test_bytes_in_words(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("training", "length", "batches"),
    [
        ({"batch_size": 16, "max_length": 2048}, None, (1, 4, 8192, 8192)),
        ({"batch_size": 32, "max_length": 2048}, None, (2, 4, 8192, 16_384)),
        ({"batch_size": 16, "max_length": 3000}, None, (2, 2, 8192, 12_000)),
        ({"batch_size": 16, "max_length": 20_000}, None, (4, 1, 20_000, 80_000)),
        ({"batch_size": 16, "max_length": 20_000}, 500, (1, 4, 2000, 2000)),
        ({"batch_size": 16, "max_length": 2048, "per_device_train_batch_size": 1}, None, (4, 1, 2048, 8192)),
        ({"batch_size": 2, "max_length": 2048}, None, (1, 1, 2048, 2048)),
    ],
)
def test_a_micro_batch_takes_what_its_budget_allows(
    training: dict[str, Any], length: int | None, batches: tuple[int, ...], tmp_path: Path
) -> None:
    """Of 8,192 tokens on four ranks; the peak is a row filled with shorter samples, or one longer sample alone."""
    spec = spec_on(save_base(tmp_path / "base"), 4, training={**training, "tokens_per_micro_batch": 8192})
    found = planned_micro_batches(spec, Layout(1, 4), length)
    assert (found.rounds, found.samples, found.tokens, found.step_tokens) == batches


def test_what_fp8_and_dropout_compute_with_is_counted(tmp_path: Path) -> None:
    """At 8,192 tokens, where without them two gradients as wide as the feed-forward are the most that there is: beside one of
    these the weight dequantised, and three bytes a number of the gradient and one of the input; or a mask and a copy.
    """
    options: Any = {
        "training": {"batch_size": 4, "max_length": 2048, "tokens_per_micro_batch": 8192},
        "distributed": {"activation_checkpointing": "full"},
    }
    plain, fp8, dropped = (
        plan_8b(tmp_path, precision={"default": "fp8", "fp8_products": products}, lora=lora, **options).rank.workspace
        for products, lora in (("off", {}), ("auto", {}), ("off", {"lora_dropout": 0.1}))
    )
    inner, dense = 2 * 8192 * 14_336, 2 * 4096 * 14_336
    assert fp8 - plain == dense + 8192 * (3 * 4096 + 14_336) - inner
    assert dropped - plain == dense + 8192 * 3 * 14_336 - inner


def test_a_processors_allocator_holds_more_than_the_tensors(tmp_path: Path) -> None:
    """A share with a glibc that finds no hole for an aligned block, and bytes whatever the tensors; a GPU's is in what is
    usable.
    """
    assert heap_share((2, 36)) > 3 * heap_share((2, 38)) > 0
    assert heap_share(None) == heap_share((2, 41))
    spec = spec_on(save_base(tmp_path / "base"))
    rank = plan_job(spec, replace(find_machine("cpu"), allocator_share=0.25, allocator_bytes=1000)).rank
    assert rank.gaps == 1000 + rank.live // 4
    assert rank.total == rank.live + rank.gaps
    on_gpu = plan_job(spec, MACHINES["H100"]).rank
    assert (on_gpu.gaps, on_gpu.total) == (0, on_gpu.live)
    words = spec_on(save_base(tmp_path / "words", {**TINY, "vocab_size": 40_000}), training={"tokens_per_micro_batch": 2048})
    heap, mapped = (plan_job(words, replace(find_machine("cpu"), mapped_above=bytes)).rank for bytes in (None, 2**20))
    least = min(mapped.logits, mapped.workspace)
    assert least > 0
    assert mapped.live == heap.live
    assert mapped.mapped >= 2 * 4 * 40_000 * 1024  # a chunk's logits and their log-probabilities, fp32
    assert mapped.gaps - heap.gaps == pytest.approx(least + mapped.allocator_share * (least - mapped.mapped), abs=2)


def test_a_layer_that_is_computed_again_finds_no_room_where_it_lay(tmp_path: Path) -> None:
    spec = spec_on(save_base(tmp_path / "base"), distributed={"activation_checkpointing": "full"})
    old, new = (plan_job(spec, replace(find_machine("cpu"), refits_badly=badly)).rank for badly in (True, False))
    kept = {mode: old.in_mode(mode).activations for mode in ("none", "full")}
    assert old.gaps - new.gaps == old.remade == pytest.approx(kept["none"] / TINY["num_hidden_layers"], rel=0.1)
    assert old.in_mode("none").remade == new.remade == 0
