"""Root of the command line, and its errors: one line `ft: …` on stderr and an exit code.

0 succeeded; 1 failed; 64 wrong spec or usage; 75 stopped with a checkpoint; 130 interrupted from
the keyboard.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ft_service.cli.command_list import HELP, Commands, first_screen, simplify_help, usage_text
from ft_service.cli.output import (
    Json,
    json_text,
    print_error,
    print_json,
    print_text,
    replace_unencodable,
)
from ft_service.errors import DataError, FtError, SpecError
from ft_service.host.disk import disk_fault

FAILED = 1
WRONG = 64
INTERRUPTED = 130

app = typer.Typer(
    cls=Commands, pretty_exceptions_enable=False, context_settings={"help_option_names": HELP}
)


def register(typer_app: typer.Typer) -> None:
    typer_app.command()(version)


def version(as_json: Json = False) -> None:
    """Print the version."""
    from ft_service.version import this_version  # which asks git

    if as_json:
        print_json({"version": this_version()})
    else:
        typer.echo(f"ft-service {this_version()}")


def _version_wanted(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_version_wanted, is_eager=True
        ),
    ] = False,
) -> None:
    """Fine-tune language models on your own machines: serve the API, submit jobs and watch them."""


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return the exit code.

    Errors are printed on stderr, in a sentence, or with --json as one object `{"error": {"message",
    "code", "param", "exit_code"}}` on a line.
    """
    as_json = "--json" in arguments
    replace_unencodable(sys.stdout, sys.stderr)
    try:
        command = typer.main.get_command(app)
        simplify_help(command, below=False)
        if not arguments:
            print_text(first_screen())
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
        if fault is None and not isinstance(error.filename, str):
            raise
        return _tell(
            fault or FtError(f"{error.filename}: {error.strerror}.", code="file_error"),
            FAILED,
            as_json,
        )
    return code if isinstance(code, int) else 0


def _tell(error: FtError, code: int, as_json: bool) -> int:
    if not as_json:
        return print_error(error.message, code)
    body = {"message": error.message, "code": error.code, "param": error.param, "exit_code": code}
    print(json_text({"error": body}, sys.stderr), file=sys.stderr)
    return code
