"""All commands, and what an error looks like: one line `ft: …` on stderr and an exit code.

0 done; 1 failed; 64 the spec or the usage is wrong; 75 stopped with a checkpoint; 130 interrupted from the keyboard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ft_service import __version__
from ft_service.cli import (
    convert_command,
    jobs,
    keys,
    merge_command,
    plan_command,
    prune_command,
    run_command,
    serve,
    verify_command,
)
from ft_service.cli.data_files import commands
from ft_service.cli.output import Json, complain, print_json
from ft_service.errors import DataError, FtError, SpecError

FAILED = 1
WRONG = 64
INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
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


serve.register(app)
run_command.register(app)
plan_command.register(app)
jobs.register(app)
convert_command.register(app)
verify_command.register(app)
merge_command.register(app)
prune_command.register(app)
app.add_typer(commands.app, name="data")
app.add_typer(keys.app, name="keys")


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Mistakes of the user's and failures of the service end in one line on stderr."""
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="ft", standalone_mode=False)
    except typer.TyperException as error:
        return complain(error.format_message(), WRONG)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except (SpecError, DataError) as error:
        return complain(error.message, WRONG)
    except FtError as error:
        return complain(error.message, FAILED)
    return code if isinstance(code, int) else 0
