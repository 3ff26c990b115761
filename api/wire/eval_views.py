"""Evals, their runs and what came of items, as OpenAI's API has them. Pure."""

from __future__ import annotations

from typing import Any, Literal

from api.wire.views import Seconds, View
from ft_service.evals.item_results import Tally
from ft_service.store.evals import Eval, EvalItem, EvalRun, RunStatus

_SAMPLE = {"type": "object", "properties": {"output_text": {"type": "string"}}}


class EvalView(View):
    id: str
    object: Literal["eval"] = "eval"
    created_at: Seconds
    name: str
    """Its id if it was given none."""
    data_source_config: dict[str, Any]
    """`type`, and the JSON `schema` of a line: `item`, and `sample` if there is one."""
    testing_criteria: list[dict[str, Any]]
    metadata: dict[str, str]


class DeletedEvalView(View):
    object: Literal["eval.deleted"] = "eval.deleted"
    deleted: Literal[True] = True
    eval_id: str


class DeletedRunView(View):
    object: Literal["eval.run.deleted"] = "eval.run.deleted"
    deleted: Literal[True] = True
    run_id: str


class ResultCountsView(View):
    total: int
    """Items; 0 before the file is read."""
    passed: int
    failed: int
    errored: int


class CriterionCountsView(View):
    testing_criteria: str
    passed: int
    failed: int
    """An answer that could not be graded counts as neither."""


class ModelUsageView(View):
    model_name: str
    invocation_count: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Literal[0] = 0
    total_tokens: int


class EvalRunView(View):
    id: str
    object: Literal["eval.run"] = "eval.run"
    created_at: Seconds
    eval_id: str
    name: str
    """Its id if it was given none."""
    status: RunStatus
    model: str | None
    """null: a run that asks none."""
    data_source: dict[str, Any]
    error: dict[str, Any] | None
    """Why it failed: `code` and `message`."""
    result_counts: ResultCountsView
    per_testing_criteria_results: list[CriterionCountsView]
    per_model_usage: list[ModelUsageView]
    report_url: None = None
    """There is no page of it."""
    metadata: dict[str, str]


class EvalItemView(View):
    id: str
    object: Literal["eval.run.output_item"] = "eval.run.output_item"
    created_at: Seconds
    eval_id: str
    run_id: str
    status: Literal["pass", "fail", "error"]
    """error: there is no answer, or no grade."""
    datasource_item_id: int
    """Its place in the source, from 0."""
    datasource_item: dict[str, Any]
    results: list[dict[str, Any]]
    """`name`, `type`, `score`, `passed` of each criterion, and `error` (not in OpenAI's API)."""
    sample: dict[str, Any]


def eval_view(own: Eval) -> EvalView:
    config = own.data_source_config
    properties = {"item": config["item_schema"]}
    if config["include_sample_schema"]:
        properties["sample"] = _SAMPLE
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return EvalView.of(
        own,
        name=own.name or own.id,
        data_source_config={"type": config["type"], "schema": schema},
        testing_criteria=list(own.testing_criteria),
        metadata=own.metadata or {},
    )


def run_view(run: EvalRun) -> EvalRunView:
    tally = Tally(**run.tally)
    model = run.data_source.get("model")
    counts = ResultCountsView(
        total=run.total or 0, passed=tally.passed, failed=tally.failed, errored=tally.errored
    )
    usage = ModelUsageView(
        model_name=model or "",
        invocation_count=tally.asked,
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
        total_tokens=tally.prompt_tokens + tally.completion_tokens,
    )
    return EvalRunView.of(
        run,
        name=run.name or run.id,
        model=model,
        result_counts=counts,
        per_testing_criteria_results=[
            CriterionCountsView(testing_criteria=name, passed=passed, failed=failed)
            for name, (passed, failed) in tally.criteria.items()
        ],
        per_model_usage=[usage] if tally.asked else [],
        metadata=run.metadata or {},
    )


def item_view(item: EvalItem, eval_id: str) -> EvalItemView:
    return EvalItemView.of(
        item, eval_id=eval_id, datasource_item_id=item.number, datasource_item=item.item
    )
