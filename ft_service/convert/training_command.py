"""The training command of a shell script: which tool it starts, with which options, on how many
GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from ft_service.convert.shell_script import Command, read_script
from ft_service.convert.verdicts import Method, Unread
from ft_service.errors import SpecError

_TOOLS: Mapping[tuple[str, str], str] = {
    **{("swift", name): "ms_swift" for name in ("sft", "pt", "rlhf")},
    **{
        (name, "train"): table
        for name, table in {"llamafactory-cli": "llama_factory", "lmf": "llama_factory"}.items()
    },
    **{
        ("trl", name): "trl"
        for name in ("sft", "dpo", "grpo", "kto", "orpo", "cpo", "rloo", "reward", "gkd")
    },
    ("axolotl", "train"): "axolotl",
    ("tune", "run"): "torchtune",
}
"""Command and subcommand → the table of its options."""
_MODULES = {
    "verl.trainer.main_ppo": "verl",
    "axolotl.cli.train": "axolotl",
    **{f"swift.cli.{name}": "ms_swift" for name in ("sft", "pt", "rlhf")},
}
"""Python's modules, which may be given as files, → the table of their options."""
_STARTERS = ("python", "accelerate", "torchrun", "deepspeed")
_NO_PROGRAMS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start another program."""
_OVERRIDES = ("verl", "torchtune", "llama_factory")
"""Tables of tools whose options are given as `name=value`."""
_METHODS: Mapping[str, Method] = {
    "sft": "supervised",
    "dpo": "dpo",
    "kto": "kto",
    "orpo": "orpo",
    "simpo": "simpo",
    "grpo": "reinforcement",
}
_METHOD_NAME = re.compile(
    r"(?<![a-z])(sft|dpo|grpo|orpo|kto|cpo|simpo|ppo|rloo|gkd|reward)(?![a-z])"
)
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_CONFIG = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Program:
    """The options that a program gives to a tool."""

    tool: str
    """The name of the tool's table; empty: its options say which."""
    options: dict[str, Any]
    """Name of an option → value. Names may be dotted."""
    said_by: str
    """The command, in few words."""
    method: Method | None = None
    """The method that the command names."""
    config: str = ""
    """The file that has further options."""
    gpus: int | None = None
    """Number of GPUs that train together. None: the command does not say it."""
    notes: list[str] = field(default_factory=list)
    """What the reader of the SPEC has to know besides."""


def training_programs(text: str, name: str) -> list[Program]:
    """The commands of a shell script that may train, in their order.

    `name`: for messages. Raises SpecError for another method than those converted, and for text
    that is no shell script.
    """
    script = read_script(text, name)
    defaults = [f"{name}={value}" for name, value in script.defaults.items() if value]
    notes = (
        [f"defaults of variables that the environment may set: {', '.join(defaults)}"]
        if defaults
        else []
    )
    return [
        program for command in script.commands if (program := _program(command, notes)) is not None
    ]


def _program(command: Command, notes: list[str]) -> Program | None:
    """What a command starts. None: no program that may train."""
    words = command.words
    for index, word in enumerate(words):
        name = PurePosixPath(word).name
        following = words[index + 1 : index + 2]
        if following and (table := _TOOLS.get((name, following[0]))):
            return _of_tool(
                command, table, f"{name} {following[0]}", words[:index], words[index + 2 :], notes
            )
        if name.rstrip("0123456789.") in _STARTERS:
            return _started(command, words[index:], notes)
    return None


def _started(command: Command, words: Sequence[str], notes: list[str]) -> Program | None:
    """The script or the module that Python, or a launcher, starts."""
    for index, word in enumerate(words):
        before = words[:index]
        after = words[index + 1 :]
        if word in ("-m", "--module") and after and after[0] not in _NO_PROGRAMS:
            return _of_tool(command, _MODULES.get(after[0], ""), after[0], before, after[1:], notes)
        if word.endswith(".py"):
            module = word.removesuffix(".py").replace("/", ".")
            table = next(
                (table for name, table in _MODULES.items() if f".{module}".endswith(f".{name}")), ""
            )
            return _of_tool(command, table, PurePosixPath(word).name, before, after, notes)
        if index and (table := _TOOLS.get((PurePosixPath(word).name, after[0] if after else ""))):
            return _of_tool(command, table, f"{word} {after[0]}", before, after[1:], notes)
    return None


def _of_tool(
    command: Command,
    table: str,
    name: str,
    launcher: Sequence[str],
    arguments: Sequence[str],
    notes: list[str],
) -> Program:
    if table == "torchtune" and "--config" in arguments[1:]:
        recipe = arguments.index("--config") - 1
        name = f"{name} {arguments[recipe]}"
        launcher = arguments[:recipe]
        arguments = arguments[recipe + 1 :]
    options, config = _options(arguments, table in _OVERRIDES)
    if table == "ms_swift" and not config:  # what its commands differ in
        own = {"pt": {"loss_scale": "all"}, "rlhf": {"rlhf_type": "dpo"}}
        options = (
            own.get(name.removesuffix(".py").replace(".", " ").rpartition(" ")[2], {}) | options
        )
    started = dict(_options(launcher, False)[0])
    if "config_file" in started:
        notes = [
            *notes,
            f"{started['config_file']} is the launcher's own file: run `ft convert` on it for its "
            "sharding",
        ]
    return Program(
        table,
        options,
        f"line {command.line}: {name}",
        _method(name) if table in ("trl", "") else None,
        config,
        _gpus(started, command.environment, table),
        notes,
    )


def _method(name: str) -> Method | None:
    """The method that the name of a command or script says.

    Raises SpecError for one that is not converted.
    """
    found = _METHOD_NAME.findall(name.lower())
    if other := next((method for method in found if method not in _METHODS), None):
        raise SpecError(
            f"{name} is for {other.upper()}, which is not converted: methods are sft, dpo, simpo, orpo, "
            "kto and grpo."
        )
    return _METHODS[found[-1]] if found else None


def _options(arguments: Sequence[str], overrides: bool) -> tuple[dict[str, Any], str]:
    """The options in arguments, and the file of options that they name.

    `overrides`: whether `a.b=c` is an option.
    """
    options: dict[str, Any] = {}
    values: dict[str, list[str]] = {}
    flag = ""
    config = ""
    for word in arguments:
        override = _OVERRIDE.fullmatch(word) if overrides else None
        if override:
            name = override[2].removesuffix("@") if override[1] == "~" else override[2]
            options[name] = None if override[1] == "~" else value_of([_of(word, override[3])])
            flag = ""
        elif (found := _FLAG.fullmatch(word)) and _is_flag(word):
            flag = found[1].replace("-", "_")
            values[flag] = [] if found[2] is None else [_of(word, found[2])]
            if found[2] is not None:
                flag = ""
        elif flag and not word.startswith("--"):
            values[flag].append(word)
        elif word.endswith(_CONFIG):
            config = word
        elif word:
            options[word] = word if isinstance(word, Unread) else True
    options |= {name: value_of(given) for name, given in values.items()}
    named = options.pop("config", None)
    return options, str(named) if named else config


def _is_flag(word: str) -> bool:
    """Whether a word that begins with a dash is the name of an option, and not a negative
    number.
    """
    return not re.fullmatch(r"-[\d.]+(e-?\d+)?", word)


def _of(word: str, text: str) -> str:
    return Unread(text) if isinstance(word, Unread) else text


def value_of(words: Sequence[str]) -> Any:
    """The value of an option: true if it has no words, a list if it has several."""
    if not words:
        return True
    if any(isinstance(word, Unread) for word in words):
        return Unread(" ".join(words))
    return _scalar(words[0]) if len(words) == 1 else [_scalar(word) for word in words]


def _scalar(word: str) -> Any:
    """A word as YAML reads it, as argument parsers and Hydra nearly do.

    Text that is no YAML stays as it is.
    """
    try:
        value = yaml.safe_load(word)
    except yaml.YAMLError:
        return word
    plain = (
        isinstance(value, bool | int | float)
        or word == "null"
        or (isinstance(value, list | dict) and word[0] in "[{")
    )
    return value if plain else word


def _gpus(started: Mapping[str, Any], environment: Mapping[str, str], table: str) -> int | None:
    """The number of GPUs that a launcher's options or the environment say. None: they do not."""

    def number(*names: str) -> int | None:
        given = [started.get(name) for name in names] + [
            environment.get(name.upper()) for name in names
        ]
        return next(
            (int(text) for text in map(str, given) if text.isdecimal() and int(text) > 0), None
        )

    if total := number("num_processes"):
        return total
    if per_host := number("nproc_per_node", "num_gpus"):
        return per_host * (number("nnodes", "num_nodes") or 1)
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    return len(visible.split(",")) if visible and table in ("llama_factory", "axolotl") else None
