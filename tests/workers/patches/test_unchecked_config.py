"""Values that a config refuses although its model's class takes them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from workers.patches.unchecked_config import set_unchecked


@pytest.mark.parametrize(("kind", "name"), [("gemma3n_text", "altup_coef_clip")])
def test_none_is_refused_by_a_check_and_can_be_set_past_it(kind: str, name: str) -> None:
    config: Any = AutoConfig.for_model(kind)
    with pytest.raises(Exception, match=name):
        setattr(config, name, None)
    set_unchecked(config, name, None)
    assert getattr(config, name) is None
    assert config.to_dict()[name] is None
