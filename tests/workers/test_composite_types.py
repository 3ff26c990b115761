"""Every type of transformers that is made of several models, tiny: refused by plan and worker
alike, or its text part trains as in the published class.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ft_service.errors import SpecError
from tests.support.training.causal_types import OF_SEVERAL, REFUSED_HERE
from tests.support.training.checks import check_here
from tests.support.training.composites import EXACT, NAMED_OTHERWISE, save_composite

NOISY = ("gemma4_unified", "qwen4_exp")
"""Types whose own gradients in fp32 are further than 1e-5 from those in fp64."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OF_SEVERAL)
def test_a_type_of_several_models_is_refused_or_trains_as_its_class_with_plain_peft(
    kind: str, tmp_path: Path
) -> None:
    """Sizes and names as planned; loss, every gradient, and the exported adapter on the published
    class.
    """
    made = save_composite(kind, tmp_path / "base")
    if kind in REFUSED_HERE:
        with pytest.raises((SpecError, AssertionError), match=REFUSED_HERE[kind]):
            check_here(tmp_path / "base", tmp_path)
        return
    found = check_here(tmp_path / "base", tmp_path)
    if kind in NAMED_OTHERWISE:
        found = replace(found, same_as_planned=True)
    assert made or found.refused
    assert found.refused or found.exact, found.faults()
    assert found.exact == (kind in EXACT), found.refused
    assert found.noise == 0 or kind in NOISY
