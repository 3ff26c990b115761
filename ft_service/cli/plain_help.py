"""Help and usage errors in the words of this service, and not in those of the library that reads the command line."""

from __future__ import annotations

import re
from typing import Any

import typer
import typer.core

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
"""The library's word for what an option takes → ours."""


def in_plain_words(command: Any, *, below: bool = True) -> None:
    """Change the help of a command, and of those `below` it: `SPEC`, not `{SPEC}` and `<path>`; `NUMBER`, not `<float range>`;
    and nothing behind an option that takes no value."""
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
        in_plain_words(part)


def _name_argument(argument: Any) -> None:
    name = argument.display_name_raw if argument.metavar else argument.display_name_raw.upper()
    argument.metavar = name
    shown = argument.metavar if argument.required else f"[{argument.metavar}]"
    pieces = [shown if argument.nargs == 1 else f"{shown}..."]
    argument.get_usage_pieces = lambda _: pieces
    argument.display_type_rich = lambda ctx: ""


def usage_text(error: typer.TyperException) -> str:
    """What is wrong with a command line, in a sentence."""
    message, where = _plain(error.format_message()), getattr(error, "ctx", None)
    return f"{message} What it takes: {where.command_path} -h" if where and message.startswith("Missing") else message


def _plain(message: str) -> str:
    message = re.sub(r" \(Possible options?: (.*)\)", r". Did you mean \1?", message.replace("Value error, ", ""))
    return re.sub(r"Input should be a valid (integer|number)(, unable to parse.*)?", r"it must be a \1", message).replace(
        "a integer", "a whole number"
    )
