"""`ft models`: what a server can train on and what it has trained."""

from __future__ import annotations

import typer

from ft_service.cli.output import Json, connect, local_time, print_json, print_table


def register(app: typer.Typer) -> None:
    app.command()(models)


def models(as_json: Json = False) -> None:
    """List the models that the server knows: bases and tuned ones."""
    with connect() as client:
        known = client.models()
    if as_json:
        print_json([model.model_dump() for model in known])
    elif known:
        print_table(("MODEL", "OWNER", "CREATED"), [(m.id, m.owned_by, local_time(m.created)) for m in known])
    else:
        print("The server knows no models: put Hugging Face folders below one that FT_MODELS names.")
