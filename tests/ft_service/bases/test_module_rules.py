"""Which modules "all-linear" means in a mixture of experts."""

from __future__ import annotations

import pytest

from ft_service.bases.module_rules import choose_targets
from ft_service.errors import SpecError

ATTENTION = ["layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj"]
DENSE = ["layers.0.mlp.gate_proj", "layers.0.mlp.down_proj", "layers.1.mlp.shared_expert.down_proj"]
SHARES = ["layers.1.mlp.shared_expert_gate"]
ROUTERS = ["layers.1.mlp.gate", "layers.1.mlp.router.proj"]
STACKS = ["layers.1.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
LINEARS = [*ATTENTION, *DENSE, *SHARES, *ROUTERS]


def test_shared_experts_and_dense_layers_are_meant_and_routers_are_not() -> None:
    assert choose_targets(LINEARS, STACKS, "all-linear", shared_experts=True) == [*ATTENTION, *DENSE, *SHARES]


def test_a_job_of_an_earlier_version_goes_on_with_the_modules_that_it_began_with() -> None:
    assert choose_targets(LINEARS, STACKS, "all-linear") == [*ATTENTION, *SHARES]


@pytest.mark.parametrize("shared", [True, False])
def test_without_experts_every_linear_layer_is_meant(shared: bool) -> None:
    dense = [*ATTENTION, *DENSE, "layers.0.mlp.gate"]
    assert choose_targets(dense, [], "all-linear", shared_experts=shared) == dense


def test_a_name_alone_stays_ambiguous_in_a_mixture() -> None:
    with pytest.raises(SpecError, match="named with what they lie in"):
        choose_targets(LINEARS, STACKS, ["down_proj"], shared_experts=True)
    assert choose_targets(LINEARS, STACKS, ["shared_expert.down_proj"], shared_experts=True) == DENSE[2:]
