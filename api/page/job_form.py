"""The form of a new job: its fields, the create body that they mean, and the body as Python,
command line and YAML. Pure.
"""

from __future__ import annotations

import contextlib
import json
import math
import pprint
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from ft_service.data.formats.detect_format import COMPRESSED_ENDINGS, DATA_ENDINGS
from ft_service.spec import (
    AUTO,
    LEARNING_RATES,
    PAIR_METHODS,
    EvaluationOptions,
    JobOptions,
    JobRequest,
)
from ft_service.spec.options import CHOSEN_UNLESS_GIVEN
from ft_service.spec.yaml_loader import StrictLoader

ACCEPTED = ",".join((*DATA_ENDINGS, *COMPRESSED_ENDINGS))
"""Endings of the files that a browser offers to upload."""
SECTIONS = ("training", "lora", "precision", "distributed", "checkpoint", "evaluation")
FIRST: Mapping[str, str] = {
    "training.n_epochs": "Epochs",
    "training.learning_rate": "Learning rate",
    "training.batch_size": "Batch size",
    "training.max_length": "Max. tokens per sample",
    "lora.r": "LoRA rank",
    "precision.default": "Base precision",
    "distributed.nproc_per_node": "Ranks",
}
"""Options that users change first → their labels."""
_FILES = ("training_file", "validation_file")
_NUMBERS = ("validation_split", "seed", "priority", "max_seconds", "max_cost")
_TOP_LEVEL = ("model", *_FILES, "suffix", *_NUMBERS)
METHOD = "method"
PAIRS = "method.pairs"
BETA = "method.beta"
GRADER = "method.grader"
TEACHER = "method.teacher"
CONTEXT = "method.with_context"
"""The fields for the method's card, for which loss a card of pairs takes, for beta of preferences,
for the grader of reinforcement learning: a mapping, as YAML; and for a teacher's name, and what it
alone reads, as text.
"""
PAIR_CARD = "dpo"
"""The card of all methods whose data are pairs (PAIRS says which)."""
PAIR_LOSSES: Mapping[str, str] = {
    "dpo": "DPO: compared with the model that training starts from",
    "simpo": "SimPO: without comparison; long answers count no more than short ones",
    "orpo": "ORPO: from a base, good answers and preferences in one job",
}
"""Type of a method that learns from pairs → when to take it."""
_WITH_BETA = (*PAIR_METHODS, "kto")
_OF_TEACHER = {TEACHER: "teacher", CONTEXT: "with_context"}
METHODS: Mapping[str, str] = {
    "supervised": "Each sample is a conversation with the answer that the model should give.",
    "dpo": "Each sample has two answers to one question, of which one is better.",
    "kto": "Each sample is a conversation whose answer is good or bad, by its label.",
    "distillation": "Each sample is a conversation. The model learns how likely another one, or "
    "itself behind a prompt, finds each word of the answers.",
    "reinforcement": "Each sample is a question. The model answers, and a grader scores its "
    "answers.",
}
"""Type of a method that the form creates → what its data are."""
_CONVERSATION = (
    ("instruction", "question"),
    ("input", "context of the question"),
    ("output", "answer"),
    ("system", "system prompt"),
    ("messages", "conversation: list of messages"),
    ("text", "text without a question"),
)
_PAIR = (
    ("prompt", "question"),
    ("chosen", "better answer"),
    ("rejected", "worse answer"),
    ("system", "system prompt"),
)
COLUMN_ROLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "supervised": _CONVERSATION,
    **dict.fromkeys(PAIR_METHODS, _PAIR),
    "kto": (*_CONVERSATION[:-1], ("label", "whether the answer is good: true or false")),
    "distillation": _CONVERSATION[:-1],
    "reinforcement": (("messages", "question: list of messages"),),
}
"""Type of a method → the names of its columns that a user may choose, each with what it holds."""
EXAMPLE_GRADER = """\
type: string_check
name: same
input: "{{ sample.output_text }}"
reference: "{{ item.reference_answer }}"
operation: eq
"""
DATA = "data"
"""The field for the columns of the files: a mapping, as YAML."""
_WITH_FIELDS = {*_TOP_LEVEL, DATA, "sweep", *SECTIONS, "metadata", "hyperparameters"}
_MOST_YAML = 300_000
"""Most characters of a field, whose YAML takes some four seconds to read: the prompts of an
evaluation may have nearly as many.
"""
SWEEP = "sweep"
"""The field for the values to try: options with their values, as YAML."""
OTHER = "other"
"""The field for options without a field of their own, such as `method`: as YAML."""


@dataclass(frozen=True)
class Option:
    """An option of a job as a field of the form."""

    name: str
    """Dotted."""
    label: str
    hint: str
    default: str
    """The value where the field is left empty."""
    choices: tuple[str, ...]
    """Every possible value; empty: other values too."""
    is_number: bool
    """Whether it takes numbers; text of a number is that number then."""

    @property
    def words(self) -> tuple[str, ...]:
        """The choices that are text, whatever YAML says."""
        return tuple(choice for choice in self.choices if choice not in ("true", "false"))

    def read(self, text: str) -> Any:
        """Return the value that is written in the field."""
        return text if text in self.words else _value(text)

    def written(self, value: Any) -> str:
        """Return a value as `read` reads it."""
        if value is False and "off" in self.words:  # as YAML reads an unquoted `off`
            return "off"
        if isinstance(value, str) and (
            value in self.words or (self.is_number and _is_number(_value(value)))
        ):
            return value
        return _scalar(value)


@cache
def options() -> dict[str, Option]:
    """Return every option by its dotted name."""
    schema = JobRequest.model_json_schema()
    fields = {}
    for section in SECTIONS:
        model = schema["$defs"][f"{section.capitalize()}Options"]
        for name, about in model["properties"].items():
            full = f"{section}.{name}"
            default = getattr(
                JobOptions.model_fields[section].default or EvaluationOptions.model_validate({}),
                name,
            )
            fields[full] = Option(
                name=full,
                label=FIRST.get(full, name),
                hint=about.get("description", ""),
                default=AUTO if full in CHOSEN_UNLESS_GIVEN else _default_text(default),
                choices=_choices(about),
                is_number=any(
                    part.get("type") in ("number", "integer")
                    for part in about.get("anyOf", [about])
                ),
            )
    return fields


def _default_text(default: Any) -> str:
    if default is None:
        return "none"
    return default if isinstance(default, str) else _scalar(default)


def body_of(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the create body of the filled-in fields. Values are YAML; the API checks them."""
    body: dict[str, Any] = {
        name: form[name].strip()
        for name in ("model", *_FILES, "suffix")
        if form.get(name, "").strip()
    }
    for name, text in form.items():
        if name in options() and text.strip():
            section, key = name.split(".")
            body.setdefault(section, {})[key] = options()[name].read(text.strip())
    for name in (*_NUMBERS, DATA):
        if form.get(name, "").strip():
            body[name] = _value(form[name])
    if isinstance(body.get(DATA), dict) and set(body[DATA]) == {
        DATA
    }:  # pasted with its name, as error messages write it
        body[DATA] = body[DATA][DATA]
    if metadata := _metadata(form):
        body["metadata"] = metadata
    if form.get(SWEEP, "").strip():
        body[SWEEP] = _sweep(form[SWEEP])
    other = other_options(form)
    return body | other | _method(form, other.get("method"))


def _method(form: Mapping[str, str], other: Any) -> dict[str, Any]:
    """Return the method that the form's fields and the other options mean together; nothing for the
    usual one. Raises ValueError where both say the same thing.
    """
    kind = form.get(METHOD) or "supervised"
    if kind == PAIR_CARD:
        kind = form.get(PAIRS) or kind
    if kind == "supervised" or not isinstance(other, dict | None):
        return {}
    rest = other or {}
    if rest.get("type", kind) != kind:
        raise ValueError(
            f"method.type is {kind!r} by its card, and {rest['type']!r} in other options: keep one."
        )
    section = dict(rest.get(kind) or {})
    if kind in _WITH_BETA and form.get(BETA, "").strip():
        given = dict(section.get("hyperparameters") or {})
        _refuse_twice("beta", given)
        section["hyperparameters"] = {"beta": _value(form[BETA].strip()), **given}
    if kind == "distillation":
        for field, name in _OF_TEACHER.items():
            if text := form.get(field, "").replace("\r\n", "\n"):
                _refuse_twice(name, section)
                section[name] = text if field == CONTEXT else text.strip()
    if kind == "reinforcement" and form.get(GRADER, "").strip():
        _refuse_twice("grader", section)
        section["grader"] = _grader(form[GRADER])
    return {"method": {**rest, "type": kind, **({kind: section} if section else {})}}


def _sweep(text: str) -> dict[str, Any]:
    """Return the values to try. Raises ValueError unless the text is YAML of options."""
    try:
        values = _load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"The values to try must be YAML: {error}.") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(
            "The values to try must be options with lists of values, one option a line, such as "
            "`lora.r: [8, 32]`."
        )
    if set(values) == {SWEEP} and isinstance(values[SWEEP], dict):  # pasted from a SPEC file
        return values[SWEEP]
    return values


def _refuse_twice(name: str, given: Mapping[str, Any]) -> None:
    if name in given:
        raise ValueError(f"{name}: the form has a field for it. Fill in that.")


def _grader(text: str) -> Any:
    try:
        return _load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"The grader must be YAML: {error}.") from None


def other_options(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the options without a field of their own.

    Raises ValueError if their text is not YAML of `name: value`.
    """
    text = form.get(OTHER, "")
    try:
        options = _load(text) if text.strip() else {}
    except yaml.YAMLError as error:
        raise ValueError(
            f"Everything else must be YAML, with one option a line: {error}."
        ) from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError(
            "Everything else must be options with their values, as in a SPEC file: `name: value`."
        )
    if twice := sorted(
        (_WITH_FIELDS - ({DATA} if not form.get(DATA, "").strip() else set())).intersection(options)
    ):
        raise ValueError(f"{twice[0]}: the form has fields for it. Fill in those.")
    return options


def fields_of(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that a create body fills in.

    OpenAI's hyperparameters fill in the options that they mean.
    """
    fields = {name: str(body[name]) for name in _TOP_LEVEL if body.get(name) is not None}
    for section in SECTIONS:
        given = {f"{section}.{name}": value for name, value in (body.get(section) or {}).items()}
        fields |= {
            name: options()[name].written(value)
            for name, value in given.items()
            if name in options()
        }
    unit = LEARNING_RATES[(body.get("method") or {}).get("type", "supervised")]
    for name, value in _hyperparameters(body).items():
        rate = name == "learning_rate_multiplier"
        ours = f"{float(value) * unit:.12g}" if rate and value != AUTO else value
        option = options()["training.learning_rate" if rate else f"training.{name}"]
        fields[option.name] = option.written(ours)
    fields[DATA] = _scalar(body[DATA]) if body.get(DATA) else ""
    fields["metadata"] = "\n".join(
        _metadata_line(key, value) for key, value in (body.get("metadata") or {}).items()
    )
    other = {
        name: value
        for name, value in body.items()
        if name not in _WITH_FIELDS and value is not None
    }
    of_method, rest = _method_fields(other.pop("method", None) or {})
    fields |= of_method
    other |= {"method": rest} if rest else {}
    fields[OTHER] = (
        yaml.safe_dump(other, sort_keys=False, allow_unicode=True, width=100) if other else ""
    )
    return fields


def _method_fields(method: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return (the fields that a method fills in, what of it they do not hold)."""
    kind = method.get("type", "supervised")
    if kind == "supervised":  # its hyperparameters have fields of their own
        return {}, {}
    if kind not in METHODS and kind not in PAIR_METHODS:  # without a card
        return {}, dict(method)
    fields = {METHOD: PAIR_CARD, PAIRS: kind} if kind in PAIR_METHODS else {METHOD: kind}
    section = dict(method.get(kind) or {})
    given = section.get("hyperparameters")
    if kind in _WITH_BETA and isinstance(given, dict) and "beta" in given:
        fields[BETA] = _scalar(given["beta"])
        section["hyperparameters"] = {
            name: value for name, value in given.items() if name != "beta"
        }
        section = {
            name: value for name, value in section.items() if name != "hyperparameters" or value
        }
    if kind == "distillation":
        for field, name in _OF_TEACHER.items():
            if isinstance(section.get(name), str):
                fields[field] = section.pop(name)
    if kind == "reinforcement" and isinstance(section.get("grader"), dict):
        fields[GRADER] = yaml.safe_dump(
            section.pop("grader"), sort_keys=False, allow_unicode=True, width=100
        )
    rest = {name: value for name, value in method.items() if name not in ("type", kind)}
    rest |= {kind: section} if section or (kind in method and not method[kind]) else {}
    return fields, rest


def given_options(body: Mapping[str, Any]) -> set[str]:
    """Return the dotted names of the options that a create body sets."""
    return {name for name in fields_of(body) if name in options()}


def yaml_text(body: Mapping[str, Any], files: Mapping[str, str] | None = None) -> str:
    """Return a create body as a SPEC file. `files`: id → name, which replaces the id."""
    named = {
        name: (files or {}).get(value, value) if name in _FILES else value
        for name, value in body.items()
    }
    return yaml.safe_dump(named, sort_keys=False, allow_unicode=True, width=100)


def command_text(body: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Return shell commands that write the SPEC file and submit it."""
    submit = "ft sweep submit" if SWEEP in body else "ft submit"
    return (
        f"cat > job.yaml <<'END-OF-SPEC'\n{yaml_text(body, files)}END-OF-SPEC\n{submit} "
        "--watch job.yaml\n"
    )


def python_text(body: Mapping[str, Any], base_url: str) -> str:
    """Return a program that creates the job, or the sweep, with the openai client."""
    client = f'client = OpenAI(base_url="{base_url}/v1", api_key=os.environ["FT_API_KEY"])'
    if SWEEP in body:
        whole = pprint.pformat(dict(body), width=96, sort_dicts=False).replace("\n", "\n    ")
        call = f'sweep = client.post(\n    "/fine_tuning/sweeps", cast_to=object,\n    body={whole},\n)'
        return f'import os\n\nfrom openai import OpenAI\n\n{client}\n{call}\nprint(sweep["id"])\n'
    extra = {"validation_split", *JobOptions.model_fields}
    theirs = {name: value for name, value in body.items() if name not in extra}
    ours = {name: value for name, value in body.items() if name not in theirs}
    lines = [
        f"    {name}={pprint.pformat(value, sort_dicts=False)}," for name, value in theirs.items()
    ]
    if ours:
        extra_body = pprint.pformat(ours, width=96, sort_dicts=False).replace("\n", "\n    ")
        lines.append(f"    extra_body={extra_body},")
    call = "\n".join(["job = client.fine_tuning.jobs.create(", *lines, ")"])
    return f"import os\n\nfrom openai import OpenAI\n\n{client}\n{call}\nprint(job.id)\n"


def _hyperparameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's hyperparameters that fill in fields: of other methods than the supervised one
    those at the top level, without an "auto" for which the method itself, in the field for
    everything else, has a value.
    """
    method = body.get("method") or {}
    kind = method.get("type", "supervised")
    own = (method.get(kind) or {}).get("hyperparameters") or {}
    given = {
        name: value
        for name, value in (body.get("hyperparameters") or {}).items()
        if value != AUTO or name not in own
    }
    return {**given, **own} if kind == "supervised" else given


def _metadata(form: Mapping[str, str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for line in form.get("metadata", "").splitlines():
        if line.strip():
            pairs |= _metadata_of(line.strip())
    return pairs


def _metadata_of(line: str) -> dict[str, str]:
    """Return the pairs of a line: `key=value`, or JSON of the pairs that cannot be written so."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            pairs = json.loads(line)
            _refuse_what_json_cannot_hold(pairs)
            return pairs
    key, _, value = line.partition("=")
    return {key.strip(): value.strip()}


def _metadata_line(key: str, value: str) -> str:
    """Return a pair as one line, which `_metadata` reads back."""
    line = f"{key}={value}"
    return line if _metadata({"metadata": line}) == {key: value} else json.dumps({key: value})


class _FormLoader(StrictLoader):
    """Reads YAML without aliases: a few hundred bytes of them stand for more values than memory
    holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            told = f"*{alias.anchor}: aliases are not read here. Write the value out"
            raise yaml.MarkedYAMLError(None, None, told, alias.start_mark)
        return super().compose_node(parent, index)


def _load(text: str) -> Any:
    """Return what YAML says, as in a SPEC file, if a create body can hold it.

    Raises yaml.YAMLError.
    """
    if len(text) > _MOST_YAML:
        raise yaml.YAMLError(
            f"{len(text):,} characters, at most {_MOST_YAML:,}: use a SPEC file with ft submit"
        )
    try:
        value = yaml.load(text, Loader=_FormLoader)
        _refuse_what_json_cannot_hold(value)
    except (
        ArithmeticError,
        AttributeError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ):  # PyYAML's own too: `!!int x`
        told = (
            "a value that JSON cannot hold, such as a date without quotes, .nan, .inf or lists "
            "of hundreds of levels"
        )
        raise yaml.YAMLError(told) from None
    return value


def _refuse_what_json_cannot_hold(value: Any) -> None:
    """Raise ValueError, TypeError or RecursionError for NaN, infinity, half of a surrogate pair and
    other types.
    """
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


def _value(text: str) -> Any:
    """Return a value as YAML reads it; 2e-4 is a number too. Text that is not YAML stays text."""
    try:
        value = _load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            number = float(text)  # which fails for text in quotes
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value if value is None or isinstance(value, bool | int | float | list | dict) else text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scalar(value: Any) -> str:
    """Return a value as one line, which `_value` reads back."""
    if isinstance(value, str):
        return (
            value
            if value.strip() and _value(value.strip()) == value
            else _one_line(value, style='"')
        )
    if isinstance(value, float):
        short = f"{value:.12g}"
        return short if float(short) == value else repr(value)
    return _one_line(value.model_dump() if hasattr(value, "model_dump") else value)


def _one_line(value: Any, style: str | None = None) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, default_style=style, allow_unicode=True, width=math.inf
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _choices(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every value that a JSON schema allows, if they are few; else ()."""
    parts = about.get("anyOf", [about])
    found: list[str] = []
    for part in parts:
        if part.get("type") == "boolean" and "const" not in part:
            found += ["true", "false"]
        elif "enum" in part or "const" in part:
            found += [
                value if isinstance(value, str) else _scalar(value)
                for value in part.get("enum", [part.get("const")])
            ]
        elif "$ref" not in part or "Format" not in part["$ref"]:
            return ()
    return tuple(found)
