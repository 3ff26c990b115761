"""`ft login` and `ft logout`: a person's sign-in by the organisation's single sign-on."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ft_service.cli.output import Json, load_settings, local_time, print_json, print_note
from ft_service.errors import NotFoundError

Address = Annotated[
    str | None,
    typer.Argument(
        metavar="ADDRESS",
        help="The server, such as https://ft.example.com; default: FT_BASE_URL, the one that runs "
        "here, or that of the last login.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command()(login)
    app.command()(logout)


def login(
    address: Address = None,
    project: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Project to work in; default: where you were last."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Sign in at a server by your organisation's single sign-on, in a browser on any device.

    Until that ends, or `ft logout`, `ft` has at this server what your groups open there.
    """
    from ft_service.client.connection import find_address
    from ft_service.client.logins import SignIn, keep_login

    home = load_settings().home
    base_url = find_address(os.environ, home, address)
    begun = SignIn.begin(base_url)
    code = begun.code
    print_note(f"Open {code.verification_uri} in a browser, and type the code {code.user_code}.")
    if code.verification_uri_complete is not None:
        print_note(f"With the code in it: {code.verification_uri_complete}")
    made = begun.wait(project)
    keep_login(home, base_url, made)
    if as_json:
        print_json({"base_url": base_url, **made.model_dump(exclude={"key"})})
    else:
        print(
            f"{made.name} is signed in at {base_url} until {local_time(made.expires_at)}: project "
            f"{made.project_id}, scope {made.scope}."
        )
    if os.environ.get("FT_API_KEY"):
        print_note("FT_API_KEY is set, and goes first: unset it to use this sign-in.")


def logout(address: Address = None, as_json: Json = False) -> None:
    """End a sign-in by `ft login`, here and at the server."""
    from ft_service.client.connection import address_of, kept_logins
    from ft_service.client.logins import end_login

    home = load_settings().home
    logins = kept_logins(home)
    named = address or os.environ.get("FT_BASE_URL") or next(reversed(logins), None)
    base_url = None if named is None else address_of(named)
    if base_url not in logins:
        raise NotFoundError(
            f"Nobody is signed in{f' at {base_url}' if base_url else ''} by `ft login`."
        )
    told = end_login(home, base_url)
    if as_json:
        print_json({"base_url": base_url, "ended_at_server": told})
    else:
        print(f"Signed out of {base_url}.")
    if not told:
        print_note("The server does not answer: there, the sign-in ends by itself.")
