"""Options of a job that determine how its data becomes tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import date
from typing import Any, Self

from ft_service.data.formats.columns import AS_THEY_ARE, Columns
from ft_service.spec import JobSpec, TrainOn
from ft_service.spec.options import DataOptions


@dataclass(frozen=True)
class PixelBounds:
    """Pixels of a picture as the base's towers see it. None: the base's own bound."""

    least: int | None = None
    most: int | None = None

    @classmethod
    def of(cls, data: DataOptions) -> Self:
        return cls(data.min_pixels, data.max_pixels)

    def __bool__(self) -> bool:
        return self != NO_BOUNDS


NO_BOUNDS = PixelBounds()


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
    pixels: PixelBounds = NO_BOUNDS

    @classmethod
    def of(cls, spec: JobSpec) -> TokenOptions:
        return cls(
            spec.chat_template,
            spec.date,
            spec.training.train_on,
            Columns.of(spec.data, spec.method, sampled=spec.reinforcement is not None),
            spec.context,
            PixelBounds.of(spec.data),
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
        for name in ("labels", "strict_images"):  # as keys of stored sets have it
            if "columns" in given and not getattr(self.columns, name):
                del given["columns"][name]
        return given


DEFAULT = TokenOptions()
