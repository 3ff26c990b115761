from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_segments_are_left() -> Iterator[None]:
    """Forget the segments of the last micro-batch that a test trained on here: the models of the
    next test have others.
    """
    yield
    from workers.layers import segments

    segments.CURRENT.use(None)
