"""What a base's description says of its towers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.ranks import often_and_slow
from tests.support.training.models import save_chat_base
from tests.support.training.pictures import TWO_WAY, WHOLE, save_whole_base
from workers.describe import describe
from workers.images import tower, trial

EARLY = {"qwen 3 vl": 2}
SLOW = ("qwen 2.5 vl", "internvl 3", "smolvlm", "qwen 3.5", "pixtral", "gemma 4")


@pytest.mark.parametrize("family", often_and_slow(sorted(WHOLE), SLOW))
def test_features_in_place_of_placeholders_are_what_the_published_class_computes(
    family: str, tmp_path: Path
) -> None:
    found = describe(str(save_whole_base(family, tmp_path)))
    assert found.no_images_because is None
    assert found.images is not None
    assert found.images.early_layers == EARLY.get(family, 0)
    assert found.images.two_way == TWO_WAY.get(family, ())
    assert found.images.tower_weights > 10_000


def test_windows_that_bound_pictures_otherwise_are_found(tmp_path: Path) -> None:
    """The published class's alone are made narrow."""
    folder = save_whole_base("gemma 3", tmp_path)

    def of_published(models: Sequence[Any], _: Any) -> bool:
        models[1].config.get_text_config(decoder=True).sliding_window = 3
        return True

    with patch.object(trial, "_narrow", of_published):
        found = describe(str(folder))
    assert found.images is None
    assert "its windows" in str(found.no_images_because)


@pytest.mark.parametrize("broken", ["positions", "early", "rows"])
def test_a_step_that_is_left_out_is_found(broken: str, tmp_path: Path) -> None:
    """Text positions, no features for the first layers, or features of another picture."""
    folder = save_whole_base("qwen 3 vl", tmp_path)
    features = tower.Tower.features

    def without(self: Any, ids: Any, inputs: Any) -> Any:
        made = features(self, ids, inputs)
        if broken == "early":
            return tower.Features(made.rows, made.early[:0], made.layout)
        return tower.Features(made.rows.flip(0), made.early, made.layout)

    positions = patch("workers.images.trial.positions_of", return_value=None)
    with positions if broken == "positions" else patch.object(tower.Tower, "features", without):
        found = describe(str(folder))
    assert found.images is None
    assert "in another way" in str(found.no_images_because)


@pytest.mark.slow
def test_embeddings_of_every_layer_are_refused(tmp_path: Path) -> None:
    """As Gemma 4 E2B has them."""
    kind, values = WHOLE["gemma 4"]
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300}
    small = {**values, "text_config": {**values["text_config"], **own, "enable_moe_block": False}}
    with patch.dict(WHOLE, {"gemma 4": (kind, small)}):
        found = describe(str(save_whole_base("gemma 4", tmp_path)))
    assert found.images is None
    assert "(hidden_size_per_layer_input in config.json)" in str(found.no_images_because)


def test_a_text_model_has_no_towers(tmp_path: Path) -> None:
    found = describe(str(save_chat_base(tmp_path / "base")))
    assert (found.images, found.no_images_because) == (None, None)
