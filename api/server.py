"""The server process: it starts and stops the database, the first key, the socket, the background
work and the web server.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import uvicorn

from api.app import create_app
from api.bootstrap import PROJECT, local_holder, prepare
from api.http import probe
from api.http.connections import limited, possible_connections
from api.http.dependencies import Services
from api.routes import inference
from api.transfer.multipart import TEMPORARY_PREFIX
from ft_service import logs
from ft_service.agents.open_rollouts import OpenRollouts
from ft_service.bases.cache_folder import Cache
from ft_service.bases.catalogue import Catalogue
from ft_service.bases.describing import Descriptions
from ft_service.control import eval_runs, webhook_delivery
from ft_service.control import sweep_loop as sweep_keeper
from ft_service.control.admission.job_admission import LateAdmission
from ft_service.control.bases import pull_runner
from ft_service.control.bases.describe_bases import service_descriptions, watch_models
from ft_service.control.cleanup import housekeeping
from ft_service.control.jobs import former_hosts
from ft_service.control.jobs.reconciler import ReconcilerOptions
from ft_service.control.jobs.reconcilers import run_all
from ft_service.control.places.launcher_choice import new_launchers
from ft_service.control.places.price_list import price_list, refuse_other_currency
from ft_service.control.reinforcement import reinforcement_jobs
from ft_service.control.tinker import tinker_models, tinker_samples
from ft_service.control.tracking import metric_sender
from ft_service.engines.tending import EngineOptions
from ft_service.errors import SpecError, UnavailableError
from ft_service.graders import python_fence
from ft_service.host.home import create_home, openness, require_writable
from ft_service.host.lifetime import EndCall
from ft_service.host.port_owner import holder
from ft_service.host.running_servers import Server, announced, living_servers
from ft_service.jobs.states import Phase, State
from ft_service.meters import Meters
from ft_service.serving import exporting, handoff
from ft_service.serving.handoff import teaching_servers
from ft_service.serving.preview import Preview
from ft_service.serving.server_samples import ServerSampler
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.store.database import DatabaseLimits
from ft_service.store.sql import Store, migrate, open_store
from ft_service.traces import Traces

log = logging.getLogger(__name__)

Work = Callable[[Settings, Store, Meters, threading.Event], None]
"""Runs in its own thread until the event is set."""

_STREAM_GRACE_SECONDS = 3
"""Time that running answers (downloads) have after the server was asked to stop."""
_THREAD_GRACE_SECONDS = 10.0
_END_SECONDS = 28.0
"""How long a process may take to end by a signal, whatever hangs: less than the 30 after which
Kubernetes kills it.
"""
_SLICE_SECONDS = 0.0005
"""Longest time that a thread keeps the interpreter while others wait for it.

A request changes threads some ten times: with Python's 5 ms, each thread that computes would cost
every request of all projects 50 ms.
"""
_STALE_UPLOAD_SECONDS = 24 * 3600.0


def reconcile_here(
    settings: Settings,
    store: Store,
    meters: Meters,
    stop: threading.Event,
    descriptions: Descriptions,
    preview: Preview | None = None,
    traces: Traces | None = None,
) -> None:
    """Run jobs where FT_LAUNCHER says.

    `descriptions`: made by this process. `preview`: stops when jobs need its slots.
    """
    minutes = settings.preempt_after_minutes
    options = ReconcilerOptions(
        without_paths=settings.without_paths,
        meters=meters,
        traces=traces,
        slot_user=preview,
        preempt_after=None if minutes is None else minutes * 60.0,
        engines=EngineOptions(
            most_seats=settings.seats,
            mounts=settings.launcher == "kubernetes" and not settings.storage,
        ),
        admission=LateAdmission(store, settings, descriptions),
        leave_after_seconds=settings.unattended_seconds,
        rate_of=price_list(settings).rate,
    )
    run_all(
        store, new_launchers(settings, store.leases.move_host), Places.of(settings), options, stop
    )


def serve(
    settings: Settings,
    reconcile: Work | None = None,
    *,
    api_only: bool = False,
    as_json: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM. Only for a process's main thread.

    `api_only`: other processes migrate the database (`migrate`) and move jobs (`reconcile_only`).
    `as_json`: print one JSON object per line. Raises SpecError if a setting is wrong or the port is
    taken, UnavailableError if the database does not answer or is not up to date.
    """
    _prepare_process(settings)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_bound(settings))
        url = _url(settings, listener)
        if not api_only:
            migrate(settings.resolved_database_url())
        store = stack.enter_context(_opened(settings))
        refuse_other_currency(settings, store.usage.currency())
        meters = Meters()
        preview = Preview(settings, store) if settings.previews and not api_only else None
        descriptions = service_descriptions(settings, makes=not api_only)
        traces = stack.enter_context(_traced())
        rollouts = OpenRollouts("" if api_only else settings.public_url or url)
        app = create_app(settings, store, meters, preview, descriptions, traces, rollouts)
        _warn_of_shown(app.state.services.grader_limits.private)
        key = prepare(settings, store)
        store.keep_reserve()
        _remove_stale_uploads(settings.files_dir)
        web = _web_server(app, settings.max_connections, settings.trusted_proxies)
        others = living_servers(settings.home)
        stack.enter_context(announced(settings.home, url, settings.model_folders()))

        def end() -> None:
            web.should_exit = True
            store.hurry()

        stack.enter_context(_ended_by_signals(end))
        if not api_only:
            if preview is not None:
                stack.enter_context(_in_threads({"preview": preview.run}, end))
            reconcile = reconcile or partial(
                reconcile_here, descriptions=descriptions, preview=preview, traces=traces
            )
            services = app.state.services
            work = _background_work(settings, descriptions, reconcile, services, rollouts)
            given = {name: partial(one, settings, store, meters) for name, one in work.items()}
            stack.enter_context(_in_threads(given, end))
        _greet(url, key, as_json, _link(settings, store))
        _warn_of(others, settings, store, as_json)
        web.run(sockets=[listener])
        if not api_only:
            with contextlib.suppress(UnavailableError):  # which jobs run is not known then
                _print_running_jobs(store, as_json)


def reconcile_only(
    settings: Settings, reconcile: Work | None = None, *, as_json: bool = False
) -> None:
    """Move jobs and do the other background work until SIGINT or SIGTERM.

    Only for a process's main thread.

    `as_json`: as for `serve`. Raises UnavailableError if the database does not answer or is not up
    to date, and if a part of the work has failed.
    """
    _prepare_process(settings)
    ended = EndCall()
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(_opened(settings))
        refuse_other_currency(settings, store.usage.currency())

        def end() -> None:
            ended.make()
            store.hurry()

        stack.enter_context(_ended_by_signals(end))
        meters = Meters()
        if settings.metrics_port is not None:
            stack.enter_context(probe.serving(settings.metrics_port, settings.bind, meters))
        descriptions = service_descriptions(settings, makes=True)
        traces = stack.enter_context(_traced())
        # It answers requests for samples: nothing else does where API processes are others.
        preview = Preview(settings, store) if settings.previews else None
        if preview is not None:
            stack.enter_context(_in_threads({"preview": preview.run}, end))
        reconcile = reconcile or partial(
            reconcile_here, descriptions=descriptions, preview=preview, traces=traces
        )
        catalogue = Catalogue.from_settings(settings, descriptions)
        services = Services(settings, store, catalogue, meters, preview)
        work = _background_work(settings, descriptions, reconcile, services, OpenRollouts(""))
        stack.enter_context(
            _in_threads(
                {name: partial(one, settings, store, meters) for name, one in work.items()}, end
            )
        )
        _print("reconciling", "Moving jobs.", as_json)
        ended.wait()


def _prepare_process(settings: Settings) -> None:
    sys.setswitchinterval(_SLICE_SECONDS)
    logs.configure(settings.log_level, settings.log_format)
    # Refuses a wrong FT_CACHE_BYTES, by which every job would fail.
    Cache.from_environment(os.environ)
    create_home(settings.home)
    require_writable(settings.home)
    # A cluster's volume is shared by groups on purpose, and a container has no other users.
    if settings.launcher == "local" and (warning := openness(settings.home)):
        logging.getLogger(__name__).warning("%s", warning)


@contextlib.contextmanager
def _opened(settings: Settings) -> Iterator[Store]:
    """Yield the store of a database that has this version's schema."""
    store = open_store(settings.resolved_database_url(), DatabaseLimits.of(settings))
    try:
        store.check()
        store.keep_rules(settings)
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def _traced() -> Iterator[Traces | None]:
    """Yield what sends traces; None: the environment does not switch them on."""
    traces = Traces.from_environment(os.environ)
    try:
        yield traces
    finally:
        if traces is not None:
            traces.close()


def _background_work(
    settings: Settings,
    descriptions: Descriptions,
    reconcile: Work,
    services: Services,
    rollouts: OpenRollouts,
) -> dict[str, Work]:
    """`services`: by which this process answers chat completions. `rollouts`: where agents call the
    model.
    """
    work: dict[str, Work] = {
        "housekeeping": housekeeping.run,
        "hosts": former_hosts.run,
        "webhooks": webhook_delivery.run,
        "tracking": metric_sender.run,
        "sweeps": sweep_keeper.run,
        "handoff": handoff.run,
        "exports": exporting.run,
        "bases": partial(watch_models, descriptions=descriptions),
        "pulls": partial(pull_runner.run, descriptions=descriptions),
        "tinker": tinker_models.run,
        "reconciler": reconcile,
    }
    preview = services.preview
    sampler = ServerSampler(settings) if settings.inference_urls else preview
    if sampler is not None:
        teachers = ServerSampler(settings, teaching_servers(settings))
        work["evals"] = partial(eval_runs.run, ask=partial(inference.asked, services=services))
        work["reinforcement"] = partial(
            reinforcement_jobs.run,
            sampler=sampler,
            rollouts=rollouts if sampler is preview else None,
            teachers=teachers if settings.teacher_urls else None,
        )
        work["teachers"] = lambda settings, store, meters, stop: teachers.run(stop)
        if settings.tinker == "on":
            work["samples"] = partial(
                tinker_samples.run, sampler=sampler, descriptions=descriptions
            )
        if isinstance(sampler, ServerSampler):
            work["sampler"] = lambda settings, store, meters, stop: sampler.run(stop)
    return work


def _web_server(app: Any, max_connections: int, trusted_proxies: str = "") -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=limited(possible_connections(max_connections)),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=trusted_proxies,
        timeout_graceful_shutdown=_STREAM_GRACE_SECONDS,
    )
    return uvicorn.Server(config)


@contextlib.contextmanager
def _bound(settings: Settings) -> Iterator[socket.socket]:
    """Yield the listening socket.

    It is opened first, so that a port in use does not leave a half-started server.
    """
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    # With an explicit protocol: asyncio turns off Nagle's algorithm only for a socket that it
    # recognises as TCP, and with it every answer would wait 40 ms for the client's delayed
    # acknowledgement.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.bind, settings.port))
        except OSError as error:
            raise SpecError(
                _cannot_listen(settings, error), param="FT_PORT", code="cannot_listen"
            ) from None
        listener.listen(128)
        yield listener


def _cannot_listen(settings: Settings, error: OSError) -> str:
    if error.errno != errno.EADDRINUSE:
        return (
            f"The server cannot listen on {settings.bind} (FT_BIND), port {settings.port}: "
            f"{error.strerror or error}."
        )
    ours = [
        server.pid
        for server in living_servers(settings.home)
        if server.url.endswith(f":{settings.port}")
    ]
    whose = f"the server of {settings.home} (process {ours[0]})" if ours else holder(settings.port)
    return (
        f"Port {settings.port} of {settings.bind} is in use by {whose}. Stop that, or use "
        "another: --port N (or FT_PORT)."
    )


def _url(settings: Settings, listener: socket.socket) -> str:
    """Return an address that works from this host."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.bind, settings.bind)
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _ended_by_signals(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` at SIGINT and SIGTERM, also before the web server has started, and let the process
    clean up afterwards, for _END_SECONDS.

    uvicorn handles both while it runs, and raises them again afterwards, which would kill the
    process during the clean-up.
    """

    told = SimpleQueue[None]()  # unlike an Event, it may be used in a signal handler

    def handle(number: int, frame: FrameType | None) -> None:
        told.put(None)
        end()

    def watch() -> None:  # to the end of the process, which may wait for threads of others
        told.get()
        time.sleep(_END_SECONDS)
        living = ", ".join(
            thread.name
            for thread in threading.enumerate()
            if thread is not threading.current_thread()
        )
        log.error(
            "the process was told to end %g seconds ago, and hangs in a thread: %s",
            _END_SECONDS,
            living,
        )
        os._exit(1)

    threading.Thread(target=watch, name="end", daemon=True).start()
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _in_threads(
    work: Mapping[str, Callable[[threading.Event], None]], end: Callable[[], None]
) -> Iterator[None]:
    """Run background work, by name, while the block runs.

    If one fails, `end` is called: a server whose jobs do not move must not look healthy. Afterwards
    all are told to stop at once, and waited for together. Raises UnavailableError if one has
    failed.
    """
    stop = threading.Event()
    failures: dict[str, Exception] = {}

    def run(name: str, work: Callable[[threading.Event], None]) -> None:
        try:
            work(stop)
        except Exception as error:
            failures[name] = error
            end()

    threads = [
        threading.Thread(target=run, args=one, name=one[0], daemon=True) for one in work.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        ends = time.monotonic() + _THREAD_GRACE_SECONDS
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
    for name, error in failures.items():
        raise UnavailableError(
            f"The thread {name} has failed, so the server has ended: {error!r}"
        ) from error


def _print(event: str, text: str, as_json: bool, **values: object) -> None:
    """Print `text` to stdout, or a JSON object with the event and its values."""
    print(json.dumps({"event": event, **values}) if as_json else text, flush=True)


def _greet(url: str, key: str | None, as_json: bool, link: str | None) -> None:
    # Otherwise it may be a log, which must not contain a key or a link.
    private = sys.stdout.isatty()
    page = None if link is None else f"{url}{link if private else '/'}"
    text = f"Serving {url}/v1 (documentation: {url}/docs)"
    if page is not None:
        text += f"\nPage: {page} ({'signs in once; later' if private else 'sign in'}: ft open)"
    _print(
        "serving",
        text,
        as_json,
        base_url=f"{url}/v1",
        documentation=f"{url}/docs",
        page=page,
        pid=os.getpid(),
    )
    if key and private:
        _print("first_key", f"First admin key: {key}", as_json, key=key)


def _warn_of(others: Sequence[Server], settings: Settings, store: Store, as_json: bool) -> None:
    """Print that other servers serve this home, unless that is intended: several servers on one
    PostgreSQL.
    """
    if not others or (store.is_shared and settings.launcher != "local"):
        return
    named = " and ".join(f"{server.url} (process {server.pid})" for server in others)
    text = f"Warning: {settings.home} is served already, by {named}."
    if not store.is_shared:
        text += (
            " They share one SQLite database, which only one can write at a time: while the other "
            "is suspended during a write, "
            "every write here fails (database_locked). Both move jobs. Unless that is intended, "
            "stop one."
        )
    known = [{"url": server.url, "pid": server.pid} for server in others]
    _print("another_server", text, as_json, message=text, servers=known)


def _warn_of_shown(private: Mapping[str, Path]) -> None:
    """Log what python graders would see of the service's own, for which they are refused."""
    for name, folder in python_fence.shown(private).items():
        logging.getLogger(__name__).warning(
            "Graders of type python are refused: they see the libraries in %s, and %s = %s lies "
            "there. Move it elsewhere.",
            *(folder, name, private[name]),
        )


def _link(settings: Settings, store: Store) -> str | None:
    """Return the path of a link that signs in with the key of the credentials file; the page's path
    without that key; None without a page.
    """
    if settings.page == "off":
        return None
    holder = local_holder(settings, store)
    return "/" if holder is None else f"/sign-in?link={store.sessions.new_link(holder)}"


def _print_running_jobs(store: Store, as_json: bool) -> None:
    """Print the jobs that still run after the server has stopped: training does not need the
    server.
    """
    jobs = store.jobs.list_jobs(PROJECT, limit=100).data
    running = [
        job.id for job in jobs if job.state is State.RUNNING and job.phase is not Phase.STOPPING
    ]
    text = (
        f"Stopped serving. Training continues without the server: {', '.join(running)}\n"
        "The next start takes over these jobs; to stop one, start the server and cancel it."
    )
    if running or as_json:
        _print("stopped", text, as_json, running=running)


def _remove_stale_uploads(folder: Path) -> None:
    """Remove temporary files of a server that was killed during an upload."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - _STALE_UPLOAD_SECONDS:
                path.unlink()
