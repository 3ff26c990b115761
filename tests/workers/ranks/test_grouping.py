"""Groups of modules by size."""

from __future__ import annotations

from torch import nn

from workers.ranks.grouping import _choose


def test_no_group_by_size_lies_inside_what_runs_sample_by_sample() -> None:
    """Ranks run that as often as they have samples, and would gather as often."""
    attention = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    model = nn.Sequential(attention, nn.Linear(40, 40))

    def groups() -> list[str]:
        chosen: set[int] = set()
        _choose(model, 1000, set(), chosen)
        return [name for name, module in model.named_modules() if id(module) in chosen]

    assert groups() == ["0.0", "0.1", "1"]
    attention.by_sample = True  # pyright: ignore[reportArgumentType]
    assert groups() == ["0", "1"]
