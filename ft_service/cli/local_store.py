"""This machine's database, models and homes, for commands that need no server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ft_service.cli.output import load_settings
from ft_service.host.home import create_home, require_writable
from ft_service.host.running_servers import living_servers
from ft_service.installation import ROOT, SAMPLE_MODELS, is_installed
from ft_service.settings import Settings

if TYPE_CHECKING:
    from ft_service.store.sql import Store

PROJECT = "default"
MAKES = ".ft"
"""Home that `make` uses, in the source folder."""


@contextlib.contextmanager
def local_store(settings: Settings) -> Iterator[Store]:
    """Open the store of FT_HOME or FT_DATABASE_URL, migrated to this version's schema."""
    from ft_service.store.database import DatabaseLimits

    # Half of the command line's start-up time, for few rare commands.
    from ft_service.store.sql import (
        migrate,
        open_store,
    )

    create_home(settings.home)
    require_writable(settings.home)
    url = settings.resolved_database_url()
    migrate(url)
    store = open_store(url, DatabaseLimits.of(settings))
    try:
        store.keep_rules(settings, is_command=True)
        store.projects.ensure_project(PROJECT, settings.organization)
        yield store
    finally:
        store.close()


def settings_with_models() -> Settings:
    """Return the environment's settings; without FT_MODELS, with the model folders of the home's
    newest running server, or, if none runs, those of `ft serve`. Raises SpecError.
    """
    settings = load_settings()
    if settings.models:
        return settings
    folders = next(
        (server.models for server in living_servers(settings.home) if server.models), None
    )
    return (
        settings.model_copy(update={"models": folders}) if folders else with_sample_base(settings)
    )


def with_sample_base(settings: Settings) -> Settings:
    """Return the settings with FT_HOME/models and the sample base as folders of models, unless
    FT_MODELS names others. A cluster's pods do not see this host's folders, and get no sample
    base.
    """
    if settings.models or settings.launcher == "kubernetes" or not SAMPLE_MODELS.is_dir():
        return settings
    return settings.model_copy(update={"models": [*settings.model_folders(), SAMPLE_MODELS]})


def settings_of_server() -> Settings:
    """Return the environment's settings; without FT_HOME, with the home in which a server runs:
    `~/.ft`, or the `.ft` of `make` in this folder, one above it, or the source folder. Raises
    SpecError.
    """
    settings = load_settings()
    if os.environ.get("FT_HOME"):
        return settings
    here = Path.cwd()
    makes = [
        folder / MAKES for folder in (here, *here.parents, *([] if is_installed() else [ROOT]))
    ]
    running = (home for home in (settings.home, *makes) if _is_ours(home) and living_servers(home))
    return settings.model_copy(update={"home": next(running, settings.home)})


def _is_ours(home: Path) -> bool:
    try:
        return home.stat().st_uid == os.getuid()
    except OSError:
        return False
