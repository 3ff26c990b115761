"""Samplers of Tinker clients, and their requests for samples, which wait for
ft_service/control/tinker/tinker_samples.py.
"""

from __future__ import annotations

from typing import Any

from api.http.dependencies import JsonBody, Services, Svc
from api.http.tinker_auth import TinkerCaller, tinker_router
from ft_service.control.tinker import tinker_models
from ft_service.errors import SpecError
from ft_service.store.records import Principal
from ft_service.store.tinker import TinkerSample, TinkerSampler
from ft_service.tinker.bodies import CreateSampler, OfSampler
from ft_service.tinker.names import WeightsPath, check_sampler_id, request_id, sampler_id
from ft_service.tinker.sample_calls import parse_sample_request

router = tinker_router()


@router.post("/create_sampling_session")
def create_sampler(body: JsonBody, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    given = CreateSampler.parse(body)
    session = services.store.tinker.open_session(caller.project_id, given.session_id)
    base, path = _source(given, caller, services)
    sampler = TinkerSampler(
        id=sampler_id(session.id, given.sampling_session_seq_id),
        project_id=caller.project_id,
        session_id=session.id,
        base=base,
        model_path=path,
    )
    stored = services.store.tinker.put_sampler(sampler)
    return {"type": "create_sampling_session", "sampling_session_id": stored.id}


def _source(given: CreateSampler, caller: Principal, services: Services) -> tuple[str, str | None]:
    """The base, and the path of the weights. Raises SpecError and NotFoundError."""
    services.refuse_samples(of_weights=given.model_path is not None)
    if given.model_path is None:
        if given.base_model is None:
            raise SpecError("model_path or base_model is needed.", param="base_model")
        return services.catalogue.find(given.base_model).name, None
    path = WeightsPath.parse(given.model_path, "sampler_weights")
    job, _ = tinker_models.find_weights(path, caller, services.store, services.places)
    return job.spec.model.name, str(path)


@router.post("/join_sampling_session")
def join_sampler(body: JsonBody, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    own = check_sampler_id(OfSampler.parse(body).sampling_session_id)
    return {
        "type": "join_sampling_session",
        "client_counter": services.store.tinker.join_sampler(caller.project_id, own),
    }


@router.get("/samplers/{own}")
def get_sampler(own: str, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    """A sampler; `logprob_gap`: mean distance in nats from the trainer's log-probabilities, null
    until it is measured.
    """
    sampler = services.store.tinker.get_sampler(caller.project_id, check_sampler_id(own))
    return {
        "sampler_id": sampler.id,
        "base_model": sampler.base,
        "model_path": sampler.model_path,
        "logprob_gap": sampler.logprob_gap,
    }


@router.post("/asample")
def sample(body: JsonBody, caller: TinkerCaller, services: Svc) -> dict[str, Any]:
    """Store a request for samples. A repeated one finds the same answer."""
    request = parse_sample_request(body)
    if request.sampling_session_id is None or request.seq_id is None:
        text = (
            "sampling_session_id and seq_id are needed: create_sampling_session makes a "
            "sampler of base_model or model_path."
        )
        raise SpecError(text, param="sampling_session_id")
    sampler = services.store.tinker.get_sampler(
        caller.project_id, check_sampler_id(request.sampling_session_id)
    )
    own = request_id(sampler.id, request.seq_id)
    services.store.tinker.put_sample(
        TinkerSample(
            id=own,
            project_id=caller.project_id,
            sampler_id=sampler.id,
            request=request.model_dump(exclude_none=True),
        )
    )
    return {
        "request_id": own,
        "sample_sequence_ids": [f"{own}/{number}" for number in range(request.num_samples)],
    }
