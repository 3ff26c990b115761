"""Losses: pauses grow, and the operator is told."""

from __future__ import annotations

import logging

import pytest

from ft_service.shared_work.losses import FIRST_SECONDS, LONGEST_SECONDS, Losses, pause_seconds


def test_pauses_grow_and_have_a_bound() -> None:
    assert [pause_seconds(n, first=2, longest=300) for n in (1, 2, 3, 9, 10_000)] == [
        2,
        4,
        8,
        300,
        300,
    ]


def test_losses_of_one_input_are_counted_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    losses = Losses("a test", clock=lambda: now[0])

    assert losses.pending("x") is None
    with caplog.at_level(logging.WARNING):
        pauses = [losses.add("x", "killed by signal 9") for _ in range(4)]
    assert pauses == [FIRST_SECONDS * 2**n for n in range(4)]
    assert [record.levelno for record in caplog.records] == [
        logging.WARNING,
        logging.WARNING,
        logging.ERROR,
        logging.ERROR,
    ]
    assert losses.pending("x") == (pauses[-1], "killed by signal 9")
    assert losses.pending("y") is None

    now[0] += pauses[-1]
    assert losses.pending("x") is None
    assert losses.count("x") == 4
    losses.forget("x")
    assert losses.count("x") == 0
    assert pause_seconds(1) < LONGEST_SECONDS
