"""The server process: database, first key, socket, reconciler, web server; and an orderly end of all of them."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import uvicorn

from api.app import create_app
from api.bootstrap import PROJECT, local_holder, prepare
from api.http import probe
from api.http.connections import at_most, limited
from api.transfer.multipart import TEMPORARY_PREFIX
from ft_service import logs
from ft_service.control import housekeeping, webhook_delivery
from ft_service.control.capacity import machines_now
from ft_service.control.launcher_choice import new_launcher
from ft_service.control.reconciler import Reconciler
from ft_service.control.sweeps import keeper as sweep_keeper
from ft_service.control.tracking import keeper
from ft_service.errors import SpecError, UnavailableError
from ft_service.host.home import create_home, openness
from ft_service.host.listeners import holder
from ft_service.host.servers import Server, announced, living_servers
from ft_service.jobs.states import Phase, State
from ft_service.meters import Meters
from ft_service.serving import exporting, handoff
from ft_service.serving.preview import Preview
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.sql import Store, migrate, open_store

Work = Callable[[Settings, Store, Meters, threading.Event], None]
"""Goes on until the event is set, in a thread of its own."""

_Ended = TypeVar("_Ended", bound="_Ending")
_END_POLL_SECONDS = 0.2
_STREAM_GRACE_SECONDS = 3
"""How long running answers (downloads) may go on after the server was told to stop."""
_THREAD_GRACE_SECONDS = 10.0
_STALE_UPLOAD_SECONDS = 24 * 3600.0


class _Ending(Protocol):
    """Something that ends when its flag is set: the web server, or a process without one."""

    should_exit: bool


def reconcile_here(
    settings: Settings, store: Store, meters: Meters, stop: threading.Event, preview: Preview | None = None
) -> None:
    """Run jobs where FT_LAUNCHER says. `preview`: makes way for them."""
    minutes = settings.preempt_after_minutes
    displace_after = None if minutes is None else minutes * 60.0
    launcher, places = new_launcher(settings, store), Places.of(settings)
    Reconciler(
        store,
        launcher,
        places,
        meters=meters,
        guest=preview,
        displace_after=displace_after,
        machines=partial(machines_now, settings, store),
    ).run(stop)


def serve(settings: Settings, reconcile: Work | None = None, *, api_only: bool = False, as_json: bool = False) -> None:
    """Serve until SIGINT or SIGTERM. Only for a process's main thread.

    `api_only`: other processes bring the database up to date (`migrate`) and move jobs (`reconcile_only`). `as_json`: print
    one object a line. Raises SpecError if a setting is wrong or the port is taken, UnavailableError if the database
    does not answer or is not up to date.
    """
    logs.configure(settings.log_level, settings.log_format)
    _create_home(settings)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_bound(settings))
        url = _url(settings, listener)
        if not api_only:
            migrate(settings.resolved_database_url())
        store = stack.enter_context(_opened(settings))
        meters = Meters()
        preview = Preview(settings, store) if settings.previews and not api_only else None
        app = create_app(settings, store, meters, preview)
        key = prepare(settings, store)
        store.keep_reserve()
        _remove_stale_uploads(settings.files_dir)
        web = _web_server(app, settings.max_connections)
        others = living_servers(settings.home)
        stack.enter_context(announced(settings.home, url, settings.model_folders()))
        stack.enter_context(_ended_by_signals(web))
        if not api_only:
            if preview is not None:
                stack.enter_context(_in_thread("preview", preview.run, web))
            _work_beside(stack, settings, store, meters, reconcile or partial(reconcile_here, preview=preview), web)
        _greet(url, key, as_json, _link(settings, store))
        _warn_of(others, settings, store, as_json)
        _look_for_garbage_less()
        web.run(sockets=[listener])
        if not api_only:
            _say_what_goes_on(store, as_json)


def reconcile_only(settings: Settings, reconcile: Work = reconcile_here, *, as_json: bool = False) -> None:
    """Move jobs, and do the other work beside the web server, until SIGINT or SIGTERM. Only for a process's main thread.

    `as_json`: as for `serve`. Raises UnavailableError if the database does not answer or is not up to date, and if a part of
    the work has failed.
    """
    logs.configure(settings.log_level, settings.log_format)
    _create_home(settings)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(_opened(settings))
        end = stack.enter_context(_ended_by_signals(_End()))
        meters = Meters()
        if settings.metrics_port is not None:
            stack.enter_context(probe.serving(settings.metrics_port, settings.bind, meters))
        _work_beside(stack, settings, store, meters, reconcile, end)
        _say("reconciling", "Moving jobs.", as_json)
        while not end.should_exit:
            time.sleep(_END_POLL_SECONDS)


def _create_home(settings: Settings) -> None:
    create_home(settings.home)
    # A cluster's volume is shared by groups on purpose, and no other user is in a container.
    if settings.launcher == "local" and (warning := openness(settings.home)):
        logging.getLogger(__name__).warning("%s", warning)


@dataclass
class _End:
    """A flag to end, in place of a web server."""

    should_exit: bool = False


@contextlib.contextmanager
def _opened(settings: Settings) -> Iterator[Store]:
    """The database, whose schema is this version's."""
    store = open_store(settings.resolved_database_url())
    try:
        store.check()
        yield store
    finally:
        store.close()


def _work_beside(
    stack: contextlib.ExitStack, settings: Settings, store: Store, meters: Meters, reconcile: Work, end: _Ending
) -> None:
    works: dict[str, Work] = {
        "housekeeping": housekeeping.run,
        "webhooks": webhook_delivery.run,
        "tracking": keeper.run,
        "sweeps": sweep_keeper.run,
        "handoff": handoff.run,
        "exports": exporting.run,
        "reconciler": reconcile,
    }
    for name, work in works.items():
        stack.enter_context(_in_thread(name, partial(work, settings, store, meters), end))


def _web_server(app: Any, max_connections: int) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=limited(at_most(max_connections)),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here depends on who is asking from where, or under which name
        timeout_graceful_shutdown=_STREAM_GRACE_SECONDS,
    )
    return uvicorn.Server(config)


@contextlib.contextmanager
def _bound(settings: Settings) -> Iterator[socket.socket]:
    """The listening socket, opened before anything else: a port that is taken must not leave a half-started server."""
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    # By its protocol's name: asyncio turns Nagle's algorithm off only where it sees that it is TCP, and without that every
    # answer waits 40 ms for the client's delayed acknowledgement.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.bind, settings.port))
        except OSError as error:
            raise SpecError(_cannot_listen(settings, error), param="FT_PORT", code="cannot_listen") from None
        listener.listen(128)
        yield listener


def _cannot_listen(settings: Settings, error: OSError) -> str:
    if error.errno != errno.EADDRINUSE:
        return f"The server cannot listen on {settings.bind} (FT_BIND), port {settings.port}: {error.strerror or error}."
    ours = [server.pid for server in living_servers(settings.home) if server.url.endswith(f":{settings.port}")]
    whose = f"the server of {settings.home} (process {ours[0]})" if ours else holder(settings.port)
    return (
        f"Port {settings.port} of {settings.bind} is in use by {whose}. Stop that, or take another port: --port N (or FT_PORT)."
    )


def _url(settings: Settings, listener: socket.socket) -> str:
    """An address that works from this host."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.bind, settings.bind)
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _ended_by_signals(web: _Ended) -> Iterator[_Ended]:
    """SIGINT and SIGTERM end the web server, also before it has started, and then leave this process time to clean up.

    uvicorn handles them while it runs, and raises them again afterwards, which would kill the process in the middle of that.
    """

    def end(number: int, frame: FrameType | None) -> None:
        web.should_exit = True

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield web
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _in_thread(name: str, work: Callable[[threading.Event], None], web: _Ending) -> Iterator[None]:
    """Run work beside the server. If it fails, the process ends: a server whose jobs stand still must not look well.

    Raises UnavailableError at the end if it has failed.
    """
    stop = threading.Event()
    failures: list[Exception] = []

    def run() -> None:
        try:
            work(stop)
        except Exception as error:
            failures.append(error)
            web.should_exit = True

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_THREAD_GRACE_SECONDS)
    if failures:
        raise UnavailableError(f"The thread {name} has failed, so the server has ended: {failures[0]!r}") from failures[0]


def _say(event: str, text: str, as_json: bool, **values: object) -> None:
    """Print one line on stdout: `text`, or an object with the event and its values."""
    print(json.dumps({"event": event, **values}) if as_json else text, flush=True)


def _look_for_garbage_less() -> None:
    """Exempt all present objects from garbage collection, and collect less often: counting references frees most of what a
    request leaves behind. Saves a tenth of a request's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _greet(url: str, key: str | None, as_json: bool, link: str | None) -> None:
    private = sys.stdout.isatty()  # else it may be a log, where no key and no link belongs
    page = None if link is None else f"{url}{link if private else '/'}"
    text = f"Serving {url}/v1 (documentation: {url}/docs)"
    if page is not None:
        text += f"\nPage: {page} ({'signs in once; later' if private else 'sign in'}: ft open)"
    _say("serving", text, as_json, base_url=f"{url}/v1", documentation=f"{url}/docs", page=page, pid=os.getpid())
    if key and private:
        _say("first_key", f"First admin key: {key}", as_json, key=key)


def _warn_of(others: Sequence[Server], settings: Settings, store: Store, as_json: bool) -> None:
    """Say that other servers serve this home, unless that is how it is meant to be: several on one PostgreSQL."""
    if not others or (store.is_shared and settings.launcher != "local"):
        return
    named = " and ".join(f"{server.url} (process {server.pid})" for server in others)
    text = f"Warning: {settings.home} is served already, by {named}."
    if not store.is_shared:
        text += (
            " They share one SQLite database, which one at a time writes: while the other is stopped in the middle of a write, "
            "every write here fails (database_locked). Jobs are moved by either. Unless that is meant, end one."
        )
    found = [{"url": server.url, "pid": server.pid} for server in others]
    _say("another_server", text, as_json, message=text, servers=found)


def _link(settings: Settings, store: Store) -> str | None:
    """Path of a link that signs in with the key of the credentials file; without one, of the page; None: there is no page."""
    if settings.page == "off":
        return None
    holder = local_holder(settings, store)
    return "/" if holder is None else f"/sign-in?link={store.new_link(holder)}"


def _say_what_goes_on(store: Store, as_json: bool) -> None:
    """Tell whoever stops the server which jobs still run: training does not need the server."""
    jobs = store.list_jobs(PROJECT, limit=100).data
    running = [job.id for job in jobs if job.state is State.RUNNING and job.phase is not Phase.STOPPING]
    text = (
        f"Stopped serving. Training goes on without the server: {', '.join(running)}\n"
        "The next start takes these jobs up again; to stop one, start the server and cancel it."
    )
    if running or as_json:
        _say("stopped", text, as_json, running=running)


def _remove_stale_uploads(folder: Path) -> None:
    """Remove temporary files of a server that was killed in the middle of an upload."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - _STALE_UPLOAD_SECONDS:
                path.unlink()
