"""Profiles of a cluster: the operator's settings of pods or of batch jobs, one or several by name,
in a YAML file that a setting names. A job cannot change them.

The file is one profile, or several by name under `profiles`: types of GPUs, pools, accounts of
projects. Fields beside `profiles` are shared; a field of a profile replaces the shared one as a
whole. A job names its profile (`distributed.profile`), or gets the first one that its project may
use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import ValidationError

from ft_service.errors import SpecError
from ft_service.spec import Strict, spec_error
from ft_service.spec.yaml_loader import read_yaml_setting


class HasProjects(Protocol):
    """A profile."""

    @property
    def projects(self) -> list[str] | None:
        """Ids of the projects whose jobs may use it; None: all."""
        ...


P = TypeVar("P", bound=HasProjects)
S = TypeVar("S", bound=Strict)


@dataclass(frozen=True)
class Profiles(Generic[P]):
    """The profiles of a file."""

    by_name: Mapping[str | None, P]
    """In the file's order. None: the file is one profile, which has no name."""
    setting: str
    """The setting that names the file."""
    kind: str
    """What a profile describes, for messages: "kind of pods"."""

    @property
    def first(self) -> P:
        """The first of the file."""
        return next(iter(self.by_name.values()))

    def choose(self, name: str | None, project: str | None) -> str | None:
        """Return the name of the profile of a job that asks for `name` (None: for none), of a
        project (None: of any).

        Raises SpecError if there is no such profile for the project.
        """
        if name is None and None in self.by_name:
            return None
        allowed = [
            key
            for key, profile in self.by_name.items()
            if project is None or profile.projects is None or project in profile.projects
        ]
        if name is None and allowed:
            return allowed[0]
        if name is not None and name in allowed:
            return name
        named = ", ".join(key for key in allowed if key is not None)
        choice = (
            f"Choose from {named}, or leave it out."
            if named
            else "Leave it out."
            if None in self.by_name
            else ""
        )
        choice = choice or f"The operator has to give it one (projects in {self.setting})."
        raise SpecError(
            f"distributed.profile = {name!r}: this project has no such {self.kind}. {choice}",
            param="distributed.profile",
        )


def read_profiles(setting: str, path: Path, model: type[S]) -> Mapping[str | None, S]:
    """Read the profiles of a file, by name.

    Raises SpecError that names the file, the profile and the field.
    """
    where = f"{setting} = {path}"
    given = read_yaml_setting(setting, path)
    validated = _validating(setting, model)
    if not isinstance(given, dict) or "profiles" not in given:
        return {None: validated(given, where)}
    shared = {key: value for key, value in given.items() if key != "profiles"}
    own = given["profiles"]
    if not isinstance(own, dict) or not own or not all(_is_name(name) for name in own):
        message = (
            f"{where}: profiles: give each a name (lower-case letters, digits and hyphens, "
            "at most 40) and its fields."
        )
        raise SpecError(message, param=setting)
    return {
        name: validated({**shared, **(fields or {})}, f"{where}: profiles.{name}")
        for name, fields in own.items()
    }


def _is_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", name) is not None
    )


def _validating(setting: str, model: type[S]) -> Callable[[Any, str], S]:
    def validated(given: Any, where: str) -> S:
        try:
            return model.model_validate(given)
        except ValidationError as error:
            message = f"{where}: {spec_error(error, model).message}"
            raise SpecError(message, param=setting) from None

    return validated
