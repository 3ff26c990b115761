"""The commands of `ft`: where each is, and its line in `ft --help`.

A command's module is imported when it is called, and not when it is listed or completed: most of what `ft` can do needs
packages that the rest does not.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import typer
import typer.core

from ft_service.cli.plain_help import in_plain_words

_CLI = "ft_service.cli"


@dataclass(frozen=True)
class Entry:
    """A command, or a group of commands."""

    module: str
    """Below ft_service.cli; its `register(typer)` adds the command, perhaps beside others."""
    title: str
    """Under which it is listed."""
    sentence: str
    """The first one of what its own help says."""


_JOBS = "Jobs"
_ALONE = "Before and without a server"
_MODELS = "Models"
_SERVICE = "The service"

ENTRIES: Mapping[str, Entry] = {
    "submit": Entry("jobs.submit", _JOBS, "Check a SPEC and its data, upload the files and create the job."),
    "jobs": Entry("jobs.listing", _JOBS, "List the newest jobs."),
    "get": Entry("jobs.listing", _JOBS, "Show one job: its state, its options, its files and its checkpoints."),
    "watch": Entry("jobs.following", _JOBS, "Show a job's progress until it finishes or is paused."),
    "logs": Entry("jobs.following", _JOBS, "Print what a job's processes have printed: supervisor, torchrun and every rank."),
    "events": Entry("jobs.listing", _JOBS, "Print what has happened to a job, the newest last."),
    "checkpoints": Entry("jobs.listing", _JOBS, "List a job's checkpoints, the newest first."),
    "files": Entry("jobs.listing", _JOBS, "List the newest files that were uploaded, and the results of jobs."),
    "compare": Entry(
        "jobs.comparing", _JOBS, "Show the options in which two jobs differ, their results, and the curves of their losses."
    ),
    "eval": Entry(
        "jobs.evaluations",
        _JOBS,
        "Show a job's answers before and after training side by side, with their scores at every step that was evaluated.",
    ),
    "pause": Entry("jobs.verbs", _JOBS, "Stop a job at a checkpoint and free its processors, until it is resumed."),
    "resume": Entry("jobs.verbs", _JOBS, "Let a paused job go on from its checkpoint."),
    "cancel": Entry("jobs.verbs", _JOBS, "Stop a job for good."),
    "rm": Entry("jobs.verbs", _JOBS, "Remove an uploaded file, or the tuned model of a job."),
    "download": Entry(
        "jobs.fetching", _JOBS, "Download a finished job's adapter, or one of a checkpoint's, in the format that PEFT loads."
    ),
    "sweep": Entry(
        "jobs.sweeps", _JOBS, "Try several values of options: jobs under one id, of which those without hope are stopped early."
    ),
    "plan": Entry(
        "local.plan_command", _ALONE, "Show whether a SPEC fits, what it takes in memory and time, and what would help."
    ),
    "run": Entry("local.run_command", _ALONE, "Run a SPEC on this machine without a server."),
    "convert": Entry(
        "local.convert_command",
        _ALONE,
        "Print a configuration of Accelerate, DeepSpeed, Transformers, TRL, Axolotl or LLaMA-Factory as a SPEC, and what "
        "becomes of each of its options.",
    ),
    "data": Entry(
        "data_files.commands", _ALONE, "Look at a data file before it is trained on: check, show, count and convert it."
    ),
    "models": Entry(
        "models", _MODELS, "List the models that the server knows: bases, whether they can be tuned, and tuned ones."
    ),
    "pull": Entry(
        "models", _MODELS, "Fetch a base from Hugging Face's hub (or HF_ENDPOINT's) into the first folder of FT_MODELS."
    ),
    "chat": Entry("chat_command", _MODELS, "Talk to a tuned model."),
    "merge": Entry(
        "merge_command",
        _MODELS,
        "Write base + adapter as one model, without a GPU, and what that changes in validation loss.",
    ),
    "export": Entry("export_command", _MODELS, "Write a tuned model as another program reads it."),
    "verify": Entry("jobs.verifying", _MODELS, "Check an adapter's manifest, checksums and shapes."),
    "serve": Entry("serve", _SERVICE, "Serve the REST API and run jobs on this machine, until Ctrl-C."),
    "open": Entry(
        "serve",
        _SERVICE,
        "Open the server's page in a browser, signed in: by a link that works once, within 15 minutes.",
    ),
    "keys": Entry("tenants", _SERVICE, "Create, list, rotate and revoke API keys, in this machine's database."),
    "projects": Entry("tenants", _SERVICE, "Create, list, limit and archive projects, in this machine's database."),
    "audit": Entry("tenants", _SERVICE, "Show what was changed in this machine's database, by which key, and from where."),
    "prune": Entry(
        "prune_command",
        _SERVICE,
        "Remove, from this machine's FT_HOME, adapters of deleted models and what belongs to no job or file; with an age "
        "(here or in FT_KEEP_…_DAYS) also what is older.",
    ),
    "doctor": Entry(
        "doctor_command",
        _SERVICE,
        "Look for attempts that run in the cluster although this database does not know their job, as after its loss.",
    ),
    "agent": Entry("agents", _SERVICE, "Make this machine one of several hosts where jobs run, and say which of them may."),
    "agents": Entry(
        "agents", _SERVICE, "List the hosts whose agents have joined: what they have, what is in use, and whether they answer."
    ),
    "reconcile": Entry(
        "serve",
        _SERVICE,
        "Move jobs, deliver webhooks and remove what is no longer needed, without serving the API, until Ctrl-C.",
    ),
    "migrate": Entry("serve", _SERVICE, "Bring the database to this version's schema."),
    "version": Entry("app", _SERVICE, "Print the version."),
}
"""By name, in the order in which they are listed."""


NEEDED = ("plan", "submit", "jobs", "watch", "get", "chat", "download", "data", "models", "serve")
"""What most people need, in the order in which they do."""


def first_screen() -> str:
    """What `ft` alone prints: a screen of what most people need."""
    lines = [f"  {name:<10}{_SHORT[name]}" for name in NEEDED]
    return "\n".join(
        [
            "Fine-tune language models on your own machines.",
            "",
            "Usage: ft COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "What a command takes: ft COMMAND -h",
            "All commands:         ft --help",
        ]
    )


_SHORT: Mapping[str, str] = {
    "plan": "Does a job fit, and how long will it take?",
    "submit": "Check a SPEC and its data, and create the job.",
    "jobs": "List the newest jobs.",
    "watch": "Show a job's progress until it finishes or is paused.",
    "get": "Show one job: its state, options, files and checkpoints.",
    "chat": "Talk to a tuned model.",
    "download": "Download a finished job's adapter.",
    "data": "Look at a data file: check, show, count, convert.",
    "models": "List bases, and tuned models.",
    "serve": "Serve the REST API and run jobs on this machine.",
}


def load(name: str) -> typer.core.TyperCommand | typer.core.TyperGroup:
    """The command or group of that name. Raises KeyError."""
    part = typer.Typer()
    importlib.import_module(f"{_CLI}.{ENTRIES[name].module}").register(part)
    command: Any = typer.main.get_group(part).commands[name]
    in_plain_words(command)
    return command


class _Loaded(dict[str, Any]):
    """Commands by name, each loaded when it is asked for."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(ENTRIES))

    def __getitem__(self, name: str) -> Any:
        if super().__getitem__(name) is None:
            self[name] = load(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        with contextlib.suppress(KeyError):
            return self[name]
        return default

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


class Commands(typer.core.TyperGroup):
    """All commands, for a Typer as its `cls`."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = _Loaded()
        self._only_listed = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(ENTRIES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = ENTRIES.get(cmd_name)
        if entry is None or not self._only_listed:
            return self.commands.get(cmd_name)
        return typer.core.TyperCommand(cmd_name, help=entry.sentence, rich_help_panel=entry.title)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._listing():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        with self._listing():
            return super().shell_complete(ctx, incomplete)

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        """While the block runs, commands are names and sentences, and nothing is imported."""
        self._only_listed = True
        try:
            yield
        finally:
            self._only_listed = False
