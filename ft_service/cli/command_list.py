"""Commands of `ft`: the module of each, its line in `ft --help`, and help in plain words.

A command's module is imported when it is called, not when it is listed or completed: most commands
need packages that others do not.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import typer
import typer.core

from ft_service.cli.examples import add_examples

_CLI = "ft_service.cli"


HELP = ["--help", "-h"]
_KINDS = {
    "int": "NUMBER",
    "int range": "NUMBER",
    "float": "NUMBER",
    "float range": "NUMBER",
    "str": "TEXT",
    "list[str]": "TEXT",
    "path": "PATH",
}
"""Library's name of an option's type → name in the help."""


def simplify_help(command: Any, *, below: bool = True) -> None:
    """Change the help of a command, and of its subcommands if `below`: `SPEC` instead of
    `{SPEC}` and `<path>`, `NUMBER` instead of `<float range>`, and nothing after an option
    without a value.
    """
    context = typer.Context(command, help_option_names=HELP)
    for parameter in command.params:
        if isinstance(parameter, typer.core.TyperArgument):
            _name_argument(parameter)
        elif getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.metavar is None:
            kind = parameter.display_type(context).strip("<>")
            parameter.metavar = _KINDS.get(kind, kind)
    command.get_help_option(context).metavar = ""
    for part in getattr(command, "commands", {}).values() if below else ():
        simplify_help(part)


def _name_argument(argument: Any) -> None:
    name = argument.display_name_raw if argument.metavar else argument.display_name_raw.upper()
    argument.metavar = name
    shown = argument.metavar if argument.required else f"[{argument.metavar}]"
    pieces = [shown if argument.nargs == 1 else f"{shown}..."]
    argument.get_usage_pieces = lambda _: pieces
    argument.display_type_rich = lambda ctx: ""


def usage_text(error: typer.TyperException) -> str:
    """Return the message for a wrong command line."""
    message = _plain(error.format_message())
    where = getattr(error, "ctx", None)
    if error.__cause__ is not None and _LIMIT.search(message):
        message = _with_value(message, error.__cause__)
    return (
        f"{message} What it takes: {where.command_path} -h"
        if where and message.startswith("Missing")
        else message
    )


_LIMIT = re.compile(r"must be at (least|most) [^ ]+$")


def _with_value(message: str, cause: BaseException) -> str:
    """A refusal that names a limit, with the value that it refuses."""
    from pydantic import ValidationError  # which has refused it

    given = str(cause.errors()[0]["input"]) if isinstance(cause, ValidationError) else ""
    return (
        f"{message}, not {given if len(given) <= 80 else given[:77] + '...'}" if given else message
    )


def _plain(message: str) -> str:
    message = re.sub(
        r" \(Possible options?: (.*)\)", r". Did you mean \1?", message.replace("Value error, ", "")
    )
    message = message.replace("Input should be greater than or equal to", "it must be at least")
    message = message.replace("Input should be less than or equal to", "it must be at most")
    return re.sub(
        r"Input should be a valid (integer|number)(, unable to parse.*)?",
        r"it must be a \1",
        message,
    ).replace("a integer", "a whole number")


@dataclass(frozen=True)
class CommandEntry:
    """Command, or group of commands."""

    module: str
    """Module below ft_service.cli; its `register(typer)` adds the command, possibly with others."""
    title: str
    """Heading in the list."""
    sentence: str
    """First sentence of its own help."""


_JOBS = "Jobs"
_ALONE = "Before and without a server"
_MODELS = "Models"
_SERVICE = "The service"

ENTRIES: Mapping[str, CommandEntry] = {
    "submit": CommandEntry(
        "jobs.submit_command",
        _JOBS,
        "Check a SPEC and its data, upload the files and create the job.",
    ),
    "jobs": CommandEntry("jobs.list_commands", _JOBS, "List the newest jobs."),
    "get": CommandEntry(
        "jobs.list_commands",
        _JOBS,
        "Show one job: its state, its options, its files and its checkpoints.",
    ),
    "watch": CommandEntry(
        "jobs.watch_command", _JOBS, "Show a job's progress until it finishes or is paused."
    ),
    "logs": CommandEntry(
        "jobs.watch_command",
        _JOBS,
        "Print what a job's processes have printed: supervisor, torchrun and every rank.",
    ),
    "events": CommandEntry(
        "jobs.list_commands", _JOBS, "Print what has happened to a job, the newest last."
    ),
    "checkpoints": CommandEntry(
        "jobs.list_commands", _JOBS, "List a job's checkpoints, the newest first."
    ),
    "files": CommandEntry(
        "jobs.list_commands",
        _JOBS,
        "List the newest files that were uploaded, and the results of jobs.",
    ),
    "compare": CommandEntry(
        "jobs.compare_command",
        _JOBS,
        "Show the options in which two jobs differ, their results, and the curves of their losses "
        "and rewards.",
    ),
    "eval": CommandEntry(
        "jobs.eval_command",
        _JOBS,
        "Show a job's answers before and after training side by side, with their scores at every "
        "step that was evaluated.",
    ),
    "rollouts": CommandEntry(
        "jobs.rollouts_command",
        _JOBS,
        "Show what a job of reinforcement learning has sampled, with rewards: an agent's rollouts "
        "as conversations.",
    ),
    "pause": CommandEntry(
        "jobs.action_commands",
        _JOBS,
        "Stop a job at a checkpoint and free its processors, until it is resumed.",
    ),
    "resume": CommandEntry(
        "jobs.action_commands", _JOBS, "Resume a paused job from its checkpoint."
    ),
    "cancel": CommandEntry("jobs.action_commands", _JOBS, "Stop a job for good."),
    "rename": CommandEntry("jobs.action_commands", _JOBS, "Give a job another name, or a note."),
    "rm": CommandEntry(
        "jobs.action_commands", _JOBS, "Remove an uploaded file, or the tuned model of a job."
    ),
    "download": CommandEntry(
        "jobs.download_command",
        _JOBS,
        "Download a finished job's adapter, or one of a checkpoint's, in the format that PEFT "
        "loads.",
    ),
    "sweep": CommandEntry(
        "jobs.sweep_command",
        _JOBS,
        "Run a job for each combination of values, and stop the poor ones early.",
    ),
    "engines": CommandEntry(
        "jobs.engines_command",
        _JOBS,
        "List the engines that train several jobs on one base, and their jobs.",
    ),
    "plan": CommandEntry(
        "local.plan_command",
        _ALONE,
        "Show whether a SPEC fits, what it takes in memory and time, and what would help.",
    ),
    "run": CommandEntry(
        "local.run_command", _ALONE, "Run a SPEC on this machine without a server."
    ),
    "convert": CommandEntry(
        "local.convert_command",
        _ALONE,
        "Print another tool's configuration or training script as a SPEC, and what becomes of "
        "each of its options.",
    ),
    "data": CommandEntry(
        "data_files.data_commands",
        _ALONE,
        "Look at a data file before it is trained on: check, show, count and convert it.",
    ),
    "models": CommandEntry(
        "models_command",
        _MODELS,
        "List the models that the server knows: bases, whether they can be tuned, and tuned ones.",
    ),
    "pull": CommandEntry(
        "models_command",
        _MODELS,
        "Fetch a base from Hugging Face's hub (or HF_ENDPOINT's) into the first folder of "
        "FT_MODELS.",
    ),
    "chat": CommandEntry("chat_command", _MODELS, "Talk to a tuned model."),
    "merge": CommandEntry(
        "merge_command",
        _MODELS,
        "Merge an adapter into its base (no GPU needed), and report the change in validation loss.",
    ),
    "export": CommandEntry(
        "export_command",
        _MODELS,
        "Export a tuned model for vLLM, Ollama, llama.cpp or Transformers.",
    ),
    "verify": CommandEntry(
        "jobs.verify_command", _MODELS, "Check an adapter's manifest, checksums and shapes."
    ),
    "serve": CommandEntry(
        "serve_command", _SERVICE, "Serve the REST API and run jobs on this machine, until Ctrl-C."
    ),
    "rollout": CommandEntry(
        "rollout_command", _SERVICE, "Serve a Python function as an agent that jobs train."
    ),
    "quickstart": CommandEntry(
        "quickstart.quickstart_command",
        _SERVICE,
        "Fine-tune the sample base on this machine, from upload to adapter, with a server of its "
        "own.",
    ),
    "open": CommandEntry(
        "serve_command",
        _SERVICE,
        "Open the server's page in a browser, signed in: by a link that works once, within 15 "
        "minutes.",
    ),
    "mcp": CommandEntry(
        "mcp_command",
        _SERVICE,
        "Let a coding agent use the server's tools (Model Context Protocol).",
    ),
    "login": CommandEntry(
        "login_command",
        _SERVICE,
        "Sign in at a server by your organisation's single sign-on, in a browser on any device.",
    ),
    "logout": CommandEntry(
        "login_command", _SERVICE, "End a sign-in by `ft login`, here and at the server."
    ),
    "keys": CommandEntry(
        "keys_command",
        _SERVICE,
        "Create, list, rotate and revoke API keys, in this machine's database.",
    ),
    "projects": CommandEntry(
        "keys_command",
        _SERVICE,
        "Create, list, limit, archive and delete projects, in this machine's database.",
    ),
    "audit": CommandEntry(
        "keys_command",
        _SERVICE,
        "Show what was changed in this machine's database, by which key, and from where.",
    ),
    "prune": CommandEntry(
        "prune_command",
        _SERVICE,
        "Remove, from FT_HOME or object storage, adapters of deleted models and what belongs to "
        "no job or file; with an age (here or in FT_KEEP_…_DAYS) also what is older.",
    ),
    "doctor": CommandEntry(
        "doctor_command",
        _SERVICE,
        "Check this installation: PyTorch, GPUs, disk, home, port, models, database.",
    ),
    "reconcile": CommandEntry(
        "serve_command",
        _SERVICE,
        "Move jobs, deliver webhooks and remove what is no longer needed, without serving the "
        "API, until Ctrl-C.",
    ),
    "migrate": CommandEntry(
        "serve_command", _SERVICE, "Bring the database to this version's schema."
    ),
    "version": CommandEntry("root_command", _SERVICE, "Print the version."),
}
"""Entries by name, in the order of the list."""


NEEDED = ("plan", "submit", "jobs", "watch", "get", "chat", "download", "data", "models", "serve")
"""Commands that most people need, in the order in which they need them."""


def first_screen() -> str:
    """Return the output of `ft` alone: the commands that most people need."""
    lines = [f"  {name:<10}{_SHORT[name]}" for name in NEEDED]
    return "\n".join(
        [
            "Fine-tune language models on your own machines.",
            "",
            "Usage: ft COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "Help on a command:    ft COMMAND -h",
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
    """Return the command or group of a name. Raises KeyError."""
    part = typer.Typer()
    importlib.import_module(f"{_CLI}.{ENTRIES[name].module}").register(part)
    command: Any = typer.main.get_group(part).commands[name]
    simplify_help(command)
    add_examples(command, name)
    return command


class _Loaded(dict[str, Any]):
    """Commands by name, each loaded at its first use."""

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
    """All commands, as the `cls` of a Typer."""

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
        """List commands by name and sentence, without importing them, while the block runs."""
        self._only_listed = True
        try:
            yield
        finally:
            self._only_listed = False
