"""Whether several ranks can share a job's samples (distributed.context_parallel), and the refusal
where they cannot.
"""

from __future__ import annotations

from ft_service.bases.description import Description
from ft_service.errors import SpecError
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.spec import JobSpec
from ft_service.spec.resolved import not_shared_by_method

COMPILED = (
    "distributed.compile: true compiles its layers, and the exchange between ranks cannot be "
    "compiled"
)
IMAGES = "its samples have images, whose features stand at places in whole rows"


def why_whole(base: Description, spec: JobSpec, lengths: SampleLengths | None) -> str | None:
    """Why ranks cannot share a sample, as the end of a sentence; None: they can."""
    if (method := not_shared_by_method(spec.method)) is not None:
        return method
    if base.whole_because is not None:
        return base.whole_because
    if spec.distributed.compile is True:
        return COMPILED
    if lengths is not None and lengths.with_images:
        return IMAGES
    return None


def refuse_to_share(base: Description, spec: JobSpec, lengths: SampleLengths | None) -> None:
    """Raise SpecError where distributed.context_parallel is more than the job allows."""
    ranks = spec.distributed.ranks_per_sample
    if ranks > 1 and (why := why_whole(base, spec, lengths)) is not None:
        raise not_shareable(ranks, why)


def not_shareable(ranks: int, why: str) -> SpecError:
    """The refusal. `why`: as the end of a sentence."""
    return SpecError(
        f"distributed.context_parallel = {ranks}: {ranks} ranks cannot share a sample of this job, "
        f"since {why}. Set it to 1 or auto, and if the longest samples do not fit then lower "
        "training.max_length.",
        param="distributed.context_parallel",
    )
