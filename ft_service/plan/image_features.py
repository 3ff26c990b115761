"""What the images of a job take beside its training: the towers of the base, which look at each
once before the model is loaded, and the features that they give, which are kept while it runs.
"""

from __future__ import annotations

from ft_service.bases.description import Description, facts_of_images
from ft_service.bases.module_rules import choose_tower_targets, refuse_with_towers
from ft_service.kernel_limits import span_bytes
from ft_service.plan.context_parallel import IMAGES, not_shareable
from ft_service.spec import JobSpec
from ft_service.wording import bytes_text, counted

_BYTES = {"fp32": 4, "bf16": 2}
"""Compute dtype → bytes of a number, as features are kept in it."""


def features_bytes(base: Description, tokens: int, compute: str) -> int:
    """Bytes of the features of so many placeholders. `compute`: `precision.compute`.

    Raises SpecError for a base whose pictures cannot be learned from.
    """
    layers = 1 + facts_of_images(base).early_layers
    return tokens * layers * base.dimensions.hidden * _BYTES[compute]


def note_on_images(base: Description, spec: JobSpec, images: int, tokens: int) -> str:
    """The sentence about a job's images. `tokens`: those that stand for them.

    Raises SpecError for a base whose pictures cannot be learned from, and for a job whose ranks
    share samples.
    """
    if spec.distributed.ranks_per_sample > 1 and "distributed.context_parallel" not in spec.chosen:
        raise not_shareable(spec.distributed.ranks_per_sample, IMAGES)
    facts = facts_of_images(base)
    tower = facts.tower_bytes
    kept = features_bytes(base, tokens, spec.precision.compute)
    linears = [weight.module for weight in base.linears]
    trained = choose_tower_targets(base.tower_linears, spec.lora.target_modules, linears)
    refuse_with_towers(spec, trained)
    beside = ""
    if facts.two_way:
        asked = spec.training.tokens_per_micro_batch
        row = spec.training.max_length if asked == "auto" else asked
        works_in = span_bytes(row, -(-tokens // max(1, images)), base.dimensions.heads)
        beside = (
            f" In layers where the tokens of an image see each other in both directions, attention "
            f"works in up to {bytes_text(works_in)} more."
        )
    if trained:
        return (
            f"lora.target_modules names {counted(len(trained), 'layer')} of the base's tower: it is "
            f"trained whole on every rank ({bytes_text(tower)} beside the model, and what its layers "
            f"make of a micro-batch's images), and looks at each of the {counted(images, 'image')} "
            f"in every epoch.{beside}"
        )
    return (
        f"The base's tower ({bytes_text(tower)} a rank, before the model is loaded) looks at "
        f"{counted(images, 'image')} once; the features of their {tokens:,} tokens take up to "
        f"{bytes_text(kept)} in the run directory until the job has succeeded. If that is more than "
        "half of its free disk, the tower stays on every rank and looks at each micro-batch's images "
        f"anew.{beside}"
    )
