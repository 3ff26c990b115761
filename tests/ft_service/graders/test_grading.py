"""Servers that grade fail, hang and lie: every answer has a finite reward or a counted error."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from ft_service.errors import SpecError, UnavailableError
from ft_service.graders import asking, grading, python_fence
from ft_service.graders.grades import Case, Grade, Sample, Score
from ft_service.graders.grading import GraderContext, grade, grade_all, parse_grader
from ft_service.graders.limits import GraderLimits, GraderModel
from ft_service.shared_work.places import Kind, Places
from tests.support.attempts import wait_for
from tests.support.graders import case
from tests.support.rest.receiver import Answer, Received, Receiver, hanging, receiving

SECRET = "whsec_" + "c2VjcmV0" * 4
ENDPOINT: Any = {
    "type": "endpoint",
    "name": "e",
    "webhook_endpoint_id": "we_1",
    "timeout_seconds": 1,
}
SCORED: Any = {
    "type": "score_model",
    "name": "s",
    "model": "judge",
    "input": [{"role": "developer", "content": "{{item.q}}"}],
}
LABELLED: Any = {
    **SCORED,
    "type": "label_model",
    "labels": ["good", "bad"],
    "passing_labels": ["good"],
}
CHECK: Any = {
    "type": "string_check",
    "name": "c",
    "input": "{{sample.output_text}}",
    "reference": "4",
    "operation": "eq",
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "RETRY_SECONDS", 0.01)


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


def context(url: str, seconds: float | None = None, *, allow_private: bool = True) -> GraderContext:
    models = {"judge": GraderModel(base_url=f"{url}/v1/")}
    return GraderContext(
        project="p",
        limits=GraderLimits(models=models, allow_private=allow_private),
        secrets=lambda _: [SECRET],
        seconds=seconds,
    )


def graded(grader: Any, url: str, answer: str = "4", **given: Any) -> Grade:
    own = context(url, **given)
    return grade(parse_grader(grader, own.limits), Sample(answer), {"q": "2+2?"}, own)


def says(body: Any, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> Any:
    return lambda _: (
        status,
        headers,
        iter([body if isinstance(body, bytes) else json.dumps(body).encode()]),
    )


def says_text(content: Any, **choice: Any) -> Any:
    return says(
        {
            "choices": [
                {
                    "message": {"role": "assistant", "content": content},
                    "finish_reason": "stop",
                    **choice,
                }
            ]
        }
    )


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (says({"reward": float("nan")}), "parse"),
        (says({"reward": float("inf")}), "parse"),
        (says(b'{"reward": 1e999}'), "parse"),
        (says(b'{"reward": 1' + b"0" * 4000 + b"}"), "parse"),
        (says(b'{"reward": 1' + b"0" * 9000 + b"}"), "parse"),
        (says({"reward": "1"}), "parse"),
        (says({"reward": True}), "parse"),
        (says({"reward": None}), "parse"),
        (says([1.0]), "parse"),
        (says(b"[" * 100_000), "parse"),
        (says({"reward": 1, "x": [[]] * (asking.MOST_VALUES // 2)}), "parse"),
        (says(b"\xff\xfe"), "parse"),
        (says(b""), "parse"),
        (says(b'{"reward": 1}' + b" " * 10 * 2**20), "parse"),
        (says(b"\x1f\x8b\x08", headers={"content-encoding": "gzip"}), "parse"),
        (says(b"", 302, {"location": "http://169.254.169.254/latest/meta-data"}), "server"),
        (says(b"", 307, {"location": "/elsewhere"}), "server"),
        (says({"reward": 1}, 404), "server"),
        (says({"reward": 1}, 500), "server"),
        (lambda _: (200, {"content-length": "99"}, iter([b'{"reward": 1}'])), "server"),
    ],
)
def test_an_endpoint_that_lies_is_an_error_that_counts(
    server: Receiver, answer: Any, error: str
) -> None:
    server.answer = answer
    found = graded({**ENDPOINT, "url": server.url}, server.url)
    assert (found.reward, list(found.errors)) == (0.0, [f"endpoint_grader_{error}_error"])
    assert math.isfinite(found.reward)
    assert {one.path for one in server.arrived.queue} == {"/"}, "no redirect is followed"


def test_half_of_a_surrogate_pair_in_an_answer_or_in_an_error_ends_nothing(
    server: Receiver,
) -> None:
    def echo(received: Received) -> Answer:
        assert json.loads(received.body)["sample"]["output_json"] == {"a": "\ud83d"}
        return says({"reward": 0.5})(received)

    server.answer = echo
    assert graded({**ENDPOINT, "url": server.url}, server.url, r'{"a": "\ud83d"}').reward == 0.5
    server.answer = says({"error": {"message": "no \ud83d"}}, 400)
    assert graded(SCORED, server.url).errors == {
        "model_grader_server_error": "the model's server answered 400: no ?"
    }
    server.answer = says({"model": "\ud83d", "choices": [{"message": {"content": "1"}}]})
    assert graded(SCORED, server.url).sampled_model == "?"


def test_failures_that_pass_are_tried_again_under_the_same_id(server: Receiver) -> None:
    answers = iter([says(b"", 503), says(b"", 429), says({"reward": -0.25})])
    server.answer = lambda received: next(answers)(received)
    assert graded({**ENDPOINT, "url": server.url}, server.url).reward == -0.25
    assert len({one.headers["webhook-id"] for one in server.arrived.queue}) == 1
    assert server.arrived.qsize() == asking.TRIES


def test_an_endpoint_that_hangs_or_trickles_takes_its_time_and_no_more(
    server: Receiver, monkeypatch: Any
) -> None:
    monkeypatch.setattr(asking, "TRIES", 1)

    def trickle(_: Received) -> Answer:
        def parts() -> Iterator[bytes]:
            for _ in range(20):  # each within the limit of a wait
                time.sleep(0.1)
                yield b" "

        return 200, {}, parts()

    server.answer = trickle
    with hanging() as (url, _):
        for target in (url, server.url):
            found = graded({**ENDPOINT, "url": target}, target)
            assert found.errors == {
                "endpoint_grader_server_error": "there was no answer within 1 seconds, in 1 tries"
            }


def test_what_is_late_for_the_whole_call_has_an_error_and_the_rest_its_reward() -> None:
    with hanging() as (url, _):
        both = {
            "type": "multi",
            "name": "m",
            "graders": {"c": CHECK, "e": {**ENDPOINT, "url": url, "timeout_seconds": 99}},
        }
        found = graded({**both, "calculate_output": "c + e"}, url, seconds=0.3)
    assert (found.reward, found.sub_rewards, list(found.errors)) == (
        0.0,
        {"c": 1.0},
        ["unresponsive_reward_error"],
    )


def test_a_batch_is_few_requests_and_each_answer_has_its_own_reward(server: Receiver) -> None:
    def rewards(received: Received) -> Answer:
        batch = json.loads(received.body)["batch"]
        found = [
            None if one["sample"]["output_text"] == "3" else float(one["sample"]["output_text"])
            for one in batch
        ]
        return says({"rewards": found})(received)

    server.answer = rewards
    own = context(server.url)
    grader = parse_grader(
        {**ENDPOINT, "url": server.url, "batch_size": 4, "timeout_seconds": 60}, own.limits
    )
    found = grade_all(grader, [case(str(number)) for number in range(10)], own)
    assert [one.reward for one in found] == [0, 1, 2, 0, *range(4, 10)]
    assert [bool(one.errors) for one in found] == [number == 3 for number in range(10)]
    assert sorted(len(json.loads(one.body)["batch"]) for one in server.arrived.queue) == [2, 4, 4]
    server.answer = says({"rewards": [1.0]})
    assert all(
        one.errors.keys() == {"endpoint_grader_parse_error"}
        for one in grade_all(grader, [case("1")] * 4, own)
    )


def test_addresses_are_checked_again_when_the_name_is_looked_up(
    server: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://localhost:{server.url.rpartition(':')[2]}"
    found = graded({**ENDPOINT, "url": url}, server.url, allow_private=False)
    assert (
        "localhost resolves to an address that is not public"
        in found.errors["endpoint_grader_server_error"]
    )
    for literal in (
        "https://169.254.169.254",
        "https://[::ffff:169.254.169.254]",
        "https://2852039166",
        "https://127.1",
    ):
        with pytest.raises(SpecError, match=r"grader\.url"):
            parse_grader({**ENDPOINT, "url": literal}, GraderLimits())
    assert server.arrived.empty()


@pytest.mark.parametrize(
    ("grader", "answer", "reward", "error"),
    [
        (SCORED, says_text('{"steps": [], "result": 0.5}'), 0.5, None),
        (SCORED, says_text("0.5"), 0.5, None),
        (SCORED, says_text('{"result": 7}'), 0, "model_grader_parse_error"),
        ({**SCORED, "range": [-5, 10]}, says_text('{"result": 7}'), 7, None),
        (SCORED, says_text('{"result": NaN}'), 0, "model_grader_parse_error"),
        (SCORED, says_text("good"), 0, "model_grader_parse_error"),
        (SCORED, says_text(None), 0, "model_grader_parse_error"),
        (SCORED, says_text(["0.5"]), 0, "model_grader_parse_error"),
        (SCORED, says_text("", finish_reason="content_filter"), 0, "model_grader_refusal_error"),
        (
            SCORED,
            says({"choices": [{"message": {"content": None, "refusal": "No."}}]}),
            0,
            "model_grader_refusal_error",
        ),
        (SCORED, says({"choices": [{"message": "0.5"}]}), 0, "model_grader_refusal_error"),
        (SCORED, says({"choices": []}), 0, "model_grader_parse_error"),
        (SCORED, says(b"nonsense"), 0, "model_grader_parse_error"),
        (SCORED, says(b" " * 10 * 2**20), 0, "model_grader_parse_error"),
        (
            SCORED,
            says({"error": {"message": "no such model"}}, 404),
            0,
            "model_grader_server_error",
        ),
        (
            SCORED,
            says(b"", 302, {"location": "http://169.254.169.254/"}),
            0,
            "model_grader_server_error",
        ),
        (SCORED, says(b"", 502), 0, "model_grader_server_error"),
        (LABELLED, says_text('{"result": "good"}'), 1, None),
        (LABELLED, says_text('{"result": "bad"}'), 0, None),
        (LABELLED, says_text('{"result": "fine"}'), 0, "model_grader_parse_error"),
        (LABELLED, says_text('{"result": {}}'), 0, "model_grader_parse_error"),
    ],
)
def test_what_a_model_answers_is_checked(
    server: Receiver, grader: Any, answer: Any, reward: float, error: str | None
) -> None:
    server.answer = answer
    alone = {"type": "multi", "name": "m", "graders": {"g": grader}, "calculate_output": "g"}
    found = graded(alone, server.url)
    assert (found.reward, list(found.errors)) == (reward, [error] if error else [])
    sent = json.loads(server.arrived.get_nowait().body)
    assert sent["messages"] == [{"role": "system", "content": "2+2?"}]
    schema = sent["response_format"]["json_schema"]["schema"]["properties"]["result"]
    assert schema == (
        {"type": "number"}
        if grader["type"] == "score_model"
        else {"type": "string", "enum": ["good", "bad"]}
    )


@pytest.mark.parametrize("grader", [SCORED, LABELLED])
def test_a_model_that_the_operator_has_removed_since_gives_no_grade(grader: Any) -> None:
    alone = {
        "type": "multi",
        "name": "m",
        "graders": {"g": grader, "c": CHECK},
        "calculate_output": "g + c",
    }
    parsed = parse_grader(alone, context("http://127.0.0.1:9").limits)
    for found in grade_all(parsed, [case("4")] * 2, GraderContext(project="p")):
        assert found.reward == 0
        assert found.errors == {
            "model_grader_server_error": "'judge' is no longer one of FT_GRADER_MODELS"
        }


def test_usage_that_a_server_invents_is_left_out(server: Receiver) -> None:
    server.answer = says(
        {
            "model": 7,
            "choices": [{"message": {"content": "1"}}],
            "usage": {"prompt_tokens": -1, "completion_tokens": "9", "total_tokens": 12, "x": {}},
        }
    )
    found = graded(SCORED, server.url)
    assert (found.reward, found.usage, found.sampled_model) == (
        1.0,
        {"judge": {"total_tokens": 12}},
        None,
    )


@pytest.mark.skipif(python_fence.refusal({}) is not None, reason="no fence on this host")
def test_many_answers_share_a_few_processes_and_one_that_fails_costs_no_other() -> None:
    source = (
        "import os\ndef grade(sample, item):\n return item['n'] / int(sample['output_text']) "
        "if item['n'] != 5 else os._exit(1)"
    )
    grader = parse_grader({"type": "python", "name": "p", "source": source}, GraderLimits())
    found = grade_all(
        grader,
        [Case(Sample("2"), {"n": number}) for number in range(12)],
        GraderContext(project="p"),
    )
    assert [one.reward for one in found] == [
        0 if number == 5 else number / 2 for number in range(12)
    ]
    assert [list(one.errors) for one in found if one.errors] == [["python_grader_server_error"]]
    assert all(one.seconds > 0 for one in found)


@pytest.mark.skipif(python_fence.refusal({}) is not None, reason="no fence on this host")
def test_the_time_of_a_call_ends_what_runs_in_a_fence() -> None:
    grader = parse_grader(
        {"type": "python", "name": "p", "source": "def grade(s, i):\n while True: pass"},
        GraderLimits(),
    )
    found = grade_all(grader, [case("4")] * 3, GraderContext(project="p", seconds=0.5))
    assert [list(one.errors) for one in found] == [["unresponsive_reward_error"]] * 3


@pytest.mark.skipif(python_fence.refusal({}) is not None, reason="no fence on this host")
def test_python_graders_of_two_projects_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        grading, "FENCES", Places(Kind(name="python graders of a test", places=1, of_project=1))
    )
    monkeypatch.setattr(grading, "FENCE_TURN_SECONDS", 0.0)
    score = python_fence.FencedGrader.score
    order = []

    def noted(self: python_fence.FencedGrader, message: bytes) -> Score:
        project = json.loads(message)["item"]["project"]
        order.append(project)
        if len(order) == 1:
            others.start()
            wait_for(lambda: "b" in grading.FENCES.projects())
        return score(self, message)

    monkeypatch.setattr(python_fence.FencedGrader, "score", noted)
    grader = parse_grader(
        {"type": "python", "name": "p", "source": "def grade(s, i): return 0.5"}, GraderLimits()
    )

    def grade_for(project: str) -> None:
        cases = [case("4", {"project": project})] * 3
        found = grade_all(grader, cases, GraderContext(project=project))
        assert [one.reward for one in found] == [0.5] * 3

    others = threading.Thread(target=grade_for, args=("b",))
    grade_for("a")
    others.join()
    assert order[:2] == ["a", "b"]
    assert "a" in order[2:5], "in turn by what their cases cost, of which each has three"


def test_a_database_that_does_not_answer_is_no_error_of_the_answers(server: Receiver) -> None:
    def secrets(_: str) -> list[str]:
        raise UnavailableError("The database does not answer.")

    limits = GraderLimits(allow_private=True)
    grader = parse_grader({**ENDPOINT, "url": server.url}, limits)
    with pytest.raises(UnavailableError):
        grade_all(grader, [case("1")], GraderContext(project="p", limits=limits, secrets=secrets))
