"""What is said of a job's images before it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_service.bases.description import Description, ImageFacts
from ft_service.errors import SpecError
from ft_service.kernel_limits import span_bytes, spans_at_once
from ft_service.plan.image_features import features_bytes, note_on_images
from ft_service.plan.job import plan_job
from ft_service.plan.machines import MACHINES
from ft_service.plan.weight_storage import ShardLayout, adapters_of
from ft_service.wording import bytes_text
from tests.support.bases import describe, spec_on
from tests.support.plans import made_base
from tests.support.training.models import save_chat_base, spec_for


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


@pytest.mark.parametrize(("compute", "number"), [("bf16", 2), ("fp32", 4)])
def test_features_are_kept_for_the_input_and_each_early_layer(compute: str, number: int) -> None:
    base = made_base(images=ImageFacts(5, 3, 100))
    assert features_bytes(base, 10, compute) == 10 * (1 + 3) * 64 * number
    with pytest.raises(SpecError, match="does not learn from images"):
        features_bytes(made_base(), 10, compute)


def note(base: Description, images: int, tokens: int, **options: Any) -> str:
    precision = {"compute": "bf16"}
    spec = spec_on(Path("/made"), options.pop("ranks", 1), precision=precision, **options)
    return note_on_images(base, spec, images, tokens)


@pytest.mark.parametrize(
    ("budget", "images", "tokens", "spans"),
    [
        # 4 heads: 16 bytes a score of pictures of 256 tokens, as many as there are in a row
        (1024, 4, 1021, 16 * 4 * 4 * 256**2),
        ("auto", 4, 1021, 16 * 4 * 2 * 256**2),
        (1024, 0, 600, 16 * 4 * 2 * 600**2),
    ],
)
def test_what_is_said_of_images_has_all_their_bytes(
    budget: int | str, images: int, tokens: int, spans: int
) -> None:
    training = {"tokens_per_micro_batch": budget, "max_length": 512}
    tower, kept = bytes_text(4 * 5000), bytes_text(tokens * 64 * 2)
    causal, two_way = (
        note(made_base(images=ImageFacts(5, 0, 5000, ways)), images, tokens, training=training)
        for ways in ((), ("full_attention",))
    )
    assert causal == (
        f"The base's tower ({tower} a rank, before the model is loaded) looks at "
        f"{images} images once; the features of their {tokens:,} tokens take up to {kept} in the "
        "run directory until the job has succeeded. If that is more than half of its free disk, "
        "the tower stays on every rank and looks at each micro-batch's images anew."
    )
    assert two_way == causal + (
        " In layers where the tokens of an image see each other in both directions, attention "
        f"works in up to {bytes_text(spans)} more."
    )
    linears: dict[str, Any] = {"tower_linears": {"visual.qkv": (30, 10), "visual.o": (3, 1)}}
    base = made_base(images=ImageFacts(5, 0, 5000), **linears)
    lora = {"target_modules": ["q_proj", "qkv", "o"]}
    assert note(base, 1, tokens, lora=lora) == (
        "lora.target_modules names 2 layers of the base's tower: it is trained whole on every rank "
        f"({tower} beside the model, and what its layers make of a micro-batch's images), and "
        "looks at each of the 1 image in every epoch."
    )


def test_samples_with_images_are_not_shared_unless_the_service_chose_it_before() -> None:
    base = made_base(images=ImageFacts(5, 0, 5000))
    shared: dict[str, Any] = {"ranks": 2, "distributed": {"context_parallel": 2}}
    with pytest.raises(SpecError) as refused:
        note(base, 1, 1, **shared)
    assert refused.value.param == "distributed.context_parallel"
    spec = spec_on(Path("/made"), 2, distributed={"context_parallel": 2})
    chosen = spec.model_copy(update={"chosen": {"distributed.context_parallel": "why"}})
    assert note_on_images(base, chosen, 1, 1)
