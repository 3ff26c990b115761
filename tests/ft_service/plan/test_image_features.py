"""What is said of a job's images before it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ft_service.bases.description import ImageFacts
from ft_service.kernel_limits import span_bytes, spans_at_once
from ft_service.plan.image_features import features_bytes, note_on_images
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
