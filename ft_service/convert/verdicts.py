"""Verdicts on one option of another tool, and the file that a rule looks at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Taken:
    """The option's meaning is kept, by options of ours: dotted name → value."""

    options: Mapping[str, Any]
    remark: str = ""


@dataclass(frozen=True)
class Reason:
    """A verdict on an option that is not taken over."""

    reason: str


class Named(Reason):
    """Data by name, which a SPEC names as a file: shown beside training_file."""


class NoEffect(Reason):
    """Leaving the option out changes nothing here."""


class ToCheck(Reason):
    """The option asks for what is not done here, and the model that results is most likely the same."""


class ToDo(Reason):
    """The option asks for what the user must do by hand, else the result may differ."""


class Lost(Reason):
    """The option asks for what this service does not do, and the result may differ."""


class Refused(Reason):
    """A file that asks for this is not converted at all."""


Verdict = Taken | Reason


class Source(dict[str, Any]):
    """Every option of a file by its dotted name, for rules that look at more than one."""

    method: Literal["supervised", "dpo"] = "supervised"
    tool = ""
    gpus: int | None = None
    """Number of GPUs that train together, as the user says. None: it is not said."""
    micro_batch: int | None = None
    """Samples of a micro-batch where the file does not say; None: the tool has no default."""
    around: Source | None = None
    """The file in which this is a section."""

    def number(self, *names: str) -> int | None:
        """The first of some options that is a whole number. None: none is."""
        for name in names:
            value = as_number(self.get(name))
            if value is not None and value == int(value):
                return int(value)
        return None

    def inside(self, prefix: str) -> Source:
        """A section of this file as a file of its own."""
        inner = Source({name.removeprefix(prefix): value for name, value in self.items() if name.startswith(prefix)})
        inner.method, inner.tool, inner.gpus, inner.around = self.method, self.tool, self.gpus, self
        return inner


Rule = Callable[[Any, Source], Verdict]

OFF: tuple[Any, ...] = (None, False, "", "no", "none", "NO", "off", 0, [], {})
NOT_SET = NoEffect("it is not set")
"""The verdict on a value that means that the option is not given."""
ONLY_DPO = NoEffect("only direct preference optimisation reads it")


def as_plain(value: Any) -> Any:
    """A value, with the text that tools write for a truth value replaced by that truth value."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def as_number(value: Any) -> float | None:
    """A finite number, or text that is one. None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None
