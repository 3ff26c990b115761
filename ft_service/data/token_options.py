"""Options of a job that determine how its data becomes tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.spec import JobSpec, TrainOn


@dataclass(frozen=True)
class TokenOptions:
    """Options that change tokens or targets; a token set is for one combination of them."""

    chat_template: str = ""
    """The template's text; empty: the base's own template."""
    date: str = ""
    """Date (ISO 8601) for chat templates that write today's date; empty: today's."""
    train_on: TrainOn = "all_assistant"
    columns: Columns = AS_THEY_ARE
    """The data files' names of columns."""
    context: str = ""
    """What a teacher reads before each record: every sample is followed by the teacher's."""

    @classmethod
    def of(cls, spec: JobSpec) -> TokenOptions:
        return cls(
            spec.chat_template,
            spec.date,
            spec.training.train_on,
            Columns.of(spec.data, spec.method, sampled=spec.reinforcement is not None),
            spec.context,
        )

    @property
    def day(self) -> date:
        return date.fromisoformat(self.date) if self.date else date.today()

    def given(self) -> dict[str, Any]:
        """The options that differ from the defaults, by name."""
        given = {
            name: value
            for name, value in asdict(self).items()
            if getattr(self, name) != getattr(DEFAULT, name)
        }
        if not self.columns.labels and "columns" in given:  # as keys of stored sets have it
            del given["columns"]["labels"]
        return given


DEFAULT = TokenOptions()
