from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ft_service.errors import SpecError
from ft_service.tinker import tinker_messages_pb2 as pb
from ft_service.tinker.sample_calls import NO_LOGPROB, Sampled, parse_sample_request

PROMPT = {
    "chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]
}


def body(**changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "sampling_params": {"max_tokens": 4}, "type": "sample", **changes}


def test_the_order_for_the_sampler() -> None:
    given = {"max_tokens": 4, "seed": -1, "stop": ["\n", "END"], "top_k": -1}
    order = parse_sample_request(
        body(num_samples=2, sampling_params=given, prompt_logprobs=True)
    ).order("/a")
    assert order["prompt"] == [1, 2, 3]
    assert (order["n"], order["top_k"], order["seed"], order["scored"]) == (2, 0, 2**63 - 1, 2)
    assert (order["stop_texts"], order["stop_tokens"], order["ends"]) == (["\n", "END"], [], False)


@pytest.mark.parametrize(
    ("stop", "texts", "tokens", "ends"),
    [
        (None, [], [], True),
        ([], [], [], False),
        ("x", ["x"], [], False),
        ([7, 8], [], [7, 8], False),
    ],
)
def test_what_ends_an_answer(stop: Any, texts: list[str], tokens: list[int], ends: bool) -> None:
    order = parse_sample_request(body(sampling_params={"stop": stop})).order(None)
    assert (order["stop_texts"], order["stop_tokens"], order["ends"]) == (texts, tokens, ends)


WRONG: dict[str, dict[str, Any]] = {
    r"num_samples = 0": {"num_samples": 0},
    r"prompt: it has no tokens": {"prompt": {"chunks": []}},
    r"prompt\.chunks\.0: dmel: this service samples from tokens and images only": {
        "prompt": {"chunks": [{"type": "dmel", "tokens": []}]}
    },
    r"prompt\.chunks\.0\.data: is no base64": {
        "prompt": {"chunks": [{"type": "image", "data": "…", "format": "png"}]}
    },
    r"prompt\.chunks\.0\.data: is no PNG, JPEG, WEBP or GIF": {
        "prompt": {"chunks": [{"type": "image", "data": "aGVsbG8=", "format": "png"}]}
    },
    r"prompt\.chunks\.0\.data is required": {"prompt": {"chunks": [{"type": "image"}]}},
    r"prompt\.chunks\.0\.location = 'tinker://a': images are fetched from https:": {
        "prompt": {"chunks": [{"type": "image_asset_pointer", "location": "tinker://a"}]}
    },
    r"prompt\.chunks\.0\.expected_tokens: log-probabilities of a prompt need it": {
        "prompt": {"chunks": [{"type": "image_asset_pointer", "location": "https://a.b/c.png"}]},
        "prompt_logprobs": True,
    },
    r"sampling_params\.top_p = 0": {"sampling_params": {"top_p": 0}},
    r"sampling_params\.surprise: this service does not know it": {
        "sampling_params": {"surprise": 1}
    },
    r"prompt_alt_tokens_k: alternatives": {"prompt_alt_tokens_k": 3},
    r"record_stability_info: ": {"record_stability_info": True},
    r"prompt_logprobs_last_n = 3: the prompt has 3 tokens": {
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 3,
    },
    r"later_field: this service does not know it": {"later_field": "on"},
}


@pytest.mark.parametrize("text", list(WRONG))
def test_what_is_wrong_is_named(text: str) -> None:
    with pytest.raises(SpecError, match=text):
        parse_sample_request(body(**WRONG[text]))


def test_fields_of_later_clients_that_say_nothing_are_let_through() -> None:
    parse_sample_request(
        body(later_field=None, other=False, third=0, fourth=[], target_prompt_logprobs=None)
    )


def test_the_answer_is_the_clients_message() -> None:
    request = parse_sample_request(
        body(
            num_samples=2,
            prompt_logprobs=True,
            prompt_logprobs_last_n=1,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=1,
        )
    )
    sampled = Sampled(request)
    for part in (
        {"kind": "begun", "prompt_tokens": 3},
        {"kind": "scores", "place": 2, "logprobs": [-0.5], "top": [[(3, -0.5), (9, -2.0)]]},
        {"kind": "tokens", "index": 1, "tokens": [8], "logprobs": [-3.0], "top": [[(8, -3.0)]]},
        {
            "kind": "tokens",
            "index": 0,
            "tokens": [4, 5],
            "logprobs": [-1.0, -2.0],
            "top": [[(4, -1.0)], [(6, -1.5)]],
        },
        {"kind": "end", "index": 0, "reason": "stop"},
        {"kind": "end", "index": 1, "reason": "length"},
    ):
        sampled.take(part)
    assert not sampled.done
    sampled.take({"kind": "done", "completion_tokens": 3})
    assert sampled.done
    message = pb.SampleResponse.FromString(sampled.message())
    assert [np.frombuffer(one.tokens, "<i4").tolist() for one in message.sequences] == [[4, 5], [8]]
    assert [one.stop_reason for one in message.sequences] == [
        pb.STOP_REASON_STOP,
        pb.STOP_REASON_LENGTH,
    ]
    assert np.frombuffer(message.sequences[0].logprobs, "<f4").tolist() == [-1.0, -2.0]
    assert np.frombuffer(message.sequences[0].topk_sampled_logprobs.token_ids, "<i4").tolist() == [
        4,
        6,
    ]
    scores = np.frombuffer(message.prompt_logprobs, "<f4")
    assert np.isnan(scores[:2]).all()
    assert scores[2] == -0.5
    top = message.topk_prompt_logprobs
    assert (top.k, top.length) == (2, 3)
    assert np.frombuffer(top.token_ids, "<i4").reshape(3, 2).tolist() == [[0, 0], [0, 0], [3, 9]]
    assert np.frombuffer(top.logprobs, "<f4")[0] == np.float32(NO_LOGPROB)
