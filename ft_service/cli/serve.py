"""`ft serve`: the server in the foreground."""

from __future__ import annotations

import importlib
import signal
from typing import Annotated

import typer

from ft_service.cli.output import load_settings
from ft_service.errors import FtError
from ft_service.lifetime import die_with_parent

WEB_PACKAGES = frozenset({"api", "fastapi", "fastapi_offline", "starlette", "uvicorn", "python_multipart"})


def register(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    port: Annotated[int | None, typer.Option(metavar="N", help="Default: FT_PORT, else 8000; 0: any free one.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: FT_BIND, else 127.0.0.1.")] = None,
    with_parent: Annotated[bool, typer.Option("--die-with-parent", hidden=True)] = False,
) -> None:
    """Serve the REST API and run jobs on this machine, until Ctrl-C."""
    if with_parent:
        die_with_parent(with_signal=signal.SIGTERM)
    settings = load_settings(port=port, bind=host)
    try:
        server = importlib.import_module("api.server")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in WEB_PACKAGES:
            raise
        raise FtError(f"The server needs {error.name}, which is not installed: pip install 'ft-service[api]'.") from None
    server.serve(settings)
