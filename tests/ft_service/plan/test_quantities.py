from __future__ import annotations

import pytest

from ft_service.plan.machines import GIB
from ft_service.plan.quantities import bytes_text, duration_text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 * GIB, "5.00 GiB")])
def test_bytes_in_words(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.4, "less than a second"), (29, "29 s"), (31, "31 s"), (59.4, "59 s"), (59.6, "1 min"), (89, "1 min")),
        *((7500, "2 h 5 min"), (3599, "1 h 0 min")),
    ],
)
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
