"""The tools: each is one or two requests of the REST API with the caller's key, and answers with
the API's object and one sentence.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from api.page.inner_api import InnerApi
from ft_service.errors import SpecError
from ft_service.jobs.states import TERMINAL
from ft_service.plan.plan_text import time_text
from ft_service.rundir.documents import ExportFormat
from ft_service.spec import Strict
from ft_service.spec.methods import OfferedMethod
from ft_service.wording import counted

MOST_CHARACTERS = 2 * 1024**2
"""Longest data file that a tool takes."""
LONGEST_WAIT = 50
"""Seconds: clients give a call up after a minute."""
_LOOK_SECONDS = 2.0
_NONCE = 8
"""Hex digits of a plan's id that differ for each plan."""
_JOBS = "/v1/fine_tuning/jobs"

Told = tuple[Any, str]
"""The API's object, and a sentence about it."""


class Nothing(Strict):
    """No arguments."""


class Data(Strict):
    """A data file's content."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """Its name, which ends as its kind does: train.jsonl, train.csv."""
    content: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
    """Its text."""


class OfFile(Strict):
    """A data file and how a job would read it."""

    file_id: str
    method: OfferedMethod | None = None
    columns: dict[str, str] | None = None
    """Names of the file's columns, such as {"prompt": "question", "completion": "answer"}."""

    def query(self) -> dict[str, str | None]:
        columns = None if self.columns is None else json.dumps(self.columns)
        return {"method": self.method, "data": columns}


class OfSamples(OfFile):
    """A data file as a base would see it."""

    model: str
    """A base."""
    limit: Annotated[int, Field(ge=1, le=10)] = 3


class Request(Strict):
    """The body of POST /v1/fine_tuning/jobs."""

    request: dict[str, Any]
    """model and training_file are needed; validation_file, method, suffix, hyperparameters, lora,
    precision, training and others are as in the REST API.
    """


class Planned(Request):
    """The body that was planned, and the plan's id."""

    plan_id: str
    """As `plan` gave it for this same body."""


class OfJob(Strict):
    """A job."""

    job_id: str


class Waiting(OfJob):
    """A job, and how long to wait for its end."""

    seconds: Annotated[int, Field(ge=1, le=LONGEST_WAIT)] = 45


class OfJobs(Strict):
    """Jobs to compare."""

    job_ids: Annotated[list[str], Field(min_length=1, max_length=10)]


class Listing(Strict):
    """The newest jobs."""

    limit: Annotated[int, Field(ge=1, le=100)] = 10


class Message(Strict):
    """A turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Chat(Strict):
    """A conversation to answer."""

    model: str
    """A base or a tuned model (a job's fine_tuned_model)."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=100)]
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 256
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0


class Export(OfJob):
    """A job, and the form in which its model is to be written."""

    format: ExportFormat
    """gguf: llama.cpp and Ollama; merged: one model in safetensors; vllm, peft: an adapter."""


@dataclass(frozen=True)
class Tool:
    """What an agent may call."""

    name: str
    description: str
    """What it does, when to call it, and what comes next."""
    arguments: type[Strict]
    call: Callable[[InnerApi, Any], Awaitable[Told]]
    """Raises ApiError and SpecError."""
    changes: bool = False
    """Whether it stores or spends anything."""


async def _models(api: InnerApi, _: Nothing) -> Told:
    found = await api.get("/v1/models")
    bases = [one["id"] for one in found["data"] if (one.get("base") or {}).get("trainable")]
    tuned = sum(1 for one in found["data"] if one["id"].startswith("ft:"))
    names = ", ".join(bases[:5]) or "none"
    return found, f"Bases that can be tuned: {names}. There are {counted(tuned, 'tuned model')}."


async def _upload(api: InnerApi, data: Data) -> Told:
    made = await api.upload(data.name, data.content.encode())
    return made, f"{made['id']} holds {made['bytes']:,} bytes. Check it with check_data."


async def _check(api: InnerApi, asked: OfFile) -> Told:
    found = await api.get(f"/v1/files/{asked.file_id}/check", **asked.query())
    more = "Plan a job with plan." if found["ok"] else "Mend the lines and upload the file again."
    return found, f"{found['message']} {more}"


async def _samples(api: InnerApi, asked: OfSamples) -> Told:
    query = {**asked.query(), "model": asked.model, "limit": asked.limit}
    found = await api.get(f"/v1/files/{asked.file_id}/samples", **query)
    return found, "Tokens with a role of target are learned; the others are read."


async def _plan(api: InnerApi, asked: Request) -> Told:
    plan = await api.post("/v1/fine_tuning/plan", asked.request)
    time = f" {time_text(plan['time'])}" if plan["time"] else ""
    if plan["fits"] is False:
        changes = " or ".join(change["text"] for change in plan["changes"][:3])
        return {"plan": plan}, f"It does not fit.{f' It would {changes}' if changes else ''}"
    await api.post("/v1/fine_tuning/check", {"job": asked.request})
    made = plan_id(asked.request, secrets.token_hex(_NONCE // 2))
    found = {"plan_id": made, "plan": plan}
    return found, f"It would be accepted.{time} Submit the same body with plan_id {made}."


async def _submit(api: InnerApi, asked: Planned) -> Told:
    if plan_id(asked.request, asked.plan_id.removeprefix("plan-")[:_NONCE]) != asked.plan_id:
        raise SpecError(
            "plan_id: it is not that of a plan of this body. Call plan with the body, and submit "
            "it unchanged.",
            param="plan_id",
        )
    job = await api.post(_JOBS, asked.request, key=asked.plan_id)
    return job, f"{job['id']} is {job['status']}. Wait for its end with wait."


async def _jobs(api: InnerApi, asked: Listing) -> Told:
    found = await api.get(_JOBS, limit=asked.limit)
    going = sum(1 for job in found["data"] if job["status"] not in TERMINAL)
    return found, f"{counted(len(found['data']), 'job')}, {going} of them not ended."


async def _status(api: InnerApi, asked: OfJob) -> Told:
    job = await api.get(f"{_JOBS}/{asked.job_id}")
    events = await api.get(f"{_JOBS}/{asked.job_id}/events", limit=5)
    return {"job": job, "newest_events": events["data"]}, _sentence(job)


async def _wait(api: InnerApi, asked: Waiting) -> Told:
    ends = asyncio.get_running_loop().time() + asked.seconds
    while True:
        job = await api.get(f"{_JOBS}/{asked.job_id}")
        left = ends - asyncio.get_running_loop().time()
        if job["status"] in TERMINAL or job["status"] == "paused" or left <= 0:
            return job, _sentence(job)
        await asyncio.sleep(min(_LOOK_SECONDS, left))


async def _metrics(api: InnerApi, asked: OfJob) -> Told:
    found = await api.get(f"{_JOBS}/{asked.job_id}/metrics", points=40)
    return found, "Series by step; valid_loss shows whether it learns more than its own file."


async def _compare(api: InnerApi, asked: OfJobs) -> Told:
    jobs = [await api.get(f"{_JOBS}/{job_id}") for job_id in asked.job_ids]
    found = await api.get("/v1/fine_tuning/metrics", job=asked.job_ids, points=10)
    return {"jobs": jobs, "metrics": found["data"]}, "Losses compare on one validation file only."


async def _evaluation(api: InnerApi, asked: OfJob) -> Told:
    found = await api.get(f"{_JOBS}/{asked.job_id}/evaluation")
    said = "Answers to the job's own prompts, before and after." if found["data"] else "No answers."
    return found, f"{said} A job has them if its request has an evaluation."


async def _chat(api: InnerApi, asked: Chat) -> Told:
    answer = await api.post("/v1/chat/completions", asked.model_dump())
    return answer, str(answer["choices"][0]["message"]["content"])


async def _export(api: InnerApi, asked: Export) -> Told:
    made = await api.post(f"{_JOBS}/{asked.job_id}/exports", {"format": asked.format})
    path = f"{_JOBS}/{asked.job_id}/exports/{asked.format}"
    return made, f"It is {made['status']}. Look with GET {path}, then GET {path}/content."


async def _cancel(api: InnerApi, asked: OfJob) -> Told:
    job = await api.post(f"{_JOBS}/{asked.job_id}/cancel")
    return job, _sentence(job)


async def _why(api: InnerApi, asked: OfJob) -> Told:
    job = await api.get(f"{_JOBS}/{asked.job_id}")
    events = await api.get(f"{_JOBS}/{asked.job_id}/events", limit=50)
    told = [event for event in events["data"] if event["level"] != "info"]
    error = job.get("error") or {}
    why = error.get("message") or job.get("pending_reason") or "Nothing is wrong with it."
    return {"status": job["status"], "error": error, "warnings": told}, str(why)


def plan_id(request: Mapping[str, Any], nonce: str) -> str:
    """Return the id of a plan: it says which body was planned, so that no other is submitted."""
    body = json.dumps(request, sort_keys=True)
    return f"plan-{nonce}{hashlib.sha256(f'{nonce} {body}'.encode()).hexdigest()[:16]}"


def _sentence(job: Mapping[str, Any]) -> str:
    if job["status"] == "succeeded":
        return f"It succeeded. The tuned model is {job['fine_tuned_model']}; try it with chat."
    if job["status"] == "failed":
        return f"It failed: {(job.get('error') or {}).get('message')}"
    reason = f": {job['pending_reason']}" if job.get("pending_reason") else ""
    return f"It is {job['status']}{reason}."


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "models",
            "List bases, whether each can be tuned and why not, and tuned models.",
            Nothing,
            _models,
        ),
        Tool(
            "upload_data",
            "Upload a data file of at most 2 million characters. Longer ones: POST /v1/files, or `ft submit`.",
            Data,
            _upload,
            changes=True,
        ),
        Tool(
            "check_data",
            "Check a data file: its format, lines that cannot be trained on, what is not learned.",
            OfFile,
            _check,
        ),
        Tool(
            "show_samples",
            "Show samples as a base sees them: every token with its role, and what is learned.",
            OfSamples,
            _samples,
        ),
        Tool(
            "plan",
            "Plan a job before it is submitted: memory, time, whether it fits, what would help. "
            "Gives the plan_id that submit needs.",
            Request,
            _plan,
        ),
        Tool(
            "submit",
            "Create a job, which takes GPUs or processors. Needs the plan_id of the same body. "
            "Repeated with one plan_id it makes one job.",
            Planned,
            _submit,
            changes=True,
        ),
        Tool("jobs", "List the newest jobs.", Listing, _jobs),
        Tool("status", "Show a job and its newest events.", OfJob, _status),
        Tool(
            "wait",
            "Wait for a job's end, at most 50 seconds. Call it again while the job goes on.",
            Waiting,
            _wait,
        ),
        Tool("metrics", "Losses and other series of a job, by step.", OfJob, _metrics),
        Tool("compare", "Several jobs with their options and last metrics.", OfJobs, _compare),
        Tool(
            "evaluation",
            "Answers to a job's evaluation prompts, by the base and by the tuned model.",
            OfJob,
            _evaluation,
        ),
        Tool("chat", "Ask a base or a tuned model.", Chat, _chat),
        Tool(
            "export",
            "Write a tuned model in a form that other programs read.",
            Export,
            _export,
            changes=True,
        ),
        Tool("cancel", "Cancel a job.", OfJob, _cancel, changes=True),
        Tool(
            "explain_refusal",
            "Say why a job failed or waits, with its warnings.",
            OfJob,
            _why,
        ),
    )
}
