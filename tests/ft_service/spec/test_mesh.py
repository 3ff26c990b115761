from __future__ import annotations

import pytest

from ft_service.errors import SpecError
from ft_service.spec.mesh import Replicate, mesh_shape


@pytest.mark.parametrize(
    ("replicate", "ranks", "shape"),
    [
        ("auto", 4, (1, 4)),
        (-1, 4, (4, 1)),
        (1, 3, (1, 3)),
        (2, 4, (2, 2)),
        (4, 4, (4, 1)),
        (-1, 1, (1, 1)),
    ],
)
def test_ranks_are_copies_times_shards(
    replicate: Replicate, ranks: int, shape: tuple[int, int]
) -> None:
    assert mesh_shape(replicate, ranks) == shape


@pytest.mark.parametrize(("replicate", "ranks"), [(2, 3), (8, 4)])
def test_copies_that_do_not_divide_the_ranks_are_refused(replicate: int, ranks: int) -> None:
    with pytest.raises(
        SpecError,
        match=rf"distributed.replicate = {replicate}: {ranks} ranks cannot .* Use one of 1, ",
    ) as e:
        mesh_shape(replicate, ranks)
    assert e.value.param == "distributed.replicate"
