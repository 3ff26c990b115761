"""`/v1/evals`: criteria for answers, and runs in which a base or a tuned model is judged by them.

Runs are carried out by ft_service/control/eval_runs.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Header, Query, Request

from api.http import idempotency
from api.http.auth import Caller
from api.http.dependencies import (
    After,
    ExactJsonBody,
    JsonBody,
    Svc,
    body_schema,
    parse_body,
    with_whole_numbers,
)
from api.http.routing import keyed_router
from api.http.threads import takes_turns
from api.routes.graders import grader_context
from api.routes.inference import require_answerable
from api.wire.eval_views import (
    DeletedEvalView,
    DeletedRunView,
    EvalItemView,
    EvalRunView,
    EvalView,
    eval_view,
    item_view,
    run_view,
)
from api.wire.views import ListView, list_view
from ft_service.errors import SpecError
from ft_service.evals.eval_request import (
    EvalRequest,
    EvalUpdate,
    FileId,
    ModelData,
    RunRequest,
    check_eval,
    check_run,
)
from ft_service.graders.grading import check_outside
from ft_service.ids import new_id
from ft_service.store.evals import Eval, EvalRun, RunStatus
from ft_service.store.records import Order

router = keyed_router("/v1/evals", "evals")

_PREFIX = "eval_"
_RUN_PREFIX = "evalrun_"

_NO_MESSAGES = [{"role": "user", "content": ""}]
"""Messages of a chat completion whose options alone are checked."""
Limit = Annotated[int, Query(ge=1, le=100)]
FewerLimit = Annotated[int, Query(ge=1, le=20)]
"""Of lists whose items hold whole bodies."""
_OF_RUN = "/{eval_id}/runs/{run_id}"


@router.post("", openapi_extra=body_schema(EvalRequest))
@takes_turns("grading")
def create(
    request: Request,
    body: JsonBody,
    caller: Caller,
    services: Svc,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> EvalView:
    """Create an eval: the schema of its items, and graders that judge answers.

    Its items come with each run (`data_source_config` of type `custom`). Graders are those of
    reinforcement learning, with `label_model`; all but `string_check` and `label_model` need a
    `pass_threshold`. Not in OpenAI's API: graders of type `endpoint`.
    """
    given = parse_body(body, EvalRequest)
    check_eval(given, services.grader_limits)
    for criterion in given.testing_criteria:
        context = grader_context(services, caller.project_id)
        check_outside(criterion, context)  # pyright: ignore[reportArgumentType]
    stored = given.model_dump(mode="json", exclude_none=True)
    keyed_id = idempotency.keyed_id(_PREFIX, idempotency_key, caller)
    new = Eval(
        id=keyed_id or new_id(_PREFIX),
        project_id=caller.project_id,
        data_source_config=stored["data_source_config"],
        testing_criteria=stored["testing_criteria"],
        name=given.name,
        metadata=given.metadata,
    )
    made, _ = idempotency.once(
        lambda: idempotency.earlier_eval(services.store, new, keyed_id, request.headers),
        lambda: services.store.evals.create_eval(new),
    )
    return eval_view(made)


@router.get("", response_model=ListView[EvalView])
def list_evals(
    caller: Caller,
    services: Svc,
    after: After = None,
    limit: FewerLimit = 20,
    order: Order = "asc",
    order_by: Literal["created_at"] = "created_at",
) -> Any:
    """Oldest first, unless `order` is desc."""
    page = services.store.evals.list_evals(caller.project_id, after=after, limit=limit, order=order)
    return list_view([eval_view(own) for own in page.data], page.has_more)


@router.get("/{eval_id}")
def retrieve(eval_id: str, caller: Caller, services: Svc) -> EvalView:
    return eval_view(services.store.evals.get_eval(caller.project_id, eval_id))


@router.post("/{eval_id}", openapi_extra=body_schema(EvalUpdate))
def update(eval_id: str, body: JsonBody, caller: Caller, services: Svc) -> EvalView:
    """Change its name or its metadata."""
    changes = parse_body(body, EvalUpdate).model_dump(exclude_none=True)
    return eval_view(services.store.evals.update_eval(caller.project_id, eval_id, **changes))


@router.delete("/{eval_id}")
def delete(eval_id: str, caller: Caller, services: Svc) -> DeletedEvalView:
    """Delete an eval with its runs."""
    services.store.evals.delete_eval(caller.project_id, eval_id)
    return DeletedEvalView(eval_id=eval_id)


@router.post("/{eval_id}/runs", openapi_extra=body_schema(RunRequest))
def create_run(
    request: Request,
    eval_id: str,
    body: ExactJsonBody,
    caller: Caller,
    services: Svc,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> EvalRunView:
    """Have a base or a tuned model answer up to 1,000 items, and its answers judged.

    `data_source` of type `completions` or `responses` asks a model with `input_messages` (a
    template with `{{ item.key }}`, or an `item_reference`), `jsonl` judges answers that lines bring
    along (`{"item": {…}, "sample": {"output_text": "…"}}`). Items are in the body (`file_content`)
    or in a file (`file_id`, JSON lines). The models are those of chat completions; a run waits
    while they cannot answer, and goes on after a restart.
    """
    given = parse_body(_with_exact_items(body), RunRequest)
    own = services.store.evals.get_eval(caller.project_id, eval_id)
    check_run(given, own.data_source_config["item_schema"])
    data = given.data_source
    if isinstance(data.source, FileId):
        _require_file(data.source.id, caller.project_id, services)
    if isinstance(data, ModelData):
        params = data.sampling_params.model_dump(exclude_none=True)
        asked = {"model": data.model, "messages": _NO_MESSAGES, **params}
        require_answerable(asked, caller, services)
    keyed_id = idempotency.keyed_id(_RUN_PREFIX, idempotency_key, caller, eval_id)
    new = EvalRun(
        id=keyed_id or new_id(_RUN_PREFIX),
        project_id=caller.project_id,
        eval_id=eval_id,
        key_id=caller.key_id,
        data_source=data.model_dump(mode="json", exclude_none=True),
        name=given.name,
        metadata=given.metadata,
    )
    made, _ = idempotency.once(
        lambda: idempotency.earlier_eval_run(services.store, new, keyed_id, request.headers),
        lambda: services.store.evals.create_run(new),
    )
    return run_view(made)


@router.get("/{eval_id}/runs", response_model=ListView[EvalRunView])
def list_runs(
    eval_id: str,
    caller: Caller,
    services: Svc,
    after: After = None,
    limit: FewerLimit = 20,
    order: Order = "asc",
    status: RunStatus | None = None,
) -> Any:
    """Oldest first, unless `order` is desc."""
    page = services.store.evals.list_runs(
        caller.project_id, eval_id, status=status, after=after, limit=limit, order=order
    )
    return list_view([run_view(run) for run in page.data], page.has_more)


@router.get(_OF_RUN)
def retrieve_run(eval_id: str, run_id: str, caller: Caller, services: Svc) -> EvalRunView:
    return run_view(services.store.evals.get_run(caller.project_id, eval_id, run_id))


@router.post(_OF_RUN)
def cancel_run_as_before(eval_id: str, run_id: str, caller: Caller, services: Svc) -> EvalRunView:
    """Cancel a run, as clients before 3 ask for it."""
    return cancel_run(eval_id, run_id, caller, services)


@router.post(f"{_OF_RUN}/cancel")
def cancel_run(eval_id: str, run_id: str, caller: Caller, services: Svc) -> EvalRunView:
    """Cancel a run. What came of its items so far stays."""
    return run_view(services.store.evals.cancel_run(caller.project_id, eval_id, run_id))


@router.delete(_OF_RUN)
def delete_run(eval_id: str, run_id: str, caller: Caller, services: Svc) -> DeletedRunView:
    """Delete a run with its output items."""
    services.store.evals.delete_run(caller.project_id, eval_id, run_id)
    return DeletedRunView(run_id=run_id)


@router.get(f"{_OF_RUN}/output_items", response_model=ListView[EvalItemView])
def list_items(
    eval_id: str,
    run_id: str,
    caller: Caller,
    services: Svc,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    status: Literal["pass", "fail", "error"] | None = None,
) -> Any:
    """What came of items. Not in OpenAI's API: `status` error."""
    run = services.store.evals.get_run(caller.project_id, eval_id, run_id)
    page = services.store.evals.list_items(
        run.id, status=status, after=after, limit=limit, order=order
    )
    return list_view([item_view(item, eval_id) for item in page.data], page.has_more)


@router.get(f"{_OF_RUN}/output_items/{{output_item_id}}")
def retrieve_item(
    eval_id: str, run_id: str, output_item_id: str, caller: Caller, services: Svc
) -> EvalItemView:
    run = services.store.evals.get_run(caller.project_id, eval_id, run_id)
    return item_view(services.store.evals.get_item(run.id, output_item_id), eval_id)


def _require_file(file_id: str, project_id: str, services: Svc) -> None:
    """Raise SpecError unless the project has such a file."""
    found = services.store.files.find_files([file_id]).get(file_id)
    if found is None or found.project_id != project_id:
        raise SpecError(
            f"data_source.source.id = {file_id[:80]!r}: this project has no such file. Give the "
            "id that POST /v1/files answered.",
            param="data_source.source.id",
            code="file_not_found",
        )


def _with_exact_items(body: Any) -> Any:
    """Return a body whose items have 1.0 as 1.0, as lines of files have, and all else whole
    numbers where they are.
    """
    source = body
    for name in ("data_source", "source", "content"):
        source = source.get(name) if isinstance(source, dict) else None
    whole = with_whole_numbers(body)
    if source is not None:
        whole["data_source"]["source"]["content"] = source
    return whole
