"""What vLLM answers where adapters are loaded at run time, as far as a hand-off uses it.

Adapters are loaded from a folder and refused when they are there already, have no config, or one that it would not read; names
that are not loaded are a 404. `logprobs` says what it thinks of a prompt's tokens, by the model's name.
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


@dataclass
class FakeVllm:
    """Everything may be changed while it runs."""

    url: str = ""
    base: str = "base"
    loaded: dict[str, Path] = field(default_factory=dict)
    logprobs: Callable[[str, list[int]], list[float]] = field(default=lambda name, tokens: [-1.0] * len(tokens))
    key: str | None = None
    asked: list[str] = field(default_factory=list)
    """Paths of requests, in order."""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(path)
        match (method, path):
            case ("GET", "/v1/models"):
                return 200, {"object": "list", "data": [{"id": name} for name in (self.base, *self.loaded)]}
            case ("POST", "/v1/load_lora_adapter"):
                return self._load(body["lora_name"], Path(body["lora_path"]))
            case ("POST", "/v1/unload_lora_adapter"):
                if self.loaded.pop(body["lora_name"], None) is None:
                    return _refusal(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
                return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."
            case ("POST", "/v1/completions"):
                return self._complete(body)
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
        known = [None, *self.logprobs(body["model"], body["prompt"])[: len(body["prompt"]) - 1], -0.5]
        return 200, {"choices": [{"text": "", "logprobs": {"token_logprobs": known if body["echo"] else known[-1:]}}]}


def _refusal(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


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
