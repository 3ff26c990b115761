"""Which tool wrote a file, the decision on each of its options, and the SPEC that results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ft_service.convert import accelerate, deepspeed, transformers
from ft_service.convert.rules import NotSupported, Table, Taken, Verdict, body_of, flatten, verdict_on
from ft_service.errors import SpecError
from ft_service.local.spec_file import parse_yaml
from ft_service.spec import parse_request

PLACEHOLDERS = {
    "model": "a base that `ft models` lists, or a folder (./…, /…) for `ft run`",
    "training_file": "your data, relative to this file; `ft data check FILE` says what it is",
}
"""What a SPEC must say and no such file says."""


@dataclass(frozen=True)
class ConfigFormat:
    """A kind of configuration file."""

    title: str
    version: str
    """Of the tool whose options the table holds."""
    table: Table
    marks: Callable[[Mapping[str, Any]], bool]
    """Whether a file is of this kind, by its top-level names."""


@dataclass(frozen=True)
class Decision:
    """The fate of one option."""

    option: str
    """Dotted, as the file writes it."""
    value: Any
    verdict: Verdict

    def line(self) -> str:
        shown = json.dumps(self.value, ensure_ascii=False, default=str)
        return f"{self.option}: {shown if len(shown) <= 60 else shown[:57] + '...'} → {self._outcome()}"

    def _outcome(self) -> str:
        if isinstance(self.verdict, Taken):
            options = ", ".join(f"{name}: {json.dumps(value)}" for name, value in self.verdict.options.items())
            return f"taken over as {options}" + (f" ({self.verdict.remark})" if self.verdict.remark else "")
        kind = "not supported because" if isinstance(self.verdict, NotSupported) else "not needed because"
        return f"{kind} {self.verdict.reason}"


@dataclass(frozen=True)
class Conversion:
    """The outcome: a SPEC that is valid as it stands but for its placeholders, and one decision per option of the file."""

    file: str
    format: str
    body: dict[str, Any]
    decisions: list[Decision]

    def spec_yaml(self) -> str:
        """The SPEC file: decisions as comments first, so that it keeps the record of where it comes from."""
        head = [f"# From {self.file}: {self.format}.", "#", *(f"# {decision.line()}" for decision in self.decisions), ""]
        missing = [self._named(name, hint) for name, hint in PLACEHOLDERS.items()]
        rest = {name: value for name, value in self.body.items() if name not in PLACEHOLDERS}
        taken = yaml.safe_dump(rest, sort_keys=False, allow_unicode=True) if rest else ""
        return "\n".join([*head, *missing, "# validation_file: to be named here, if there is one", taken])

    def lost(self) -> list[str]:
        """The options without which the model that results may be another."""
        return [d.option for d in self.decisions if isinstance(d.verdict, NotSupported) and d.verdict.changes_result]

    def _named(self, name: str, hint: str) -> str:
        value = self.body[name]
        return f"{name}: {json.dumps(value)} # {'to fill in: ' if value == body_of({})[name] else ''}{hint}"


FORMATS = (
    ConfigFormat(
        "an Accelerate config",
        f"accelerate {accelerate.KNOWN_VERSION}",
        accelerate.TABLE,
        lambda names: bool(
            names.keys() & {"compute_environment", "distributed_type", "num_machines", "main_training_function"}
        ),
    ),
    ConfigFormat(
        "a DeepSpeed config",
        f"deepspeed {deepspeed.KNOWN_VERSION}",
        deepspeed.TABLE,
        lambda names: bool(names.keys() & {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}),
    ),
    ConfigFormat(
        "Transformers' TrainingArguments, or what TRL, Axolotl or LLaMA-Factory make of them",
        f"transformers {transformers.KNOWN_VERSION}",
        transformers.TABLE,
        lambda names: _mostly(names, transformers.TABLE),
    ),
    ConfigFormat(
        "a fsdp_config of Transformers' TrainingArguments",
        f"transformers {transformers.KNOWN_VERSION}",
        transformers.FSDP_CONFIG,
        lambda names: _mostly(names, transformers.FSDP_CONFIG),
    ),
)


def convert_file(path: Path) -> Conversion:
    """Read a file and convert it. Raises SpecError if it cannot be read or is of an unknown kind."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text file'}.") from None
    body = parse_yaml(text, str(path))  # JSON is YAML but for tabs, which no config is indented with by these tools
    kind = next((known for known in FORMATS if known.marks(body)), None)
    if kind is None:
        titles = "; ".join(known.title for known in FORMATS)
        raise SpecError(f"{path} is none of the files that can be converted: {titles}.")
    return convert(body, kind, path.name)


def convert(body: Mapping[str, Any], kind: ConfigFormat, file: str) -> Conversion:
    """Convert a file's contents, with one decision per option. Of two options that set one option of ours differently, one is
    refused.
    """
    source = flatten(kind.table, body)
    decisions: list[Decision] = []
    for name in source:
        decisions.append(Decision(name, source[name], _settle(verdict_on(kind.table, source, name), decisions)))
    return Conversion(file, f"{kind.title} (options of {kind.version})", _body(decisions), decisions)


def _settle(verdict: Verdict, earlier: list[Decision]) -> Verdict:
    """A verdict, unless an earlier option said otherwise or the SPEC would not be valid with it."""
    if not isinstance(verdict, Taken):
        return verdict
    for decision in earlier:
        said = decision.verdict.options if isinstance(decision.verdict, Taken) else {}
        for name, value in verdict.options.items():
            if name in said and said[name] != value:
                return NotSupported(f"{decision.option} already says {name}: {json.dumps(said[name])}; keep one of the two")
    try:
        parse_request(_body([*earlier, Decision("", None, verdict)]))
    except SpecError as error:
        return NotSupported(error.message.removesuffix("."))
    return verdict


def _body(decisions: list[Decision]) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    for decision in decisions:
        if isinstance(decision.verdict, Taken):
            taken.update(decision.verdict.options)
    return body_of(taken)


def _mostly(names: Mapping[str, Any], table: Table) -> bool:
    known = [name for name in names if name in table or any(other.startswith(f"{name}.") for other in table)]
    return len(known) * 2 > len(names)
