"""An agent's calls by the unmodified openai client, and a job whose rollouts it makes: with ranks
and a sampler that only answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from ft_service.agents.hosting import hosting
from ft_service.agents.open_rollouts import OpenRollout, OpenRollouts
from ft_service.agents.rollout_handler import Returned, RolloutFunction
from ft_service.agents.running import EndedRollout
from ft_service.control.reinforcement.agent_rollouts import answer_of
from ft_service.control.reinforcement.reinforcement_jobs import JobPaused, RolloutLoop
from ft_service.errors import SpecError
from ft_service.graders.grading import GraderContext
from ft_service.graders.limits import GraderLimits
from ft_service.reinforcement.prompt_file import PromptHeader, PromptTokens, write_prompts
from ft_service.reinforcement.step_commands import commands_of, first_commands
from ft_service.reinforcement.step_records import SampledAnswer
from ft_service.storage.locations import Places
from ft_service.tinker.commands import CommandLog
from tests.support.agents import new_rollout
from tests.support.rest.refusals import check_error
from tests.support.rest.service import Service
from tests.support.rollout_loops import (
    HEADER,
    Place,
    PlayedSampler,
)
from tests.support.rollouts import GRADER, rollout_spec, save_prompts

SECRET = "whsec_c2VjcmV0"
USER = {"role": "user", "content": "2 + 2"}


@pytest.fixture
def sampler() -> PlayedSampler:
    return PlayedSampler()


@pytest.fixture
def opened(service: Service, sampler: PlayedSampler) -> OpenRollouts:
    opened = OpenRollouts(service.url)
    parts: Any = {"preview": sampler, "rollouts": opened}
    service.app.state.services = replace(service.app.state.services, **parts)
    return opened


Client = Callable[[OpenRollout], openai.OpenAI]


@pytest.fixture
def client_of(service: Service, opened: OpenRollouts) -> Client:
    def client(rollout: OpenRollout) -> openai.OpenAI:
        opened.open(rollout)
        return openai.OpenAI(
            base_url=opened.url_of(rollout),
            api_key=rollout.key,
            max_retries=0,
            http_client=service.connections,
        )

    return client


def ask(client: openai.OpenAI, **options: Any) -> Any:
    messages: list[Any] = [USER]
    given = {"model": "gpt-4o", "messages": messages, **options}
    return client.chat.completions.create(**given)


def test_a_call_is_answered_and_recorded(client_of: Client, sampler: PlayedSampler) -> None:
    rollout = new_rollout()
    client = client_of(rollout)
    answer = ask(client, temperature=0.1, max_tokens=2)
    assert answer.choices[0].message.content == "1"
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        "gpt-4o",
        2,
        2,
    )
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "1"
    assert (chunks[-2].choices[0].finish_reason, chunks[-1].usage.prompt_tokens) == ("stop", 2)
    assert [list(own.recorded.tokens) for own in rollout.answered] == [[40, 41]] * 2
    assert rollout.messages == [USER]
    assert rollout.sampling == {"temperature": 0.1}
    assert sampler.orders[0]["temperature"] == 0.5


def test_texts_and_tokens_are_continued_and_recorded(
    client_of: Client, sampler: PlayedSampler
) -> None:
    rollout = new_rollout()
    client = client_of(rollout)
    ids: Any = {"return_token_ids": True, "add_special_tokens": False}
    answer: Any = client.completions.create(
        model="any", prompt="2 + 2 =", temperature=0.0, seed=3, extra_body=ids
    )
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("2 + 2 =", "stop", None)
    assert (choice.prompt_token_ids, choice.token_ids) == ([2], [40, 41])
    assert (answer.object, answer.usage.total_tokens) == ("text_completion", 3)
    chunks: Any = list(
        client.completions.create(
            model="any",
            prompt=[2, 40, 41, 5],
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [own.text for chunk in chunks for own in chunk.choices] == ["[2, 40, 41, 5]"]
    assert (chunks[0].choices[0].finish_reason, chunks[0].usage) == ("stop", None)
    assert (chunks[-1].choices, chunks[-1].usage.prompt_tokens) == ([], 4)
    assert [list(own.recorded.prompt) for own in rollout.answered] == [[2], [2, 40, 41, 5]]
    assert [list(own.recorded.tokens) for own in rollout.answered] == [[40, 41]] * 2
    text, tokens = sampler.orders
    assert (text["op"], text["temperature"], text["add_special_tokens"]) == ("text", 0.5, False)
    assert (tokens["max_tokens"], tokens["seen"]) == (2, [[2, 40, 41]])
    assert rollout.sampling == {"temperature": 0.0, "seed": 3}
    record = answer_of(EndedRollout(rollout)).trajectory
    assert record is not None
    assert [(list(row.tokens), list(row.sampled)) for row in record.rows] == [
        ([2, 40, 41, 5, 40, 41], [(1, 3), (4, 6)])
    ]
    said = [(own["role"], own["content"]) for own in record.messages]
    assert said == [("user", "read [2, 40, 41, 5]"), ("assistant", "[2, 40, 41, 5]")]


def test_texts_have_the_budget_of_chats(client_of: Client) -> None:
    rollout = new_rollout(turns=2)
    client = client_of(rollout)
    refused: tuple[dict[str, Any], ...] = (
        {"n": 2},
        {"echo": True},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": ""},
        {"suffix": "b"},
    )
    for body in refused:
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(**{"model": "any", "prompt": "a", **body})
        assert wrong.value.param == next(iter(body))
    ask(client)
    client.completions.create(model="any", prompt=["a"])
    with pytest.raises(openai.BadRequestError) as used:
        client.completions.create(model="any", prompt="a")
    assert used.value.code == "rollout_turns_used"
    assert rollout.refused == {
        **{"invalid_value": 4, "unsupported_parameter": 2, "rollout_turns_used": 1}
    }


def test_a_sampler_without_a_place_is_waited_for(client_of: Client, sampler: PlayedSampler) -> None:
    sampler.busy = 1
    rollout = new_rollout()
    assert ask(client_of(rollout)).choices[0].message.content == "1"
    assert rollout.unserved is None
    sampler.busy = 100
    short = new_rollout(seconds=0.3)
    with pytest.raises(openai.NotFoundError):
        ask(client_of(short))
    assert short.unserved is not None


def test_what_is_refused_is_counted_by_its_code(client_of: Client) -> None:
    rollout = new_rollout(turns=1)
    client = client_of(rollout)
    for body in ({"n": 2}, {"temperature": "hot"}, {"messages": []}):
        with pytest.raises(openai.BadRequestError):
            ask(client, **body)
    ask(client)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client)
    assert refused.value.code == "rollout_turns_used"
    assert rollout.refused == {"invalid_value": 3, "rollout_turns_used": 1}


def test_no_other_key_opens_a_rollout(
    service: Service, client_of: Client, opened: OpenRollouts
) -> None:
    own = new_rollout()
    other = new_rollout()
    client_of(own)
    client_of(other)
    path = f"/v1/rollouts/{own.id}/chat/completions"
    for key, status in ((other.key, 404), (service.key, 404), ("ftr-guessed", 401), ("", 401)):
        check_error(
            service.http("POST", path, key=key or "none", json={"messages": [USER]}), status
        )
    assert check_error(service.http("GET", "/v1/models", key=own.key), 401)
    opened.close(own)
    check_error(service.http("POST", path, key=own.key, json={"messages": [USER]}), 401)
    assert (own.answered, other.refused) == ([], {"rollout_wrong_key": 1})


# Jobs


def new_place(folder: Path, sampler: PlayedSampler, url: str, **method: Any) -> Place:
    file = save_prompts(folder / "prompts.jsonl", HEADER.training)
    environment = {"type": "endpoint", "url": url, "webhook_endpoint_id": "we_1"}
    given = {
        "environment": {**environment, "max_turns": 3, **method.pop("environment", {})},
        "hyperparameters": {
            **{"batch_size": 2, "num_generations": 2, "max_completion_length": 4},
            **method.pop("hyperparameters", {}),
        },
        **method,
    }
    spec = rollout_spec(
        folder,
        file,
        method={"type": "reinforcement", "reinforcement": given},
        training={"max_length": 32, "max_steps": 1},
    )
    run = Places(folder).run(spec.job_id)
    prompts = [
        PromptTokens([2, 1], {"answer": str(i)}, f"prompt {i}", messages=[USER])
        for i in range(HEADER.training)
    ]
    write_prompts(run, PromptHeader([9], HEADER.training, 0), prompts)
    return Place(run, spec, sampler)


def loop_of(place: Place, opened: OpenRollouts | None) -> RolloutLoop:
    context = GraderContext(
        project="p", limits=GraderLimits(allow_private=True), secrets=lambda _: [SECRET]
    )
    stop = place.stopped.is_set
    return RolloutLoop(
        place.job, place.run, place.sampler, context, place.told.append, stop, opened
    )


async def two_turns(client: Any, item: Mapping[str, Any]) -> float:
    """A reward for the first answer to each prompt, by the rollout's own number."""
    messages = list(item["messages"])
    for _ in range(2):
        answer = await client.chat.completions.create(
            model="any", messages=messages, temperature=0.0
        )
        said = answer.choices[0].message
        messages += [{"role": "assistant", "content": said.content}, USER]
    return float(item["answer"]) + float(zlib.crc32(client.api_key.encode()) % 97)


@pytest.fixture
def agent() -> Iterator[Callable[[RolloutFunction], str]]:
    """The address of a function as an agent."""
    function: list[RolloutFunction] = []

    async def rollout(client: Any, item: Mapping[str, Any]) -> Returned:
        return await function[0](client, item)

    with hosting(rollout, secret=SECRET) as url:

        def served(own: RolloutFunction) -> str:
            function[:] = [own]
            return url

        yield served


def answers_of(place: Place) -> list[SampledAnswer]:
    return place.records()[0].answers


def test_a_step_is_sampled_by_an_agent_recorded_and_given(
    tmp_path: Path, sampler: PlayedSampler, opened: OpenRollouts, agent: Any
) -> None:
    place = new_place(tmp_path, sampler, agent(two_turns))
    with place.ranks():
        loop_of(place, opened).run()
    for own in answers_of(place):
        assert own.errors == {}
        assert own.reward is not None
        assert own.trajectory is not None
        assert list(own.tokens) == [40, 41] * 2
        # The second prompt begins with the first one and its answer.
        assert [list(row.tokens) for row in own.trajectory.rows] == [[2, 1, 40, 41, 2, 1, 40, 41]]
        assert [message["role"] for message in own.trajectory.messages] == [
            *("user", "assistant", "user", "assistant")
        ]
    commands = first_commands(place.spec.job_id)
    for record in place.records():
        commands += commands_of(record, place.spec, place.schedule)
    log = CommandLog(place.run)
    assert [log.command(seq) for seq in range(log.first_missing())] == commands
    [told] = place.told
    assert "temperature = 0.0" in told.message
    seeds = {order["seed"] for order in sampler.orders if "messages" in order}
    assert len(seeds) == 8, "each call has its own"


async def silent(client: Any, item: Mapping[str, Any]) -> None:
    await client.chat.completions.create(model="any", messages=item["messages"])


def test_a_grader_sees_the_whole_trajectory(
    tmp_path: Path, sampler: PlayedSampler, opened: OpenRollouts, agent: Any
) -> None:
    asked = "{{ sample.messages[0].content }} {{ sample.calls[0].finish_reason }}"
    grader = {**GRADER, "input": asked, "reference": "2 + 2 stop"}
    place = new_place(tmp_path, sampler, agent(silent), grader=grader)
    with place.ranks():
        loop_of(place, opened).run()
    assert [own.reward for own in answers_of(place)] == [1.0] * 4


async def broken(client: Any, item: Mapping[str, Any]) -> float:
    await silent(client, item)
    raise RuntimeError("the agent's own fault")


@pytest.mark.parametrize(
    ("agents", "kind"), [(broken, "agent_failed"), (silent, "agent_no_reward")]
)
def test_too_many_rollouts_without_a_reward_pause_the_job(
    tmp_path: Path, sampler: PlayedSampler, opened: OpenRollouts, agent: Any, agents: Any, kind: str
) -> None:
    place = new_place(tmp_path, sampler, agent(agents))
    with place.ranks(), pytest.raises(JobPaused, match=f"4 of the 4 answers.*{kind}"):
        loop_of(place, opened).run()
    assert place.records() == []


def test_without_the_api_in_its_process_a_job_says_so(
    tmp_path: Path, sampler: PlayedSampler
) -> None:
    """An environment without an agent needs none, but the preview, which None says is not there."""
    url = "http://127.0.0.1:9"
    agents = new_place(tmp_path, sampler, url)
    (tmp_path / "game").mkdir()
    game = new_place(tmp_path / "game", sampler, url, environment={"type": "openenv"})
    for place, opened in ((agents, None), (game, None), (agents, OpenRollouts(""))):
        with pytest.raises(SpecError, match="environment") as refused:
            loop_of(place, opened)
        assert refused.value.code == "not_available"
    loop = loop_of(game, OpenRollouts(""))
    assert loop.agents is not None


async def two_rewards(client: Any, item: Mapping[str, Any]) -> list[float]:
    """A reward for each of two calls, whose sum is the same for all."""
    await two_turns(client, item)
    own = zlib.crc32(client.api_key.encode()) % 97 + 1
    return [float(own), -float(own)]


def test_a_step_with_rewards_of_calls_is_recorded_and_given(
    tmp_path: Path, sampler: PlayedSampler, opened: OpenRollouts, agent: Any
) -> None:
    """What differs are the calls alone: outcomes would teach nothing."""
    url = agent(two_rewards)
    place = new_place(tmp_path, sampler, url, environment={"supervision": "process"})
    with place.ranks():
        loop_of(place, opened).run()
    for own in answers_of(place):
        assert own.trajectory is not None
        assert (own.reward, sum(own.trajectory.rewards)) == (0.0, 0.0)
        assert [list(row.calls) for row in own.trajectory.rows] == [[0, 1]]
    [first, *_] = [commands_of(own, place.spec, place.schedule) for own in place.records()]
    assert first[0].op == "forward_backward"
    assert CommandLog(place.run).command(first[0].seq) == first[0]
