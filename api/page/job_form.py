"""The form of a new job: its fields, the create body that they mean, and the body as Python, command line and YAML. Pure."""

from __future__ import annotations

import pprint
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from ft_service.spec import AUTO, LEARNING_RATES, EvaluationOptions, JobOptions, JobRequest

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
_NUMBERS = ("validation_split", "seed", "priority", "max_seconds")
_TOP_LEVEL = ("model", *_FILES, "suffix", *_NUMBERS)
DATA = "data"
"""The field for the columns of the files: a mapping, as YAML."""
_WITH_FIELDS = {*_TOP_LEVEL, DATA, *SECTIONS, "metadata", "hyperparameters"}
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


@cache
def options() -> dict[str, Option]:
    """Return every option by its dotted name."""
    schema = JobRequest.model_json_schema()
    fields = {}
    for section in SECTIONS:
        model = schema["$defs"][f"{section.capitalize()}Options"]
        for name, about in model["properties"].items():
            full = f"{section}.{name}"
            default = getattr(JobOptions.model_fields[section].default or EvaluationOptions.model_validate({}), name)
            fields[full] = Option(
                name=full,
                label=FIRST.get(full, name),
                hint=about.get("description", ""),
                default="none" if default is None else _scalar(default),
                choices=_choices(about),
            )
    return fields


def body_of(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the create body of the filled-in fields. Values are YAML; the API checks them."""
    body: dict[str, Any] = {name: form[name].strip() for name in ("model", *_FILES, "suffix") if form.get(name, "").strip()}
    sections = {name: value.strip() for name, value in form.items() if name in options() and value.strip()}
    for name, value in sections.items():
        section, key = name.split(".")
        body.setdefault(section, {})[key] = _value(value)
    for name in (*_NUMBERS, DATA):
        if form.get(name, "").strip():
            body[name] = _value(form[name])
    if isinstance(body.get(DATA), dict) and set(body[DATA]) == {DATA}:  # pasted with its name, as error messages write it
        body[DATA] = body[DATA][DATA]
    if metadata := _metadata(form):
        body["metadata"] = metadata
    return body | other_options(form)


def other_options(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the options without a field of their own. Raises ValueError if their text is not YAML of `name: value`."""
    text = form.get(OTHER, "")
    try:
        options = yaml.safe_load(text) if text.strip() else {}
    except yaml.YAMLError as error:
        raise ValueError(f"Everything else must be YAML, with one option a line: {error}.") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError("Everything else must be options with their values, as in a SPEC file: `name: value`.")
    if twice := sorted((_WITH_FIELDS - ({DATA} if not form.get(DATA, "").strip() else set())).intersection(options)):
        raise ValueError(f"{twice[0]}: the form has fields for it. Fill in those.")
    return options


def fields_of(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that a create body fills in. OpenAI's hyperparameters fill in the options that they mean."""
    fields = {name: str(body[name]) for name in _TOP_LEVEL if body.get(name) is not None}
    for section in SECTIONS:
        fields |= {f"{section}.{name}": _scalar(value) for name, value in (body.get(section) or {}).items()}
    unit = LEARNING_RATES[(body.get("method") or {}).get("type", "supervised")]
    for name, value in _hyperparameters(body).items():
        rate = name == "learning_rate_multiplier"
        ours = value * unit if rate and value != AUTO else value
        fields["training.learning_rate" if rate else f"training.{name}"] = _scalar(ours)
    fields[DATA] = _scalar(body[DATA]) if body.get(DATA) else ""
    fields["metadata"] = "\n".join(f"{key}={value}" for key, value in (body.get("metadata") or {}).items())
    other = {name: value for name, value in body.items() if name not in _WITH_FIELDS and value is not None}
    if (other.get("method") or {}).get("type", "supervised") == "supervised":  # its hyperparameters have fields
        other.pop("method", None)
    fields[OTHER] = yaml.safe_dump(other, sort_keys=False, allow_unicode=True, width=100) if other else ""
    return fields


def given_options(body: Mapping[str, Any]) -> set[str]:
    """Return the dotted names of the options that a create body sets."""
    return {name for name in fields_of(body) if name in options()}


def yaml_text(body: Mapping[str, Any], files: Mapping[str, str] | None = None) -> str:
    """Return a create body as a SPEC file. `files`: id → name, which replaces the id."""
    named = {name: (files or {}).get(value, value) if name in _FILES else value for name, value in body.items()}
    return yaml.safe_dump(named, sort_keys=False, allow_unicode=True, width=100)


def command_text(body: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Return shell commands that write the SPEC file and submit it."""
    return f"cat > job.yaml <<'END-OF-SPEC'\n{yaml_text(body, files)}END-OF-SPEC\nft submit --watch job.yaml\n"


def python_text(body: Mapping[str, Any], base_url: str) -> str:
    """Return a program that creates the job with the openai client."""
    extra = {"validation_split", *JobOptions.model_fields}
    theirs = {name: value for name, value in body.items() if name not in extra}
    ours = {name: value for name, value in body.items() if name not in theirs}
    lines = [f"    {name}={pprint.pformat(value, sort_dicts=False)}," for name, value in theirs.items()]
    if ours:
        extra_body = pprint.pformat(ours, width=96, sort_dicts=False).replace("\n", "\n    ")
        lines.append(f"    extra_body={extra_body},")
    call = "\n".join(["job = client.fine_tuning.jobs.create(", *lines, ")"])
    client = f'client = OpenAI(base_url="{base_url}/v1", api_key=os.environ["FT_API_KEY"])'
    return f"import os\n\nfrom openai import OpenAI\n\n{client}\n{call}\nprint(job.id)\n"


def _hyperparameters(body: Mapping[str, Any]) -> dict[str, Any]:
    method = (body.get("method") or {}).get("supervised") or {}
    return {**(body.get("hyperparameters") or {}), **(method.get("hyperparameters") or {})}


def _metadata(form: Mapping[str, str]) -> dict[str, str]:
    pairs = [line.partition("=") for line in form.get("metadata", "").splitlines() if line.strip()]
    return {key.strip(): value.strip() for key, _, value in pairs}


def _value(text: str) -> Any:
    """Return a value as YAML reads it; 2e-4 is a number too. Text that is not YAML stays text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value if isinstance(value, bool | int | float | list | dict) else text


def _scalar(value: Any) -> str:
    """Return a value as one line, which `_value` reads back."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.12g}"
    dumped = value.model_dump() if hasattr(value, "model_dump") else value
    return yaml.safe_dump(dumped, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _choices(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every value that a JSON schema allows, if they are few; else ()."""
    parts = about.get("anyOf", [about])
    found: list[str] = []
    for part in parts:
        if part.get("type") == "boolean" and "const" not in part:
            found += ["true", "false"]
        elif "enum" in part or "const" in part:
            found += [_scalar(value) for value in part.get("enum", [part.get("const")])]
        elif "$ref" not in part or "Format" not in part["$ref"]:
            return ()
    return tuple(found)
