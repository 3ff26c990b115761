"""`ft models`: models of a server; `ft pull`: fetch a base or a data set from a hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.bases import hub
from ft_service.bases.description import Described
from ft_service.cli.local_store import settings_with_models
from ft_service.cli.output import (
    Json,
    connect,
    load_settings,
    local_time,
    print_error,
    print_json,
    print_note,
    print_table,
    print_text,
)
from ft_service.control.bases.base_facts import BaseFacts, base_facts
from ft_service.control.bases.describe_bases import local_descriptions
from ft_service.control.bases.pulling import described, folder_for, refusal
from ft_service.data.hub_data import FOLDER, PREFIX, pull_data
from ft_service.errors import SpecError
from ft_service.host.home import create_home
from ft_service.spec import is_tuned

INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    app.command()(models)
    app.command()(pull)


def models(as_json: Json = False) -> None:
    """List the models that the server knows: bases, whether they can be tuned, and tuned ones."""
    with connect() as client:
        known = client.models()
    if as_json:
        print_json([model.model_dump() for model in known])
        return
    bases = [(model, model.base or {}) for model in known if not is_tuned(model.id)]
    tuned = [model for model in known if is_tuned(model.id)]
    if bases:
        facts_shown = ("FAMILY", "SIZE", "FORMAT", "CONTEXT", "CHAT", "IMAGES", "LICENCE")
        titles = ("BASE", *facts_shown, "TUNES")
        notes = ("WHY NOT", [_why(facts) for _, facts in bases])
        print_table(
            titles, [_row(model.id, facts) for model, facts in bases], notes=notes, whole_notes=True
        )
    else:
        print_text(
            "The server knows no bases: fetch one (ft pull ORG/NAME), or put a Hugging Face "
            "folder below one that FT_MODELS "
            "names."
        )
    if tuned:
        print_text()
        print_table(
            ("TUNED MODEL", "OWNER", "CREATED"),
            [(m.id, m.owned_by, local_time(m.created)) for m in tuned],
        )


def pull(
    model: Annotated[str, typer.Argument(metavar="ORG/NAME[@REVISION]", help="Name on the hub.")],
    name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Local name. Default: ORG/NAME.")
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Fetch it even if it cannot be tuned here.")
    ] = False,
    data: Annotated[
        bool, typer.Option("--data", help="It is a data set: fetch its data files into FT_HOME.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Fetch a base from Hugging Face's hub (or HF_ENDPOINT's) into the first folder of FT_MODELS.

    Weights in safetensors, configuration and tokenizer only; with --data the data files of a data
    set, which a SPEC names as hf://ORG/NAME. HF_TOKEN opens gated ones. If interrupted, it
    continues where it stopped.
    """
    if data:
        return _pull_data(model, name, as_json)
    repository, revision = hub.parse_name(model)
    called = repository if name is None else name
    folder = folder_for(called, settings_with_models().model_folders(), field="--as")
    listing = hub.look_up(repository, revision)
    create_home(settings_with_models().home)
    target = folder / called
    if hub.is_there(target, repository, listing.commit):
        print_note(f"{called} is there already, at {listing.commit[:12]}.")
    else:
        try:
            target = hub.pull(
                listing,
                folder,
                called,
                lambda staged: _judge(staged, anyway),
                print_note,
                shows_bars=sys.stderr.isatty(),
            )
        except KeyboardInterrupt:
            return print_error(
                f"stopped. What has arrived is kept; continue with: ft pull {model}", INTERRUPTED
            )
    document = _described(target)
    facts = base_facts(target, document)
    if as_json:
        print_json(
            {
                "name": called,
                "path": str(target),
                "commit": listing.commit,
                "licence": listing.licence,
            }
        )
    else:
        size = f"{_size(facts.parameters)} parameters, " if facts.parameters else ""
        print_text(
            f"{called} is in {target} ({size}licence: {listing.licence or 'none is named'})."
        )
        print_text(_verdict(called, facts))
    return 0


def _pull_data(named: str, called: str | None, as_json: bool) -> int:
    if called is not None:
        raise SpecError(
            "--as is for bases: a data set is named as on the hub, hf://ORG/NAME.", param="as"
        )
    repository, revision = hub.parse_name(named)
    listing = hub.look_up(repository, revision, "dataset")
    home = load_settings().home
    create_home(home)
    try:
        folder = pull_data(listing, home / FOLDER, print_note, shows_bars=sys.stderr.isatty())
    except KeyboardInterrupt:
        return print_error(
            f"stopped. What has arrived is kept; continue with: ft pull --data {named}", INTERRUPTED
        )
    if as_json:
        print_json(
            {
                "name": f"{PREFIX}{repository}",
                "path": str(folder),
                "commit": listing.commit,
                "licence": listing.licence,
            }
        )
    else:
        print_text(f"{repository} is in {folder} (licence: {listing.licence or 'none is named'}).")
        print_text(f"Train on it: training_file: {PREFIX}{repository}")
    return 0


def _judge(staged: Path, anyway: bool) -> None:
    if not anyway and (why := refusal(staged, _described)) is not None:
        message = f"{why.message} No weights were fetched; --anyway fetches them all the same."
        raise SpecError(message, param="model", code=why.code)


def _described(folder: Path) -> Described | None:
    """Describe a base; None: the workers' packages are not installed here, and the cache has no
    description.
    """
    descriptions = local_descriptions(settings_with_models())
    if descriptions.missing is None:
        print_note("Describing it …")
    return described(folder, descriptions)


def _verdict(called: str, facts: BaseFacts) -> str:
    if not facts.described:
        return (
            "It is described by the server that sees it; then `ft models` says whether "
            f"{called} can be tuned."
        )
    return (
        f"Train on it: model: {called}"
        if facts.trainable
        else f"It cannot be tuned here: {facts.why_not}"
    )


def _row(name: str, facts: dict[str, Any]) -> tuple[str, ...]:
    context = facts.get("context")
    return (
        name,
        facts.get("family") or "",
        _size(facts.get("parameters")),
        facts.get("format") or "",
        f"{context:,}" if context else "",
        _yes(facts.get("chat_template")),
        _yes(facts.get("images")),
        facts.get("licence") or "",
        "not yet" if facts.get("described") is False else _yes(facts.get("trainable")),
    )


def _why(facts: dict[str, Any]) -> str | None:
    return facts.get("why_not") or (
        None if facts.get("described", True) else "It is being described."
    )


def _yes(known: bool | None) -> str:
    """Return "yes" or "no"; empty if unknown."""
    return "" if known is None else "yes" if known else "no"


def _size(parameters: int | None) -> str:
    if not parameters:
        return ""
    unit, letter = next(
        ((unit, letter) for unit, letter in ((1e9, "B"), (1e6, "M")) if parameters >= unit),
        (1e3, "K"),
    )
    return f"{parameters / unit:.3g}{letter}"
