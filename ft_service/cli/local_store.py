"""This machine's database, models and homes, for commands that need no server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ft_service.cli.output import load_settings
from ft_service.host.home import create_home
from ft_service.host.servers import living_servers
from ft_service.settings import Settings

if TYPE_CHECKING:
    from ft_service.store.sql import Store

PROJECT = "default"
SAMPLES = Path(__file__).parents[2] / "examples" / "models"
"""The sample base of a source folder; an installed package has none."""
MAKES = ".ft"
"""The home that `make` takes, in the source folder."""


@contextlib.contextmanager
def local_store(settings: Settings) -> Iterator[Store]:
    """The store that FT_HOME or FT_DATABASE_URL names, brought to this version's schema."""
    from ft_service.store.sql import migrate, open_store  # half of the command line's start-up time, for few rare commands

    create_home(settings.home)
    url = settings.resolved_database_url()
    migrate(url)
    store = open_store(url)
    try:
        store.ensure_project(PROJECT, settings.organization)
        yield store
    finally:
        store.close()


def settings_with_models() -> Settings:
    """The environment's settings; without FT_MODELS the model folders of the home's newest server, or, where none runs, those
    that `make serve` takes: FT_HOME/models and the sample base. Raises SpecError.
    """
    settings = load_settings()
    if settings.models:
        return settings
    folders = next((server.models for server in living_servers(settings.home) if server.models), None)
    return settings.model_copy(
        update={"models": folders or [*settings.model_folders(), *([SAMPLES] if SAMPLES.is_dir() else [])]}
    )


def settings_of_server() -> Settings:
    """The environment's settings; without FT_HOME the home in which a server runs: `~/.ft`, or the `.ft` of `make` in this
    folder, one above it, or the source folder. Raises SpecError.
    """
    settings = load_settings()
    if "FT_HOME" in os.environ:
        return settings
    here = Path.cwd()
    makes = [folder / MAKES for folder in (here, *here.parents, SAMPLES.parents[1])]
    running = (home for home in (settings.home, *makes) if _is_ours(home) and living_servers(home))
    return settings.model_copy(update={"home": next(running, settings.home)})


def _is_ours(home: Path) -> bool:
    try:
        return home.stat().st_uid == os.getuid()
    except OSError:
        return False
