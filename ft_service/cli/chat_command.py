"""`ft chat`: talk to a tuned model, or compare it with its base."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from ft_service.cli.jobs.job_argument import find_job
from ft_service.cli.output import Json, connect, print_json, print_text
from ft_service.client.client import Client
from ft_service.data.image_part import TYPE, refuse_large, refuse_other_types, url_of
from ft_service.data.line_errors import OF_FILES, LineError
from ft_service.data.sample_kinds import Picture
from ft_service.errors import FtError, NotFoundError, SpecError
from ft_service.spec import is_tuned

_BYE = ("/exit", "/quit", "/bye")
_NEW = "/new"
_HELP = "/help"
_HELP_TEXT = f"""\
{_NEW:<20}start a new conversation
{", ".join(_BYE):<20}leave, as with Ctrl-D
{_HELP:<20}show this list
Ctrl-C              stop an answer, which is then not remembered
Everything else is sent to the model."""


@dataclass(frozen=True)
class ChatTarget:
    """Model of a conversation, with a title for its answers."""

    title: str
    model: str


def register(app: typer.Typer) -> None:
    app.command()(chat)


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="A job (id, beginning of it, suffix, `last`), a tuned model, or a base.",
        ),
    ],
    message: Annotated[
        str | None,
        typer.Argument(help="Send this and exit; without it, or with -, it is a conversation."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show the base's answer too, side by side.")
    ] = False,
    base: Annotated[bool, typer.Option("--base", help="Show only the base's answer.")] = False,
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", help="The job's checkpoint at this step.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message to begin with.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="0: the same answer every time.")
    ] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens.")
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|URL",
            help="Show this image with the first message; may be given several times.",
        ),
    ] = None,
    cpu: Annotated[
        bool,
        typer.Option(
            "--cpu", help="While training has every slot, answer on the processor, slowly."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Talk to a tuned model.

    In a conversation /help lists the commands, and /exit or Ctrl-D leaves.
    """
    if base and compare:
        raise SpecError(
            "--base and --compare: the first uses only the base, the second both models. Keep one.",
            param="compare",
        )
    if as_json and message is None:
        raise SpecError("--json needs a message: a conversation is for people.", param="json")
    if message == "-":
        message = sys.stdin.read()
    images = [_image_part(given) for given in image or ()]
    with connect() as client:
        tuned, its_base = find_chat_targets(client, model, checkpoint)
        asked = (
            [its_base]
            if base
            else [tuned, its_base]
            if compare and tuned.model != its_base.model
            else [tuned]
        )
        options: dict[str, Any] = {"temperature": temperature} | (
            {"max_tokens": max_tokens} if max_tokens else {}
        )
        options |= {"processor": True} if cpu else {}
        begin = [{"role": "system", "content": system}] if system else []
        talk = ChatSession(client, asked, options, begin, images)
        if message is None:
            talk.hold()
        elif as_json:
            print_json({target.model: talk.answer(target, message) for target in asked})
        else:
            talk.ask(message)


def find_chat_targets(
    client: Client, wanted: str, step: int | None = None
) -> tuple[ChatTarget, ChatTarget]:
    """Return the model that a job's or model's name means, and its base.

    Raises SpecError or NotFoundError.

    For a job that has not succeeded, it is the newest checkpoint.
    """
    names = {model.id: model for model in client.models()}
    if step is None and wanted in names:
        root = (names[wanted].model_extra or {}).get("root") or wanted
        return ChatTarget("tuned" if is_tuned(wanted) else "base", wanted), ChatTarget("base", root)
    try:
        job = client.job(find_job(client, wanted, fit=lambda job: job.fine_tuned_model is not None))
    except NotFoundError as error:
        raise NotFoundError(
            f"{error.message} Bases: `ft models`.", param=error.param, code=error.code
        ) from None
    its_base = ChatTarget("base", job.model)
    if step is None and is_tuned(wanted):
        return ChatTarget("checkpoint", wanted), its_base
    if step is None and job.fine_tuned_model is not None:
        return ChatTarget("tuned", job.fine_tuned_model), its_base
    points = client.checkpoints(job.id)
    chosen = next((point for point in points if step is None or point.step_number == step), None)
    if chosen is None:
        steps = ", ".join(str(point.step_number) for point in reversed(points)) or "none yet"
        raise NotFoundError(
            f"Job {job.id} ({job.status}) has no such checkpoint; it has: {steps}.",
            param="checkpoint",
        )
    return ChatTarget(f"step {chosen.step_number}", chosen.fine_tuned_model_checkpoint), its_base


class ChatSession:
    """Conversation with one or two models, each with a history of its own answers."""

    def __init__(
        self,
        client: Client,
        targets: list[ChatTarget],
        options: dict[str, Any],
        begin: list[dict[str, Any]],
        images: Sequence[dict[str, Any]] = (),
    ) -> None:
        """`images`: parts that the first message of the user begins with."""
        self._client = client
        self._targets = targets
        self._options = options
        self._begin = begin
        self._images = images
        self._history: dict[str, list[dict[str, Any]]] = {}
        self._console = Console(highlight=False, emoji=False)
        self.forget()

    def forget(self) -> None:
        self._history = {target.model: list(self._begin) for target in self._targets}

    def hold(self) -> None:
        """Send what the user types, until the user leaves."""
        names = " and ".join(target.model for target in self._targets)
        print_text(
            f"Talking to {names}. {_NEW} starts a new conversation, {_BYE[0]} leaves, {_HELP} "
            "lists all commands."
        )
        with suppress(ImportError):  # if present, it adds editing and a history to the input
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
                print_text(_HELP_TEXT)
            elif message.startswith("/") and message[1:].isalpha():
                print_text(
                    f"There is no {message}. {_HELP} lists the commands; with a space in front it "
                    "is sent to the model."
                )
            elif message.strip():
                try:
                    self.ask(message.strip())
                except KeyboardInterrupt:
                    print("\n(ended; it is not remembered)")
                except FtError as error:
                    self._console.print(Text(error.message, style="red"), soft_wrap=True)

    def ask(self, message: str) -> None:
        """Send a message and print the answers; a single one as it arrives."""
        if len(self._targets) == 1:
            for text in self._stream(self._targets[0], message):
                print(text, end="", flush=True)
            print()
            return
        answers = [self.answer(target, message) for target in self._targets]
        width = (self._console.width - 1) // len(answers)
        panels = [
            Panel(Text(answer), title=Text(f"{target.title}: {target.model}"), width=width)
            for target, answer in zip(self._targets, answers, strict=True)
        ]
        if self._console.is_terminal:
            self._console.print(Columns(panels, padding=0))
        else:
            for target, answer in zip(self._targets, answers, strict=True):
                print(f"{target.title}: {answer}")

    def answer(self, target: ChatTarget, message: str) -> str:
        return "".join(self._stream(target, message))

    def _stream(self, target: ChatTarget, message: str) -> Iterator[str]:
        said = self._history[target.model]
        shows = self._images and not any(own["role"] == "user" for own in said)
        content = [*self._images, {"type": "text", "text": message}] if shows else message
        asked = [*said, {"role": "user", "content": content}]
        body = {"model": target.model, "messages": asked, "stream": True, **self._options}
        answer = ""
        with (
            self._console.status("Loading the model and reading")
            if self._console.is_terminal
            else nullcontext()
        ):
            parts = self._client.chat(body)
            first = next(parts, "")
        for text in chain([first], parts):
            answer += text
            yield text
        self._history[target.model] = [*asked, {"role": "assistant", "content": answer}]


def _image_part(given: str) -> dict[str, Any]:
    """The part of a message that shows an image. `given`: its file or URL.

    Raises SpecError for a file that is no image which a request may hold.
    """
    if re.match(r"(https?|data):", given):
        return {"type": TYPE, TYPE: {"url": given}}
    try:
        data = Path(given).expanduser().read_bytes()
        refuse_large(len(data), given)
        refuse_other_types(data, given)
    except OSError as error:
        raise SpecError(
            f"--image {given}: cannot be read: {error.strerror}.", param="image"
        ) from None
    except LineError as error:
        reason = error.reason.removesuffix(OF_FILES)
        raise SpecError(f"--image {given}: {reason}.", param="image") from None
    return {"type": TYPE, TYPE: url_of(Picture.of(data))}
