"""`python -m workers.serving`: the preview's process, which reads requests from stdin and writes
answers to stdout.

Lines of JSON both ways. First the base: {op: base, load, path, precision, threads, memory}, and
later another in its place; then requests {op: complete, …}, {op: sample, …}, {op: cancel, id}, {op:
adapter, …} and {op: threads, n} (requests.py). Answers carry their request's id (answers.py,
engine.py); {kind: ready, load} or {kind: failed, load, message} is of a base. It ends when its
input does.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from ft_service.host.quick_imports import quick_imports
from workers.patches.absent_torchao import keep_torchao_out

if __name__ == "__main__":  # before transformers is imported
    keep_torchao_out()

Inbox = queue.SimpleQueue[dict[str, Any]]


class RequestChannel:
    """Requests and answers.

    What arrives is read in a thread, so that the server never waits for a forward.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # what libraries print is no answer
        self.inbox: Inbox = queue.SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def say(self, message: dict[str, Any]) -> None:
        try:
            self._answers.write(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(0)  # the server is gone

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self.inbox.put(json.loads(line))
        os._exit(0)


class PreviewWorker:
    """The base that answers requests, or the reason why there is none."""

    def __init__(self, wire: RequestChannel) -> None:
        self._wire = wire
        self._engine: Any = None
        self._base = ""
        """The base that the engine has, with its formats."""
        self._parked: dict[str, Any] = {}
        """Engines without their bases, whose answers go on when these are loaded again."""
        self._failure: dict[str, Any] = {}
        """Answer to all requests while there is no base."""
        self._threads: dict[str, int] = {}
        """Best number of threads by base folder."""

    @property
    def busy(self) -> bool:
        return self._engine is not None and self._engine.busy

    def step(self) -> None:
        if self._engine is not None:
            self._engine.step()

    def take(self, message: dict[str, Any]) -> None:
        match message.pop("op"):
            case "base":
                self._load(message)
            case "threads":
                _set_threads(message["n"])
            case "cancel":
                for engine in (self._engine, *self._parked.values()):
                    if engine is not None:
                        engine.drop(message["id"])
                self._parked = {
                    base: engine for base, engine in self._parked.items() if engine.busy
                }
            case "adapter" if self._engine is not None:
                self._engine.prepare(**message)
            case "complete" if self._engine is not None:
                self._engine.add(_chat_request(message))
            case "sample" if self._engine is not None:
                self._engine.add_tokens(_token_request(message))
            case "text" if self._engine is not None:
                self._engine.add_text(_text_request(message))
            case "complete" | "sample" | "text":
                self._wire.say({"kind": "error", "id": message["id"], **self._failure})

    def _load(self, wanted: dict[str, Any]) -> None:
        """Replace the base; the memory of the former one is freed first.

        Its answers go on when it is loaded again.
        """
        if self.busy:
            self._engine.park()
            self._parked[self._base] = self._engine
        self._engine, self._base = (
            None,
            json.dumps([wanted["path"], wanted["precision"]], sort_keys=True),
        )
        parked = self._parked.pop(self._base, None)
        try:
            _return_memory()
            self._engine = self._built(wanted, parked)
        except Exception as error:  # every error is sent to the server
            import traceback

            traceback.print_exc()
            self._failure = _told(error)
            for request in parked.requests if parked is not None else ():
                self._wire.say({"kind": "error", "id": request, **self._failure})
            self._wire.say({"kind": "failed", "load": wanted["load"], **self._failure})
            return
        self._wire.say({"kind": "ready", "load": wanted["load"]})

    def _built(self, wanted: dict[str, Any], parked: Any) -> Any:
        """The engine of a base. `parked`: that of its earlier answers, if they go on."""
        with quick_imports():
            import torch

            from ft_service.bases.cache_folder import Cache
            from ft_service.spec import PrecisionOptions
            from workers.serving.chat_tokens import Chats
            from workers.serving.engine import Engine
            from workers.serving.model import ServedModel

        path = wanted["path"]
        most = wanted["threads"]
        torch.set_num_threads(most)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        chats = None if parked else Chats(path)
        precision = PrecisionOptions.model_validate(wanted["precision"])
        if device.type == "cpu":
            precision = precision.model_copy(update={"compute": _compute(path, wanted["memory"])})
        model = ServedModel(path, precision, device, Cache.from_environment(os.environ))
        if device.type == "cpu":
            if path not in self._threads:
                self._threads[path] = model.settle_threads(most)
            torch.set_num_threads(min(most, self._threads[path]))
        if chats is None:
            parked.resume(model)
            return parked
        return Engine(model, chats, self._wire.say)


def main() -> int:
    wire = RequestChannel()
    worker = PreviewWorker(wire)
    while True:
        worker.take(wire.inbox.get())
        while worker.busy or not wire.inbox.empty():
            while not wire.inbox.empty():
                worker.take(wire.inbox.get())
            worker.step()


def _chat_request(message: dict[str, Any]) -> Any:
    from workers.serving.requests import ChatRequest

    return ChatRequest(**message)


def _text_request(message: dict[str, Any]) -> Any:
    from workers.serving.requests import TextRequest

    return TextRequest(**message)


def _token_request(message: dict[str, Any]) -> Any:
    from workers.serving.requests import TokenRequest

    return TokenRequest(**message)


def _set_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def _return_memory() -> None:
    """Free the memory of the former base."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _compute(path: str, memory: int | None) -> str:
    """What processors compute in: fp32, which is quicker for them and exact, unless the base would
    take more than `memory` (bytes; None: half of all).
    """
    from ft_service.bases.safetensors_folder import read_tensors
    from ft_service.host.hardware import memory_bytes

    in_fp32 = sum(4 * math.prod(tensor.shape) for tensor in read_tensors(Path(path)).values())
    return "fp32" if in_fp32 < (memory_bytes() / 2 if memory is None else memory) else "bf16"


def _told(error: Exception) -> dict[str, Any]:
    from ft_service.errors import FtError, SpecError

    if isinstance(error, FtError):
        return {
            "message": error.message,
            "code": error.code,
            "param": error.param,
            "wrong": isinstance(error, SpecError),
        }
    return {
        "message": f"{type(error).__name__}: {error}",
        "code": "preview_failed",
        "param": None,
        "wrong": False,
    }


if __name__ == "__main__":
    sys.exit(main())
