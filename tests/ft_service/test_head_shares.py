"""How ranks that share rows divide attention's heads."""

from __future__ import annotations

import pytest

from ft_service.head_shares import head_shares


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((32, 8, 2), (16, 4, 1)),  # even: nothing is repeated
        ((32, 8, 16), (2, 1, 2)),  # two ranks a group
        ((6, 2, 3), (2, 2, 3)),  # a rank's heads are of two groups
        ((9, 3, 2), (5, 5, 3)),  # one of zeros behind the last
        ((14, 2, 4), (4, 1, 2)),  # one of zeros behind each group's
        ((28, 4, 8), (4, 1, 2)),
        ((4, 1, 8), (1, 1, 4)),  # more ranks than heads
    ],
)
def test_heads_and_groups_of_a_rank(
    given: tuple[int, int, int], expected: tuple[int, int, int]
) -> None:
    """Heads, groups and copies; every rank's heads are of as many groups, all alike."""
    shares = head_shares(*given)
    assert (shares.heads, shares.groups, shares.copies) == expected
    assert shares.heads % shares.groups == 0


def test_no_rank_has_more_heads_than_it_must_and_each_has_its_groups() -> None:
    for groups in range(1, 9):
        for in_group in range(1, 9):
            for ranks in range(1, 17):
                shares = head_shares(groups * in_group, groups, ranks)
                assert shares.heads == -(-groups * in_group // ranks)
                together = shares.heads // shares.groups
                for head in range(groups * in_group):
                    group, within = divmod(head, in_group)
                    place = group * shares.in_group + within
                    assert place // together // shares.copies == group
