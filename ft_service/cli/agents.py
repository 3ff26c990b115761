"""`ft agent`: makes this machine one of the hosts where jobs run; and what is asked of such hosts: list, drain, forget."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from ft_service import logs
from ft_service.cli.output import Json, load_settings, local_time, print_json, print_table
from ft_service.errors import ConflictError, SpecError
from ft_service.host import hardware
from ft_service.host.lifetime import try_lock
from ft_service.plan.machines import this_host
from ft_service.plan.text import bytes_text
from ft_service.settings import Settings

if TYPE_CHECKING:
    from ft_service.store.fleet.hosts import HostRow
    from ft_service.store.sql import Store

agent = typer.Typer(help="Make this machine one of several hosts where jobs run, and say which of them may.")
HostName = Annotated[str, typer.Argument(metavar="HOST", help="Its name, as `ft agents` shows it.")]


def register(app: typer.Typer) -> None:
    app.command("agents")(list_agents)
    app.add_typer(agent, name="agent")


@agent.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    name: Annotated[str | None, typer.Option(help="What the host is called. Default: its host name.")] = None,
    address: Annotated[
        str | None, typer.Option(help="By which other hosts reach this one. Default: that from which it reaches the database.")
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Ranks at once. Default: FT_SLOTS, else its GPUs or cores.")] = None,
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder of this host's own, for locks; it must stay while jobs run. Default: below /tmp."),
    ] = None,
) -> None:
    """Run jobs on this host, until Ctrl-C; what runs then goes on, and the next agent finds it.

    Needs FT_LAUNCHER=agents with the service's FT_DATABASE_URL, and its FT_HOME as a shared folder or its FT_STORAGE.
    """
    if context.invoked_subcommand is not None:
        return
    from ft_service.launcher.agent import Agent, Equipment  # the database takes time to import
    from ft_service.storage.locations import Places

    settings = _settings(slots=slots)
    logs.configure(settings.log_level, settings.log_format)
    host = _this_host(settings, name, address)
    folder = (scratch or Path(tempfile.gettempdir()) / f"ft-agent-{os.getuid()}" / host.host).absolute()
    _own(folder)
    lock = try_lock(folder / "agent.lock")
    if lock is None:
        raise ConflictError(f"An agent of host {host.host} runs on this machine already (it holds {folder}).")
    equipment = Equipment(folder, settings.stop_grace_seconds, settings.host_lease_seconds, settings.storage)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with _store(settings) as store:
        print(f"Host {host.host} ({host.address}): {host.slots} slots, {host.kind}.", flush=True)
        Agent(store, Places.of(settings), host, equipment).run(stop)
    os.close(lock)


@agent.command()
def drain(host: HostName, as_json: Json = False) -> None:
    """Place nothing on a host any more; what runs there stops at a checkpoint, and goes on elsewhere."""
    _mark(host, True, as_json)


@agent.command()
def resume(host: HostName, as_json: Json = False) -> None:
    """Place jobs on a drained host again."""
    _mark(host, False, as_json)


@agent.command()
def forget(host: HostName, as_json: Json = False) -> None:
    """Remove a host that does not come back from the list."""
    with _store(_settings()) as store:
        store.remove_host(host)
    _say({"host": host, "forgotten": True}, f"{host} is forgotten.", as_json)


def list_agents(as_json: Json = False) -> None:
    """List the hosts whose agents have joined: what they have, what is in use, and whether they answer."""
    settings = _settings()
    with _store(settings) as store:
        hosts = store.list_hosts()
    if as_json:
        print_json([{**asdict(host), "state": _state(host, settings)} for host in hosts])
    elif hosts:
        rows = [
            (
                host.host,
                host.address,
                host.kind,
                "" if host.memory is None else bytes_text(host.memory),
                f"{host.held}/{host.slots}",
                _state(host, settings),
                local_time(host.joined_at),
            )
            for host in hosts
        ]
        print_table(("HOST", "ADDRESS", "KIND", "MEMORY", "IN USE", "STATE", "JOINED"), rows)
    else:
        print("No host has joined yet. Start `ft agent` on each.")


def _state(host: HostRow, settings: Settings) -> str:
    if host.silent_seconds > settings.host_lease_seconds:
        return f"silent for {host.silent_seconds:.0f} s"
    if host.drained_at is None:
        return "ready"
    return "draining" if host.held else "drained"


def _mark(host: str, drained: bool, as_json: bool) -> None:
    with _store(_settings()) as store:
        store.drain_host(host, drained)
    said = (
        "gets no jobs any more; what runs there stops at a checkpoint and goes on elsewhere" if drained else "gets jobs again"
    )
    _say({"host": host, "drained": drained}, f"{host} {said}.", as_json)


def _say(document: dict[str, object], text: str, as_json: bool) -> None:
    print_json(document) if as_json else print(text)


def _settings(**given: object) -> Settings:
    """Raises SpecError unless they are those of an installation with agents."""
    settings = load_settings(**given)
    if settings.launcher != "agents":
        raise SpecError(
            f"FT_LAUNCHER = {settings.launcher}: there are agents with FT_LAUNCHER = agents only, which `ft serve` or "
            "`ft reconcile` needs too, with PostgreSQL in FT_DATABASE_URL.",
            param="FT_LAUNCHER",
        )
    return settings


@contextlib.contextmanager
def _store(settings: Settings) -> Iterator[Store]:
    from ft_service.store.sql import open_store

    store = open_store(settings.resolved_database_url())
    try:
        store.check()
        yield store
    finally:
        store.close()


def _this_host(settings: Settings, name: str | None, address: str | None) -> HostRow:
    from ft_service.store.fleet.hosts import HostRow

    machine, gpus = this_host(), hardware.gpu_count()
    kind, memory = hardware.gpu_memory() or (machine.name, machine.memory)
    return HostRow(
        host=name or platform.node(),
        slots=settings.slots or hardware.default_slots(),
        address=address or _own_address(settings),
        kind=kind,
        gpus=gpus,
        memory=memory,
    )


def _own_address(settings: Settings) -> str:
    """That of the interface by which the database is reached; where it is on this machine, the host's name."""
    url = urlsplit(settings.resolved_database_url())
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname or "127.0.0.1", url.port or 5432))  # sends nothing
        found = probe.getsockname()[0]
        if not found.startswith("127."):
            return found
    return platform.node()


def _own(folder: Path) -> None:
    """Make a folder that nobody else can write to. Raises SpecError if it is somebody else's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (folder, folder.parent) if folder.parent.name.startswith("ft-agent-") else (folder,):
        if path.stat().st_uid != os.getuid() or path.is_symlink():
            raise SpecError(f"--scratch = {str(folder)!r}: {path} belongs to somebody else. Name another.", param="scratch")
