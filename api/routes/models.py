"""`/v1/models`: the bases of this host, the aliases that the operator gave them, and the tuned
models of the project.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from fastapi import Query

from api.http.auth import Caller
from api.http.dependencies import Services, Svc
from api.http.routing import keyed_router
from api.wire.views import BaseView, DeletedModelView, ModelsView, ModelView, VerifyView
from ft_service.bases.catalogue import Base
from ft_service.bases.description import write_described
from ft_service.control.admission import tuned_models
from ft_service.control.bases.base_facts import base_facts
from ft_service.errors import ForbiddenError, NotFoundError, SpecError
from ft_service.rundir.verify import verify
from ft_service.spec import is_tuned
from ft_service.store.records import Principal

router = keyed_router("/v1/models", "models")


@router.get("")
def list_models(
    caller: Caller,
    services: Svc,
    owned_by: Annotated[
        Literal["system"] | None, Query(description="`system`: no tuned models.")
    ] = None,
) -> ModelsView:
    """List every base below FT_MODELS, the aliases in FT_MODEL_ALIASES, then the tuned models
    that the project may use, newest first. `owned_by` (not in OpenAI's API): only the bases and
    aliases.
    """
    bases = [_base(model.name, model, services) for model in services.catalogue.list_models()]
    aliases = [_base(alias, model, services) for alias, model in services.catalogue.list_aliases()]
    tuned = () if owned_by else tuned_models.list_usable(caller, services.store, services.places)
    return ModelsView(data=[*bases, *aliases, *(_tuned(model, caller) for model in tuned)])


@router.get("/{model:path}")
def retrieve(
    model: str,
    caller: Caller,
    services: Svc,
    include: Annotated[
        Literal["description"] | None,
        Query(description="`description`: what training finds in a base."),
    ] = None,
) -> ModelView:
    """A base, an alias, a tuned model, or a checkpoint of one; ids contain `/` and `:`,
    percent-encoded or not. `include` (not in OpenAI's API) adds the description of a base.
    """
    if is_tuned(model):
        tuned = tuned_models.find(model, caller, services.store)
        tuned_models.refuse_pruned(tuned, services.places)
        return _tuned(tuned, caller)
    try:
        base = services.catalogue.find(model)
    except SpecError as error:
        raise NotFoundError(error.message, param="model", code="model_not_found") from None
    view = _base(model, base, services)
    described = services.catalogue.descriptions.known(base.path) if include else None
    return (
        view
        if described is None
        else view.model_copy(update={"description": json.loads(write_described(described))})
    )


@router.delete("/{model:path}")
def delete(model: str, caller: Caller, services: Svc) -> DeletedModelView:
    """Hide a tuned model or a checkpoint of one: it can no longer be found, downloaded or served.

    The job stays. Bases and aliases are the operator's and cannot be deleted here.
    """
    if not is_tuned(model):
        base = retrieve(model, caller, services)
        message = (
            f"model = {base.id!r}: a base model is the operator's and cannot be deleted; "
            "only tuned models can."
        )
        raise ForbiddenError(message, param="model")
    tuned = tuned_models.find_own(model, caller.project_id, services.store)
    tuned_models.refuse_pruned(tuned, services.places)
    services.store.models.delete_model(caller.project_id, tuned.name)
    return DeletedModelView(id=tuned.name)


@router.post("/{model:path}/verify")
def verify_adapter(model: str, caller: Caller, services: Svc) -> VerifyView:
    """Not in OpenAI's API. Read the adapter of a tuned model of the project again, and compare its
    files, digests and shapes with those that were written.
    """
    tuned = tuned_models.find_own(model, caller.project_id, services.store)
    tuned_models.refuse_pruned(tuned, services.places)
    report = verify(services.places.run(tuned.job.id).path(tuned.adapter_key))
    return VerifyView(
        model=tuned.name, ok=not report.faults, checked=report.checked, faults=report.faults
    )


def _base(name: str, model: Base, services: Services) -> ModelView:
    facts = base_facts(model.path, services.catalogue.descriptions.known(model.path))
    return ModelView(
        id=name,
        created=int(model.created_at),
        owned_by="system",
        root=model.name,
        base=BaseView.of(facts),
    )


def _tuned(model: tuned_models.Tuned, caller: Principal) -> ModelView:
    parent = model.job.known_spec.parent
    return ModelView(
        id=model.name,
        created=int(model.created_at),
        owned_by=model.organization,
        root=model.base,
        parent=parent.name if parent else model.base,
        job_id=model.job.id if model.job.project_id == caller.project_id else None,
    )
