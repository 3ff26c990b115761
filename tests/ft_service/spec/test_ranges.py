from __future__ import annotations

from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.spec import DistributedOptions, JobRequest, parse_request
from tests.support.reconciling import spec_of


def asked(**distributed: Any) -> JobRequest:
    return parse_request({"model": "m", "training_file": "f", "distributed": distributed})


def test_a_range_stands_for_two_options() -> None:
    options = asked(nnodes="1:4", nproc_per_node="2:8").distributed
    assert options == DistributedOptions(nnodes=1, max_nnodes=4, nproc_per_node=2, max_nproc_per_node=8)
    assert asked(nproc_per_node=2, max_nproc_per_node=8).distributed.max_nproc_per_node == 8


@pytest.mark.parametrize(
    ("distributed", "says"),
    [
        ({"nproc_per_node": "8:2"}, "distributed.nproc_per_node = 8 with max_nproc_per_node = 2"),
        ({"nproc_per_node": "0:2"}, "distributed.nproc_per_node = 0: must be at least 1"),
        ({"nproc_per_node": "2:65"}, "distributed.max_nproc_per_node = 65: must be at most 64"),
        ({"nproc_per_node": "2-8"}, "distributed.nproc_per_node = '2-8'"),
        ({"nnodes": "1:513"}, "distributed.max_nnodes = 513: must be at most 512"),
        ({"nnodes": "auto"}, "distributed.nnodes = 'auto': must be a whole number"),
        ({"max_nproc_per_node": 4}, "distributed.nproc_per_node = 'auto' with max_nproc_per_node = 4"),
    ],
)
def test_a_range_that_is_none_is_refused_with_field_value_and_limit(distributed: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        asked(**distributed)


def test_shapes_go_from_the_most_ranks_to_the_fewest_as_far_as_machines_and_options_allow() -> None:
    spec = spec_of("j", distributed=DistributedOptions(nnodes=1, max_nnodes=3, nproc_per_node=2, max_nproc_per_node=4))
    assert spec.shapes(9, 9, 0) == [(3, 4), (2, 4), (1, 4), (1, 3), (1, 2)]
    assert spec.shapes(2, 3, 0) == [(2, 3), (1, 3), (1, 2)]
    assert spec.shapes(1, 2, 0) == [(1, 2)]
    copies = spec_of("j", distributed=DistributedOptions(nproc_per_node=2, max_nproc_per_node=8, replicate=2))
    assert copies.shapes(1, 8, 0) == [(1, 8), (1, 6), (1, 4), (1, 2)], "what two copies cannot divide is left out"
    there = spec.on(3, 4)
    assert (there.world_size, there.distributed.max_nnodes) == (12, None)
