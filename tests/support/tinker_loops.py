"""Training loops of Tinker's clients, and what they leave."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from safetensors.torch import load_file

from ft_service.tinker.commands import CommandLog
from ft_service.tinker.names import job_id_of
from tests.support.service import Server, wait_until
from tests.support.tinker_server import PROGRAMS, environment_of

STEPS = 9
VARIANTS = 5
"""What a client trains on follows from its number modulo VARIANTS."""
Lines = dict[int, list[dict[str, Any]]]


@contextlib.contextmanager
def loops(server: Server, seeds: Sequence[int]) -> Iterator[tuple[subprocess.Popen[str], Lines]]:
    """Loops of clients, and the lines of each. They must succeed."""
    command = [
        sys.executable,
        str(PROGRAMS / "tinker_loop.py"),
        "tiny",
        str(STEPS),
        str(VARIANTS),
        *map(str, seeds),
    ]
    process = subprocess.Popen(
        command, env=environment_of(server), stdout=subprocess.PIPE, text=True
    )
    lines: Lines = {seed: [] for seed in seeds}

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as told:
            for line in told:
                lines[json.loads(line)["seed"]].append(json.loads(line))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield process, lines
        assert process.wait(2400) == 0
    finally:
        process.kill()
        process.wait()
        thread.join()


def outcome(
    server: Server, lines: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """What a client was told of its steps, and the adapter that its model leaves, to the last
    bit.
    """
    job_id = job_id_of(lines[0]["model"])
    wait_until(server.client(), job_id, "succeeded")
    run = server.run(job_id)
    assert CommandLog(run).first_missing() - 1 == 2 * STEPS + 2 * (STEPS // 3) + 1, (
        "no command twice, none missing"
    )
    assert [line["step"] for line in lines[1:]] == list(range(STEPS))
    tensors = load_file(run.path("adapter/adapter_model.safetensors"))
    told = [{name: value for name, value in line.items() if name != "seed"} for line in lines[1:]]
    return told, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
