"""`ft models` and `ft pull`: what a server can train on and what it has trained; a base from a hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ft_service.bases import hub
from ft_service.bases.catalogue import MAX_DEPTH, is_model_name
from ft_service.bases.origin import read_origin
from ft_service.cli.local_store import SAMPLES, settings_with_models
from ft_service.cli.output import Json, complain, connect, load_settings, local_time, print_json, print_table, say, tell
from ft_service.control.base_facts import base_facts, refuse_untrainable
from ft_service.data.hub_data import FOLDER, PREFIX, pull_data
from ft_service.errors import FtError, SpecError
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
        titles = ("BASE", "FAMILY", "SIZE", "FORMAT", "CONTEXT", "CHAT", "LICENCE", "TUNES")
        notes = ("WHY NOT", [_why(facts) for _, facts in bases])
        print_table(titles, [_row(model.id, facts) for model, facts in bases], notes=notes, whole_notes=True)
    else:
        tell(
            "The server knows no bases: fetch one (ft pull ORG/NAME), or put a Hugging Face folder below one that FT_MODELS "
            "names."
        )
    if tuned:
        tell()
        print_table(("TUNED MODEL", "OWNER", "CREATED"), [(m.id, m.owned_by, local_time(m.created)) for m in tuned])


def pull(
    model: Annotated[str, typer.Argument(metavar="ORG/NAME[@REVISION]", help="As its page names it.")],
    name: Annotated[str | None, typer.Option("--as", metavar="NAME", help="What it is called here. Default: ORG/NAME.")] = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="Fetch it even if it cannot be tuned here.")] = False,
    data: Annotated[bool, typer.Option("--data", help="It is a data set: fetch its data files into FT_HOME.")] = False,
    as_json: Json = False,
) -> int:
    """Fetch a base from Hugging Face's hub (or HF_ENDPOINT's) into the first folder of FT_MODELS. Weights in safetensors,
    configuration and tokenizer only; with --data the data files of a data set, which a SPEC names as hf://ORG/NAME. HF_TOKEN
    opens gated ones. Interrupted, it goes on where it was.
    """
    if data:
        return _pull_data(model, name, as_json)
    repository, revision = hub.parse_name(model)
    called = repository if name is None else name
    folder = _model_folder(called)
    found = hub.look_up(repository, revision)
    create_home(settings_with_models().home)
    there = read_origin(folder / called)
    target = folder / called
    if there is not None and (there.repository, there.commit) == (repository, found.commit):
        say(f"{called} is there already, at {found.commit[:12]}.")
    else:
        try:
            target = hub.pull(
                found, folder, called, lambda staged: _judge(staged, called, anyway), say, shows_bars=sys.stderr.isatty()
            )
        except KeyboardInterrupt:
            return complain(f"stopped. What has arrived is kept; go on with: ft pull {model}", INTERRUPTED)
    facts = base_facts(target, called)
    if as_json:
        print_json({"name": called, "path": str(target), "commit": found.commit, "licence": found.licence})
    else:
        size = f"{_size(facts.parameters)} parameters, " if facts.parameters else ""
        tell(f"{called} is in {target} ({size}licence: {found.licence or 'none is named'}).")
        tell(f"Train on it: model: {called}" if facts.trainable else f"It cannot be tuned here: {facts.why_not}")
    return 0


def _pull_data(named: str, called: str | None, as_json: bool) -> int:
    if called is not None:
        raise SpecError("--as is for bases: a data set is named as on the hub, hf://ORG/NAME.", param="as")
    repository, revision = hub.parse_name(named)
    found = hub.look_up(repository, revision, "dataset")
    home = load_settings().home
    create_home(home)
    try:
        folder = pull_data(found, home / FOLDER, say, shows_bars=sys.stderr.isatty())
    except KeyboardInterrupt:
        return complain(f"stopped. What has arrived is kept; go on with: ft pull --data {named}", INTERRUPTED)
    if as_json:
        print_json({"name": f"{PREFIX}{repository}", "path": str(folder), "commit": found.commit, "licence": found.licence})
    else:
        tell(f"{repository} is in {folder} (licence: {found.licence or 'none is named'}).")
        tell(f"Train on it: training_file: {PREFIX}{repository}")
    return 0


def _model_folder(called: str) -> Path:
    """The first folder of models that is not the sample's. Raises SpecError for a name by which nobody could find the model."""
    deep = called.count("/") >= MAX_DEPTH
    if not is_model_name(called) or deep or is_tuned(called) or called != called.strip() or called.startswith("-"):
        raise SpecError(
            f"--as = {called[:80]!r}: must be a name as in ORG/NAME, of at most {MAX_DEPTH} parts, none of them empty or "
            "hidden, that begins with neither '-' nor 'ft:', which stands for tuned models.",
            param="as",
        )
    folders = [folder for folder in settings_with_models().model_folders() if folder.absolute() != SAMPLES]
    if not folders:
        raise SpecError("FT_MODELS names the sample's folder only: add one for what is pulled.", param="FT_MODELS")
    return folders[0].absolute()


def _judge(staged: Path, called: str, anyway: bool) -> None:
    try:
        refuse_untrainable(staged, called)
    except FtError as error:
        if error.code == "model_unreadable":  # config.json alone does not say enough: the weights will
            return
        if not anyway:
            message = f"{error.message} No weights were fetched; --anyway fetches them all the same."
            raise SpecError(message, param="model", code=error.code) from None


def _row(name: str, facts: dict[str, Any]) -> tuple[str, ...]:
    context = facts.get("context")
    return (
        name,
        facts.get("family") or "",
        _size(facts.get("parameters")),
        facts.get("format") or "",
        f"{context:,}" if context else "",
        _yes(facts.get("chat_template")),
        facts.get("licence") or "",
        _yes(facts.get("trainable")),
    )


def _why(facts: dict[str, Any]) -> str | None:
    return facts.get("why_not")


def _yes(known: bool | None) -> str:
    """Nothing where a server of an earlier version does not say."""
    return "" if known is None else "yes" if known else "no"


def _size(parameters: int | None) -> str:
    if not parameters:
        return ""
    unit, letter = next(((unit, letter) for unit, letter in ((1e9, "B"), (1e6, "M")) if parameters >= unit), (1e3, "K"))
    return f"{parameters / unit:.3g}{letter}"
