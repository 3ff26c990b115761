"""`ft chat`: talk to a tuned model, beside its base if wanted."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from ft_service.cli.jobs.naming import find_job
from ft_service.cli.output import Json, connect, print_json, tell
from ft_service.client.client import Client
from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.spec import is_tuned

_BYE = ("/exit", "/quit", "/bye")
_NEW = "/new"
_HELP = "/help"
_HELP_TEXT = f"""\
{_NEW:<20}begin anew: what was said is forgotten
{", ".join(_BYE):<20}leave, as Ctrl-D does
{_HELP:<20}this
Ctrl-C              end an answer; it is not remembered
Everything else is asked."""


@dataclass(frozen=True)
class Partner:
    """Whom one talks to."""

    title: str
    model: str


def register(app: typer.Typer) -> None:
    app.command()(chat)


def chat(
    model: Annotated[
        str,
        typer.Argument(metavar="ID", help="A job (id, beginning of it, suffix, `last`), a tuned model, or a base."),
    ],
    message: Annotated[
        str | None, typer.Argument(help="Ask this and leave; without it, or with -, it is a conversation.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="The base's answer too, side by side.")] = False,
    base: Annotated[bool, typer.Option("--base", help="Only the base's answer.")] = False,
    checkpoint: Annotated[int | None, typer.Option(metavar="STEP", help="The job's checkpoint at this step.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message to begin with.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: the same answer every time.")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer, at most.")] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="While training has every slot, answer on the processor beside it, slowly.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Talk to a tuned model. In a conversation /help tells what can be typed, and /exit or Ctrl-D leaves."""
    if base and compare:
        raise SpecError("--base and --compare: one asks the base alone, the other both. Keep one.", param="compare")
    if as_json and message is None:
        raise SpecError("--json needs a message: a conversation is for people.", param="json")
    if message == "-":
        message = sys.stdin.read()
    with connect() as client:
        tuned, its_base = find_partners(client, model, checkpoint)
        asked = [its_base] if base else [tuned, its_base] if compare and tuned.model != its_base.model else [tuned]
        options: dict[str, Any] = {"temperature": temperature} | ({"max_tokens": max_tokens} if max_tokens else {})
        options |= {"processor": True} if cpu else {}
        begin = [{"role": "system", "content": system}] if system else []
        talk = Talk(client, asked, options, begin)
        if message is None:
            talk.hold()
        elif as_json:
            print_json({partner.model: talk.answer(partner, message) for partner in asked})
        else:
            talk.ask(message)


def find_partners(client: Client, wanted: str, step: int | None = None) -> tuple[Partner, Partner]:
    """The model that a word for a job, or a model's name, means, and its base. Raises SpecError or NotFoundError.

    A job that has not succeeded stands for its newest checkpoint.
    """
    names = {model.id: model for model in client.models()}
    if step is None and wanted in names:
        root = (names[wanted].model_extra or {}).get("root") or wanted
        return Partner("tuned" if is_tuned(wanted) else "base", wanted), Partner("base", root)
    try:
        job = client.job(find_job(client, wanted, fit=lambda job: job.fine_tuned_model is not None))
    except NotFoundError as error:
        raise NotFoundError(f"{error.message} Bases: `ft models`.", param=error.param, code=error.code) from None
    its_base = Partner("base", job.model)
    if step is None and is_tuned(wanted):
        return Partner("checkpoint", wanted), its_base
    if step is None and job.fine_tuned_model is not None:
        return Partner("tuned", job.fine_tuned_model), its_base
    points = client.checkpoints(job.id)
    chosen = next((point for point in points if step is None or point.step_number == step), None)
    if chosen is None:
        steps = ", ".join(str(point.step_number) for point in reversed(points)) or "none yet"
        raise NotFoundError(f"Job {job.id} ({job.status}) has no such checkpoint; it has: {steps}.", param="checkpoint")
    return Partner(f"step {chosen.step_number}", chosen.fine_tuned_model_checkpoint), its_base


class Talk:
    """One conversation with one partner or two, each of whom remembers its own answers."""

    def __init__(self, client: Client, partners: list[Partner], options: dict[str, Any], begin: list[dict[str, Any]]) -> None:
        self._client, self._partners, self._options, self._begin = client, partners, options, begin
        self._said: dict[str, list[dict[str, Any]]] = {}
        self._console = Console(highlight=False, emoji=False)
        self.forget()

    def forget(self) -> None:
        self._said = {partner.model: list(self._begin) for partner in self._partners}

    def hold(self) -> None:
        """Ask what is typed, until the end."""
        names = " and ".join(partner.model for partner in self._partners)
        tell(f"Talking to {names}. {_NEW} begins anew, {_BYE[0]} leaves, {_HELP} tells more.")
        with suppress(ImportError):  # where there is one, what is typed can be edited and called back
            importlib.import_module("readline")
        while True:
            try:
                message = input("> ").rstrip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if message in _BYE:
                return
            if message == _NEW:
                self.forget()
            elif message == _HELP:
                tell(_HELP_TEXT)
            elif message.startswith("/") and message[1:].isalpha():
                tell(f"There is no {message}. {_HELP} tells what there is; a space before it sends it to the model.")
            elif message.strip():
                try:
                    self.ask(message.strip())
                except KeyboardInterrupt:
                    print("\n(ended; it is not remembered)")
                except FtError as error:
                    self._console.print(Text(error.message, style="red"), soft_wrap=True)

    def ask(self, message: str) -> None:
        """Ask everybody and print the answers; a single one as it comes."""
        if len(self._partners) == 1:
            for text in self._stream(self._partners[0], message):
                print(text, end="", flush=True)
            print()
            return
        answers = [self.answer(partner, message) for partner in self._partners]
        width = (self._console.width - 1) // len(answers)
        panels = [
            Panel(Text(answer), title=Text(f"{partner.title}: {partner.model}"), width=width)
            for partner, answer in zip(self._partners, answers, strict=True)
        ]
        if self._console.is_terminal:
            self._console.print(Columns(panels, padding=0))
        else:
            for partner, answer in zip(self._partners, answers, strict=True):
                print(f"{partner.title}: {answer}")

    def answer(self, partner: Partner, message: str) -> str:
        return "".join(self._stream(partner, message))

    def _stream(self, partner: Partner, message: str) -> Iterator[str]:
        said = self._said[partner.model]
        asked = [*said, {"role": "user", "content": message}]
        body = {"model": partner.model, "messages": asked, "stream": True, **self._options}
        answer = ""
        with self._console.status("Loading the model and reading") if self._console.is_terminal else nullcontext():
            parts = self._client.chat(body)
            first = next(parts, "")
        for text in chain([first], parts):
            answer += text
            yield text
        self._said[partner.model] = [*asked, {"role": "assistant", "content": answer}]
