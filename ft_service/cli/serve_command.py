"""`ft serve`: the server in the foreground; `ft reconcile` and `ft migrate`: its parts, for
containers of their own; `ft open`: its page.
"""

from __future__ import annotations

import importlib
import os
import signal
import webbrowser
from typing import Annotated, Any
from urllib.parse import quote

import typer

from ft_service.cli.jobs.job_argument import complete_job, find_job
from ft_service.cli.local_store import with_sample_base
from ft_service.cli.output import Json, connect, load_settings, print_json_line, print_note
from ft_service.errors import FtError
from ft_service.host.lifetime import die_with_parent
from ft_service.host.quick_imports import quick_imports
from ft_service.settings import refuse_misspelt
from ft_service.version import this_version

WEB_PACKAGES = frozenset(
    {"api", "fastapi", "fastapi_offline", "starlette", "uvicorn", "python_multipart"}
)


def register(app: typer.Typer) -> None:
    app.command()(serve)
    app.command()(reconcile)
    app.command()(migrate)
    app.command("open")(open_page)


def serve(
    port: Annotated[
        int | None, typer.Option(metavar="N", help="Default: FT_PORT, else 8000; 0: any free one.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: FT_BIND, else 127.0.0.1.")
    ] = None,
    api_only: Annotated[
        bool,
        typer.Option(
            "--api-only",
            help="Only the REST API; `ft migrate` and `ft reconcile` do the rest elsewhere.",
        ),
    ] = False,
    with_parent: Annotated[bool, typer.Option("--die-with-parent", hidden=True)] = False,
    as_json: Json = False,
) -> None:
    """Serve the REST API and run jobs on this machine, until Ctrl-C."""
    if with_parent:
        die_with_parent(with_signal=signal.SIGTERM)
    refuse_misspelt(os.environ)
    settings = with_sample_base(load_settings(port=port, bind=host))
    _server().serve(settings, api_only=api_only, as_json=as_json)


def reconcile(as_json: Json = False) -> None:
    """Move jobs, deliver webhooks and remove what is no longer needed, without serving the API,
    until Ctrl-C.
    """
    refuse_misspelt(os.environ)
    _server().reconcile_only(with_sample_base(load_settings()), as_json=as_json)


def migrate(as_json: Json = False) -> None:
    """Bring the database to this version's schema.

    `ft serve` does that by itself unless it serves only the API.
    """
    store = importlib.import_module("ft_service.store.sql")
    store.migrate(load_settings().resolved_database_url())
    if as_json:
        print_json_line({"event": "migrated", "version": this_version()})
    else:
        print("The database has this version's schema.")


def open_page(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="A job to look at, named as elsewhere; default: the list.",
            autocompletion=complete_job,
        ),
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the link, and start no browser.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Open the server's page in a browser, signed in: by a link that works once, within 15
    minutes.
    """
    with connect() as client:
        url = client.sign_in_link(
            f"/jobs/{quote(client.job(find_job(client, job)).id, safe='')}" if job else "/jobs"
        )
    if as_json:
        print_json_line({"url": url})
    elif only_print:
        print(url)
    elif not webbrowser.open(url):
        print_note(
            "There is no browser here. Open this link in one; it works once, within 15 minutes."
        )
        print(url)
    else:
        print("The page is open in your browser. `ft open --print` prints a link in its place.")


def _server() -> Any:
    try:
        with quick_imports():
            return importlib.import_module("api.server")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in WEB_PACKAGES:
            raise
        raise FtError(
            f"The server needs {error.name}, which is not installed: pip install 'ft-service[api]'."
        ) from None
