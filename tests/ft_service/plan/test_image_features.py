"""What is said of a job's images before it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.description import ImageFacts
from ft_service.errors import SpecError
from ft_service.kernel_limits import span_bytes, spans_at_once
from ft_service.plan.image_features import features_bytes, note_on_images
from ft_service.plan.job import plan_job
from ft_service.plan.machines import MACHINES
from ft_service.plan.weight_storage import ShardLayout, adapters_of
from tests.support.bases import describe
from tests.support.training.models import save_chat_base, spec_for


def test_pictures_that_see_both_ways_take_room_beside_attention(tmp_path: Path) -> None:
    folder = save_chat_base(tmp_path / "base")
    text = describe(str(folder))
    spec = spec_for(folder, training={"tokens_per_micro_batch": 4096})
    causal = replace(text, images=ImageFacts(5, 1, 100))
    two_way = replace(text, images=ImageFacts(5, 1, 100, ("full_attention",)))
    assert features_bytes(causal, 10, "bf16") == 10 * 2 * text.dimensions.hidden * 2
    assert "both directions" not in note_on_images(causal, spec, 4, 1024)
    heads = text.dimensions.heads
    assert span_bytes(4096, 256, heads) == 16 * heads * min(16, 2**24 // (heads * 2**16)) * 2**16
    assert "both directions" in note_on_images(two_way, spec, 4, 1024)


def test_one_picture_may_have_more_scores_than_are_made_at_once() -> None:
    assert spans_at_once(256, 16) == 16
    assert spans_at_once(5000, 16) == 1
    assert span_bytes(8192, 5000, 16) == 16 * 16 * 5000**2


def test_adapters_of_a_tower_are_planned_whole_on_every_rank(tmp_path: Path) -> None:
    text = describe(str(save_chat_base(tmp_path / "base")))
    base = replace(
        text,
        images=ImageFacts(5, 0, 100),
        tower_linears={"visual.qkv": (30, 10), "visual.o": (1, 1)},
    )
    folder = tmp_path / "base"
    named = spec_for(folder, lora={"r": 4, "target_modules": ["q_proj", "qkv"]})
    of_tower = [own for own in adapters_of(base, named) if own.on_every_rank]
    assert [(own.module, own.numel) for own in of_tower] == [("visual.qkv", 4 * 40)]
    assert of_tower[0].numel_on_rank(ShardLayout(1, 8)) == 4 * 40
    assert "1 layer of the base's tower" in note_on_images(base, named, 4, 1024)
    of_text = spec_for(folder, lora={"r": 4, "target_modules": ["q_proj"]})
    plans = [plan_job(base, spec, MACHINES["H100"]).rank for spec in (of_text, named)]
    assert [rank.tower for rank in plans] == [0, 4 * 100]
    assert plans[1].resident - plans[0].resident == 4 * 100 + 16 * 4 * 40 + 2 * 4
    by_pattern = spec_for(folder, lora={"r": 4, "target_modules": r".*(q_proj|qkv)"})
    assert not any(own.on_every_rank for own in adapters_of(base, by_pattern))
    assert "1 layer of the base's tower" in note_on_images(base, by_pattern, 4, 1024)


@pytest.mark.parametrize("option", [{"use_dora": True}, {"lora_dropout": 0.1}])
def test_what_adapters_of_a_tower_cannot_have_is_refused(
    option: dict[str, Any], tmp_path: Path
) -> None:
    text = describe(str(save_chat_base(tmp_path / "base")))
    base = replace(text, images=ImageFacts(5, 0, 100), tower_linears={"visual.qkv": (30, 10)})
    spec = spec_for(tmp_path / "base", lora={"target_modules": ["q_proj", "qkv"], **option})
    with pytest.raises(SpecError) as refused:
        adapters_of(base, spec)
    assert refused.value.param == f"lora.{next(iter(option))}"
