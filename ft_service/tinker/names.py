"""Ids and paths on Tinker's wire. Pure.

session-…                            a client's session
session-…:train:<n>                  the n-th model of a session, whose job's id follows from it
session-…:sample:<n>                 the n-th sampler of a session
<model or sampler>#<seq>             a request, whose result is asked for
tinker://<model>/weights/<name>      saved weights to go on from; sampler_weights: to sample from
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ft_service.errors import SpecError
from ft_service.tinker.saved_weights import NAME, Kind

SESSION = "session-"
KEY_PREFIX = "tml-"
"""Beginning of a key of ours as Tinker's client takes it."""
_OTHER_KIND: Mapping[Kind, tuple[str, str]] = {
    "weights": ("train on", "To sample, take those of save_weights_for_sampler"),
    "sampler_weights": ("sample from", "To train on, take those of save_state"),
}
"""Kind → what such weights are for, and what to take for the other purpose."""
_MODEL = re.compile(r"(session-[0-9A-Za-z]{1,64}):train:([0-9]{1,9})")
_SAMPLER = re.compile(r"(session-[0-9A-Za-z]{1,64}):sample:([0-9]{1,9})")
_REQUEST = re.compile(r"(session-[0-9A-Za-z]{1,64}:(train|sample):[0-9]{1,9})#([0-9]{1,12})")
_PATH = re.compile(r"tinker://([^/]{1,120})/(weights|sampler_weights)/([^/]{1,128})")


def model_id(session_id: str, seq: int) -> str:
    return f"{session_id}:train:{seq}"


def sampler_id(session_id: str, seq: int) -> str:
    return f"{session_id}:sample:{seq}"


def session_of(any_id: str) -> str:
    """The session of a model or a sampler."""
    return any_id.split(":")[0]


def check_model_id(given: str) -> str:
    """Raises SpecError."""
    if not _MODEL.fullmatch(given):
        raise SpecError(
            f"model_id = {given[:120]!r}: a model's id is SESSION:train:NUMBER, as create_model "
            "answers.",
            param="model_id",
        )
    return given


def check_sampler_id(given: str) -> str:
    """Raises SpecError."""
    if not _SAMPLER.fullmatch(given):
        text = (
            f"sampling_session_id = {given[:120]!r}: it is SESSION:sample:NUMBER, as "
            "create_sampling_session answers."
        )
        raise SpecError(text, param="sampling_session_id")
    return given


def job_id_of(model: str) -> str:
    """The id of the job that a model is, so that a repeated creation finds it."""
    return "ftjob-" + hashlib.sha256(model.encode()).hexdigest()[:24]


def request_id(owner: str, seq: int) -> str:
    """`owner`: the model or the sampler that it is for."""
    return f"{owner}#{seq}"


def parse_request_id(given: str) -> tuple[str, bool, int]:
    """Model or sampler, whether it is a sampler, and the request's number there.

    Raises SpecError.
    """
    match = _REQUEST.fullmatch(given)
    if match is None:
        raise SpecError(
            f"request_id = {given[:120]!r}: it is none that this service has given.",
            param="request_id",
        )
    return match[1], match[2] == "sample", int(match[3])


@dataclass(frozen=True)
class WeightsPath:
    """A path of saved weights."""

    model_id: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """The id in REST: `weights/<name>`."""
        return f"{self.kind}/{self.name}"

    @classmethod
    def parse(cls, given: str, kind: Kind | None = None) -> WeightsPath:
        """Raises SpecError for a path that is none, or of another kind than `kind`."""
        match = _PATH.fullmatch(given)
        if match is None or not _MODEL.fullmatch(match[1]) or not NAME.fullmatch(match[3]):
            form = "tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME"
            raise SpecError(
                f"path = {given[:200]!r}: a path of saved weights is {form}.", param="path"
            )
        path = cls(match[1], "weights" if match[2] == "weights" else "sampler_weights", match[3])
        if kind not in (None, path.kind):
            purpose, instead = _OTHER_KIND[path.kind]
            raise SpecError(
                f"path = {path}: these weights were saved to {purpose}. {instead}.", param="path"
            )
        return path


def check_name(name: str) -> str:
    """The name of weights that are to be saved. Raises SpecError."""
    if not NAME.fullmatch(name):
        form = (
            "1 to 128 letters, digits, dots, underscores and hyphens, the first one a letter "
            "or a digit"
        )
        raise SpecError(f"path = {name[:140]!r}: a name has {form}.", param="path")
    return name
