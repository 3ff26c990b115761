"""What the options of `distributed` do to collectives and activations; that they do not change the
numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ft_service.spec import JobSpec
from tests.support.ranks import Cases, often_and_slow
from tests.support.training.models import save_tiny_llama, spec_for
from tests.support.training.parity import (
    CPU,
    MIXED,
    References,
    Step,
    assert_parity,
    constructed,
    counted_collectives,
    one_step,
    samples,
    steps_needed,
    steps_of_sharding,
)
from workers.base.load import adapters, plain_name
from workers.data.batches import collate
from workers.model.build import build
from workers.ranks.grouping import ShardGroup, grouped
from workers.ranks.sharding import gather_first
from workers.training.step import evaluate

BF16 = {"default": "bf16"}
KEPT = {"keep_unsharded": True}


def job(
    model: Path, ranks: int, precision: dict[str, Any], *, each: int = 2, **distributed: Any
) -> JobSpec:
    training = {"per_device_train_batch_size": each}
    precision = {**precision, "compute": "fp32"}
    return spec_for(
        model,
        ranks=ranks,
        precision=precision,
        training=training,
        lora={"r": 4},
        distributed=distributed,
    )


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, as in the arithmetic of the gathers."""
    return save_tiny_llama(tmp_path_factory.mktemp("deep"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(
        tmp_path_factory.mktemp("tied"), num_hidden_layers=3, tie_word_embeddings=True
    )


@pytest.fixture(scope="module")
def references() -> References:
    return References()


class Seen:
    """What ranks see of every case, of whichever test: those of one number are started once."""

    def __init__(self, deep: Path, tied: Path) -> None:
        together: list[Cases[Any]] = []

        def of(function: Any, specs: dict[str, JobSpec], slow: Collection[str] = ()) -> Cases[Any]:
            return Cases(function, specs, slow, together)

        def trained(model: Path, slow: Collection[str]) -> Cases[list[Step]]:
            specs = {
                case: job(model, 2, precision, **options)
                for case, (precision, options, *_) in CASES.items()
            }
            return of(steps_of_sharding, specs, slow)

        self.trained = {"deep": trained(deep, SLOW), "tied": trained(tied, SLOW_WHEN_TIED)}
        others = {
            case: job(deep, ranks, precision, each=8, **own)
            for case, (ranks, precision, own, _) in OTHERS.items()
        }
        self.otherwise: Cases[list[Step]] = of(steps_of_sharding, others, SLOW_OTHERWISE)
        depths = {depth: job(deep, 2, MIXED, each=8, **own) for depth, own in DEPTHS.items()}
        self.prefetched: Cases[tuple[list[int], list[int]]] = of(
            gathers_before_each_layer, depths, SLOW_DEPTHS
        )
        early = {"prefetching": job(deep, 2, MIXED, each=8, prefetch={})}
        self.early: Cases[tuple[int, int]] = of(early_gathers, early)
        ignoring = {"one kind": job(deep, 2, MIXED, ignored=[r".*mlp\.up_proj.*"])}
        self.ignoring: Cases[dict[str, bool]] = of(sharded_or_whole, ignoring)
        validated = {case: job(deep, 2, MIXED, **own) for case, own in VALIDATED.items()}
        self.validated: Cases[list[str]] = of(unsharded_after_validation, validated)


@pytest.fixture(scope="module")
def seen(deep: Path, tied: Path) -> Seen:
    return Seen(deep, tied)


LAYERS = 3
CASES: dict[
    str, tuple[dict[str, Any], dict[str, Any], int, int]
] = {  # precision, options, gathers, gathers when tied
    "by default": (MIXED, {}, 16, 14),
    "kept unsharded": (MIXED, KEPT, 5, 4),
    "kept unsharded, prefetching": (MIXED, {**KEPT, "prefetch": {}}, 5, 4),
    "not resharded": (MIXED, {"reshard_after_forward": False}, 10, 8),
    "prefetching two ahead": (MIXED, {"prefetch": {"forward": 2, "backward": 2}}, 16, 14),
    "all at once": (MIXED, {"wrap": "none"}, 2, 2),
    "all at once, kept": (MIXED, {"wrap": "none", **KEPT}, 1, 1),
    "full checkpointing": (MIXED, {"activation_checkpointing": "full"}, 16, 14),
    "selective checkpointing": (MIXED, {"activation_checkpointing": "selective"}, 16, 14),
}


SLOW = ("kept unsharded, prefetching", "prefetching two ahead", "all at once, kept")
SLOW_WHEN_TIED = (
    *SLOW,
    "not resharded",
    "full checkpointing",
    "selective checkpointing",
)
"""The others have most counts of gathers, and these are not about the head."""


@pytest.mark.parametrize(
    ("base", "case"),
    [
        pytest.param(base, case, marks=[pytest.mark.slow] * (case in slow))
        for base, slow in (("deep", SLOW), ("tied", SLOW_WHEN_TIED))
        for case in CASES
    ],
)
def test_gathers_and_reductions_of_a_step_of_two_micro_batches(
    base: str, case: str, seen: Seen, references: References
) -> None:
    _, options, untied_gathers, tied_gathers = CASES[case]
    spec, of_ranks = seen.trained[base].of(case)
    truth = references.of(spec, steps_needed(spec))
    for steps in of_ranks:
        assert_parity(steps, truth)
        for step in steps:
            kinds = Counter(kind for kind, *_ in step.collectives)
            assert kinds["gather"] == (tied_gathers if base == "tied" else untied_gathers)
            assert kinds["reduce"] == (1 if options.get("wrap") == "none" else LAYERS), (
                "once a step and group with adapters"
            )


# Where nothing is gathered together by layers, and bases that are partly left out
# ---------------------------------------

OTHERS: dict[
    str, tuple[int, dict[str, Any], dict[str, Any], int]
] = {  # ranks, precision, options, gathers a micro-batch
    "resharded to two of four": (4, BF16, {"reshard_after_forward": 2}, 8),
    "resharded to two of four, one copy of two": (
        4,
        BF16,
        {"reshard_after_forward": True, "replicate": 2},
        8,
    ),
    "every linear layer a group": (2, MIXED, {"wrap": {"min_params": 1}}, 0),
    "every linear layer a group, checkpointed": (
        2,
        MIXED,
        {"wrap": {"min_params": 1}, "activation_checkpointing": "full"},
        0,
    ),
    "every linear layer a group, checkpointed selectively": (
        2,
        MIXED,
        {"wrap": {"min_params": 1}, "activation_checkpointing": "selective"},
        0,
    ),
    "larger groups only": (3, MIXED, {"wrap": {"min_params": 20_000}, "prefetch": {}}, 0),
    "norms and embedding on every rank": (
        3,
        MIXED,
        {"ignored": [r".*norm\.weight", r".*embed_tokens.*"]},
        7,
    ),
    "quantised weights on every rank": (2, MIXED, {"ignored": [r".*mlp.*"], **KEPT}, 5),
}


SLOW_OTHERWISE = {
    "every linear layer a group",
    "every linear layer a group, checkpointed selectively",
    "resharded to two of four, one copy of two",
}
"""Another keeps less for the backward; test_hsdp.py has copies."""


@pytest.mark.parametrize("case", often_and_slow(OTHERS, SLOW_OTHERWISE))
def test_other_ways_to_shard_change_no_number(
    case: str, seen: Seen, references: References
) -> None:
    _, _, options, gathers = OTHERS[case]
    spec, of_ranks = seen.otherwise.of(case)
    truth = references.of(spec, steps_needed(spec))
    for steps in of_ranks:
        assert_parity(steps, truth)
        kinds = Counter(kind for kind, *_ in steps[0].collectives)
        assert kinds["gather"] == gathers or not gathers
        if "wrap" in options:
            assert kinds["gather"] > 8, "smaller groups than layers"


@pytest.mark.parametrize("base", ["deep", "tied"])
def test_no_group_by_size_holds_one_place_of_a_tied_weight(
    base: str, request: pytest.FixtureRequest
) -> None:
    spec = job(request.getfixturevalue(base), 2, BF16, wrap={"min_params": 1000})
    built = build(spec, CPU)
    model = built.peft_model.get_base_model()
    assert isinstance(model, PreTrainedModel)
    held = [
        id(p)
        for group in grouped(built.peft_model, built.layers, spec.distributed)
        for p in _parameters_of(group)
    ]
    places: Any = model
    embedding = places.get_input_embeddings().weight
    head = places.get_output_embeddings().weight
    assert (embedding is head) == (base == "tied")
    assert (id(embedding) in held, id(head) in held) == (base == "deep", base == "deep")


def _parameters_of(group: ShardGroup) -> list[nn.Parameter]:
    return [parameter for module in group.modules for parameter in module.parameters()]


def test_resharding_to_fewer_ranks_gathers_over_those_in_backward(
    seen: Seen,
) -> None:
    _, of_ranks = seen.otherwise.of("resharded to two of four")
    for first, *_ in of_ranks:
        sizes = [ranks for kind, _, _, ranks in first.collectives if kind == "gather"]
        forward = sizes[1 : 1 + LAYERS]
        backward = sizes[-LAYERS:]
        assert forward == [4] * LAYERS
        assert backward == [2] * LAYERS


def test_ignored_weights_are_whole_and_what_remains_is_sharded(seen: Seen) -> None:
    for kinds in seen.ignoring.of("one kind")[1]:
        whole = {name for name, sharded in kinds.items() if not sharded}
        assert whole == {n for n in kinds if "up_proj.base_layer" in n}


def sharded_or_whole(rank: int, world: int, spec: JobSpec) -> dict[str, bool]:
    built = constructed(spec, world)
    return {
        plain_name(name): isinstance(p, DTensor) for name, p in built.peft_model.named_parameters()
    }


# Prefetch
# ------------------------------------------------------------------------------


DEPTHS: dict[str, dict[str, Any]] = {
    "0": {},
    "1": {"prefetch": {"forward": 1, "backward": 1}},
    "2": {"prefetch": {"forward": 2, "backward": 2}},
}


SLOW_DEPTHS = ("1",)


@pytest.mark.parametrize("depth", often_and_slow(DEPTHS, SLOW_DEPTHS))
def test_prefetch_gathers_so_many_layers_ahead(depth: str, seen: Seen) -> None:
    """Without it the gather of a layer is issued when its forward begins; backward is FSDP2's own:
    one ahead.
    """
    ahead = int(depth)
    behind = int(depth) or 1
    for forward, backward in seen.prefetched.of(depth)[1]:
        # Groups are embedding, three layers, norm with head. When layer i computes, its gather is
        # number i + 2.
        assert forward == [min(i + 2 + ahead, 5) for i in range(LAYERS)]
        # Backward gathers the layers only, from the last one on. When layer i's backward begins,
        # its own is number 3 - i.
        assert backward == [min(LAYERS - i + behind, LAYERS) for i in reversed(range(LAYERS))]


def gathers_before_each_layer(rank: int, world: int, spec: JobSpec) -> tuple[list[int], list[int]]:
    """How many gathers were issued when each layer's forward and, in the order of backward, its
    backward began.
    """
    built = constructed(spec, world)
    forward = []
    backward = []
    with counted_collectives() as log:

        def gathers() -> int:
            return sum(entry[0] == "gather" for entry in log)

        def on_output(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            forward.append(gathers())

        for layer in built.layers:
            mlp = layer.get_submodule("mlp")
            mlp.register_forward_hook(on_output)
            mlp.register_full_backward_pre_hook(lambda module, grad: backward.append(gathers()))
        one_step(rank, world, spec, built, dict(adapters(built.peft_model)))
    return forward, [count - 5 for count in backward]


def test_the_first_gather_can_be_issued_before_the_forward(seen: Seen) -> None:
    for early, later in seen.early.of("prefetching")[1]:
        assert (early, later) == (1, 8), "and then not again"


def early_gathers(rank: int, world: int, spec: JobSpec) -> tuple[int, int]:
    built = constructed(spec, world)
    with counted_collectives() as log:
        gather_first(built.peft_model)
        early = len(log)
    step = one_step(rank, world, spec, built, dict(adapters(built.peft_model)))
    return early, early + sum(kind == "gather" for kind, *_ in step.collectives)


# Validation
# ------------------------------------------------------------------------------


VALIDATED: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept": KEPT,
    "not resharded": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("case", VALIDATED)
def test_a_validation_leaves_nothing_gathered(case: str, seen: Seen) -> None:
    assert not any(seen.validated.of(case)[1])


def unsharded_after_validation(rank: int, world: int, spec: JobSpec) -> list[str]:
    built = constructed(spec, world)
    evaluate(built.peft_model, [collate(samples()[:2], CPU)], world)
    return [name for name, p in built.peft_model.named_parameters() if not isinstance(p, DTensor)]


# Activations
# ------------------------------------------------------------------------------


class CountedOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators(rank: int, world: int, spec: JobSpec) -> tuple[Counter[str], Counter[str], list[str]]:
    """Operators run in forward and in backward, and the names that a checkpoint of the job would
    hold.
    """
    built = constructed(spec, world)
    batch = collate(samples()[:3], CPU)
    with CountedOperators() as forward:
        loss = built.peft_model(input_ids=batch.ids).logits.float().square().mean()
    with CountedOperators() as backward:
        loss.backward()
    return forward.counts, backward.counts, [name for name, _ in adapters(built.peft_model)]


def test_checkpointing_computes_again_what_it_does_not_keep(deep: Path) -> None:
    modes = ("none", "full", "selective")
    cases = Cases(
        operators,
        {mode: job(deep, 1, {"default": "nf4"}, activation_checkpointing=mode) for mode in modes},
    )
    found = {mode: cases.of(mode)[1][0] for mode in modes}
    attention = "attend"
    forward = found["none"][0]
    assert forward["frozen_linear"] == 7 * LAYERS
    assert forward[attention] == LAYERS
    for mode in ("none", "selective"):
        assert found[mode][1]["frozen_linear"] == 0, f"{mode}: kept"
        assert found[mode][1][attention] == 0, f"{mode}: kept"
    assert found["full"][1]["frozen_linear"] >= 6 * LAYERS, (
        "again in backward, but for what nothing needs"
    )
    assert found["full"][1][attention] == LAYERS
    assert found["none"][1]["silu"] == 0
    assert found["selective"][1]["silu"] == LAYERS, "cheap, and as large as the widest product"
    products = {
        mode: backward["mm"] + backward["addmm"] for mode, (_, backward, _) in found.items()
    }
    assert products["none"] < products["selective"] < products["full"], (
        "selective computes only the products with B again"
    )
    assert found["none"][2] == found["full"][2] == found["selective"][2], "names know nothing of it"
