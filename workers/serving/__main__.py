"""`python -m workers.serving DESCRIPTOR PARENT`: the preview's process, at the other end of a socket that the server holds.

Lines of JSON both ways. First the base: {op: base, load, path, precision, threads, memory}, and later another in its place;
then requests {op: complete, …}, {op: cancel, id}, {op: adapter, …} and {op: threads, n}. Answers carry their request's id
(engine.py); {kind: ready, load} or {kind: failed, load, message} is of a base. It ends when the socket does, however the server
ended.
"""

from __future__ import annotations

import json
import math
import os
import queue
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from ft_service.host.lifetime import die_with_parent
from workers import keep_torchao_out

if __name__ == "__main__":  # before torch is imported, which takes seconds
    die_with_parent(int(sys.argv[2]))
    keep_torchao_out()

Inbox = queue.SimpleQueue[dict[str, Any]]


class Wire:
    """The socket's two directions. What arrives is read in a thread, so that the server never waits for a forward."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self.inbox: Inbox = queue.SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def say(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(0)  # the server is gone

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                self.inbox.put(json.loads(line))
        os._exit(0)


class Station:
    """What the process holds: a base that answers, or why it does not."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._engine: Any = None
        self._failure: dict[str, Any] = {}
        """What is told to all who ask while there is no base."""
        self._threads: dict[str, int] = {}
        """Those that were found best, by the bases' folders."""

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
            case "cancel" if self._engine is not None:
                self._engine.drop(message["id"])
            case "adapter" if self._engine is not None:
                self._engine.prepare(**message)
            case "complete" if self._engine is not None:
                self._engine.add(_request(message))
            case "complete":
                self._wire.say({"kind": "error", "id": message["id"], **self._failure})

    def _load(self, wanted: dict[str, Any]) -> None:
        """In place of what there is, whose memory is free before."""
        self._engine = None
        try:
            _return_memory()
            self._engine = self._built(wanted)
        except Exception as error:  # whatever it is, whoever asks must hear of it
            import traceback

            traceback.print_exc()
            self._failure = _told(error)
            self._wire.say({"kind": "failed", "load": wanted["load"], **self._failure})
            return
        self._wire.say({"kind": "ready", "load": wanted["load"]})

    def _built(self, wanted: dict[str, Any]) -> Any:
        import torch

        from ft_service.bases.cache_folder import Cache
        from ft_service.spec import PrecisionOptions
        from workers.serving.chat import Chats
        from workers.serving.engine import Engine
        from workers.serving.model import ServedModel

        path, most = wanted["path"], wanted["threads"]
        torch.set_num_threads(most)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        chats = Chats(path)
        precision = PrecisionOptions.model_validate(wanted["precision"])
        if device.type == "cpu":
            precision = precision.model_copy(update={"compute": _compute(path, wanted["memory"])})
        model = ServedModel(path, precision, device, Cache.from_environment(os.environ))
        if device.type == "cpu":
            if path not in self._threads:
                self._threads[path] = model.settle_threads(most)
            torch.set_num_threads(min(most, self._threads[path]))
        return Engine(model, chats, self._wire.say)


def main(descriptor: int) -> int:
    wire = Wire(descriptor)
    station = Station(wire)
    while True:
        station.take(wire.inbox.get())
        while station.busy or not wire.inbox.empty():
            while not wire.inbox.empty():
                station.take(wire.inbox.get())
            station.step()


def _request(message: dict[str, Any]) -> Any:
    from workers.serving.engine import Request

    return Request(**message)


def _set_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def _return_memory() -> None:
    """Of the base that is no longer held."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _compute(path: str, memory: int | None) -> str:
    """What processors compute in: fp32, which is quicker for them and exact, unless the base would take more than `memory`
    (bytes; None: half of all)."""
    from ft_service.bases.safetensors_folder import read_tensors
    from ft_service.host.hardware import memory_bytes

    in_fp32 = sum(4 * math.prod(tensor.shape) for tensor in read_tensors(Path(path)).values())
    return "fp32" if in_fp32 < (memory_bytes() / 2 if memory is None else memory) else "bf16"


def _told(error: Exception) -> dict[str, Any]:
    from ft_service.errors import FtError, SpecError

    if isinstance(error, FtError):
        return {"message": error.message, "code": error.code, "param": error.param, "wrong": isinstance(error, SpecError)}
    return {"message": f"{type(error).__name__}: {error}", "code": "preview_failed", "param": None, "wrong": False}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
