"""Decisions on the options of a tool, and the resulting SPEC."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import yaml

from ft_service.convert.rules import Table, flatten, for_method, function_of, lookup, verdict_on
from ft_service.convert.verdicts import (
    NOT_SET,
    Lost,
    Method,
    Named,
    NoEffect,
    Refused,
    Source,
    Taken,
    ToCheck,
    ToDo,
    Unread,
    Verdict,
    as_plain,
)
from ft_service.errors import SpecError
from ft_service.spec import JobRequest, parse_request

PLACEHOLDERS = {"model": "MODEL", "training_file": "TRAINING.jsonl"}
"""Values of required options that the file does not give."""
_HINTS = {
    "model": "a base that `ft models` lists, or a folder (./…, /…) for `ft run`",
    "training_file": "your data, relative to this file; see `ft data check FILE`",
}
_GRADER = "method.reinforcement.grader"
_METHODS = "supervised, dpo, simpo, orpo, kto and reinforcement (GRPO) are taken over"
_BY_HAND: Mapping[str, str] = {
    "distillation": "write method.distillation by hand: teacher names the model, answers: student "
    "stands for lmbda 1 and data for 0, loss_type: forward_kl for beta 0, reverse_kl for 1 and jsd "
    "with that beta between, and top_k for loss_top_k with its tail"
}
"""Beginning of a method that is not converted → what to do instead."""
_OTHER_METHOD = re.compile(r"(?<![a-z])(cpo|ppo|rloo|gkd|reward)(?![a-z])", re.IGNORECASE)
"""Methods of TRL whose files may have the same options as a file for DPO or GRPO."""
_NAMES: tuple[tuple[Method, str], ...] = (("kto", "KTO"), ("simpo", "SimPO"), ("orpo", "ORPO"))
_PREFERENCES: Mapping[Method, tuple[str, re.Pattern[str]]] = {
    method: (shown, re.compile(rf"(?<![a-z]){method}(?![a-z])", re.IGNORECASE))
    for method, shown in _NAMES
}
"""Methods whose options are among DPO's too → their name, and what a title has of it."""
_GRPO = re.compile(r"(?<![a-z])(grpo|gspo|dapo)(?![a-z])", re.IGNORECASE)
_SECRET = re.compile(r"(hub|hf|ms|om|auth)_token$|api_key$")
"""Options whose values are not shown."""
_TITLES = ("output_dir", "hub_model_id", "run_name")
"""Options whose text often names the method."""
_ORDER = (
    "model",
    "training_file",
    "validation_split",
    "method",
    "lora",
    "precision",
    "training",
    "distributed",
    "checkpoint",
)
OUTCOMES: Mapping[type, str] = {
    Refused: "refused",
    Lost: "not supported",
    ToDo: "to do",
    ToCheck: "to check",
    Taken: "taken over",
    Named: "named",
    NoEffect: "no effect",
}
_HEADINGS: Mapping[type, str] = {
    Lost: "Not supported here, and the result may differ",
    ToDo: "To do, or the result may differ",
    ToCheck: "To check",
}


@dataclass(frozen=True)
class Decision:
    """The decision on one option."""

    option: str
    """Dotted name in the file."""
    value: Any
    verdict: Verdict
    source: str = ""
    """The tool's file that defines the option; empty: unknown."""
    given: bool = True
    """False: the file does not give the option, which has an effect."""

    def line(self) -> str:
        return f"{self.said()} → {self.text()}"

    def said(self) -> str:
        """The option with its value in the file, shortened."""
        shown = (
            json.dumps(self.value, ensure_ascii=False, default=str) if self.given else "(not given)"
        )
        return f"{self.option}: {shown if len(shown) <= 60 else shown[:57] + '...'}"

    def text(self) -> str:
        """The options of ours that replace it, or the reason why there are none."""
        if isinstance(self.verdict, Taken):
            options = ", ".join(
                f"{name}: {json.dumps(value)}" for name, value in self.verdict.options.items()
            )
            return options + (f" ({self.verdict.remark})" if self.verdict.remark else "")
        return self.verdict.reason


@dataclass(frozen=True)
class WrittenDefault:
    """A default of the tool that differs from ours."""

    option: str
    value: Any
    note: str


@dataclass(frozen=True)
class Conversion:
    """A SPEC that is valid except for its placeholders, and one decision for each option of the
    file.
    """

    file: str
    tool: str
    format: str
    """The kind of the file, how its method was recognised, and the version of the tool."""
    body: dict[str, Any]
    decisions: list[Decision]
    defaults: list[WrittenDefault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the reader has to know of a script besides its options."""

    def spec_yaml(self) -> str:
        """The SPEC file. It begins with comments on what was not taken over."""
        head = _wrapped(f"From {self.file}: {self.format}.", "")
        head += self._group("Of the script, which was read and not run:", self.notes)
        for kind, title in _HEADINGS.items():
            by_text: dict[str, list[str]] = {}
            for decision in self.decisions:
                if isinstance(decision.verdict, kind):
                    by_text.setdefault(decision.text(), []).append(decision.said())
            head += self._group(
                f"{title}:", [f"{', '.join(said)} → {text}" for text, said in by_text.items()]
            )
        head += self._group(
            f"{self._whose} defaults that differ from those here, written out below:",
            [", ".join(default.option for default in self.defaults)] if self.defaults else [],
        )
        idle = [d.option for d in self.decisions if isinstance(d.verdict, NoEffect)]
        head += self._group("No effect here:", _by_section(idle))
        body = PLACEHOLDERS | self.body
        body = {name: body[name] for name in (*(name for name in _ORDER if name in body), *body)}
        text = yaml_text(body, self._comments())
        if "validation_file" not in body and "validation_split" not in body:
            first, second, rest = text.split("\n", 2)
            text = "\n".join(
                [first, second, "# validation_file: to be named here, if there is one", rest]
            )
        return "\n".join([*(f"# {line}".rstrip() for line in head), "", text])

    def counts(self, gpus: int) -> bool:
        """Whether the batch size was computed from this number of GPUs."""
        said = [
            d.text().removesuffix(")")
            for d in self.decisions
            if isinstance(d.verdict, Taken | ToDo)
        ]
        return any(
            text.endswith(f" {gpus} GPUs")
            for text in [*said, *(default.note for default in self.defaults)]
        )

    def open(self) -> list[str]:
        """The options whose loss may change the resulting model."""
        return [d.option for d in self.decisions if isinstance(d.verdict, Lost | ToDo)]

    @property
    def _whose(self) -> str:
        return f"{self.tool}'" if self.tool.endswith("s") else f"{self.tool}'s"

    @staticmethod
    def _group(title: str, lines: list[str]) -> list[str]:
        # _wrapped keeps all text within the comment, whatever the file's names contain
        return (
            ["", title, *(part for line in lines for part in _wrapped(line, "  "))] if lines else []
        )

    def _comments(self) -> dict[str, str]:
        """Dotted name of ours → the origin of its value."""
        said: dict[str, list[str]] = {
            _GRADER: ["to fill in: what gives an answer its reward (docs/graders.md)"]
        }
        for name, hint in _HINTS.items():
            found = "" if name == "training_file" else hint
            said[name] = [found if name in self.body else f"to fill in: {hint}"]
        for decision in self.decisions:
            verdict = decision.verdict
            if isinstance(verdict, Named):
                said["training_file"].append(f"it was {decision.option}: {verdict.reason}")
            if not isinstance(verdict, Taken):
                continue
            for name in verdict.options:
                same = decision.option.rpartition(".")[2] == name.rpartition(".")[2] or name in (
                    "model",
                    "training.batch_size",
                )
                text = ": ".join(
                    part for part in ("" if same else decision.option, verdict.remark) if part
                )
                if text not in said.setdefault(name, []):
                    said[name].append(text)
        for default in self.defaults:
            note = f" ({default.note})" if default.note else ""
            said.setdefault(default.option, []).append(f"{self._whose} default{note}")
        return {
            name: _printable("; ".join(text for text in texts if text))
            for name, texts in said.items()
        }


def _by_section(names: list[str]) -> list[str]:
    """Lists of names: one of all that are not deep, then one for each section."""
    lists: dict[str, list[str]] = {}
    for name in names:
        section, _, last = name.rpartition(".")
        deep = "." in section
        lists.setdefault(section if deep else "", []).append(last if deep else name)
    return [
        f"{section}: {', '.join(lists[section])}" if section else ", ".join(lists[section])
        for section in sorted(lists)
    ]


def _wrapped(line: str, indent: str) -> list[str]:
    """A comment, wrapped. Line breaks in it become spaces."""
    return textwrap.wrap(
        _printable(line),
        116,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _printable(text: str) -> str:
    """Text for a comment: on one line, without characters that YAML does not accept."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def convert(
    body: Mapping[str, Any],
    table: Table,
    file: str,
    *,
    gpus: int | None = None,
    method: Method | None = None,
    method_by: str = "asked for",
    data_sets: Mapping[str, Any] | None = None,
) -> Conversion:
    """Convert a file's contents, with one decision for each option.

    If two options give an option of ours different values, the second is not taken over.
    `method_by`: what says `method`. `data_sets`: those that a file beside it describes, by name.
    Raises SpecError for an unsupported method.
    """
    method, known_by = _method(_source(table, flatten(table, body), gpus), table, method, method_by)
    table = for_method(table, method)
    given = flatten(table, body)
    source = _source(table, given, gpus)
    source.method = method
    source.data_sets = data_sets or {}
    absent = [name for name in table.absent if name not in given]
    taken = _given_by_method(source.method, table)
    decisions: list[Decision] = []
    for name in (*(name for name in (*absent, table.says_method) if name in source), *source):
        if any(decision.option == name for decision in decisions):
            continue
        rule = lookup(table, name)
        verdict = _settle(verdict_on(table, source, name), taken, decisions)
        if isinstance(verdict, Taken):
            taken |= verdict.options
        shown = "…" if _SECRET.search(name) else source[name]
        decisions.append(
            Decision(name, shown, verdict, table.sources[rule] if rule else "", name not in absent)
        )
    no_adapter = _trains_all(table, decisions)
    for name, text in table.differs.items():
        if name not in source and not (no_adapter and name.startswith("lora_")):
            decisions.append(Decision(name, None, ToCheck(text), given=False))
    if refused := [decision for decision in decisions if isinstance(decision.verdict, Refused)]:
        said = "; ".join(
            f"{each.option}: {json.dumps(each.value, default=str)}: {each.text()}"
            for each in refused
        )
        raise SpecError(f"{file}, {table.title}, is not converted. {said}.")
    defaults = _defaults(table, source, decisions, taken)
    title = f"{table.title}, {known_by}" if known_by else table.title
    return Conversion(
        file,
        table.tool,
        f"{title} (options of {table.version})",
        nested(taken),
        decisions,
        defaults,
    )


def _source(table: Table, given: Mapping[str, Any], gpus: int | None) -> Source:
    """The options of a file, with those that have an effect if they are not given."""
    source = Source({**table.absent, **given})
    source.tool = table.tool
    source.gpus = gpus
    source.micro_batch = table.micro_batch
    source.least_batch = table.least_batch
    return source


def _given_by_method(method: Method, table: Table) -> dict[str, Any]:
    """Options that a SPEC of this method has whatever the file says.

    A grader is one that the user has to replace.
    """
    if method == "supervised":
        return {}
    grader = {
        "type": "string_check",
        "name": "contains-answer",
        "input": "{{ sample.output_text }}",
        "reference": f"{{{{ item.{table.answer_key} }}}}",
        "operation": "like",
    }
    return {"method.type": method} | ({_GRADER: grader} if method == "reinforcement" else {})


def _trains_all(table: Table, decisions: list[Decision]) -> bool:
    """Whether the file trains all weights, so that the tool's defaults of adapters do not apply."""
    return any(isinstance(d.verdict, Lost) and d.option in table.trains_all for d in decisions)


def _method(
    source: Source, table: Table, asked: Method | None, asked_by: str
) -> tuple[Method, str]:
    """The method, and how it was recognised.

    Raises SpecError for a method that is not converted.
    """
    if name := table.says_method:
        if name not in source:
            return _agreed("supervised", asked, f"supervised, since {name} is not given")
        verdict = verdict_on(table, source, name)
        if isinstance(source[name], Unread):
            raise SpecError(
                f"{name}: {source[name]} is known only when the script runs: put the method "
                "there, and convert again."
            )
        if isinstance(verdict, Refused):
            return "supervised", ""  # the verdict on the option has the reason
        method = (
            verdict.options.get("method.type", "supervised")
            if isinstance(verdict, Taken)
            else "supervised"
        )
        return _agreed(method, asked, f"{name}: {source[name]}")
    if not table.methods:
        if asked == "reinforcement":
            raise SpecError(
                f"--method reinforcement: {table.title} does not say how answers are sampled. "
                "Leave --method out."
            )
        return asked or "supervised", f"for {asked}, {asked_by}" if asked else ""
    marks = {
        method: next((mark for mark in names if _is_marked(source, mark)), None)
        for method, names in table.methods.items()
    }
    for method, mark in marks.items():
        if mark is not None and method not in get_args(Method):
            by_hand = (text for name, text in _BY_HAND.items() if method.startswith(name))
            raise SpecError(
                f"{table.title} that says {mark} is for {method}, which is not converted: "
                f"{next(by_hand, _METHODS)}."
            )
    groups = marks["reinforcement"]
    if asked is not None:
        return (
            _agreed("reinforcement", asked, f"it says {groups}")
            if groups
            else (asked, f"for {asked}, {asked_by}")
        )
    for name in _TITLES:  # CPO's options are among DPO's, RLOO's among GRPO's
        if other := _OTHER_METHOD.search(str(source.get(name, ""))):
            raise SpecError(
                f"{table.title} with {name}: {source[name]} seems to be for {other[0].upper()}, "
                "which is not converted: "
                f"{_METHODS}. If it is for one of these, say so by --method."
            )
    groups = groups or next(
        (name for name in _TITLES if _GRPO.search(str(source.get(name, "")))), None
    )
    if groups is not None:
        return "reinforcement", f"taken as GRPO's, since it says {groups}"
    for own, (shown, titled) in _PREFERENCES.items():
        said = marks.get(own) or next(
            (name for name in _TITLES if titled.search(str(source.get(name, "")))), None
        )
        if said is not None:
            return own, f"taken as {shown}'s, since it says {said}"
    if marks["dpo"] is not None:
        return "dpo", f"taken as DPO's, since it says {marks['dpo']} (else: --method supervised)"
    return (
        "supervised",
        "taken as supervised, since it says nothing of DPO, KTO or GRPO (else: --method dpo, kto, "
        "or reinforcement)",
    )


def _agreed(found: Any, asked: Method | None, by: str) -> tuple[Method, str]:
    if asked is not None and asked != found:
        raise SpecError(f"--method {asked}: the file is for {found} ({by}). Leave --method out.")
    return found, by


def _is_marked(source: Source, mark: str) -> bool:
    name, _, value = mark.partition("=")
    if name not in source:
        return False
    given = source[name] if isinstance(source[name], list) else [source[name]]
    return value in map(str, given) if value else as_plain(source[name]) is not False


def _settle(verdict: Verdict, taken: Mapping[str, Any], earlier: list[Decision]) -> Verdict:
    """The verdict, unless it contradicts an earlier option or makes the SPEC invalid."""
    if not isinstance(verdict, Taken):
        return verdict
    for name, value in verdict.options.items():
        if name in taken and taken[name] != value:
            by = next(
                (
                    d.option
                    for d in earlier
                    if isinstance(d.verdict, Taken) and name in d.verdict.options
                ),
                "the method",
            )
            return ToDo(f"{by} already says {name}: {json.dumps(taken[name])}; keep one of the two")
    fault = _fault({**taken, **verdict.options})
    return verdict if fault is None else Lost(fault)


def _fault(options: Mapping[str, Any]) -> str | None:
    """The message of SPEC validation for these options. None: they are valid."""
    try:
        parse_request(PLACEHOLDERS | nested(options))
    except SpecError as error:
        return error.message.removesuffix(".")
    return None


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """The body with these dotted options."""
    body: dict[str, Any] = {}
    for name, value in options.items():
        *sections, key = name.split(".")
        target = body
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = value
    return body


def _defaults(
    table: Table, source: Source, decisions: list[Decision], taken: dict[str, Any]
) -> list[WrittenDefault]:
    """The tool's defaults that differ from ours, for options that the file does not give.

    Adds them to `taken`.
    """
    said = {decision.option for decision in decisions if decision.verdict != NOT_SET}
    no_adapter = _trains_all(table, decisions)
    written: list[WrittenDefault] = []
    for option, default in table.defaults.items():
        if (
            option in taken
            or said & set(default.unless)
            or (no_adapter and option.startswith("lora."))
        ):
            continue
        value = default.value
        note = default.note
        if default.rule:
            verdict = function_of(default.rule)(None, source)
            if not isinstance(verdict, Taken):
                continue
            value = verdict.options[option]
            note = note or verdict.remark
        elif isinstance(value, Mapping):
            value = value.get(source.method)
        stated = option == "training.batch_size"  # it depends on the number of GPUs
        if (
            value is None
            or (not stated and value == _ours(option, taken))
            or _fault({**taken, option: value})
        ):
            continue
        taken[option] = value
        written.append(WrittenDefault(option, value, note))
    return written


def _ours(option: str, taken: Mapping[str, Any]) -> Any:
    """Our default of an option."""
    request: JobRequest = parse_request(PLACEHOLDERS | nested(taken))
    if option.startswith(("method.dpo.", "method.kto.")):
        return getattr(request.method.loss_options(), option.rpartition(".")[2], None)
    value: Any = request.model_copy(update={"training": request.resolved_training()})
    for part in option.split("."):
        value = getattr(value, part)
    return value


def yaml_text(body: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """A body as YAML, with a comment behind each option and multi-line text as blocks.

    It reads back as `body`. `comments`: by dotted name.
    """
    return "".join(f"{line}\n" for line in _lines(body, comments, "", ""))


def _lines(
    body: Mapping[str, Any], comments: Mapping[str, str], prefix: str, indent: str
) -> Iterator[str]:
    for key, value in body.items():
        name = f"{prefix}{key}"
        comment = f" # {comments[name]}" if comments.get(name) else ""
        if isinstance(value, Mapping) and value and prefix.count(".") < 4:
            yield f"{indent}{_flow(key)}:{comment}"
            yield from _lines(value, comments, f"{name}.", f"{indent}  ")
        elif (
            isinstance(value, str)
            and "\n" in value
            and (block := _block(value, indent)) is not None
        ):
            first, *rest = block
            yield f"{indent}{_flow(key)}: {first}{comment}"
            yield from rest
        else:
            yield f"{indent}{_flow(key)}: {_flow(value)}{comment}"


def _block(text: str, indent: str) -> list[str] | None:
    """A literal block: its header and its lines. None: the text needs quotes."""
    kept = text.removesuffix("\n")
    chomp = "-" if kept == text else "+" if kept.endswith("\n") or not kept else ""
    lines = [f"|2{chomp}", *(f"{indent}  {line}" if line else "" for line in kept.split("\n"))]
    document = "\n".join(["x:", *lines]).replace("x:\n", f"{indent}x: ", 1)
    try:
        read = yaml.safe_load(document + "\n")
    except yaml.YAMLError:
        return None
    return lines if read == {"x": text} else None


def _flow(value: Any) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=1_000_000
    )
    return text.removesuffix("\n").removesuffix("\n...")
