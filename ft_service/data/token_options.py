"""What a job may say about how its data becomes tokens, beside the base and the data itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.spec import JobSpec, TrainOn


@dataclass(frozen=True)
class TokenOptions:
    """All of it decides tokens or targets, so that other options are another token set."""

    chat_template: str = ""
    """Its text; empty: the base's own."""
    date: str = ""
    """Year, month and day (ISO 8601) that chat templates which write today's date are given; empty: today's."""
    train_on: TrainOn = "all_assistant"
    columns: Columns = AS_THEY_ARE
    """What the data files call their columns."""

    @classmethod
    def of(cls, spec: JobSpec) -> TokenOptions:
        return cls(spec.chat_template, spec.date, spec.training.train_on, Columns(spec.data.pairs))

    @property
    def day(self) -> date:
        return date.fromisoformat(self.date) if self.date else date.today()

    def given(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {name: value for name, value in asdict(self).items() if getattr(self, name) != getattr(DEFAULT, name)}


DEFAULT = TokenOptions()
