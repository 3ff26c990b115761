"""Projects and scopes that a person's groups open. Pure, but for reading FT_OIDC_GROUPS."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from ft_service.errors import SpecError
from ft_service.spec.yaml_loader import read_yaml_setting
from ft_service.store.records import Scope
from ft_service.wording import kind, shown_value

log = logging.getLogger(__name__)

EVERYONE = "*"
"""The group of everyone who can sign in."""
_STRENGTH: dict[str, int] = {"read": 0, "submit": 1, "user": 1, "admin": 2}
assert set(_STRENGTH) == set(get_args(Scope)) - {"metrics"}

Groups = Mapping[str, Mapping[str, Scope]]
"""Group → project → scope."""


def read_groups(path: Path) -> Groups:
    """Return the mapping in FT_OIDC_GROUPS.

    Raises SpecError if the file is no such mapping or unreadable.
    """
    groups = read_yaml_setting("FT_OIDC_GROUPS", path)
    if not isinstance(groups, dict) or not groups:
        raise _wrong(path, f"must be a mapping of groups, not {kind(groups)}")
    for group, opened in groups.items():
        if not isinstance(group, str) or not isinstance(opened, dict) or not opened:
            raise _wrong(
                path,
                f"{shown_value(group)}: must be a group's name with a mapping of projects to "
                "scopes, such as {default: read}",
            )
        for project, scope in opened.items():
            if not isinstance(project, str) or scope not in _STRENGTH:
                raise _wrong(
                    path,
                    f"{group}: {project}: {shown_value(scope)} is no scope: use admin, submit or "
                    "read",
                )
    return groups


class GroupsFile:
    """The mapping in FT_OIDC_GROUPS, read again once the file has changed."""

    def __init__(self, path: Path) -> None:
        """Raises SpecError as `read_groups`."""
        self._path = path
        self._stamp = _stamp(path)
        self._groups = read_groups(path)

    def current(self) -> Groups:
        """Return the mapping; while the file is wrong, which is logged, the one before."""
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            try:
                self._groups = read_groups(self._path)
            except SpecError as error:
                log.error("%s What it said before still holds.", error)
            else:
                log.info("FT_OIDC_GROUPS = %s is read again", self._path)
            self._stamp = stamp
        return self._groups


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what differs between two states of a file; None: it cannot be looked at."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_mtime_ns, seen.st_size


def grants_of(claims: Mapping[str, Any], claim: str, groups: Groups | None) -> dict[str, Scope]:
    """Return project → scope by a person's groups, in the order of the mapping; of two scopes in a
    project, the one that allows more. `groups` None: the claim's values are PROJECT:SCOPE, and
    others are ignored.
    """
    values = values_of(claims, claim)
    if groups is None:
        pairs = (value.rpartition(":")[::2] for value in values)
    else:
        held = {*values, EVERYONE}
        pairs = (
            pair for group, opened in groups.items() if group in held for pair in opened.items()
        )
    grants: dict[str, Any] = {}
    for project, scope in pairs:
        if (
            project
            and scope in _STRENGTH
            and _STRENGTH[scope] >= _STRENGTH.get(grants.get(project, ""), -1)
        ):
            grants[project] = scope
    return grants


def values_of(claims: Mapping[str, Any], claim: str) -> list[str]:
    """Return the texts of a claim, which is one text or a list.

    Names such as https://example.com/groups contain dots, so dots lead into objects only if there
    is no claim of the whole name.
    """
    found: Any = claims.get(claim)
    if found is None:
        found = claims
        for part in claim.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    return list(_texts(found))


def _texts(found: Any) -> Iterator[str]:
    for value in found if isinstance(found, list) else [found]:
        if isinstance(value, str):
            yield value


def _wrong(path: Path, why: str) -> SpecError:
    return SpecError(f"FT_OIDC_GROUPS = {path}: {why}.", param="FT_OIDC_GROUPS")
