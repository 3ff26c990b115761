"""Names of tuned models: `ft:<base>:<organisation>:<suffix>:<id>`, and `…:ckpt-step-<n>` for a
checkpoint of the job. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CHECKPOINT = ":ckpt-step-"
_PREFIX = "ft:"
_JOB = "ftjob-"
_MAX_DIGITS = 9


@dataclass(frozen=True)
class TunedName:
    """A tuned model's name; `str` gives it as users see it."""

    base: str
    """Last part of the base's name."""
    organization: str
    suffix: str
    """Suffix of the job; empty: none."""
    id: str
    """Id of the job without `ftjob-`."""
    step: int | None = None
    """Step of a checkpoint; None: the job's outcome."""

    def __str__(self) -> str:
        mark = "" if self.step is None else f"{CHECKPOINT}{self.step}"
        return f"{_PREFIX}{self.base}:{self.organization}:{self.suffix}:{self.id}{mark}"

    @classmethod
    def of_job(cls, job_id: str, *, base: str, organization: str, suffix: str | None) -> TunedName:
        """The name of a job's outcome. `base`: the base's full name, whose last part is used."""
        return cls(base.rsplit("/", 1)[-1], organization, suffix or "", job_id.removeprefix(_JOB))

    @classmethod
    def parse(cls, name: str) -> TunedName:
        """Parse a name. Only a base's name may contain colons.

        Raises ValueError with the reason.
        """
        outcome, mark, step = name.partition(CHECKPOINT)
        base, *rest = outcome.removeprefix(_PREFIX).rsplit(":", 3)
        if not is_tuned(name) or len(rest) != 3:
            raise ValueError(
                "no job has trained it: such a name is ft:<base>:<organisation>:<suffix>:<id>"
            )
        if mark and not (step.isdecimal() and len(step) <= _MAX_DIGITS):
            raise ValueError(f"{step!r} is no step")
        return cls(base, *rest, step=int(step) if mark else None)

    @property
    def job_id(self) -> str:
        return _JOB + self.id

    @property
    def outcome(self) -> TunedName:
        """Name of the job's outcome."""
        return replace(self, step=None)

    def at(self, step: int) -> TunedName:
        """Name of the job's checkpoint at a step."""
        return replace(self, step=step)


def is_tuned(name: str) -> bool:
    """Whether a name has the prefix of tuned models."""
    return name.startswith(_PREFIX)
