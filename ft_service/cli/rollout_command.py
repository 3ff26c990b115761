"""`ft rollout serve`: a Python function as an agent, for jobs with an environment."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from ft_service.cli.output import Json, print_json_line, print_note
from ft_service.errors import SpecError
from ft_service.host.lifetime import EndCall

rollout = typer.Typer(help="Serve a Python function as an agent that jobs train.")


def register(app: typer.Typer) -> None:
    app.add_typer(rollout, name="rollout")


@rollout.callback()
def _group() -> None:
    """Serve a Python function as an agent that jobs train."""


@rollout.command()
def serve(
    agent: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Python file with `async def rollout(client, item)`."),
    ],
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="0: any free one.")
    ] = 8900,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the signing secret (whsec_…) of the job's webhook endpoint: other "
            "requests are refused.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve a Python function as an agent that jobs train, until Ctrl-C."""
    # It needs the package openai, which other commands do not.
    from ft_service.agents.hosting import hosting, load_function

    function = load_function(agent)
    secret = "" if secret_file is None else _secret(secret_file)
    stop = EndCall()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.make())
    with hosting(function, bind=host, port=port, secret=secret) as url:
        if as_json:
            print_json_line({"event": "serving", "url": url, "signed": bool(secret)})
        else:
            print(f"Serving {agent} as an agent: {url}", flush=True)
        if not secret:
            print_note("Requests are not checked: give --secret-file where others reach this.")
        stop.wait()


def _secret(path: Path) -> str:
    """Raises SpecError."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--secret-file {path}: {error}", param="secret_file") from None
    if not secret.startswith("whsec_"):
        raise SpecError(
            f"--secret-file {path}: holds no signing secret, which begins with whsec_ (the answer "
            "to the creation of a webhook endpoint).",
            param="secret_file",
        )
    return secret
