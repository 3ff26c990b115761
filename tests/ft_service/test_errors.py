from __future__ import annotations

import pickle

import pytest

from ft_service.errors import FtError, LimitError, SpecError
from ft_service.host.helper_process import Failure, HelperFailed, Program
from ft_service.rundir.directory import UnreadableDocumentError


@pytest.mark.parametrize(
    "error",
    [
        SpecError("Wrong.", param="model", code="base_changed"),
        LimitError("Enough.", retry_after=2.0),
        HelperFailed(
            Program(command=("python", "-m", "task")),
            Failure.EXITED,
            "ended",
            exit_code=3,
            last_words=["why"],
        ),
        UnreadableDocumentError("origins.json", "it is not JSON"),
    ],
)
def test_errors_go_from_rank_to_rank_as_they_are(error: FtError) -> None:
    """Some could not be read by the other ranks, which reported that instead of the error."""
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), str(received), vars(received)) == (type(error), str(error), vars(error))
