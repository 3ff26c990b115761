"""Which feed-forwards may go by tiles is found by trying them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.support.training.models import save_tiny
from workers.model.attention import stay_within_segments
from workers.model.build import base_on_meta
from workers.model.feed_forwards import row_wise_parts
from workers.model.small_copy import SmallCopy, small_copy


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> SmallCopy:
    """Of a base with experts in two of its three layers."""
    found = small_copy(
        base_on_meta(str(save_tiny("qwen3_moe", tmp_path_factory.mktemp("base") / "base")))
    )
    stay_within_segments(found.model)
    return found


def test_feed_forwards_and_experts_are_found_and_attention_is_not(copy: SmallCopy) -> None:
    assert sorted(row_wise_parts(copy)) == [f"model.layers.{number}.mlp" for number in range(3)]


def looks_back(x: Tensor) -> Tensor:
    return x + x.roll(1, dims=1)


def takes_whole_rows(x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        raise ValueError("one row")
    return x


@pytest.mark.parametrize("otherwise", [looks_back, takes_whole_rows])
def test_one_that_does_otherwise_is_left_out(
    otherwise: Callable[[Tensor], Tensor], copy: SmallCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense: Any = copy.model.get_submodule("model.layers.1.mlp")
    own = dense.forward
    monkeypatch.setattr(dense, "forward", lambda x: otherwise(own(x)))
    assert sorted(row_wise_parts(copy)) == ["model.layers.0.mlp", "model.layers.2.mlp"]
