"""Memory of a host for answers: what does not fit waits or is refused, and answers are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft_service.spec import PrecisionOptions
from tests.support.training.models import save_tiny
from workers.serving.cached_attention import KeyValueCache
from workers.serving.engine import Engine
from workers.serving.model import ServedModel
from workers.serving.requests import TokenRequest
from workers.serving.room import Room, tensors_in

FP32 = PrecisionOptions(compute="fp32")
TEXTLESS: Any = SimpleNamespace(ends=frozenset[int](), tokenizer=None)
PROMPTS = [[5, 9, 100, 3, 77, 21, 8], [44, 45, 46, 30], [8, 7, 6, 5, 4, 3, 2, 1, 90]]


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = save_tiny(request.param, tmp_path_factory.mktemp("bases") / request.param)
    return ServedModel(str(folder), FP32, torch.device("cpu"), None)


def held_bytes(engine: Engine) -> int:
    """Bytes that are taken by all that is known, spare capacity included."""
    memories = {
        id(one.memory): one.memory for one in (*engine._running, *engine._all_waiting())
    }.values()
    tensors = {
        tensor.data_ptr(): tensor
        for memory in memories
        for tensor in tensors_in((memory._layers, memory.state))
    }
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def answers(
    served: ServedModel, requests: list[TokenRequest]
) -> tuple[dict[tuple[str, int], list[int]], list[Any], list[int]]:
    """Tokens by request and index, all messages, and after each step the bytes that are held."""
    said: list[dict[str, Any]] = []
    engine = Engine(served, TEXTLESS, said.append)
    for one in requests:
        engine.add_tokens(one)
    held = []
    while engine.busy:
        engine.step()
        held.append(held_bytes(engine))
    found: dict[tuple[str, int], list[int]] = {}
    for message in said:
        if message["kind"] == "tokens":
            found.setdefault((message["id"], message["index"]), []).extend(message["tokens"])
    return found, said, held


def requests() -> list[TokenRequest]:
    return [
        TokenRequest(f"{number}", prompt, n=2, max_tokens=80, temperature=0.0, scored=3)
        for number, prompt in enumerate(PROMPTS)
    ]


def test_answers_beyond_the_memory_wait_and_are_the_same(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.room is not None
    plenty, _, most = answers(served, requests())
    room = Room(served.room.taken(250), served.room.fixed, served.room.of_token)
    assert max(most) > room.bytes
    monkeypatch.setattr(served, "room", room)
    found, said, held = answers(served, requests())
    assert found == plenty
    assert max(held) <= room.bytes, "what is held never takes more"
    assert not [message for message in said if message["kind"] == "error"]
    scores = [len(message["logprobs"]) for message in said if message["kind"] == "scores"]
    assert sum(scores) == 3 * len(PROMPTS), "none twice, though prompts were read again"


def test_an_answer_that_alone_is_too_long_is_refused_with_what_fits(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.room is not None
    monkeypatch.setattr(
        served, "room", Room(served.room.taken(64), served.room.fixed, served.room.of_token)
    )
    long = TokenRequest("long", PROMPTS[0], max_tokens=500, temperature=0.0)
    found, said, _ = answers(served, [long, TokenRequest("open", PROMPTS[0], temperature=0.0)])
    (error,) = [message for message in said if message["kind"] == "error"]
    assert error["id"] == "long"
    assert error["wrong"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "The memory of the preview's host suffices for 64 tokens of an answer with its prompt"
    )
    assert len(found["open", 0]) == 64 - len(PROMPTS[0]), (
        "without a limit of its own, as much as fits"
    )


def test_the_room_is_measured(served: ServedModel) -> None:
    assert served.room is not None
    assert served.room.bytes > 0
    memory = KeyValueCache()
    assert memory.nbytes == 0
    assert served.room.of_token > 0
    assert bool(served.room.fixed) is served.by_state


def test_room_by_two_measures() -> None:
    room = Room.measured(10_000, (4, 140), (8, 180))
    assert (room.fixed, room.of_token) == (100, 15.0)
    assert room.most_tokens == 660
    assert Room.measured(10_000, (4, 140), (8, 140)).most_tokens > 10**9, "only a state"


def test_what_a_host_refuses_costs_one_request(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's error for a tensor larger than a processor's memory is of no kind of its own."""
    forward = served.forward

    def greedy(pieces: Any) -> torch.Tensor:
        if any(len(piece.ids) == len(PROMPTS[2]) for piece in pieces):
            torch.empty(2**60)
        return forward(pieces)

    monkeypatch.setattr(served, "forward", greedy)
    large = TokenRequest("large", PROMPTS[2], max_tokens=4, temperature=0.0)
    found, said, _ = answers(
        served, [TokenRequest("small", PROMPTS[0], max_tokens=4, temperature=0.0), large]
    )
    (error,) = [message for message in said if message["kind"] == "error"]
    assert (error["id"], error["code"]) == ("large", "out_of_memory")
    assert len(found["small", 0]) == 4
