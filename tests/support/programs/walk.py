"""Calls every method of an openai client's files, uploads, fine-tuning, models, webhooks and evals
resources, sync and async.

A program of its own, so that it runs with whichever client its PYTHONPATH names: URL and key come
from the environment (OPENAI_BASE_URL, OPENAI_API_KEY), the ids of what a test has prepared as JSON
on the command line. With `azure_endpoint` or `base_url` among them the client is AzureOpenAI, which
reads AZURE_OPENAI_API_KEY and OPENAI_API_VERSION. It prints, as JSON, the client's version, what it
called, and which methods the client has.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai

LINE = (
    b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": '
    b'"Hello"}]}\n'
)
RESOURCES = ("files", "uploads", "fine_tuning", "models", "webhooks", "evals")
IDS: dict[str, str] = json.loads(sys.argv[1])
AZURE: dict[str, Any] = {name: IDS[name] for name in ("azure_endpoint", "base_url") if name in IDS}
KINDS = ["fine_tuning.job.succeeded"]


def methods(client: Any) -> set[str]:
    """Dotted names of all public methods below the resources that this client has."""
    names: set[str] = set()

    def look(resource: Any, place: str) -> None:
        for name in dir(resource):
            if name.startswith("_") or name.startswith("with_"):
                continue
            value = getattr(resource, name)
            if inspect.ismethod(value):
                names.add(f"{place}.{name}")
            elif type(value).__module__.startswith("openai.resources"):
                look(value, f"{place}.{name}")

    for name in RESOURCES:
        if hasattr(client, name):
            look(getattr(client, name), name)
    return names


async def walk(client: Any) -> list[str]:
    called: list[str] = []
    available = methods(client)

    async def call(place: str, *args: Any, **kwargs: Any) -> Any:
        if place not in available:
            return None
        called.append(place)
        target = client
        for part in place.split("."):
            target = getattr(target, part)
        result = target(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def all_of(place: str, *args: Any, **kwargs: Any) -> list[Any]:
        pages = await call(place, *args, **kwargs)
        if hasattr(pages, "__aiter__"):
            return [item async for item in pages]
        return list(pages or [])

    await files(call, all_of)
    await uploads(call)
    await jobs(call, all_of)
    await models(call, all_of)
    await webhooks(call, all_of)
    await evals(call, all_of)
    return called


async def files(call: Callable[..., Any], all_of: Callable[..., Any]) -> None:
    file = await call("files.create", file=("a.jsonl", LINE), purpose="fine-tune")
    assert (await call("files.retrieve", file.id)).filename == "a.jsonl"
    assert (await call("files.wait_for_processing", file.id)).status == "processed"
    assert (await call("files.content", file.id)).content == LINE
    assert await call("files.retrieve_content", file.id) == LINE.decode()
    assert file.id in [
        item.id for item in await all_of("files.list", purpose="fine-tune", limit=1, order="asc")
    ]
    assert (await call("files.delete", file.id)).deleted is True


async def uploads(call: Callable[..., Any]) -> None:
    about = {
        "bytes": len(LINE),
        "filename": "b.jsonl",
        "mime_type": "application/jsonl",
        "purpose": "fine-tune",
    }
    upload = await call("uploads.create", **about)
    part = await call("uploads.parts.create", upload.id, data=LINE)
    assert (await call("uploads.complete", upload.id, part_ids=[part.id])).file.bytes == len(LINE)
    other = await call("uploads.create", **about)
    assert (await call("uploads.cancel", other.id)).status == "cancelled"
    assert (
        await call("uploads.upload_file_chunked", file=LINE, part_size=50, **about)
    ).status == "completed"


async def jobs(call: Callable[..., Any], all_of: Callable[..., Any]) -> None:
    job = await call(
        "fine_tuning.jobs.create", model="tiny", training_file=IDS["file"], seed=7, suffix="walk"
    )
    assert (await call("fine_tuning.jobs.retrieve", job.id)).seed == 7
    assert job.id in [found.id for found in await all_of("fine_tuning.jobs.list", limit=1)]
    await call("fine_tuning.jobs.pause", job.id)
    await call("fine_tuning.jobs.resume", job.id)
    assert (await call("fine_tuning.jobs.cancel", job.id)).status == "cancelled"
    assert len(await all_of("fine_tuning.jobs.list_events", job.id, limit=1)) >= 2
    points = await all_of("fine_tuning.jobs.checkpoints.list", IDS["job"], limit=1)
    assert [point.step_number for point in points] == [10, 5]
    place = "fine_tuning.checkpoints.permissions"
    name = points[0].fine_tuned_model_checkpoint
    granted = await all_of(f"{place}.create", name, project_ids=["default"])
    assert [found.project_id for found in granted] == ["default"]
    assert [found.id for found in await all_of(f"{place}.list", name)] in (
        [],
        [found.id for found in granted],
    )
    if retrieved := await call(f"{place}.retrieve", name):
        assert [found.id for found in retrieved.data] == [found.id for found in granted]
    for permission in granted:
        await call(f"{place}.delete", permission.id, fine_tuned_model_checkpoint=name)
    grader = {
        "type": "string_check",
        "name": "same",
        "input": "{{ sample.output_text }}",
        "reference": "x",
        "operation": "eq",
    }
    if validated := await call("fine_tuning.alpha.graders.validate", grader=grader):
        assert validated.grader.name == "same"
    if graded := await call(
        "fine_tuning.alpha.graders.run", grader=grader, model_sample="x", item={}
    ):
        assert (graded.reward, graded.metadata.errors.invalid_variable_error) == (1.0, False)


async def models(call: Callable[..., Any], all_of: Callable[..., Any]) -> None:
    names = [model.id for model in await all_of("models.list")]
    assert IDS["model"] in names
    for name in (IDS["model"], f"{IDS['model']}:ckpt-step-5", "meta-llama/Llama-3.2-1B"):
        assert (await call("models.retrieve", name)).id == name
    assert (await call("models.delete", IDS[sys.argv[2]])).deleted is True


async def webhooks(call: Callable[..., Any], all_of: Callable[..., Any]) -> None:
    made = await call("webhooks.create", name="a", url=IDS["receiver"], event_types=KINDS)
    if made is None:
        return
    assert (await call("webhooks.retrieve", made.id)).id == made.id
    assert (await call("webhooks.update", made.id, name="b")).name == "b"
    assert [found.id for found in await all_of("webhooks.list")] == [made.id]
    assert (await call("webhooks.test", made.id, event_type=KINDS[0])).status_code == 200
    assert (await call("webhooks.rotate_secret", made.id)).signing_secret != made.signing_secret
    assert KINDS[0] in (await call("webhooks.event_types.list")).data
    assert (await call("webhooks.delete", made.id)).deleted is True


async def evals(call: Callable[..., Any], all_of: Callable[..., Any]) -> None:
    config = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
    template = {"type": "template", "template": [{"role": "user", "content": "{{ item.a }}"}]}
    source = {"type": "file_content", "content": [{"item": {"a": "b"}}]}
    data = {"type": "completions", "model": "tiny", "source": source, "input_messages": template}
    criterion = {
        "type": "string_check",
        "name": "same",
        "input": "{{ sample.output_text }}",
        "reference": "x",
        "operation": "eq",
    }
    made = await call(
        "evals.create", name="a", data_source_config=config, testing_criteria=[criterion]
    )
    if made is None:
        return
    assert (await call("evals.retrieve", made.id)).name == "a"
    assert (await call("evals.update", made.id, metadata={"a": "b"})).metadata == {"a": "b"}
    assert made.id in [own.id for own in await all_of("evals.list", limit=1)]
    run = await call("evals.runs.create", made.id, data_source=data)
    assert (await call("evals.runs.retrieve", run.id, eval_id=made.id)).status == "queued"
    assert [own.id for own in await all_of("evals.runs.list", made.id)] == [run.id]
    assert (await call("evals.runs.cancel", run.id, eval_id=made.id)).status == "canceled"
    assert (await call("evals.runs.delete", run.id, eval_id=made.id)).deleted is True
    assert (await call("evals.delete", made.id)).deleted is True
    of_run = {"eval_id": IDS["eval_id"], "run_id": IDS["run_id"]}
    items = await all_of("evals.runs.output_items.list", IDS["run_id"], eval_id=IDS["eval_id"])
    assert [item.id for item in items] == [IDS["output_item_id"]]
    one = await call("evals.runs.output_items.retrieve", items[0].id, **of_run)
    assert one.datasource_item_id == 0


def clients() -> Iterator[Any]:
    yield openai.AzureOpenAI(**AZURE) if AZURE else openai.OpenAI()
    yield openai.AsyncAzureOpenAI(**AZURE) if AZURE else openai.AsyncOpenAI()


if __name__ == "__main__":
    results = []
    for client, target in zip(clients(), ("sync", "async"), strict=True):
        sys.argv[2:] = [target]
        results.append(
            {"called": sorted(set(asyncio.run(walk(client)))), "has": sorted(methods(client))}
        )
    print(json.dumps({"version": openai.__version__, "walks": results}))
