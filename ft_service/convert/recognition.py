"""Files of other tools: which tool wrote one, and what a script gives to it.

Files are read and never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ft_service.convert.convert import Conversion, convert
from ft_service.convert.rules import Table, for_method, load_table, lookup
from ft_service.convert.training_command import Program, training_programs
from ft_service.convert.unsloth_script import notebook_code, unsloth_program
from ft_service.convert.verdicts import Method
from ft_service.errors import SpecError
from ft_service.spec_files.spec_file import is_data, parse_yaml

LAUNCHERS = ("accelerate", "deepspeed")
"""Tables whose files are recognised by any one of their names."""
TRAINERS = ("axolotl", "llama_factory", "trl", "unsloth", "verl", "ms_swift", "torchtune")
"""Tables whose files are recognised by most of their names; if several match, the one with most
names of its own is used.
"""
FORMATS = (*LAUNCHERS, *TRAINERS, "transformers", "fsdp_config")
_SHELL = (".sh", ".bash", ".slurm", ".sbatch", ".txt", "")
_MAX_BYTES = 4 * 2**20
"""Length of a file: notebooks with pictures are the longest."""


def convert_file(
    path: Path, *, gpus: int | None = None, method: Method | None = None
) -> Conversion:
    """Read a file and convert it.

    `gpus`: the number of GPUs that train together, for the batch size; None: as the file says, or
    else 1, with a comment. `method`: that of a file of TRL, Unsloth or Transformers, which does not
    name it.

    Raises SpecError if the file cannot be read, is of an unknown kind, asks for an unsupported
    method, or does not need `gpus`.
    """
    text = _text(path)
    if path.suffix in (".py", ".ipynb"):
        program = unsloth_program(
            notebook_code(text, str(path)) if path.suffix == ".ipynb" else text, str(path)
        )
    elif text.startswith("#!") or path.suffix in _SHELL:
        program = _training_command(text, path)
    else:
        program = Program("", _settings(text, path), "")
    options = program.options
    if program.config:
        options = _merged(_config(program.config, path), options)
    table = load_table(program.tool) if program.tool else recognised(options)
    if table is None:
        titles = "; ".join(load_table(name).title for name in FORMATS)
        raise SpecError(f"{path} is not one of the files that can be converted: {titles}.")
    asked = method or (program.method if table.methods else None)
    if method and program.method and method != program.method:
        raise SpecError(
            f"--method {method}: {program.said_by} is for {program.method}. Leave --method out."
        )
    conversion = convert(
        options,
        table,
        path.name,
        gpus=gpus or program.gpus,
        method=asked,
        method_by="as asked for" if method else f"by {program.said_by}",
        data_sets=_data_sets(path.parent, options) if table.name == "llama_factory" else None,
    )
    if gpus is not None and not conversion.counts(gpus):
        raise SpecError(
            f"--gpus {gpus}: the file does not say the batch size of one GPU. Leave --gpus out."
        )
    conversion.notes.extend([*([program.said_by] if program.said_by else []), *program.notes])
    return conversion


def _text(path: Path) -> str:
    """Raises SpecError for a file that cannot be read, is too long, or holds data."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise SpecError(
                f"{path} has more than {_MAX_BYTES:,} bytes, and settings have less: is it the "
                "right file?"
            )
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not a text file'}."
        ) from None


def _settings(text: str, path: Path) -> dict[str, Any]:
    """The options of a file of YAML or JSON. Raises SpecError."""
    if path.suffix != ".json" and is_data(path):
        raise SpecError(
            f"{path} is a data file, by its name, and this reads another tool's settings: see `ft "
            "data check`."
        )
    # JSON is YAML, except for indentation by tabs, which these tools do not write.
    read = parse_yaml(text, str(path))
    return {
        str(name): value for name, value in read.items()
    }  # `on`, `1` and dates are no text in YAML


def _training_command(text: str, path: Path) -> Program:
    """The only command of a script that trains with a known tool.

    Raises SpecError if there is none, or more than one.
    """
    programs = training_programs(text, str(path))
    known = [each for each in programs if each.tool or each.config or recognised(each.options)]
    if len(known) == 1:
        return known[0]
    if known:
        raise SpecError(
            f"{path} trains {len(known)} times ({'; '.join(each.said_by for each in known)}): "
            "keep one of these commands in a "
            "file of its own, and convert that."
        )
    found = (
        f": {'; '.join(each.said_by for each in programs[:5])} cannot be told" if programs else ""
    )
    raise SpecError(
        f"{path} has no command that trains with a known tool{found}. Known are trl, swift, "
        "llamafactory-cli, axolotl train, "
        "tune run, -m verl.trainer.main_ppo, and scripts of TRL or LLaMA-Factory by accelerate, "
        "torchrun, deepspeed or python."
    )


def _config(name: str, script: Path) -> dict[str, Any]:
    """The options of the file that a command names, beside its script or in the working directory.

    Raises SpecError.
    """
    places = [script.parent / name, Path(name)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise SpecError(
            f"{script} has its options in {name}, which is neither beside it nor in the working "
            "directory: convert that file, "
            "or go to the directory where the command runs."
        )
    return _settings(_text(path), path)


def _merged(body: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a file with those of the command line over them, whose names may be dotted."""
    merged: dict[str, Any] = json.loads(json.dumps(body, default=str))
    for name, value in options.items():
        *sections, last = name.split(".")
        target = merged
        for section in sections:
            below = target.get(section)
            target[section] = below if isinstance(below, dict) else {}
            target = target[section]
        # torchtune's way to choose another one.
        component = isinstance(target.get(last), dict) and isinstance(value, str)
        target.update({last: {**target[last], "_component_": value} if component else value})
    return merged


def _data_sets(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """LLaMA-Factory's descriptions of data sets (dataset_info.json) in `dataset_dir`, or beside the
    file. Empty: there are none.
    """
    named = options.get("dataset_dir", "data")
    for place in (folder / str(named), folder, Path(str(named))):
        try:
            read = json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(read, dict):
            return {
                str(name): {**one, "folder_of_file": str(place.resolve())}
                for name, one in read.items()
                if isinstance(one, dict)
            }
    return {}


def recognised(body: Mapping[str, Any]) -> Table | None:
    """The table of the tool that wrote a file. None: an unknown tool."""
    for table in map(load_table, LAUNCHERS):
        if body.keys() & set(table.marks):
            return table
    trainers = (table for table in map(load_table, TRAINERS) if body.keys() >= set(table.needs))
    marked = sorted(trainers, key=lambda table: -len(body.keys() & set(table.marks)))
    if body.keys() & set(marked[0].marks) and _mostly(body, marked[0]):
        return marked[0]
    return next(
        (
            table
            for table in map(load_table, ("transformers", "fsdp_config"))
            if _mostly(body, table)
        ),
        None,
    )


def _mostly(names: Mapping[str, Any], table: Table) -> bool:
    rules = {name for method in ("", *table.per_method) for name in for_method(table, method).rules}
    known = [
        name
        for name in names
        if lookup(table, name)
        or name in rules
        or any(rule.startswith(f"{name}.") for rule in rules)
    ]
    return len(known) * 2 > len(names)
