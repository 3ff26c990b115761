"""Calls every method of the `tinker` package's clients against a service, and prints one JSON line
a method: {method, error}.

    python tinker_walk.py BASE [--both]

Of a method that has an asynchronous form too, the other one alone is called; with `--both` both
are. Run with TINKER_BASE_URL and TINKER_API_KEY, in a folder that holds the base's, so that the client
finds its tokenizer.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import tinker
import torch
from tinker import types
from tinker.lib.api_future_impl import QueueState

warnings.simplefilter("ignore")
base = sys.argv[1]
both = "--both" in sys.argv


def done(value: Any) -> Any:
    """The result of a method: what a future or a coroutine comes to."""

    async def awaited(one: Any) -> Any:
        return await one

    if inspect.iscoroutine(value):
        value = asyncio.run(awaited(value))
    return value.result() if hasattr(value, "result") else value


def call(client: Any, name: str, *args: Any, **named: Any) -> Any:
    """The result of a method, called in one of its forms or in all; the last one's."""
    value: Any = None
    forms = [each for each in (name, f"{name}_async") if hasattr(client, each)]
    for each in forms if both else forms[:1]:
        full = f"{type(client).__name__}.{each}"
        error = None
        given = [
            one() if callable(one) and getattr(one, "__name__", "") == "fresh" else one
            for one in args
        ]
        try:
            value = done(getattr(client, each)(*given, **named))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps({"method": full, "error": error}), flush=True)
    return value


def names(prefix: str) -> Callable[[], str]:
    """A new name for each call."""
    numbers = iter(range(100))

    def fresh() -> str:
        return f"{prefix}-{next(numbers)}"

    return fresh


def datum(ids: list[int]) -> types.Datum:
    inputs: Any = {
        "target_tokens": ids[1:],
        "weights": [1.0] * (len(ids) - 1),
    }  # lists become arrays
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def neg_ll(
    logprobs: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss}


def custom(data: Any, logprobs: Any) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.stack([own.sum() for own in logprobs]).sum().neg(), {"data": float(len(data))}


def main() -> None:
    prompt = types.ModelInput.from_ints([5, 6, 7])
    params = types.SamplingParams(max_tokens=3, seed=1)
    data = [datum([5, 6, 7, 8]), datum([9, 10, 11])]
    service = tinker.ServiceClient()
    for name in ("get_server_capabilities", "get_telemetry", "get_console_url"):
        call(service, name)
    rest = call(service, "create_rest_client")
    training = call(service, "create_lora_training_client", base_model=base, rank=4, seed=3)
    loss = call(service, "create_custom_loss", neg_ll, {"logprobs": 1, "weights": 1})
    for name in ("get_info", "get_telemetry", "get_console_url", "get_tokenizer"):
        call(training, name)
    call(training, "forward", data, "cross_entropy")
    call(training, "forward_backward", data, "cross_entropy")
    call(training, "forward_backward_custom", data, custom)
    done(training.forward_backward_custom(data, loss))
    call(training, "optim_step", types.AdamParams(learning_rate=1e-3))
    saved = call(training, "save_state", names("state"))
    for_sampler = call(training, "save_weights_for_sampler", names("sampled"))
    call(training, "load_state", saved.path)
    call(training, "load_state_with_optimizer", saved.path)
    call(training, "create_sampling_client", for_sampler.path)
    sampling = call(training, "save_weights_and_get_sampling_client")
    call(service, "create_training_client_from_state", saved.path)
    call(service, "create_training_client_from_state_with_optimizer", saved.path)
    call(service, "create_sampling_client", base_model=base)
    service._project_id = "other"
    call(service, "copy_weights", saved.path)
    call(training, "save_weights_external", names("external"))  # refused, and what follows goes on
    for name in ("get_base_model", "get_telemetry", "get_tokenizer", "get_sampler_handle"):
        call(sampling, name)
    call(sampling, "from_sampler_handle", sampling.get_sampler_handle())
    call(sampling, "create", sampling.holder, base_model=base)
    call(sampling, "on_queue_state_change", QueueState.ACTIVE, None)
    call(sampling, "sample", prompt, 2, params)
    call(sampling, "compute_logprobs", prompt)
    _walk_rest(rest, training.model_id, saved.path, service.holder.get_session_id(), sampling)
    call(service, "close", "success")


def _walk_rest(rest: Any, model: str, path: str, session: str, sampling: Any) -> None:
    for name in (
        "get_server_capabilities",
        "get_telemetry",
        "whoami",
        "list_sessions",
        "list_training_runs",
    ):
        call(rest, name)
    call(rest, "search_sessions", types.SessionSearchRequest())
    for name in ("list_user_checkpoints", "get_current_checkpoint_storage_usage"):
        call(rest, name)
    call(rest, "get_audit_log")
    call(rest, "get_billing_usage", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")
    call(rest, "get_session", session)
    call(rest, "assign_session_project", session, "other")
    call(rest, "export_session_trace", session)
    call(rest, "get_training_run", model)
    call(rest, "list_checkpoints", model)
    call(rest, "get_sampler", sampling._sampling_session_id)
    for name in ("get_training_run", "get_weights_info"):
        call(rest, f"{name}_by_tinker_path", path)
    call(rest, "publish_checkpoint_from_tinker_path", path)
    call(rest, "unpublish_checkpoint_from_tinker_path", path)
    call(rest, "set_checkpoint_ttl_from_tinker_path", path, 7200)
    call(rest, "copy_weights", path, destination_project_id="other")
    call(rest, "get_external_weights_urls", path.replace("/weights/", "/external_weights/"))
    kept = [checkpoint.tinker_path for checkpoint in done(rest.list_checkpoints(model)).checkpoints]
    identifiers = iter(
        one.removeprefix(f"tinker://{model}/") for one in kept if "/sampler_weights/" in one
    )
    paths = iter(one for one in kept if "/weights/" in one)

    def fresh() -> str:
        return next(identifiers)

    call(rest, "delete_checkpoint", model, fresh)

    def fresh_path() -> str:
        return next(paths)

    fresh_path.__name__ = "fresh"
    call(rest, "delete_checkpoint_from_tinker_path", fresh_path)


if __name__ == "__main__":
    main()
