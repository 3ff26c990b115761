"""`ft keys`, `ft projects` and `ft audit`: tenants of the local database, and its changes (without
a server).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_service.cli.local_store import PROJECT, local_store, settings_of_server
from ft_service.cli.output import Json, is_terminal, local_time, print_json, print_note, print_table
from ft_service.errors import NotFoundError, SpecError
from ft_service.host.running_servers import living_servers, write_private
from ft_service.settings import Settings
from ft_service.store.records import ApiKey, AuditEntry, NewKey, TenantLimits
from ft_service.tinker.names import KEY_PREFIX

if TYPE_CHECKING:
    from ft_service.store.sql import Store

DAY_SECONDS = 86_400.0
_MOST_DAYS = 3650
"""As in REST (`expires_days` of a key)."""
_MOST_HOURS = 366 * 24
"""As in REST (`keep_seconds` of a rotation)."""

keys = typer.Typer(help="Create, list, rotate and revoke API keys, in this machine's database.")


def register(app: typer.Typer) -> None:
    app.add_typer(keys, name="keys")
    app.add_typer(projects, name="projects")
    app.command()(audit)


KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key, as `ft keys list` shows it.")]
InProject = Annotated[
    str, typer.Option("--project", metavar="ID", help="Project the key belongs to (ID or name).")
]


class ScopeName(StrEnum):
    ADMIN = "admin"
    SUBMIT = "submit"
    READ = "read"
    USER = "user"
    """Earlier name of submit."""
    METRICS = "metrics"


@keys.command()
def create(
    name: Annotated[str, typer.Option(help="Name in `ft keys list`, such as its owner's.")] = "cli",
    scope: Annotated[
        ScopeName,
        typer.Option(metavar="SCOPE", help="What it may do: read, submit, admin or metrics."),
    ] = ScopeName.SUBMIT,
    expires_days: Annotated[
        float | None,
        typer.Option(min=0, max=_MOST_DAYS, help="Days until it expires; default: never."),
    ] = None,
    tinker: Annotated[
        bool, typer.Option("--tinker", help="Show it as Tinker's client takes it (TINKER_API_KEY).")
    ] = False,
    project: InProject = PROJECT,
    as_json: Json = False,
) -> None:
    """Create a key. The key is shown only once."""
    settings = settings_of_server()
    with local_store(settings) as store:
        expires_at = None if expires_days is None else store.now() + expires_days * DAY_SECONDS
        project_id = find_project(store, project)
        key, secret = store.keys.create_key(
            NewKey(project_id=project_id, name=name, scope=scope.value, expires_at=expires_at)
        )
    _show_secret(key, f"{KEY_PREFIX}{secret}" if tinker else secret, settings, as_json)


@keys.command("list")
def list_keys(project: InProject = PROJECT, as_json: Json = False) -> None:
    """List a project's keys, without their secrets."""
    with local_store(settings_of_server()) as store:
        all_keys = store.keys.list_keys(find_project(store, project))
        now = store.now()
    if as_json:
        print_json([_as_dict(key, now) for key in all_keys])
    elif all_keys:
        rows = [
            (
                key.id,
                key.name,
                key.scope,
                f"{key.prefix}…",
                local_time(key.created_at),
                local_time(key.last_used_at),
                _state(key, now),
            )
            for key in all_keys
        ]
        titles = ("ID", "NAME", "SCOPE", "KEY", "CREATED", "LAST USED", "STATE")
        kept = [
            number
            for number, title in enumerate(titles)
            if not is_terminal() or title not in ("KEY", "LAST USED")
        ]
        print_table(
            [titles[number] for number in kept], [[row[number] for number in kept] for row in rows]
        )
    else:
        print("No keys yet. Create one: ft keys create")


@keys.command()
def rotate(
    key_id: KeyId,
    keep_hours: Annotated[
        float, typer.Option(min=0, max=_MOST_HOURS, help="Hours for which the old key still works.")
    ] = 24.0,
    project: InProject = PROJECT,
    as_json: Json = False,
) -> None:
    """Replace a key by a new one of its name and scope, which is shown only once."""
    settings = settings_of_server()
    with local_store(settings) as store:
        is_ours = _own_key(settings, store) == key_id
        key, secret = store.keys.rotate_key(
            find_project(store, project), key_id, keep_seconds=keep_hours * 3600.0
        )
    if is_ours:
        write_private(settings.home / "credentials", json.dumps({"api_key": secret}) + "\n")
    _show_secret(key, secret, settings, as_json)
    if is_ours:
        print_note(
            "`ft` uses it on this host from now on: it has replaced the old one in "
            f"{settings.home / 'credentials'}."
        )


@keys.command()
def revoke(
    key_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="The key, as `ft keys list` shows it.")
    ] = None,
    person: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead of a key: all that a person who signs in by single sign-on has, in every "
            "project.",
        ),
    ] = None,
    project: InProject = PROJECT,
    as_json: Json = False,
) -> None:
    """Revoke a key, which is refused from now on; a person's with the keys that the person made."""
    if (key_id is None) == (person is None):
        raise SpecError("Give either the ID of a key, or --person NAME.", param="key_id")
    settings = settings_of_server()
    if key_id is None:
        _end_person(person or "", settings, as_json)
        return
    with local_store(settings) as store:
        was_ours = _own_key(settings, store) == key_id
        key = store.keys.revoke_key(find_project(store, project), key_id)
        now = store.now()
    if was_ours:
        print_note(
            "`ft` used this key on this host. Make another, and set FT_API_KEY to it: ft keys "
            "create --scope admin"
        )
    if as_json:
        print_json(_as_dict(key, now))
    else:
        print(f"{key.id} ({key.name}) is revoked.")


def _end_person(person: str, settings: Settings, as_json: bool) -> None:
    with local_store(settings) as store:
        ended = store.people.end(person)
        now = store.now()
    if as_json:
        print_json([_as_dict(key, now) for key in ended])
        return
    for key in ended:
        print(f"{key.id} ({key.name}) in {key.project_id} is revoked.")
    print_note(
        f"{person} comes in again as long as the groups at the provider open a project: take "
        "those away too."
    )


def _own_key(settings: Settings, store: Store) -> str | None:
    """Return the id of the key that `ft` uses on this host; None: it has no key of this service."""
    try:
        secret = str(
            json.loads((settings.home / "credentials").read_text(encoding="utf-8"))["api_key"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    holder = store.keys.authenticate(secret)
    return None if holder is None else holder.key_id


def _show_secret(key: ApiKey, secret: str, settings: Settings, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "key": secret,
                "id": key.id,
                "name": key.name,
                "scope": key.scope,
                "expires_at": key.expires_at,
            }
        )
    else:
        print(secret)
        print_note(_opens(settings))


def _opens(settings: Settings) -> str:
    if settings.database_url or settings.database_url_file:
        return "It opens the service whose database FT_DATABASE_URL names."
    how = "FT_HOME" if os.environ.get("FT_HOME") else "FT_HOME is not set"
    servers = living_servers(settings.home)
    running = f"which runs at {servers[0].url}" if servers else "which does not run now"
    return f"It opens the service that keeps its state in {settings.home} ({how}), {running}."


def _state(key: ApiKey, now: float) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"


def _as_dict(key: ApiKey, now: float) -> dict[str, object]:
    return {
        "id": key.id,
        "name": key.name,
        "scope": key.scope,
        "prefix": key.prefix,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "last_used_at": key.last_used_at,
        "ends_with": key.ends_with,
        "state": _state(key, now),
    }


_MOST = 10_000
_MOST_NAME = 255
"""Characters of a project's name."""
_SHOWN = 10
"""Number of names that an error lists."""

projects = typer.Typer(
    help="Create, list, limit, archive and delete projects, in this machine's database."
)

ProjectId = Annotated[str, typer.Argument(metavar="ID", help="The project: its id, or its name.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=VALUE",
        help="max_slots, max_queued, max_bytes, max_requests_per_minute, max_priority, "
        "max_cost_per_month: a number; "
        "bases, wandb_entities: names, "
        "with commas between them. NAME= takes the limit away. May be given several times.",
    ),
]
_LISTS = ("bases", "wandb_entities")


@projects.command("create")
def create_project(
    name: Annotated[str, typer.Argument(help="Name of the project.")],
    limit: Set = None,
    as_json: Json = False,
) -> None:
    """Create a project. Make it a key: ft keys create --project NAME"""
    limits = replace(TenantLimits(), **parse_limits(limit or []))
    _check_name(name)
    settings = settings_of_server()
    _refuse_without_prices(limits.max_cost_per_month, settings)
    with local_store(settings) as store:
        organization = store.projects.get_project(
            PROJECT
        ).organization  # the server's, whatever FT_ORGANIZATION is here
        project = store.projects.create_project(name=name, organization=organization, limits=limits)
    if as_json:
        print_json(asdict(project))
    else:
        print(
            f"{project.id} ({project.name}) was created. Make it a key: ft keys create --project "
            f"{project.id}"
        )


@projects.command("list")
def list_projects(
    archived: Annotated[
        bool,
        typer.Option(
            "--archived", help="Include archived ones, and deleted ones of which something is left."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """List projects and their limits."""
    with local_store(settings_of_server()) as store:
        found = store.projects.list_projects(archived=archived, deleted=archived, limit=_MOST).data
    if as_json:
        print_json([asdict(project) for project in found])
        return
    rows = [
        (
            project.id,
            project.name,
            "deleted" if project.deleted_at else "archived" if project.archived_at else "active",
            local_time(project.created_at),
            project.organization,
        )
        for project in found
    ]
    titles = ("ID", "NAME", "STATE", "CREATED", "ORGANIZATION")
    shown = len(titles) - is_terminal()  # of one organisation, nearly always
    limits = [_limits_text(project.limits) for project in found]
    print_table(
        titles[:shown], [row[:shown] for row in rows], notes=("LIMITS", limits), whole_notes=True
    )


@projects.command("update")
def update_project(
    project_id: ProjectId,
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
    limit: Set = None,
    as_json: Json = False,
) -> None:
    """Change a project's name and limits. What is not named stays."""
    if name is not None:
        _check_name(name)
    limits = parse_limits(limit or [])
    settings = settings_of_server()
    _refuse_without_prices(limits.get("max_cost_per_month"), settings)
    with local_store(settings) as store:
        project = store.projects.update_project(
            find_project(store, project_id), name=name, limits=limits
        )
    if as_json:
        print_json(asdict(project))
    else:
        print(f"{project.id} ({project.name}): {_limits_text(project.limits) or 'no limits'}")


@projects.command("archive")
def archive_project(project_id: ProjectId, as_json: Json = False) -> None:
    """Archive a project: its keys are refused from now on; its data stays.

    `delete` removes that too.
    """
    with local_store(settings_of_server()) as store:
        project = store.projects.archive_project(find_project(store, project_id))
    if as_json:
        print_json(asdict(project))
    else:
        print(f"{project.id} ({project.name}) is archived.")


@projects.command("delete")
def delete_project(
    project_id: ProjectId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a project with all that it has: jobs, models, files, keys, webhooks.

    Sums of its use stay, and who deleted it. The server removes it in the background; `ft projects
    list --archived` shows the project until that is done.
    """
    from ft_service.cli.jobs.action_commands import ask_to_remove  # which imports the client

    with local_store(settings_of_server()) as store:
        project = store.projects.get_project(find_project(store, project_id))
        if not yes:
            ask_to_remove(
                f"the project {project.id} ({project.name}) with all its jobs, models and files"
            )
        store.erasure.delete_project(project.id)
    if as_json:
        print_json({"id": project.id, "deleted": True})
    else:
        print(f"{project.id} ({project.name}) is deleted. The server removes what it has.")


def audit(
    project: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Of this project (id or name); default: of all."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--lines", "-n", min=1, max=_MOST, help="Show at most N, newest first.")
    ] = 50,
    as_json: Json = False,
) -> None:
    """Show what was changed in this machine's database, by which key, and from where."""
    with local_store(settings_of_server()) as store:
        entries = store.audit.list_audit(
            project_id=project and find_project(store, project), limit=limit
        ).data
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    rows = [
        (local_time(one.created_at), one.type, one.target, one.project_id, *_who(one), _detail(one))
        for one in entries
    ]
    if is_terminal():  # ids stay whole: they are what other commands take
        print_table(
            ("WHEN", "WHAT", "TARGET"),
            [row[:3] for row in rows],
            ("", [_below(one) for one in entries]),
            whole_notes=True,
        )
    else:
        print_table(("WHEN", "WHAT", "TARGET", "PROJECT", "KEY", "FROM", "DETAIL"), rows)


def _check_name(name: str) -> None:
    """Raise SpecError for a name of a project that the REST interface would refuse."""
    if not 1 <= len(name) <= _MOST_NAME or not name.strip():
        raise SpecError(
            f"NAME = {name[:40]!r}: must have 1 to {_MOST_NAME} characters, not only spaces.",
            param="name",
        )


def find_project(store: Store, word: str) -> str:
    """Return the id of a project by its id or name.

    Raises NotFoundError, or SpecError if several have that name.
    """
    known = store.projects.list_projects(archived=True, limit=_MOST).data
    if any(project.id == word for project in known):
        return word
    named = [project.id for project in known if project.name == word]
    if len(named) > 1:
        raise SpecError(
            f"{len(named)} projects are called {word!r}: give the id of one: {', '.join(named)}.",
            param="project",
        )
    if not named:
        shown = ", ".join(project.name for project in known[:_SHOWN]) + (
            ", …" if len(known) > _SHOWN else ""
        )
        raise NotFoundError(f"There is no project {word!r}. There are: {shown}.", param="project")
    return named[0]


def parse_limits(given: list[str]) -> dict[str, Any]:
    """Parse limits of the form `NAME=VALUE`. Raises SpecError."""
    known = list(asdict(TenantLimits()))
    limits: dict[str, Any] = {}
    for pair in given:
        name, is_there, value = pair.partition("=")
        if not is_there or name not in known:
            raise SpecError(
                f"--limit {pair!r}: write NAME=VALUE, with a name of {', '.join(known)}.",
                param="limit",
            )
        if not value:
            limits[name] = None
        elif name in _LISTS:
            limits[name] = tuple(part.strip() for part in value.split(",") if part.strip())
        elif name == "max_cost_per_month":
            limits[name] = _amount(name, value)
        else:
            limits[name] = _number(name, value)
    return limits


def _refuse_without_prices(limit: float | None, settings: Settings) -> None:
    from ft_service.control.admission.budget import (  # most commands of keys do not need it
        refuse_limit_without_prices,
    )

    refuse_limit_without_prices(limit, settings)


def _amount(name: str, value: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", value) or not float(value):
        raise SpecError(
            f"--limit {name}={value}: it must be an amount above 0, such as 99.50.", param="limit"
        )
    return float(value)


def _number(name: str, value: str) -> int:
    lowest = -1000 if name == "max_priority" else 1
    try:
        number = int(value)
    except ValueError:
        number = None
    if number is None or not lowest <= number <= 2**53:
        raise SpecError(
            f"--limit {name}={value}: it must be a whole number from {lowest} on.", param="limit"
        )
    return number


def _limits_text(limits: TenantLimits) -> str:
    values = ((name, value) for name, value in asdict(limits).items() if value is not None)
    return " ".join(
        f"{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in values
    )


def _who(entry: AuditEntry) -> tuple[str, str]:
    """Return the key, and the address of the request."""
    return entry.key_id or "this machine", entry.address or ""


def _below(entry: AuditEntry) -> str:
    """Return the fields that have no column on a terminal."""
    key, address = _who(entry)
    where = f" from {address}" if address else ""
    project = (
        f", project {entry.project_id}" if entry.project_id not in (PROJECT, entry.target) else ""
    )
    detail = _detail(entry)
    return f"by {key}{where}{project}{': ' if detail else ''}{detail}"


def _detail(entry: AuditEntry) -> str:
    """Return changes as `NAME=VALUE`, as `--limit` takes it; without VALUE for a removed limit."""
    return " ".join(f"{name}={_value_text(value)}" for name, value in (entry.detail or {}).items())


def _value_text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value)
