"""`python -m workers.serving DESCRIPTOR PARENT`: the preview's process, at the other end of a socket that the server holds.

Lines of JSON both ways. First the base: {path, precision, threads}; then requests {op: complete, …}, {op: cancel, id} and
{op: threads, n}. Answers carry their request's id (engine.py); {kind: ready} or {kind: failed, message} is of the process
itself. It ends when the socket does, however the server ended.
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


def main(descriptor: int) -> int:
    wire = Wire(descriptor)
    wanted = wire.inbox.get()
    try:
        engine = _engine(wanted, wire)
    except Exception as error:  # whatever it is, whoever asks must hear of it
        import traceback

        traceback.print_exc()
        wire.say({"kind": "failed", **_told(error)})
        return 1
    wire.say({"kind": "ready"})
    while True:
        _take(wire.inbox, engine, wait=not engine.busy)
        engine.step()


def _engine(wanted: dict[str, Any], wire: Wire) -> Any:
    import torch

    from ft_service.bases.cache_folder import Cache
    from ft_service.spec import PrecisionOptions
    from workers.serving.chat import Chats
    from workers.serving.engine import Engine
    from workers.serving.model import ServedModel

    torch.set_num_threads(wanted["threads"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chats = Chats(wanted["path"])
    precision = PrecisionOptions.model_validate(wanted["precision"])
    if device.type == "cpu":
        precision = precision.model_copy(update={"compute": _compute(wanted["path"])})
    model = ServedModel(wanted["path"], precision, device, Cache.from_environment(os.environ))
    if device.type == "cpu":
        model.settle_threads(wanted["threads"])
    return Engine(model, chats, wire.say)


def _compute(path: str) -> str:
    """What processors compute in: fp32, which is quicker for them and exact, unless the base would take half of the memory."""
    from ft_service.bases.safetensors_folder import read_tensors
    from ft_service.host.hardware import memory_bytes

    in_fp32 = sum(4 * math.prod(tensor.shape) for tensor in read_tensors(Path(path)).values())
    return "fp32" if in_fp32 < memory_bytes() / 2 else "bf16"


def _told(error: Exception) -> dict[str, Any]:
    from ft_service.errors import FtError, SpecError

    if isinstance(error, FtError):
        return {"message": error.message, "code": error.code, "param": error.param, "wrong": isinstance(error, SpecError)}
    return {"message": f"{type(error).__name__}: {error}", "code": "preview_failed", "param": None, "wrong": False}


def _take(inbox: Inbox, engine: Any, *, wait: bool) -> None:
    """Everything that has arrived; with `wait` at least one message."""
    import torch

    from workers.serving.engine import Request

    while True:
        try:
            message = inbox.get(block=wait)
        except queue.Empty:
            return
        wait = False
        match message.pop("op"):
            case "complete":
                engine.add(Request(**message))
            case "cancel":
                engine.drop(message["id"])
            case "threads":
                torch.set_num_threads(message["n"])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
