"""Scatters of a sweep. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from api.page.sweep_scatters import scatters_of


def sweep(*tried: tuple[dict[str, Any], float | None, str | None]) -> dict[str, Any]:
    jobs = [
        {"id": f"job-{place}", "values": values, "valid_loss": loss, "stopped": stopped}
        for place, (values, loss, stopped) in enumerate(tried)
    ]
    return {"jobs": jobs, "options": list(tried[0][0]), "best": {"job_id": "job-1"}}


def test_rates_stand_by_their_logarithm_and_losses_by_their_size() -> None:
    [found] = scatters_of(
        sweep(
            ({"rate": 1e-4}, 0.6, None),
            ({"rate": 1e-3}, 0.2, None),
            ({"rate": 1e-2}, 1.0, "stopped by the sweep"),
            ({"rate": 1e-1}, None, None),
            ({"rate": 1e-1}, float("nan"), None),
        )
    )
    assert found.logarithmic
    assert (found.lowest, found.highest) == (0.2, 1.0)
    assert [point.x for point in found.points] == pytest.approx([0.0, 0.5, 1.0])
    assert [point.y for point in found.points] == pytest.approx([0.5, 0.0, 1.0])
    assert [point.kind for point in found.points] == ["", "best", "early"]
    assert [text for _, text in found.ticks] == ["1e-4", "0.001", "0.01"]


def test_close_numbers_stand_by_size_words_side_by_side_and_one_value_is_no_scatter() -> None:
    ranks, words = scatters_of(
        sweep(
            ({"r": 8, "form": "nf4", "same": 1}, 0.5, None),
            ({"r": 16, "form": "bf16", "same": 1}, 0.5, None),
            ({"r": 40, "form": None, "same": 1}, 0.5, None),
        )
    )
    assert (ranks.option, ranks.logarithmic) == ("r", False)
    assert [point.x for point in ranks.points] == [0.0, 0.25, 1.0]
    assert [point.y for point in ranks.points] == [0.0, 0.0, 0.0]
    assert words.ticks == ((0.0, "nf4"), (0.5, "bf16"), (1.0, "none"))
