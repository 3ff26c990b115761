"""What vLLM answers where adapters are loaded at run time, as far as a hand-off and Tinker's
samples use it.

Adapters are loaded from a folder and refused when they are there already, have no config, or one
that it would not read; names that are not loaded are a 404. `logprobs` says what it thinks of a
prompt's tokens, by the model's name. An answer counts on from the prompt's last token, the n-th one
in steps of n; token 9 is the base's end, and the text of token 7 is " 7".
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MAX_LORA_RANK = 16
CONTEXT = 64
END = 9


@dataclass
class FakeVllm:
    """Everything may be changed while it runs."""

    url: str = ""
    base: str = "base"
    loaded: dict[str, Path] = field(default_factory=dict)
    logprobs: Callable[[str, list[int]], list[float]] = field(
        default=lambda name, tokens: [-1.0] * len(tokens)
    )
    chat_tokens: list[int] = field(default_factory=lambda: list[int]())
    """What its chat template and image processor make of every conversation. Empty: it tells no
    log-probabilities of conversations, as SGLang.
    """
    key: str | None = None
    status: int | None = None
    """Of every answer to a completion; None: that of its request."""
    text: str = ""
    """Of every answer."""
    max_logprobs: int = 20
    asked: list[str] = field(default_factory=list)
    """Paths of requests, in order."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of completions."""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(path)
        match (method, path):
            case ("GET", "/v1/models"):
                cards = [
                    {"id": self.base, "max_model_len": CONTEXT},
                    *({"id": n, "max_model_len": None} for n in self.loaded),
                ]
                return 200, {"object": "list", "data": cards}
            case ("POST", "/v1/load_lora_adapter"):
                return self._load(body["lora_name"], Path(body["lora_path"]))
            case ("POST", "/v1/unload_lora_adapter"):
                if self.loaded.pop(body["lora_name"], None) is None:
                    return _refusal(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
                return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."
            case ("POST", "/v1/completions"):
                return self._complete(body)
            case ("POST", "/v1/chat/completions"):
                return self._chat(body)
        return _refusal(404, "Not Found")

    def _load(self, name: str, folder: Path) -> tuple[int, Any]:
        if name in self.loaded:
            return _refusal(400, f"The lora adapter '{name}' has already been loaded.")
        if not (folder / "adapter_config.json").is_file():
            return _refusal(404, f"No adapter found for {folder}")
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > MAX_LORA_RANK:
            return _refusal(400, f"LoRA rank {rank} is greater than max_lora_rank {MAX_LORA_RANK}.")
        self.loaded[name] = folder
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] not in (self.base, *self.loaded):
            return _refusal(404, f"The model `{body['model']}` does not exist.")
        self.bodies.append(body)
        if self.status is not None:
            return _refusal(self.status, "Not now.")
        if (asked := body.get("prompt_logprobs") or 0) > self.max_logprobs:
            most = self.max_logprobs
            return _refusal(
                400,
                f"Requested prompt logprobs of {asked}, which is greater than max allowed: {most}",
            )
        known = [None, *self.logprobs(body["model"], body["prompt"])[: len(body["prompt"]) - 1]]
        if body.get("echo"):
            return 200, {"choices": [{"text": "", "logprobs": {"token_logprobs": [*known, -0.5]}}]}
        if body["n"] > 1 and body["temperature"] == 0:
            return _refusal(400, f"n must be 1 when using greedy sampling, got {body['n']}.")
        if len(body["prompt"]) + body["max_tokens"] > CONTEXT:
            return _refusal(400, f"This model's maximum context length is {CONTEXT} tokens.")
        return 200, {
            "choices": [
                {**_choice(body, index, known), "text": self.text} for index in range(body["n"])
            ]
        }

    def _chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] not in (self.base, *self.loaded):
            return _refusal(404, f"The model `{body['model']}` does not exist.")
        self.bodies.append(body)
        if self.status is not None:
            return _refusal(self.status, "At most 0 image(s) may be provided in one prompt.")
        message = {"role": "assistant", "content": self.text}
        answer: dict[str, Any] = {"choices": [{"index": 0, "message": message}]}
        if not self.chat_tokens or body.get("prompt_logprobs") is None:
            return 200, answer
        known = self.logprobs(body["model"], self.chat_tokens)
        given = zip(self.chat_tokens[1:], known, strict=False)
        told = [{str(token): {"logprob": own, "rank": 1}} for token, own in given]
        return 200, {**answer, "prompt_logprobs": [None, *told]}


def _choice(body: dict[str, Any], index: int, known: list[float | None]) -> dict[str, Any]:
    tokens = list[int]()
    reason = "length"
    while len(tokens) < body["max_tokens"] and reason == "length":
        tokens.append((tokens or body["prompt"])[-1] + index + 1)
        ends = tokens[-1] in body["stop_token_ids"] or (
            tokens[-1] == END and not body["ignore_eos"]
        )
        if ends or any(text in "".join(f" {token}" for token in tokens) for text in body["stop"]):
            reason = "stop"
    # The token that was drawn, then the likeliest ones, of which it may be one.
    top = [
        {f"token_id:{token}": -0.5, **{f"token_id:{n}": -0.1 - n for n in range(body["logprobs"])}}
        for token in tokens
    ]
    of_prompt = None
    if body.get("prompt_logprobs") is not None:
        likeliest = {
            str(n): {"logprob": -0.1 - n, "rank": n + 1} for n in range(body["prompt_logprobs"])
        }
        given = zip(body["prompt"], known, strict=True)
        of_prompt = [
            None if own is None else {**likeliest, str(token): {"logprob": own, "rank": 40}}
            for token, own in given
        ]
    named = [f"token_id:{token}" for token in tokens]
    told = {"tokens": named, "token_logprobs": [-0.5] * len(tokens), "top_logprobs": top}
    return {"index": index, "finish_reason": reason, "logprobs": told, "prompt_logprobs": of_prompt}


def _refusal(status: int, message: str) -> tuple[int, Any]:
    return status, {
        "error": {"message": message, "type": "BadRequestError", "param": None, "code": status}
    }


@contextmanager
def fake_vllm() -> Iterator[FakeVllm]:
    vllm = FakeVllm()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            if vllm.key is not None and self.headers["authorization"] != f"Bearer {vllm.key}":
                status, said = _refusal(401, "Unauthorized")
            else:
                status, said = vllm.answer(self.command, self.path, body)
            answer = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        vllm.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield vllm
        finally:
            server.shutdown()
            thread.join()
