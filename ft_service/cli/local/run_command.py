"""`ft run`: run a job without a server, in a run directory."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ft_service.cli.display import Display, display_for
from ft_service.cli.local.job_inputs import describe_job, examine_data
from ft_service.cli.local.spec_arguments import (
    Changes,
    ModelName,
    SpecOrData,
    Suffix,
    load_spec_arguments,
)
from ft_service.cli.local_store import settings_with_models
from ft_service.cli.output import Json, print_error, print_json, print_note, print_text
from ft_service.control.admission.reinforcement_admission import refuse_without_sampler
from ft_service.control.tracking.integration_check import refuse_without_server
from ft_service.errors import FtError, SpecError
from ft_service.host.hardware import default_slots, gpu_count, torch_build
from ft_service.host.home import create_home
from ft_service.ids import new_id
from ft_service.local.run import run_local, wait_begun
from ft_service.plan.admit import admit, settle_counted
from ft_service.plan.auto_options import keep_choices
from ft_service.plan.machines import measured, this_host
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.rundir.attempt import ATTEMPTS
from ft_service.rundir.checkpoints import CHECKPOINTS
from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import Exit, ExitReason
from ft_service.rundir.events import Event
from ft_service.settings import Settings
from ft_service.spec import JobRequest, JobSpec
from ft_service.spec_files.parent import prepare_local
from ft_service.spec_files.spec_file import SpecFile, resolve_spec_file
from ft_service.supervisor.command_line import SupervisorOptions
from ft_service.supervisor.torchrun import Node

RunDirectory = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Run directory; an existing run in it is continued. Default: a new folder in FT_HOME.",
    ),
]
NodeRank = Annotated[
    int,
    typer.Option(
        metavar="K",
        min=0,
        help="For distributed.nnodes above 1: number of this host, from 0. Run the command on "
        "each, with a shared DIR.",
    ),
]
Endpoint = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="For distributed.nnodes above 1: address of host 0, with a free port.",
    ),
]
Address = Annotated[
    str,
    typer.Option(
        metavar="HOST",
        help="Address at which the other hosts reach this one. Default: that of its host name.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command("run")(run)


def run(
    spec: SpecOrData,
    model: ModelName = None,
    suffix: Suffix = None,
    changes: Changes = None,
    run_dir: RunDirectory = None,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = "",
    address: Address = "",
    as_json: Json = False,
) -> int:
    """Run a SPEC on this machine without a server.

    Ctrl-C stops it at a checkpoint; the same --run-dir continues it.
    """
    if torch_build() is None:
        raise FtError(
            "ft run trains on this host, and PyTorch is not installed here: pip install "
            "'ft-service[workers]'."
        )
    settings = settings_with_models()
    loaded = load_spec_arguments(spec, changes, model, suffix)
    refuse_without_server(loaded.request)
    refuse_without_sampler(loaded.request)
    node = _node(loaded.request, run_dir, node_rank, rdzv_endpoint, address)
    job_id = new_id("ftjob-")
    folder = (run_dir or settings.runs_dir / job_id).absolute()
    _refuse_folders_of_others(folder)
    create_home(settings.home)
    if node is not None and node.index:
        wait_begun(folder)  # its id and its seed are drawn on host 0
    resolved = _with_ranks_of_this_host(resolve_for(loaded, settings, folder, job_id))
    base = describe_job(resolved, settings, print_note)
    machine = measured(this_host(), base.products)
    admitted = admit(base, resolved, machine, SampleLengths.of_size(loaded.training_file.bytes))
    begun = RunDir(folder).list(ATTEMPTS)
    for adapter in resolved.adapters_read:
        if adapter is resolved.parent and begun:  # which has its own checkpoints
            continue
        prepare_local(adapter)
    with display_for(Console(highlight=False, emoji=False, stderr=as_json)) as display:
        display.status("starting")
        for level, message in admitted.events:
            display.message(level, message, time.time())
        data = examine_data(
            admitted.spec,
            settings,
            lambda sentence: display.message("info", sentence, time.time()),
            base,
        )
        for level, message in data.messages(admitted.spec):
            display.message(level, message, time.time())
        spec_of_job = admitted.spec
        lengths = data.lengths(admitted.spec)
        if lengths is not None:
            counted = settle_counted(base, admitted.spec, machine, lengths)
            spec_of_job = counted.spec
            display.message(*counted.events[0], time.time())  # the rest was told before
        with _time_limit(loaded.request.max_seconds) as stop:
            ended = run_local(
                spec_of_job,
                folder,
                lambda event: _show(display, event),
                stop=stop,
                node=node,
                options=SupervisorOptions(grace_seconds=settings.stop_grace_seconds),
            )
    given: dict[str, object] = {"model": model, "suffix": suffix, "node_rank": node_rank or None}
    given |= {"rdzv_endpoint": rdzv_endpoint or None, "address": address or None, "run_dir": folder}
    again = _command_line(spec, changes or (), given)
    return _report(ended, folder, again, as_json)


def _command_line(spec: Path, changes: Sequence[str], given: Mapping[str, object]) -> str:
    """The line that continues a run: a run of other options is not continued.

    `given`: the command's parameters by name.
    """
    words = ["ft", "run", str(spec), *(word for change in changes for word in ("--set", change))]
    options = {
        f"--{name.replace('_', '-')}": str(value)
        for name, value in given.items()
        if value is not None
    }
    return shlex.join([*words, *(word for option in options.items() for word in option)])


def _refuse_folders_of_others(folder: Path) -> None:
    """Raise SpecError for a folder without a run whose entries a run would replace: old checkpoints
    are removed, whatever they are.
    """
    there = [name for name in (CHECKPOINTS, "adapter", "adapters") if (folder / name).exists()]
    if there and not (folder / "spec.json").exists():
        raise SpecError(
            f"--run-dir = {str(folder)!r}: it holds {' and '.join(there)}, and no run that wrote "
            "them (spec.json): a run would "
            "replace them. Name another folder.",
            param="run-dir",
        )


@contextlib.contextmanager
def _time_limit(seconds: int | None) -> Iterator[threading.Event]:
    """Yield an event that is set after so many seconds; None: never."""
    over = threading.Event()
    timer = None if seconds is None else threading.Timer(seconds, over.set)
    if timer:
        timer.daemon = True
        timer.start()
    try:
        yield over
    finally:
        if timer:
            timer.cancel()


def _node(
    request: JobRequest, run_dir: Path | None, rank: int, endpoint: str, address: str
) -> Node | None:
    """Return this host's place in the job; None: the job has one host.

    Raises SpecError for options that do not fit the job.
    """
    nodes = request.distributed.nnodes
    most = request.distributed.max_nnodes
    if most is not None:
        raise SpecError(
            f"distributed.nnodes = '{nodes}:{most}': `ft run` runs on the hosts on which it is "
            "called. Give their number.",
            param="distributed.nnodes",
        )
    if nodes == 1:
        if rank or endpoint or address:
            message = (
                "--node-rank, --rdzv-endpoint and --address are for jobs with "
                "distributed.nnodes above 1. Leave them out."
            )
            raise SpecError(message, param="distributed.nnodes")
        return None
    if rank >= nodes:
        raise SpecError(
            f"--node-rank = {rank}: distributed.nnodes = {nodes}, so it is one of 0 to "
            f"{nodes - 1}.",
            param="node-rank",
        )
    host, _, port = endpoint.rpartition(":")
    if run_dir is None or not host or not port.isdigit():
        raise SpecError(
            f"distributed.nnodes = {nodes}: give --run-dir with a folder that all {nodes} hosts "
            "share, and on each the same "
            "--rdzv-endpoint HOST:PORT, and --node-rank 0, 1, ….",
            param="distributed.nnodes",
        )
    return Node(rank, endpoint, address, concludes=rank == 0)


def _with_ranks_of_this_host(spec: JobSpec) -> JobSpec:
    """Return a spec with a range of ranks, set to as many ranks as this host has."""
    if spec.distributed.max_nproc_per_node is None:
        return spec
    fewest = spec.world_size // spec.distributed.nnodes
    nodes, ranks = spec.shapes(spec.distributed.nnodes, max(fewest, default_slots()), gpu_count())[
        0
    ]
    return spec.on(nodes, ranks)


def resolve_for(loaded: SpecFile, settings: Settings, folder: Path, job_id: str) -> JobSpec:
    """Return the spec to train in a run directory.

    A run that has begun keeps its id, and the seed, the format and the length of samples that were
    chosen for it.
    """
    begun = RunDir(folder).read("spec.json", JobSpec)
    if begun is None:
        return resolve_spec_file(loaded, settings, job_id=job_id, seed=secrets.randbelow(2**31))
    resolved = resolve_spec_file(loaded, settings, job_id=begun.job_id, seed=begun.seed)
    return keep_choices(resolved, begun)


def _show(display: Display, event: Event) -> None:
    display.status("running")
    if event.metrics is not None:
        display.metrics(event.metrics, event.time)
    if event.kind != "metrics":
        display.message(event.level, event.message, event.time)


def _report(ended: Exit, folder: Path, again: str, as_json: bool) -> int:
    if as_json:
        print_json({**ended.model_dump(), "run_dir": str(folder)})
    elif ended.reason is ExitReason.SUCCEEDED:
        print_text(f"The adapter is in {folder / 'adapter'}")
    elif ended.reason is ExitReason.STOPPED:
        print(f"Stopped at a checkpoint. To continue: {again}", file=sys.stderr)
    else:
        reason = ended.error.message if ended.error else ended.message
        # A killed process is no fault of SPEC or data: what was trained is there, and the same line
        # goes on.
        killed = ended.reason is ExitReason.WORKER_KILLED
        hint = f"\nTo continue from its last checkpoint: {again}" if killed else ""
        print_error(f"{reason}\nThe logs are in {folder / ATTEMPTS}{hint}", ended.code)
    return ended.code
