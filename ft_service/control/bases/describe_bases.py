"""Descriptions of a service's bases: where they are kept, which process makes them, and the loop
that describes FT_MODELS.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ft_service.bases.catalogue import Catalogue, pickled_weights
from ft_service.bases.describing import Descriptions, describe_in_process, versions_name
from ft_service.bases.description import Versions
from ft_service.host.loops import every
from ft_service.settings import Settings
from ft_service.storage.locations import Places
from ft_service.wording import counted

if TYPE_CHECKING:  # commands that need no database import this too
    from ft_service.meters import Meters
    from ft_service.store.sql import Store

WATCH_SECONDS = 10.0
"""Interval of the search for new bases in the folders of models."""


def service_descriptions(settings: Settings, *, makes: bool) -> Descriptions:
    """The descriptions of a service.

    `makes`: whether this process makes missing ones, or waits for another to.

    Raises SpecError if the pod profile cannot be used.
    """
    if settings.launcher != "kubernetes":
        return local_descriptions(settings, makes=makes)
    from ft_service.launcher.kubernetes.profile import load_profiles

    assert settings.pod_profile is not None, "the settings demand one"
    folder = Places.of(settings).descriptions()
    image = load_profiles(settings.pod_profile).first.image
    if not makes:
        return Descriptions(folder, image)
    from ft_service.control.places.launcher_choice import new_describe_pods

    pods = new_describe_pods(settings)
    return Descriptions(folder, image, pods.describe, waits=pods.waits)


def local_descriptions(settings: Settings, *, makes: bool = True) -> Descriptions:
    """Descriptions made by processes of this host; without the workers' packages, only cached
    ones.
    """
    folder = Places.of(settings).descriptions()
    try:
        describer = versions_name(Versions.installed())
    except LookupError as error:
        missing = (
            f"Bases cannot be described here, since {error.args[0]}: pip install "
            "'ft-service[workers]'."
        )
        return Descriptions(folder, None, missing=missing)
    return Descriptions(folder, describer, describe_in_process if makes else None)


def watch_models(
    settings: Settings,
    store: Store,
    meters: Meters,
    stop: threading.Event,
    *,
    descriptions: Descriptions,
) -> None:
    """Describe every base of FT_MODELS, also those added later, until `stop` is set."""
    every(
        WATCH_SECONDS,
        partial(ask_for_all, Catalogue.from_settings(settings, descriptions)),
        stop,
        "describing bases",
    )
    descriptions.close()


def models_report(settings: Settings) -> Iterator[str]:
    """A sentence for each folder of models: its bases, and how many of them are described or
    refused. Nothing is described.
    """
    descriptions = service_descriptions(settings, makes=False)
    for folder in settings.model_folders():
        bases = Catalogue([folder]).list_models()
        known = [
            descriptions.known(base.path) for base in bases if pickled_weights(base.path) is None
        ]
        described = sum(document is not None and document.base is not None for document in known)
        waiting = known.count(None)
        yield (
            f"{folder}: {counted(len(bases), 'base')}, {described} described, "
            f"{len(bases) - described - waiting} refused, "
            f"{waiting} not described yet."
        )


def ask_for_all(catalogue: Catalogue) -> None:
    """Queue every base without a description, behind those that a request waits for."""
    for base in catalogue.list_models():
        if pickled_weights(base.path) is None:
            catalogue.descriptions.ask(base.path, first=False)
