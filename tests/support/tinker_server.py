"""Servers for the `tinker` package, whose models train on this host."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ft_service.rundir.directory import RunDir
from ft_service.tinker.names import KEY_PREFIX
from tests.support.ports import free_port
from tests.support.service import Server, all_of, send

PROGRAMS = Path(__file__).parent / "programs"


@contextlib.contextmanager
def serving(
    folder: Path,
    models: Path,
    slots: int,
    ranks: int = 2,
    together: int = 1,
    precision: str = "nf4",
    **settings: str,
) -> Iterator[Server]:
    """A server for clients of these bases, on the same port after a kill.

    `together`: sequences of a micro-batch.
    """
    (folder / "home").mkdir(parents=True)
    own: Any = {
        **tinker_settings(folder, ranks, together, precision),
        "FT_PORT": str(free_port()),
        **settings,
    }
    server = Server(folder / "home", models, slots=slots, **own)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        # Which a failed test leaves, and go on without a server.
        send(set(trainers_of(server)), signal.SIGKILL)


def tinker_settings(
    folder: Path, ranks: int, together: int = 1, precision: str = "nf4"
) -> dict[str, str]:
    """How the models of such clients train, written into a file of the folder.

    `together`: as of `serving`.
    """
    options = folder / "options.yaml"
    options.write_text(
        f"precision: {{default: {precision}, compute: fp32}}\n"
        f"training: {{max_length: 256, per_device_train_batch_size: {together}}}\n"
        f"distributed: {{nproc_per_node: {ranks}}}\n"
    )
    return {"FT_TINKER_OPTIONS": str(options), "FT_TINKER_IDLE_SECONDS": "5"}


def environment_of(server: Server) -> dict[str, str]:
    """What the package needs to know."""
    client = server.client()
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FT_", "TINKER_"))
        },
        "TINKER_BASE_URL": str(client.base_url).removesuffix("/v1/"),
        "TINKER_API_KEY": KEY_PREFIX + client.api_key,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }


def trainers_of(server: Server) -> list[int]:
    """Ranks, torchruns and supervisors, of engines and of models that have ranks of their own."""
    folders = [*(server.home / "engines").glob("*"), *(server.home / "runs").glob("*")]
    return [pid for folder in folders for pid in all_of(RunDir(folder))]


def samplers_of(server: Server) -> list[int]:
    """Processes of the server's preview."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server.pid and b"workers.serving" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found
