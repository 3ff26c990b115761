"""Environments without an agent: tools of an MCP server and games of OpenEnv, by real servers, with
a model that says what the test wants.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from ft_service.agents import mcp_tools, open_env, running
from ft_service.agents.addresses import Access, check_environment
from ft_service.agents.mcp_tools import mcp_servers
from ft_service.agents.open_env import open_envs
from ft_service.agents.open_rollouts import OpenRollout
from ft_service.agents.playing import Playing
from ft_service.agents.running import EndedRollout, run_rollouts
from ft_service.control.reinforcement.agent_rollouts import answer_of
from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.host.signed_post import is_signed
from ft_service.spec.environments import McpEnvironment, OpenEnvEnvironment
from tests.support.agents import new_rollout, parts_of
from tests.support.environments import game_served, seen, tools_served

SECRET = "whsec_c2VjcmV0"
ACCESS = Access("default", lambda _: [SECRET], allow_private=True)
USER = {"role": "user", "content": "2 + 2"}
Says = Callable[[Mapping[str, Any]], tuple[str, list[Any]]]
"""By an order: the answer's text and calls."""


class Model:
    """A sampler whose model says what the test wants."""

    def __init__(self, says: Says) -> None:
        self.says = says
        self.orders: list[dict[str, Any]] = []
        self.busy = 0

    def submit(self, model: object, order: dict[str, Any], deliver: Any, **_: Any) -> object:
        if self.busy:
            self.busy -= 1
            raise UnavailableError("busy", code="preview_busy")
        self.orders.append(order)
        text, calls = self.says(order)
        prompt = [2] * len(order["messages"]) + [1]
        for part in parts_of((40, 41), prompt, text, calls=calls):
            deliver(part)
        return None

    def cancel(self, ticket: object) -> None:
        pass


def called(name: str, **arguments: Any) -> list[dict[str, str]]:
    return [{"name": name, "arguments": json.dumps(arguments)}]


class Server(MCPServer):
    """Tools that answer, fail, say too much, and hang."""

    def __init__(self) -> None:
        super().__init__("tools", log_level="CRITICAL")
        self.sessions = 0

        @self.tool()
        def add(a: int, b: int) -> str:
            """The sum."""
            return str(a + b)

        @self.tool()
        def fail() -> str:
            raise ValueError("broken")

        @self.tool()
        def much(size: int) -> str:
            return "é," * size

        @self.tool()
        async def hang() -> str:
            import anyio

            await anyio.sleep(600)
            return ""


@pytest.fixture(scope="module")
def tools() -> Iterator[str]:
    with tools_served(Server()) as url:
        yield url


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(mcp_tools, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(open_env, "CLOSE_SECONDS", 0.2)


def with_tools(
    url: str, says: Says, rollouts: Sequence[OpenRollout] = (), **options: Any
) -> list[EndedRollout]:
    environment = McpEnvironment(type="mcp", url=url, **options)
    playing = Playing(options=environment, access=ACCESS, sampler=Model(says), connects=mcp_servers)
    wanted = [(own, {"messages": [USER]}) for own in rollouts or [new_rollout()]]
    return run_rollouts(playing, wanted, lambda: None)


def turns(*said: tuple[str, list[Any]]) -> Says:
    """One after the other, by the number of answers that there are already."""

    def says(order: Mapping[str, Any]) -> tuple[str, list[Any]]:
        return said[sum(message["role"] == "assistant" for message in order["messages"])]

    return says


def of_tools(ended: EndedRollout) -> list[str]:
    messages = answer_of(ended).trajectory.messages  # type: ignore[union-attr]
    return [message["content"] for message in messages if message["role"] == "tool"]


def test_calls_of_tools_are_carried_out_and_their_answers_read(tools: str) -> None:
    says = turns(("", called("add", a=2, b=2)), ("4", []))
    [ended] = with_tools(tools, says)
    assert (ended.error, ended.reward) == (None, None)
    answer = answer_of(ended)
    assert answer.text == "4"
    assert answer.trajectory is not None
    roles = [message["role"] for message in answer.trajectory.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert of_tools(ended) == ["4"]
    call = answer.trajectory.messages[1]["tool_calls"][0]
    assert answer.trajectory.messages[2]["tool_call_id"] == call["id"]
    assert len(answer.trajectory.calls) == 2


def test_what_a_model_does_wrong_it_is_told(tools: str) -> None:
    says = turns(
        ("", called("add", a="two", b=2)),
        ("", called("other")),
        ("", [*called("fail"), *called("add", a=1, b=2)]),
        ("4", []),
    )
    [ended] = with_tools(tools, says)
    wrong, unknown, failed, right = of_tools(ended)
    assert wrong.startswith("error: ")
    assert unknown == "error: there is no tool other"
    assert failed.startswith("error: ")
    assert right == "3"
    assert ended.error is None


def test_the_tools_are_offered_as_templates_take_them(tools: str) -> None:
    offered: list[Any] = []

    def says(order: Mapping[str, Any]) -> tuple[str, list[Any]]:
        offered[:] = order["tools"]
        return "4", []

    with_tools(tools, says)
    assert {tool["function"]["name"] for tool in offered} == {"add", "fail", "much", "hang"}
    assert offered[0]["function"]["parameters"]["required"] == ["a", "b"]


def test_a_rollout_ends_at_its_budgets_without_an_error(tools: str) -> None:
    budgets: list[tuple[dict[str, Any], int]] = [({"turns": 2}, 2), ({"tokens": 5}, 3)]
    for budget, count in budgets:
        [ended] = with_tools(
            tools, lambda _: ("", called("add", a=2, b=2)), [new_rollout(**budget)]
        )
        assert ended.error is None
        assert len(ended.rollout.answered) == count
        assert of_tools(ended) == ["4"] * count


def test_arguments_that_are_no_object_end_a_rollout(tools: str) -> None:
    [ended] = with_tools(tools, lambda _: ("", [{"name": "add", "arguments": "[2]"}]))
    assert (ended.error, len(ended.rollout.answered)) == (None, 1)


def test_a_long_answer_of_a_tool_is_cut(tools: str) -> None:
    says = turns(("", called("much", size=100)), ("4", []))
    [ended] = with_tools(tools, says, max_answer_bytes=10)
    assert of_tools(ended) == ["é,é,é, [cut off: 290 bytes more]"]


def test_a_server_that_floods_is_left(tools: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "MOST_BYTES", 100_000)
    [ended] = with_tools(tools, turns(("", called("much", size=100_000)), ("4", [])))
    assert kind_of(ended) == "environment_flood"


def test_a_tool_that_hangs_is_left_at_the_deadline(tools: str) -> None:
    began = time.monotonic()
    [ended] = with_tools(tools, lambda _: ("", called("hang")), [new_rollout(seconds=1.0)])
    assert kind_of(ended) == "environment_timeout"
    assert time.monotonic() - began < 30
    assert len(ended.rollout.answered) == 1


def test_a_sampler_without_a_place_is_waited_for(
    tools: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_service.agents.open_rollouts.BUSY_SECONDS", 0.01)
    model = Model(lambda _: ("4", []))
    model.busy = 3
    environment = McpEnvironment(type="mcp", url=tools)
    playing = Playing(options=environment, access=ACCESS, sampler=model, connects=mcp_servers)
    rollout = new_rollout()
    [ended] = run_rollouts(playing, [(rollout, {"messages": [USER]})], lambda: None)
    assert (ended.error, ended.unserved, len(rollout.answered)) == (None, None, 1)
    model.busy = 1_000_000
    [late] = run_rollouts(playing, [(new_rollout(seconds=0.5), {"messages": [USER]})], int)
    assert late.unserved is not None


@pytest.mark.parametrize("parts", [0, 1])
def test_a_sampler_that_has_not_begun_at_the_deadline_is_not_the_agents_fault(
    tools: str, parts: int
) -> None:
    class Slow(Model):
        def submit(self, model: object, order: dict[str, Any], deliver: Any, **_: Any) -> object:
            for part in parts_of((40, 41), [2, 1], "4")[:parts]:
                deliver(part)
            return None

    environment = McpEnvironment(type="mcp", url=tools)
    sampler = Slow(lambda _: ("4", []))
    playing = Playing(options=environment, access=ACCESS, sampler=sampler, connects=mcp_servers)
    [ended] = run_rollouts(playing, [(new_rollout(seconds=0.5), {"messages": [USER]})], int)
    assert kind_of(ended) == "environment_timeout"
    assert (ended.unserved is None) == (parts > 0)


def kind_of(ended: EndedRollout) -> str:
    assert ended.error is not None
    return ended.error.kind


@pytest.mark.parametrize("path", ["", "/other"])
def test_an_address_that_is_no_server(tools: str, path: str) -> None:
    url = "http://127.0.0.1:9" if not path else tools.removesuffix("/mcp") + path
    [ended] = with_tools(url, lambda _: ("4", []))
    assert kind_of(ended) == "environment_unreachable"
    [closed] = in_game(url, lambda _: ("4", []))
    assert kind_of(closed) == "environment_unreachable"


def test_lines_with_tools_of_their_own_are_refused(tools: str) -> None:
    playing = Playing(
        options=McpEnvironment(type="mcp", url=tools),
        access=ACCESS,
        sampler=Model(lambda _: ("4", [])),
        connects=mcp_servers,
    )
    item = {"messages": [USER], "tools": [{}]}
    [ended] = run_rollouts(playing, [(new_rollout(), item)], lambda: None)
    assert kind_of(ended) == "environment_failed"


# OpenEnv


class Counting:
    """A game that is over when the answers are as many as `goal`."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.goal = 0

    def __call__(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "reset":
            self.goal = data["goal"]
            return seen(f"begin {data['seed']}")
        if "message" not in data:
            return {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "Invalid"}}
        self.said.append(data["message"])
        return seen(" ".join(self.said), 0.25, done=len(self.said) == self.goal)


def in_game(
    url: str, says: Says, rollouts: Sequence[OpenRollout] = (), **options: Any
) -> list[EndedRollout]:
    environment = OpenEnvEnvironment(
        type="openenv", url=url, **{"observation_field": "text", **options}
    )
    playing = Playing(options=environment, access=ACCESS, sampler=Model(says), connects=open_envs)
    item = {"messages": [USER], "goal": 2}
    wanted = [(own, item) for own in rollouts or [new_rollout()]]
    return run_rollouts(playing, wanted, lambda: None)


@pytest.fixture(scope="module")
def game() -> Iterator[str]:
    with game_served(Counting) as url:
        yield url


def test_a_game_is_played_until_it_is_over_and_its_rewards_are_added(game: str) -> None:
    ended = in_game(game, lambda _: ("on", []), [new_rollout() for _ in range(3)])
    for own in ended:
        assert (own.error, own.reward) == (None, 0.5)
        assert answer_of(own).trajectory is not None
        messages = [m["content"] for m in answer_of(own).trajectory.messages]  # type: ignore[union-attr]
        assert messages == ["2 + 2\n\nbegin 0", "on", "on", "on", "on on"]


def test_a_budget_ends_a_game_with_the_rewards_so_far(game: str) -> None:
    [ended] = in_game(game, lambda _: ("on", []), [new_rollout(turns=1)])
    assert (ended.error, ended.reward) == (None, 0.25)


def test_with_process_supervision_a_steps_reward_is_its_calls(game: str) -> None:
    [ended] = in_game(game, lambda _: ("on", []), supervision="process")
    assert (ended.error, ended.rewards, ended.reward) == (None, [0.25, 0.25], 0.5)
    none = {"action_field": None, "supervision": "process"}
    says = turns(("no", []), ("{}", []), ('{"message": "on"}', []), ('{"message": "on"}', []))
    [told] = in_game(game, says, **none)
    assert told.rewards == [0.0, 0.0, 0.25, 0.25]
    [lost] = in_game(game, lambda _: ("no", []), [new_rollout(turns=2)], **none)
    assert (lost.error, lost.rewards) == (None, [0.0, 0.0])


def test_a_game_whose_steps_have_no_rewards_gives_no_call_one() -> None:
    """Neither does that of its beginning count, which is no call's."""

    def answer(kind: str, data: dict[str, Any]) -> dict[str, Any]:
        return seen("more", 1.0 if kind == "reset" else None)

    with game_served(lambda: answer) as url:
        [process] = in_game(url, lambda _: ("on", []), supervision="process")
        [outcome] = in_game(url, lambda _: ("on", []))
    assert (process.error, process.reward, process.rewards) == (None, None, ())
    assert (outcome.error, outcome.reward) == (None, 1.0)


def test_an_answer_may_be_the_action_itself(game: str) -> None:
    says = turns(("no", []), ("{}", []), ('{"message": "on"}', []), ('{"message": "on"}', []))
    [ended] = in_game(game, says, action_field=None)
    assert ended.reward == 0.5
    said = [m["content"] for m in answer_of(ended).trajectory.messages if m["role"] == "user"]  # type: ignore[union-attr]
    assert said[1:3] == [
        "error: the answer is not an action, an object in JSON",
        "error: Invalid",
    ]


def test_a_model_that_finds_no_action_has_no_reward_from_a_game(game: str) -> None:
    rollout = new_rollout(turns=2)
    [ended] = in_game(game, lambda _: ("no", []), [rollout], action_field=None)
    assert (ended.error, ended.reward) == (None, 0.0)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"observation": {"text": ""}, "reward": 1e300}, "environment_reward_invalid"),
        ({"observation": {"text": ""}, "reward": "1"}, "environment_reward_invalid"),
        ({"observation": {"text": ""}, "reward": float("nan")}, "environment_failed"),
        ({"observation": {"other": ""}}, "environment_failed"),
        ({"type": "error", "data": {"code": "EXECUTION_ERROR"}}, "environment_failed"),
        ({"type": "state", "data": {}}, "environment_failed"),
        ({"observation": {"text": "x" * 2**20}}, "environment_unreachable"),
        ({"observation": {"text": "", "values": [0] * 2**19}}, "environment_flood"),
        ({"observation": {"text": ""}, "done": True}, "environment_no_room"),
    ],
)
def test_a_game_that_lies_or_fails_is_an_error_of_a_kind(
    answer: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "environment_flood":
        monkeypatch.setattr(open_env, "MOST_MESSAGE", 2**24)
    with game_served(lambda: lambda _, __: answer) as url:
        [ended] = in_game(url, lambda _: ("on", []))
    assert kind_of(ended) == kind
    assert ended.reward is None


def test_requests_are_signed_if_an_endpoint_is_named() -> None:
    headers: list[dict[str, str]] = []

    with game_served(Counting, headers.append) as url:
        in_game(url, lambda _: ("on", []), webhook_endpoint_id="we_1")
        in_game(url, lambda _: ("on", []))
    signed, unsigned = headers
    assert is_signed(signed, b"", SECRET, time.time())
    assert "webhook-signature" not in unsigned


# Addresses


@pytest.mark.parametrize("kind", ["mcp", "openenv"])
def test_addresses_are_those_that_webhooks_may_have(kind: str) -> None:
    made = McpEnvironment if kind == "mcp" else OpenEnvEnvironment
    public = Access("default", lambda _: [SECRET], allow_private=False)
    for url in ("http://1.1.1.1/mcp", "https://127.0.0.1/mcp", "https://10.0.0.1:1/", "ws://a.b/"):
        environment: Any = made.model_validate({"type": kind, "url": url})
        with pytest.raises(SpecError) as refused:
            check_environment(environment, public)
        assert refused.value.param == "environment.url"


def test_a_missing_endpoint_or_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def secrets(_: str) -> list[str]:
        raise FtError("There is no such endpoint.")

    url = "https://example.com/mcp"
    environment = McpEnvironment(type="mcp", url=url, webhook_endpoint_id="we_1")
    with pytest.raises(FtError) as refused:
        check_environment(environment, Access("default", secrets, allow_private=False))
    assert refused.value.param == "environment.webhook_endpoint_id"
    monkeypatch.setattr("ft_service.agents.addresses.find_spec", lambda _: None)
    with pytest.raises(SpecError) as missing:
        check_environment(environment, ACCESS)
    assert (missing.value.param, missing.value.code) == ("environment.type", "not_available")
