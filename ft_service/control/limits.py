"""What a project's limits say of a job, as far as it is known before it is stored. Pure."""

from __future__ import annotations

from ft_service.errors import ForbiddenError, SpecError
from ft_service.spec import JobRequest, JobSpec
from ft_service.store.records import Limits


def refuse_beyond(limits: Limits, request: JobRequest, spec: JobSpec) -> None:
    """Raises ForbiddenError for a base or an entity that the project may not use, SpecError for more ranks than it may ever
    run."""
    if limits.bases is not None and spec.model.name not in limits.bases:
        raise ForbiddenError(
            f"model = {spec.model.name!r}: this project may train on {_listed(limits.bases)}.",
            param="model",
            code="base_not_allowed",
        )
    refuse_too_many_ranks(limits, spec)
    allowed = limits.wandb_entities
    for number, integration in enumerate(request.integrations or ()):
        if integration.wandb is None:
            continue
        entity = integration.wandb.entity
        if allowed is not None and entity not in allowed:
            place = f"integrations.{number}.wandb.entity"
            raise ForbiddenError(
                f"{place} = {entity!r}: this project may send metrics to {_listed(allowed)}.",
                param=place,
                code="entity_not_allowed",
            )


def refuse_too_many_ranks(limits: Limits, spec: JobSpec) -> None:
    """Raises SpecError for more ranks than the project may ever run at once."""
    if limits.max_slots is not None and spec.world_size > limits.max_slots:
        raise SpecError(
            f"distributed.nproc_per_node: the job needs {spec.world_size} ranks, and this project may run {limits.max_slots} "
            "at once (its limit max_slots). Ask for fewer.",
            param="distributed.nproc_per_node",
        )


def allowed_priority(limits: Limits, priority: int) -> int:
    """The priority that a job gets."""
    return priority if limits.max_priority is None else min(priority, limits.max_priority)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if names else "none"
