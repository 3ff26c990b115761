"""What agents do with a rollout: they answer, fail, hang, lie, flood, and never end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ft_service.agents import endpoint, running
from ft_service.agents.addresses import Access
from ft_service.agents.endpoint import AgentEndpoint
from ft_service.agents.open_rollouts import MOST_REFUSED, OpenRollout, OpenRollouts
from ft_service.agents.running import EndedRollout, run_rollouts
from ft_service.control.reinforcement.agent_rollouts import answer_of
from ft_service.errors import UnavailableError
from ft_service.host.signed_post import is_signed
from ft_service.spec.environments import EndpointEnvironment
from tests.support.agents import call, new_rollout
from tests.support.rest.receiver import Answer, Received, Receiver, receiving

SECRET = "whsec_c2VjcmV0"


@pytest.fixture(scope="module")
def agent() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(running, "LOOK_SECONDS", 0.02)


class Asked:
    """Rollouts by an agent's answers, with the calls that it makes meanwhile."""

    def __init__(self, agent: Receiver, **options: Any) -> None:
        given = {"url": agent.url, "webhook_endpoint_id": "we_1", **options}
        self.agent = agent
        self.opened = OpenRollouts("http://server")
        self.asks = AgentEndpoint(
            options=EndpointEnvironment(**given),
            access=Access("default", lambda _: [SECRET], allow_private=True),
            model="tiny",
            opened=self.opened,
        )
        self.rollouts: dict[str, OpenRollout] = {}

    def ended(
        self,
        status: int,
        body: bytes,
        during: Callable[[OpenRollout], object] = call,
        **budget: Any,
    ) -> EndedRollout:
        def answer(received: Received) -> Answer:
            during(self.rollouts[json.loads(received.body)["rollout_id"]])
            return status, {}, iter([body])

        self.agent.answer = answer
        rollout = new_rollout(**budget)
        self.rollouts[rollout.id] = rollout
        [ended] = run_rollouts(self.asks, [(rollout, {"answer": "4"})], lambda: None)
        assert rollout.is_closed
        return ended


@pytest.fixture
def asked(agent: Receiver) -> Asked:
    return Asked(agent)


def test_an_agent_gets_a_signed_message_with_all_that_it_needs(asked: Asked) -> None:
    ended = asked.ended(200, b'{"reward": 0.5}')
    assert (ended.reward, ended.error, ended.unserved) == (0.5, None, None)
    received = asked.agent.arrived.get_nowait()
    assert is_signed(received.headers, received.body, SECRET, time.time())
    assert not is_signed(received.headers, received.body + b" ", SECRET, time.time())
    assert not is_signed(received.headers, received.body, SECRET, time.time() + 1000)
    message = json.loads(received.body)
    assert message["item"] == {"answer": "4"}
    assert message["base_url"] == f"http://server/v1/rollouts/{message['rollout_id']}"
    assert message["api_key"] == ended.rollout.key
    assert message["model"] == "tiny"
    assert (message["max_turns"], message["max_tokens"]) == (4, 12)
    assert 0 < message["deadline"] - time.time() <= 60


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, b'{"reward": NaN}', "agent_reward_invalid"),
        (200, b'{"reward": 1e300}', "agent_reward_invalid"),
        (200, b'{"reward": "1"}', "agent_reward_invalid"),
        (200, b'{"reward": true}', "agent_reward_invalid"),
        (200, b'{"rewards": [1, 2]}', "agent_reward_invalid"),
        (200, b"no", "agent_reward_invalid"),
        (200, b" " * 2**21, "agent_reward_invalid"),
        (500, b"", "agent_failed"),
        (302, b"", "agent_failed"),
    ],
)
def test_an_agent_that_lies_or_fails_is_an_error_of_a_kind(
    asked: Asked, status: int, body: bytes, kind: str
) -> None:
    ended = asked.ended(status, body)
    assert ended.error is not None
    assert ended.error.kind == kind
    assert ended.reward is None


def test_with_process_supervision_each_answered_call_has_a_reward(agent: Receiver) -> None:
    asked = Asked(agent, supervision="process")

    def twice(rollout: OpenRollout) -> None:
        call(rollout)
        call(rollout)

    ended = asked.ended(200, b'{"rewards": [0.25, -1]}', twice)
    assert (ended.rewards, ended.reward, ended.error) == ([0.25, -1.0], -0.75, None)
    answer = answer_of(ended)
    assert answer.trajectory is not None
    assert answer.trajectory.rewards == [0.25, -1.0]
    assert [row.calls for row in answer.trajectory.rows] == [[0], [1]]


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"reward": 1}',
        b'{"rewards": [1, 2]}',
        b'{"rewards": []}',
        b'{"rewards": 1}',
        b'{"rewards": [null]}',
        b'{"rewards": [NaN]}',
        b'{"rewards": [1e300]}',
        b'{"rewards": ["1"]}',
        b'{"rewards": [1], "reward": 1}',
    ],
)
def test_rewards_that_are_not_those_of_the_calls(agent: Receiver, body: bytes) -> None:
    """One call was answered."""
    ended = Asked(agent, supervision="process").ended(200, body)
    assert ended.error is not None
    assert ended.error.kind == "agent_reward_invalid"
    assert (ended.reward, ended.rewards) == (None, ())


def test_rewards_whose_sum_is_beyond_the_limit(agent: Receiver) -> None:
    def twice(rollout: OpenRollout) -> None:
        call(rollout)
        call(rollout)

    ended = Asked(agent, supervision="process").ended(200, b'{"rewards": [7e11, 7e11]}', twice)
    assert ended.error is not None
    assert ended.error.kind == "agent_reward_invalid"


@pytest.mark.parametrize("body", [b"{}", b'{"reward": null}'])
def test_an_agent_may_leave_the_reward_to_the_grader(asked: Asked, body: bytes) -> None:
    ended = asked.ended(200, body)
    assert (ended.reward, ended.error) == (None, None)


def test_without_a_call_there_is_nothing_to_learn(asked: Asked) -> None:
    ended = asked.ended(200, b'{"reward": 1}', during=lambda _: None)
    assert ended.error is not None
    assert ended.error.kind == "agent_no_calls"


def test_an_agent_that_hangs_is_left_at_its_deadline(asked: Asked) -> None:
    def hang(rollout: OpenRollout) -> None:
        call(rollout)
        while not rollout.is_closed:
            time.sleep(0.01)

    ended = asked.ended(200, b'{"reward": 1}', hang, seconds=1.0)
    assert ended.error is not None
    assert ended.error.kind == "agent_timeout"
    assert len(ended.rollout.answered) == 1


def test_an_agent_that_floods_is_left(asked: Asked) -> None:
    def flood(rollout: OpenRollout) -> None:
        for _ in range(MOST_REFUSED):
            rollout.refuse("rollout_turns_used")
        while not rollout.is_closed:
            time.sleep(0.01)

    ended = asked.ended(200, b'{"reward": 1}', flood)
    assert ended.error is not None
    assert ended.error.kind == "agent_flood"
    assert ended.rollout.refused == {"rollout_turns_used": MOST_REFUSED}


def test_an_end_while_the_sampler_is_away_says_nothing(asked: Asked) -> None:
    def wait(rollout: OpenRollout) -> None:
        rollout.unserved = UnavailableError("busy")
        while not rollout.is_closed:
            time.sleep(0.01)

    ended = asked.ended(200, b"", wait, seconds=1.0)
    assert ended.unserved is not None


def test_an_agent_that_starts_again_misses_no_rollout(asked: Asked) -> None:
    """Unless it has called the model: then it may go on with what it has begun."""
    tries: list[str] = []

    def answer(received: Received) -> Answer:
        tries.append(json.loads(received.body)["rollout_id"])
        if len(tries) < endpoint.TRIES:
            return 503, {}, iter(())
        call(rollout)
        return 200, {}, iter([b'{"reward": 1}'])

    asked.agent.answer = answer
    rollout = new_rollout()
    [ended] = run_rollouts(asked.asks, [(rollout, {})], lambda: None)
    assert (ended.reward, tries) == (1.0, [rollout.id] * endpoint.TRIES)
    assert asked.ended(503, b"").error is not None
    asked.agent.arrived.queue.clear()
    asked.ended(503, b"")
    assert asked.agent.arrived.qsize() == 1


def test_an_address_where_nobody_listens(agent: Receiver) -> None:
    asked = Asked(agent, url="http://127.0.0.1:9")
    [ended] = run_rollouts(asked.asks, [(new_rollout(), {})], lambda: None)
    assert ended.error is not None
    assert ended.error.kind == "agent_unreachable"


def test_so_many_at_once_and_no_more(agent: Receiver) -> None:
    asked = Asked(agent, concurrency=2)
    now: list[int] = []
    most: list[int] = []

    def count(rollout: OpenRollout) -> None:
        now.append(1)
        most.append(len(now))
        call(rollout)
        time.sleep(0.02)
        now.pop()

    rollouts = [new_rollout() for _ in range(6)]
    asked.rollouts = {own.id: own for own in rollouts}
    agent.answer = lambda received: (
        count(asked.rollouts[json.loads(received.body)["rollout_id"]]) or (200, {}, iter([b"{}"]))
    )
    ended = run_rollouts(asked.asks, [(own, {}) for own in rollouts], lambda: None)
    assert [own.error for own in ended] == [None] * 6
    assert max(most) == 2
    assert [own.rollout for own in ended] == rollouts


class Stopped(Exception):
    pass


def test_a_job_that_stops_waits_for_no_agent(asked: Asked) -> None:
    rollout = new_rollout()

    def hang(_: Received) -> Answer:
        while not rollout.is_closed:
            time.sleep(0.01)
        return 200, {}, iter([b"{}"])

    asked.agent.answer = hang

    def stop() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        run_rollouts(asked.asks, [(rollout, {})], stop)
    assert rollout.is_closed
