from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from tests.support.training.kept_tokens import KeptExaminer


@pytest.fixture(autouse=True, scope="session")
def files_are_examined_by_one_process() -> Iterator[None]:
    """Which takes a second to start. Ranks, which are processes of their own, have their own."""
    with (
        patch("workers.data.token_sets.Examiner", KeptExaminer),
        patch("workers.tasks.fidelity.Examiner", KeptExaminer),
    ):
        yield


@pytest.fixture(autouse=True)
def no_segments_are_left() -> Iterator[None]:
    """Forget the segments of the last micro-batch that a test trained on here: the models of the
    next test have others.
    """
    yield
    from workers.layers import segments

    segments.CURRENT.use(None)
