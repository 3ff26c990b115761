"""Numbers of bodies that are used in fp32."""

from __future__ import annotations

import numpy as np
import pytest

from ft_service.errors import SpecError
from ft_service.spec import LEAST_EPSILON
from ft_service.tinker.bodies import OptimStep


def test_epsilon_is_none_that_would_be_0_in_fp32() -> None:
    assert np.float32(LEAST_EPSILON) > 0
    given = {"model_id": "m", "seq_id": 1, "adam_params": {"eps": LEAST_EPSILON}}
    assert OptimStep.parse(given).adam_params.eps == LEAST_EPSILON
    with pytest.raises(SpecError, match=r"adam_params\.eps = 1e-320: .*at least 1e-30"):
        OptimStep.parse({**given, "adam_params": {"eps": 1e-320}})
