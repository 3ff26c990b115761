"""Jobs of reinforcement learning by REST: what is created and refused, and their answers with
rewards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest

from ft_service.agents.open_rollouts import OpenRollouts
from ft_service.reinforcement.step_records import write_record
from ft_service.reinforcement.trajectories import RecordedCall
from tests.support.rest.refusals import check_error
from tests.support.rest.service import Service, run_dir
from tests.support.rollouts import GRADER, answer, group, method, record, rollout

PROMPTS = b'{"messages": [{"role": "user", "content": "1 + 1 ="}], "answer": "2"}\n' * 20


@pytest.fixture
def prompts(client: openai.OpenAI) -> str:
    return client.files.create(file=("prompts.jsonl", PROMPTS), purpose="fine-tune").id


def with_environment(**environment: Any) -> dict[str, Any]:
    given = {"type": "endpoint", "url": "http://127.0.0.1:9", "webhook_endpoint_id": "none"}
    return {"type": "reinforcement", "reinforcement": {"environment": {**given, **environment}}}


def created(client: openai.OpenAI, prompts: str, **changes: Any) -> Any:
    given = {
        "n_epochs": 2,
        "batch_size": 4,
        "compute_multiplier": 2,
        "learning_rate_multiplier": 0.5,
    }
    body: dict[str, Any] = {
        "model": "tiny",
        "training_file": prompts,
        "method": method(**given),
        **changes,
    }
    return client.fine_tuning.jobs.create(**body)


def test_a_new_job_shows_what_was_resolved(
    service: Service, client: openai.OpenAI, prompts: str
) -> None:
    job = created(client, prompts)
    shown = job.method.reinforcement
    assert job.method.type == "reinforcement"
    assert shown.grader.model_dump(exclude_none=True) == GRADER
    hyperparameters = shown.hyperparameters.model_dump()
    assert {
        name: hyperparameters[name]
        for name in ("n_epochs", "batch_size", "compute_multiplier", "num_generations")
    } == {
        "n_epochs": 2,
        "batch_size": 4,
        "compute_multiplier": 2.0,
        "num_generations": 16,
    }
    assert (hyperparameters["eval_interval"], hyperparameters["learning_rate_multiplier"]) == (
        "auto",
        0.5,
    )
    spec = service.store.jobs.get_job("default", job.id).spec
    assert spec.reinforcement is not None
    assert spec.training.learning_rate == 2e-5
    assert spec.by_commands


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": {"type": "reinforcement"}}, "give method.reinforcement with a grader"),
        (
            {"method": {"type": "reinforcement", "reinforcement": {"hyperparameters": {}}}},
            "grader is required",
        ),
        ({"method": method(reasoning_effort="high")}, "reasoning_effort = 'high': must be default"),
        ({"method": method(num_generations=1)}, "num_generations"),
        (
            {"method": method(max_completion_length=4096)},
            "training.max_length = 2048 is for prompt and answer together",
        ),
        (
            {"method": {"type": "supervised", "reinforcement": {"grader": GRADER}}},
            "give method.supervised instead",
        ),
        (
            {"extra_body": {"lora": {"lora_dropout": 0.1}}},
            "lora.lora_dropout with method.type = 'reinforcement'",
        ),
        ({"extra_body": {"validation_split": 0.1}}, "give a validation_file"),
        ({"method": with_environment(type="gym")}, "endpoint, mcp or openenv"),
        (
            {"method": with_environment(type="mcp", url="https://tools.example/mcp")},
            "grader is required with an environment of type 'mcp'",
        ),
        (
            {"method": with_environment(type="openenv", url="http://127.0.0.1:8000")},
            "environment.url",
        ),
        (
            {"method": with_environment(type="openenv", url="https://a.b", max_answer_bytes=0)},
            "environment.max_answer_bytes = 0",
        ),
        ({"method": with_environment(max_turns=0)}, "environment.max_turns = 0"),
        ({"method": with_environment()}, "environment.url"),
        (
            {"method": with_environment(url="https://agent.example")},
            "environment.webhook_endpoint_id",
        ),
        (
            {
                "method": {
                    "type": "reinforcement",
                    "reinforcement": {"grader": {**GRADER, "input": "{{ sample.x }}"}},
                }
            },
            "sample.x",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    client: openai.OpenAI, prompts: str, changes: Any, text: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        created(client, prompts, **changes)
    assert text in refused.value.message


def test_a_service_without_a_sampler_says_so(
    service: Service, client: openai.OpenAI, prompts: str
) -> None:
    before = service.settings
    service.use(before.model_copy(update={"preview": "off"}))
    try:
        with pytest.raises(openai.BadRequestError, match="this service has no sampler"):
            created(client, prompts)
    finally:
        service.use(before)


ENDPOINT = with_environment()
GAME = with_environment(type="openenv", url="https://game.example", webhook_endpoint_id=None)


@pytest.mark.parametrize("method", [ENDPOINT, GAME], ids=["endpoint", "openenv"])
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"launcher": "slurm"}, "no sampler"),
        ({"launcher": "kubernetes", "inference_url": "http://vllm", "adapters": "/a"}, "by infer"),
        ({"inference_url": "http://vllm", "adapters": "/a"}, "by inference servers"),
    ],
)
def test_an_environment_needs_the_preview(
    service: Service,
    client: openai.OpenAI,
    prompts: str,
    method: dict[str, Any],
    given: dict[str, Any],
    why: str,
) -> None:
    """Without one it is refused when the job is submitted, with what to do."""
    before = service.settings
    service.use(before.model_copy(update=given))
    try:
        with pytest.raises(openai.BadRequestError, match=why) as refused:
            created(client, prompts, method=method)
    finally:
        service.use(before)
    assert refused.value.code == "not_available"
    assert "FT_LAUNCHER=local" in refused.value.message


def test_commands_do_not_reach_ranks_by_object_storage(
    service: Service, client: openai.OpenAI, prompts: str
) -> None:
    """So what samples its answers is refused there, and does not wait for ever."""
    before = service.settings
    context = service.app.state.services
    service.app.state.services = replace(
        context, settings=before.model_copy(update={"storage": "s3://bucket/prefix"})
    )
    try:
        with pytest.raises(openai.BadRequestError, match="FT_STORAGE") as refused:
            created(client, prompts)
    finally:
        service.app.state.services = context
    assert (refused.value.code, refused.value.param) == ("not_available", "method.type")


def test_an_agent_needs_the_process_that_moves_jobs(
    service: Service, client: openai.OpenAI, prompts: str
) -> None:
    """Where another one has the API, an agent is refused; a game calls nothing."""
    services = service.app.state.services
    service.app.state.services = replace(services, rollouts=OpenRollouts(""))
    with pytest.raises(openai.BadRequestError, match="ft serve --api-only") as refused:
        created(client, prompts, method=ENDPOINT)
    assert refused.value.param == "method.reinforcement.environment.type"
    assert created(client, prompts, method=GAME).status == "validating_files"


def test_rewards_of_calls_are_asked_for_where_they_can_be(
    client: openai.OpenAI, prompts: str
) -> None:
    def asked(**changes: Any) -> dict[str, Any]:
        game = {"type": "openenv", "url": "https://game.example", "webhook_endpoint_id": None}
        method = with_environment(**game, supervision="process")
        method["reinforcement"] |= changes
        return method

    job = created(client, prompts, method=asked())
    assert job.method.reinforcement.environment["supervision"] == "process"
    for changes, text in (
        ({"grader": GRADER}, "a grader rewards whole rollouts"),
        ({"hyperparameters": {"loss_type": "gspo"}}, "gspo has one advantage for a whole answer"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            created(client, prompts, method=asked(**changes))
        assert text in refused.value.message
    tools = with_environment(type="mcp", url="https://tools.example/mcp", supervision="process")
    tools["reinforcement"]["grader"] = GRADER
    with pytest.raises(openai.BadRequestError) as refused:
        created(client, prompts, method=tools)
    assert "supervision" in refused.value.message


def test_answers_are_listed_with_their_rewards(
    service: Service, client: openai.OpenAI, prompts: str
) -> None:
    job = created(client, prompts)
    run = run_dir(service, job.id)
    for step in (1, 2, 3):
        answers = [answer([1, 2], 1.0, text="2"), answer([3], None, text="no", truncated=True)]
        groups = [group(place, answers) for place in range(step)]
        write_record(
            run, record(step, groups, first_seq=step, validation=[group(0, answers[:1])], time=5.0)
        )
    path = f"/fine_tuning/jobs/{job.id}/rollouts"
    page: Any = client.get(f"{path}?limit=2&prompts=1", cast_to=object)
    assert ([own["step"] for own in page["data"]], page["has_more"]) == ([3, 2], True)
    newest = page["data"][0]
    assert (
        len(newest["prompts"]),
        newest["prompts_total"],
        newest["mean_reward"],
        newest["valid_mean_reward"],
    ) == (
        1,
        3,
        1.0,
        1.0,
    )
    assert newest["prompts"][0]["answers"] == [
        {
            **{"text": "2", "tool_calls": [], "tokens": 2, "truncated": False},
            **{"reward": 1.0, "errors": {}, "scores": {}, "trajectory": None},
        }
    ]
    rest: Any = client.get(f"{path}?after={page['last_id']}", cast_to=object)
    assert [own["step"] for own in rest["data"]] == [1]
    failed = rest["data"][0]["prompts"][0]["answers"][1]
    assert (failed["reward"], failed["errors"], failed["truncated"]) == (
        None,
        {"other_error": "why"},
        True,
    )
    check_error(service.http("GET", f"/v1{path}?after=none"), 404)
    empty: Any = client.get(
        f"/fine_tuning/jobs/{created(client, prompts).id}/rollouts", cast_to=object
    )
    assert empty["data"] == []


def test_the_page_shows_groups_whole_with_their_mean(
    service: Service, client: openai.OpenAI, prompts: str
) -> None:
    job = created(client, prompts)
    groups = [
        group(0, [answer([n], float(n < 2), text=f"try {n}") for n in range(8)]),
        group(1, [answer([1], None, text="ungraded")]),
    ]
    write_record(run_dir(service, job.id), record(1, groups, first_seq=1, time=5.0))
    with httpx2.Client(base_url=service.url, trust_env=False, timeout=60.0) as browser:
        browser.post("/sign-in", data={"key": service.key})
        first, second = browser.get(f"/jobs/{job.id}/answers").text.split("<article")[1:]
    assert all(f"<p>try {n}</p>" in first for n in range(8))
    assert "mean reward <b>0.25</b> of 8 answers" in first
    assert "no reward of 1 answer" in second


def test_rollouts_of_agents_are_shown_as_conversations(
    service: Service, client: openai.OpenAI, prompts: str
) -> None:
    endpoint = client.webhooks.create(
        name="agent", url="https://agent.example", event_types=["fine_tuning.job.failed"]
    )
    place = {"url": "https://agent.example", "webhook_endpoint_id": endpoint.id}
    job = created(client, prompts, method=with_environment(**place))
    shown = job.method.reinforcement.model_dump()
    assert (shown["grader"], shown["environment"]["max_turns"]) == (None, 16)
    messages = [
        {"role": "user", "content": "1 + 1 ="},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": "<b>"}}],
        },
    ]
    first = RecordedCall([1], [2, 3], [-1.0, -1.0], prompt_text="1 + 1 =", drawn_text="<b>")
    calls = [first, RecordedCall([4], [5], [-1.0])]
    own = rollout(calls, 0.5, messages=messages, refused={"rollout_turns_used": 1})
    for step in (1, 2):
        step_record = record(step, [group(0, [own])], first_seq=1, time=5.0)
        write_record(run_dir(service, job.id), step_record)
    page: Any = client.get(f"/fine_tuning/jobs/{job.id}/rollouts", cast_to=object)
    way = page["data"][0]["prompts"][0]["answers"][0]["trajectory"]
    assert (way["turns"], way["rows"], way["rewritten"]) == (2, 2, 1)
    assert (way["messages"], way["refused"]) == (messages, {"rollout_turns_used": 1})
    read, learned = {"text": "1 + 1 =", "learned": False}, {"text": "<b>", "learned": True}
    assert way["row_texts"] == [[read, learned]]
    with httpx2.Client(base_url=service.url, trust_env=False, timeout=60.0) as browser:
        browser.post("/sign-in", data={"key": service.key})
        text = browser.get(f"/jobs/{job.id}/answers").text
        first = browser.get(f"/jobs/{job.id}/answers?step=1").text
    assert ("<h2>Step 2</h2>" in text, "<h2>Step 1</h2>" in first) == (True, True)
    assert '<span class="t-learned">&lt;b&gt;</span>' in text
    assert "2 turns, 3 tokens in 2 rows" in text
    assert "<code>add(&lt;b&gt;)</code>" in text
