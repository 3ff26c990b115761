"""All commands, and what an error looks like: one line `ft: …` on stderr and an exit code.

0 done; 1 failed; 64 the spec or the usage is wrong; 75 stopped with a checkpoint; 130 interrupted from the keyboard.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ft_service import __version__
from ft_service.cli import (
    agents,
    chat_command,
    convert_command,
    export_command,
    merge_command,
    models,
    prune_command,
    serve,
    tenants,
    verify_command,
)
from ft_service.cli.data_files import commands
from ft_service.cli.jobs import comparing, evaluations, fetching, following, listing, submit, sweeps, verbs
from ft_service.cli.local import plan_command, run_command
from ft_service.cli.output import Json, complain, print_json
from ft_service.errors import DataError, FtError, SpecError

FAILED = 1
WRONG = 64
INTERRUPTED = 130

HELP = ["--help", "-h"]

app = typer.Typer(pretty_exceptions_enable=False, context_settings={"help_option_names": HELP})


def version(as_json: Json = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": __version__})
    else:
        typer.echo(f"ft-service {__version__}")


def _version_wanted(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version_wanted, is_eager=True)] = False,
) -> None:
    """Fine-tune language models on your own machines: serve the API, submit jobs and watch them."""


PANELS = {
    "Jobs": (submit, listing, following, comparing, evaluations, verbs, fetching),
    "Before and without a server": (plan_command, run_command, convert_command),
    "Models": (models, chat_command, merge_command, export_command, verify_command),
    "The service": (serve, agents, prune_command, tenants),
}
"""Title in `ft --help` → modules, whose commands stand there in the order in which they register them."""


def _register(title: str, add: Callable[[typer.Typer], object]) -> None:
    """Add commands under a title. The list shows the first sentence of each."""
    known = len(app.registered_commands)
    add(app)
    for command in app.registered_commands[known:]:
        said = " ".join((command.callback.__doc__ or "").split()) if command.callback else ""
        command.rich_help_panel, command.short_help = title, re.split(r"(?<=\.) ", said)[0]


for panel, parts in PANELS.items():
    for part in parts:
        _register(panel, part.register)
_register("The service", lambda typer_app: typer_app.command()(version))
app.add_typer(sweeps.app, name="sweep", rich_help_panel="Jobs")
app.add_typer(agents.agent, name="agent", rich_help_panel="The service")
app.add_typer(tenants.keys, name="keys", rich_help_panel="The service")
app.add_typer(tenants.projects, name="projects", rich_help_panel="The service")
app.add_typer(commands.app, name="data", rich_help_panel="Before and without a server")


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Mistakes of the user's and failures of the service are told on stderr: in a
    sentence, or with --json as one object `{"error": {"message", "code", "param", "exit_code"}}` on a line.
    """
    as_json = "--json" in arguments
    try:
        command = without_types_of_flags(typer.main.get_command(app))
        code = command.main(args=list(arguments) or ["--help"], prog_name="ft", standalone_mode=False)
    except typer.TyperException as error:
        return _tell(SpecError(_usage_text(error), code="usage"), WRONG, as_json)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except (SpecError, DataError) as error:
        return _tell(error, WRONG, as_json)
    except FtError as error:
        return _tell(error, FAILED, as_json)
    return code if isinstance(code, int) else 0


def without_types_of_flags(command: Any) -> Any:
    """The command, and those below it, whose help does not say `<bool>` behind an option that takes no value."""
    for parameter in command.params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    command.get_help_option(typer.Context(command, help_option_names=HELP)).metavar = ""
    for below in getattr(command, "commands", {}).values():
        without_types_of_flags(below)
    return command


def _usage_text(error: typer.TyperException) -> str:
    message, where = _plain(error.format_message()), getattr(error, "ctx", None)
    return f"{message} What it takes: {where.command_path} -h" if where and message.startswith("Missing") else message


def _plain(message: str) -> str:
    """A usage error without the words of the libraries that read options."""
    message = re.sub(r" \(Possible options?: (.*)\)", r". Did you mean \1?", message.replace("Value error, ", ""))
    return re.sub(r"Input should be a valid (integer|number)(, unable to parse.*)?", r"it must be a \1", message).replace(
        "a integer", "a whole number"
    )


def _tell(error: FtError, code: int, as_json: bool) -> int:
    if not as_json:
        return complain(error.message, code)
    body = {"message": error.message, "code": error.code, "param": error.param, "exit_code": code}
    print(json.dumps({"error": body}, ensure_ascii=False), file=sys.stderr)
    return code
