"""Verdicts on options of another tool, and the options of a file as rules see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Method = Literal["supervised", "dpo", "simpo", "orpo", "kto", "reinforcement"]
"""Methods of files that can be converted."""


@dataclass(frozen=True)
class Taken:
    """The option is taken over. `options`: dotted name of ours → value."""

    options: Mapping[str, Any]
    remark: str = ""


@dataclass(frozen=True)
class RejectionReason:
    """A verdict on an option that is not taken over."""

    reason: str


class Named(RejectionReason):
    """The option names data.

    A SPEC names a file, so the name becomes a comment on training_file.
    """


class NoEffect(RejectionReason):
    """Leaving the option out changes nothing here."""


class ToCheck(RejectionReason):
    """The option is not taken over, and the resulting model is most likely the same."""


class ToDo(RejectionReason):
    """The user must replace the option by hand, or the result may differ."""


class Lost(RejectionReason):
    """The option is not supported, and the result may differ."""


class Refused(RejectionReason):
    """A file with this option is not converted."""


Verdict = Taken | RejectionReason


class Unread(str):
    """The text of a value that is known only when the program runs which has it."""


class Source(dict[str, Any]):
    """All options of a file by dotted name, for rules that depend on several."""

    method: Method = "supervised"
    tool = ""
    gpus: int | None = None
    """Number of GPUs that train together, as given by the user. None: not given."""
    micro_batch: int | None = None
    """The tool's default of samples in a micro-batch. None: it has no default."""
    least_batch: int | None = None
    """Samples of a step that the tool's default of accumulation reaches.

    None: it does not accumulate.
    """
    data_sets: Mapping[str, Any] = MappingProxyType({})
    """LLaMA-Factory's descriptions of data sets, by name, with the path of each file."""
    around: Source | None = None
    """The file of which this is a section."""

    def number(self, *names: str) -> int | None:
        """The first of these options that is an integer. None: there is none."""
        for name in names:
            value = as_number(self.get(name))
            if value is not None and value == int(value):
                return int(value)
        return None

    def inside(self, prefix: str) -> Source:
        """The options of a section, without the prefix."""
        inner = Source(
            {
                name.removeprefix(prefix): value
                for name, value in self.items()
                if name.startswith(prefix)
            }
        )
        inner.method = self.method
        inner.tool = self.tool
        inner.gpus = self.gpus
        inner.around = self
        return inner


Rule = Callable[[Any, Source], Verdict]

OFF: tuple[Any, ...] = (None, False, "", "no", "none", "NO", "off", 0, [], {})
NOT_SET = NoEffect("it is not set")
"""The verdict on a value that has the same meaning as leaving the option out."""
ONLY_DPO = NoEffect("only direct preference optimisation reads it")
ONLY_KTO = NoEffect("only KTO reads it")
ONLY_SIMPO = NoEffect("only SimPO reads it")
ONLY_ORPO = NoEffect("only ORPO reads it")


def as_plain(value: Any) -> Any:
    """The value; text that is a boolean becomes a bool."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def as_number(value: Any) -> float | None:
    """The value of a number, or of text that is a number. None: it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None
