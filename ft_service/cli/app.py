"""The command line as a whole, and what an error looks like: one line `ft: …` on stderr and an exit code.

0 done; 1 failed; 64 the spec or the usage is wrong; 75 stopped with a checkpoint; 130 interrupted from the keyboard.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ft_service import __version__
from ft_service.cli.commands import Commands, first_screen
from ft_service.cli.output import Json, complain, json_text, print_json, spare_letters, tell
from ft_service.cli.plain_help import HELP, in_plain_words, usage_text
from ft_service.errors import DataError, FtError, SpecError
from ft_service.host.disks import disk_fault

FAILED = 1
WRONG = 64
INTERRUPTED = 130

app = typer.Typer(cls=Commands, pretty_exceptions_enable=False, context_settings={"help_option_names": HELP})


def register(typer_app: typer.Typer) -> None:
    typer_app.command()(version)


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


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Mistakes of the user's and failures of the service are told on stderr: in a
    sentence, or with --json as one object `{"error": {"message", "code", "param", "exit_code"}}` on a line.
    """
    as_json = "--json" in arguments
    spare_letters(sys.stdout, sys.stderr)
    try:
        command = typer.main.get_command(app)
        in_plain_words(command, below=False)
        if not arguments:
            tell(first_screen())
            return 0
        code = command.main(args=list(arguments), prog_name="ft", standalone_mode=False)
    except typer.TyperException as error:
        return _tell(SpecError(usage_text(error), code="usage"), WRONG, as_json)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except (SpecError, DataError) as error:
        return _tell(error, WRONG, as_json)
    except FtError as error:
        return _tell(error, FAILED, as_json)
    except OSError as error:
        fault = disk_fault(error, f"The disk of {error.filename}" if error.filename else "The disk")
        if fault is None:
            raise
        return _tell(fault, FAILED, as_json)
    return code if isinstance(code, int) else 0


def _tell(error: FtError, code: int, as_json: bool) -> int:
    if not as_json:
        return complain(error.message, code)
    body = {"message": error.message, "code": error.code, "param": error.param, "exit_code": code}
    print(json_text({"error": body}, sys.stderr), file=sys.stderr)
    return code
