"""A job's spec in a row of the store."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from ft_service.errors import OtherVersionError
from ft_service.spec.resolved import JobSpec
from ft_service.spec.tuned_name import TunedName


@dataclass(frozen=True)
class StoredSpec:
    """A spec that is parsed on first use, once for all copies of a job's record.

    Most readers of a job do not need its spec, and a spec that this version cannot read must not
    prevent other jobs from being claimed or listed, nor its own job from being cancelled. The job's
    names are therefore read without parsing.
    """

    document: dict[str, Any]
    """The JobSpec in JSON."""

    @classmethod
    def of(cls, spec: JobSpec, *, planned: bool = True) -> StoredSpec:
        """`planned` False: only given options are stored, since the later plan needs to know
        them.
        """
        stored = cls(spec.model_dump(mode="json", exclude_unset=not planned))
        stored.__dict__["_read"] = spec, ()
        return stored

    @property
    def parsed(self) -> JobSpec:
        """The spec. Raises OtherVersionError for one that this version cannot read."""
        spec, _ = self._read
        if spec is None:
            raise OtherVersionError(
                f"Job {self.document.get('job_id')} was made by another version of the service, "
                "and this one does not know its "
                f"{self.unknown_text}. Ask again under a version that does, or create the job "
                "again with options of this one."
            )
        return spec

    @cached_property
    def known(self) -> JobSpec:
        """The spec as far as this version knows it, to be shown: of one that a later version has
        made, options that are not known are left out, and those whose value is not known have their
        default. Raises pydantic.ValidationError if too little is left.
        """
        spec, unknown = self._read
        if spec is not None:
            return spec
        document: Any = deepcopy(self.document)
        for place in sorted(
            filter(None, unknown), key=len, reverse=True
        ):  # an option before its section
            section = document
            for key in place[:-1]:
                section = section[key]
            del section[place[-1]]
        return JobSpec.model_validate(document)

    @property
    def unknown(self) -> list[str]:
        """Dotted names of the options that this version cannot read; empty: it can train the
        job.
        """
        return [".".join(map(str, place)) for place in self._read[1]]

    @property
    def unknown_text(self) -> str:
        """Some of `unknown`, for a sentence."""
        return ", ".join(self.unknown[:5]) + (" and others" if len(self.unknown) > 5 else "")

    @cached_property
    def _read(self) -> tuple[JobSpec | None, Collection[tuple[int | str, ...]]]:
        """The spec, None if this version cannot read it; and the places of what it cannot read."""
        try:
            return JobSpec.model_validate(self.document), ()
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False)
            return None, dict.fromkeys(_place(self.document, fault["loc"]) for fault in faults)

    @property
    def tuned_name(self) -> TunedName:
        return TunedName.parse(self.document["tuned_name"])

    @property
    def base(self) -> str:
        """Name of the base model."""
        return self.document["model"]["name"]

    @property
    def base_folder(self) -> str:
        """Folder of the base model where ranks run; empty: not known yet."""
        return self.document["model"].get("path", "")

    @property
    def has_training_data(self) -> bool:
        """Whether it has a training file; a Tinker client's model has none."""
        return self.document.get("training_data") is not None

    @property
    def by_commands(self) -> bool:
        """As of JobSpec."""
        return not self.has_training_data or self.document.get("reinforcement") is not None

    @property
    def adapts_experts(self) -> bool:
        """Whether its adapters are on stacks of experts, too."""
        return bool(self.document.get("lora", {}).get("target_parameters"))


def _place(document: Any, named: Sequence[int | str]) -> tuple[int | str, ...]:
    """The keys of what is at a place of a document, as pydantic names it.

    A part of the name that is the variant of a type is no key; of what is missing, they are those
    of what it is missing in.
    """
    keys: list[int | str] = []
    for part in named:
        if isinstance(document, dict) and part in document:
            keys.append(part)
            document = document[part]
    return tuple(keys)
