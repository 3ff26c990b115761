"""Which modules "all-linear" means in a mixture of experts, and the format of every weight of a
base published quantised.
"""

from __future__ import annotations

import pytest

from ft_service.bases.module_rules import (
    OuterModules,
    WeightNames,
    assign_formats,
    choose_targets,
    choose_tower_targets,
    refuse_resharding_of_held,
)
from ft_service.errors import SpecError
from ft_service.spec import PrecisionOptions, WeightFormat

ATTENTION = ["layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj"]
DENSE = ["layers.0.mlp.gate_proj", "layers.0.mlp.down_proj", "layers.1.mlp.shared_expert.down_proj"]
SHARES = ["layers.1.mlp.shared_expert_gate"]
ROUTERS = ["layers.1.mlp.gate", "layers.1.mlp.router.proj"]
STACKS = ["layers.1.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
LINEARS = [*ATTENTION, *DENSE, *SHARES, *ROUTERS]


def test_shared_experts_and_dense_layers_are_meant_and_routers_are_not() -> None:
    assert choose_targets(LINEARS, STACKS, "all-linear", shared_experts=True) == [
        *ATTENTION,
        *DENSE,
        *SHARES,
    ]


def test_a_job_of_an_earlier_version_goes_on_with_the_modules_that_it_began_with() -> None:
    """Also with those inside a router of several layers."""
    inside = "layers.1.mlp.gate.first"
    assert choose_targets([*LINEARS, inside], STACKS, "all-linear") == [*ATTENTION, *SHARES, inside]
    assert inside not in choose_targets(
        [*LINEARS, inside], STACKS, "all-linear", shared_experts=True
    )


@pytest.mark.parametrize("shared", [True, False])
def test_without_experts_every_linear_layer_is_meant(shared: bool) -> None:
    dense = [*ATTENTION, *DENSE, "layers.0.mlp.gate"]
    assert choose_targets(dense, [], "all-linear", shared_experts=shared) == dense


def test_a_pattern_is_told_that_it_has_to_match_a_whole_name() -> None:
    assert choose_targets(ATTENTION, [], r".*\.(q|k)_proj") == ATTENTION[:1]
    with pytest.raises(
        SpecError,
        match=r"it has o_proj, q_proj\. A pattern has to match a whole name, such as "
        r"layers\.0\.self_attn",
    ):
        choose_targets(ATTENTION, [], "q_proj|k_proj")


def test_a_name_alone_stays_ambiguous_in_a_mixture() -> None:
    with pytest.raises(SpecError, match="named with what they lie in"):
        choose_targets(LINEARS, STACKS, ["down_proj"], shared_experts=True)
    assert (
        choose_targets(LINEARS, STACKS, ["shared_expert.down_proj"], shared_experts=True)
        == DENSE[2:]
    )


@pytest.mark.parametrize("wanted", ["all-linear", ".*", ["o_proj", "out"]])
def test_a_name_that_linear_layers_have_too_means_these(wanted: str | list[str]) -> None:
    """As it did before the head of the same name was looked at."""
    linears = [*ATTENTION, "layers.0.out"]
    outer = OuterModules("embed", "out", tied=False)
    expected = linears if isinstance(wanted, str) else linears[1:]
    assert choose_targets(linears, [], wanted, outer=outer) == expected


HELD: dict[str, WeightFormat] = {
    "a.nv": "nvfp4",
    "a.mx": "mxfp4",
    "a.blocks": "fp8_blocks",
    "a.rows": "fp8",
    "head": "nvfp4",
}
NAMES = WeightNames(
    ["a.plain", *(name for name in HELD if name != "head")], ["head"], ["head", "a.plain"]
)


@pytest.mark.parametrize(
    ("default", "plain", "nv", "mx", "blocks"),
    [
        ("as_published", "bf16", "nvfp4", "mxfp4", "fp8_blocks"),
        ("bf16", "bf16", "bf16", "bf16", "bf16"),
        ("nf4", "nf4", "nf4", "nf4", "nf4"),
        ("fp8", "fp8", "fp8", "fp8", "fp8_blocks"),
        ("nvfp4", "nvfp4", "nvfp4", "nvfp4", "nvfp4"),
    ],
)
def test_as_published_keeps_what_the_files_hold_and_others_convert(
    default: str, plain: str, nv: str, mx: str, blocks: str
) -> None:
    formats = assign_formats(NAMES, PrecisionOptions.model_validate({"default": default}), HELD)
    head = {"head": "nvfp4"} if nv == "nvfp4" else {}
    assert formats == {
        "a.plain": plain,
        "a.nv": nv,
        "a.mx": mx,
        "a.blocks": blocks,
        "a.rows": "fp8",
        **head,
    }


def test_overrides_keep_some_weights_as_published_and_convert_others() -> None:
    some = PrecisionOptions.model_validate(
        {"default": "nf4", "overrides": {".*": "as_published", "a.mx": "fp8"}}
    )
    formats = assign_formats(NAMES, some, HELD)
    assert formats == {**HELD, "a.plain": "bf16", "a.mx": "fp8"}
    refuse_resharding_of_held(None, HELD, formats)
    with pytest.raises(SpecError, match="holds some in fp8 and fp8_blocks and nvfp4"):
        refuse_resharding_of_held(2, HELD, formats)
    refuse_resharding_of_held(2, {"a.mx": "mxfp4"}, {"a.mx": "bf16"})


TOWER = ["visual.blocks.0.attn.qkv", "visual.blocks.0.mlp.fc1", "visual.merger.q_proj"]


@pytest.mark.parametrize(
    ("wanted", "of_tower"),
    [
        ("all-linear", []),
        (["q_proj"], []),  # a layer of the text part ends so
        (["q_proj", "qkv"], TOWER[:1]),
        (["q_proj", "merger.q_proj"], TOWER[2:]),
        (r".*\.(q_proj|fc1)", TOWER[1:]),
    ],
)
def test_towers_are_named_by_patterns_and_by_names_that_mean_no_text(
    wanted: str | list[str], of_tower: list[str]
) -> None:
    text = ["layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj"]
    chosen = choose_targets(text, [], wanted, towers=TOWER)
    assert chosen == (text if wanted == "all-linear" else text[:1])
    assert choose_tower_targets(TOWER, wanted, text) == of_tower


@pytest.mark.parametrize("wanted", [["qkv"], r"visual\..*"])
def test_a_tower_alone_is_refused(wanted: str | list[str]) -> None:
    with pytest.raises(SpecError, match="tower alone"):
        choose_targets(["layers.0.self_attn.q_proj"], [], wanted, towers=TOWER)
