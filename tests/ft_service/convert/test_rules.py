"""Every option that the installed tools define has a rule; the tools are asked, not a list of
ours.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from ft_service.convert import conversions
from ft_service.convert.convert import convert
from ft_service.convert.recognition import FORMATS
from ft_service.convert.rules import (
    Table,
    compile_rule,
    for_method,
    function_of,
    load_table,
    lookup,
)
from ft_service.convert.verdicts import Source
from ft_service.spec import JobRequest
from ft_service.spec.name_suggestions import options_of
from tests.support.deepspeed_source import options

SECTIONS = {
    "fsdp_": "fsdp_config.",
    "megatron_lm_": "megatron_lm_config.",
    "fp8_": "fp8_config.",
    "dynamo_": "dynamo_config.",
    "parallelism_config_": "parallelism_config.",
    "mpirun_": "mpirun_config.",
    "zero": "deepspeed_config.",
    "offload_": "deepspeed_config.",
    "gradient_": "deepspeed_config.",
    "deepspeed_": "deepspeed_config.",
}
"""Prefix of a launch option → section of the config file that holds it."""


def without_rule(table: Table, names: set[str]) -> list[str]:
    return sorted(name for name in names if lookup(table, name) is None)


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "") for name in FORMATS), ("trl", "reinforcement")]
)
def test_every_rule_has_its_source_and_means_options_that_there_are(name: str, method: str) -> None:
    table = for_method(load_table(name), method)
    assert table.tool
    assert table.title
    assert table.version
    assert [option for option in table.rules if not table.sources.get(option)] == []
    assert set(table.defaults) <= set(options_of(JobRequest))
    assert all(
        callable(function_of(default.rule)) for default in table.defaults.values() if default.rule
    )
    named = {*table.marks, *table.needs, *table.trains_all, *table.absent, *table.examples}
    sections = {
        name for name in named if any(known.startswith(f"{name}.") for known in table.rules)
    }
    assert without_rule(table, named - sections) == []


def test_every_option_that_says_a_default_is_one_of_a_tool() -> None:
    tables = [*map(load_table, FORMATS), for_method(load_table("trl"), "reinforcement")]
    saying = {
        option
        for table in tables
        for default in table.defaults.values()
        for option in default.unless
    }
    assert [option for option in saying if not any(lookup(table, option) for table in tables)] == []


def test_the_options_that_tables_name_are_ours() -> None:
    tables = Path(conversions.__file__).parent / "tables"
    named = {
        option
        for path in tables.glob("*.yaml")
        for option in targets(yaml.safe_load(path.read_text()).get("sections"))
    }
    assert len(named) > 30
    assert named - set(options_of(JobRequest)) == set()


def targets(part: object) -> Iterator[str]:
    """The options of ours that `to` and `set` name, anywhere below."""
    if isinstance(part, dict):
        yield from [part["to"]] if isinstance(part.get("to"), str) else []
        yield from part["set"] if isinstance(part.get("set"), dict) else []
    for inner in (
        part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
    ):
        yield from targets(inner)


@pytest.mark.parametrize(
    "spec", [{}, {"too": "lora.r"}, {"if_on": {"none": "x"}, "if_off": {"nothing": "x"}}]
)
def test_what_is_no_rule_is_told(spec: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a rule"):
        compile_rule(spec)


def test_every_option_of_the_installed_accelerate_config_file() -> None:
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from accelerate.commands.launch import launch_command_parser

    fields = {
        field.name for cls in (ClusterConfig, SageMakerConfig) for field in dataclasses.fields(cls)
    }
    top = {
        name
        for name in fields
        if not any(known.startswith(f"{name}.") for known in load_table("accelerate").rules)
    }
    launch = {action.dest for action in launch_command_parser()._actions}
    nested = {
        section + name
        for name in launch
        for prefix, section in SECTIONS.items()
        if name.startswith(prefix)
    }
    assert {
        "fsdp_config.fsdp_version",
        "deepspeed_config.zero_stage",
        "dynamo_config.dynamo_backend",
    } <= nested
    assert not without_rule(load_table("accelerate"), top | nested)


def test_every_option_of_the_installed_fsdp_plugin() -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    fields = {
        field.name.removeprefix("fsdp_")
        for field in dataclasses.fields(FullyShardedDataParallelPlugin)
    }
    assert not fields - load_table("fsdp").rules.keys()


def test_every_value_of_the_installed_accelerate_that_is_chosen_from_a_list() -> None:
    from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY

    rules = load_table("fsdp").rules
    said = [str(rules["auto_wrap_policy"](value, Source())) for value in FSDP_AUTO_WRAP_POLICY]
    said += [
        str(rules["sharding_strategy"](value, Source(num_machines=2)))
        for value in FSDP_SHARDING_STRATEGY
    ]
    assert not [text for text in said if "not known" in text]


def test_every_option_of_the_installed_training_arguments() -> None:
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert len(names) > 100
    assert not without_rule(load_table("transformers"), names)


def test_every_key_of_fsdp_config_that_the_installed_transformers_reads() -> None:
    source = _origin("transformers", "training_args.py").read_text(encoding="utf-8")
    read = set(
        re.findall(r"(?<!xla_)fsdp_config(?:\.get\(|\.setdefault\(|\[)[\"'](\w+)[\"']", source)
    )
    documented = re.search(r"fsdp_config \(`str` or `dict`.*?> DeepSpeed", source, re.DOTALL)
    assert documented is not None
    read |= set(re.findall(r"^ +- (\w+) \(", documented[0], re.MULTILINE))
    assert {"version", "cpu_offload", "xla", "state_dict_type"} <= read
    assert not without_rule(load_table("fsdp_config"), read)
    assert not without_rule(load_table("transformers"), {f"fsdp_config.{name}" for name in read})


def _origin(package: str, file: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / file


@pytest.mark.slow
def test_every_option_of_trls_grpo(tmp_path: Path) -> None:
    table = for_method(load_table("trl"), "reinforcement")
    package = wheel_contents(tmp_path, table.version.replace("trl ", "trl=="))
    for file, name in (
        ("trainer/grpo_config.py", "GRPOConfig"),
        ("scripts/grpo.py", "GRPOScriptArguments"),
    ):
        module = ast.parse((package / "trl" / file).read_text(encoding="utf-8"))
        defined = next(
            node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name
        )
        fields = {
            line.target.id
            for line in defined.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
        assert fields & {"num_generations", "reward_funcs"}
        assert without_rule(table, fields) == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["", "megatron_", "veomni_", "torchtitan_"])
def test_every_option_of_verl_has_a_verdict(tmp_path: Path, engine: str) -> None:
    table = load_table("verl")
    package = wheel_contents(tmp_path, table.version.replace("verl ", "verl=="))
    file = package / f"verl/trainer/config/_generated_ppo_{engine}trainer.yaml"
    body = yaml.safe_load(file.read_text(encoding="utf-8"))
    body["algorithm"]["adv_estimator"] = "grpo"
    conversion = convert(body, table, file.name)
    assert len(conversion.decisions) > 200
    assert without_rule(table, {decision.option for decision in conversion.decisions}) == []


def wheel_contents(folder: Path, wanted: str) -> Path:
    """The files of a package's wheel, which is not installed."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        wanted,
        "-d",
        str(folder),
    ]
    ended = subprocess.run(pip, capture_output=True, text=True, timeout=200, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        pytest.skip(f"{wanted} cannot be had: {ended.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    return folder / "wheel"


@pytest.mark.slow
def test_every_option_of_deepspeed(tmp_path: Path) -> None:
    names = options(deepspeed_package(tmp_path))
    assert {
        "train_batch_size",
        "zero_optimization.stage",
        "zero_optimization.stage3_prefetch_bucket_size",
        "compile",
    } <= names
    sections = {
        name
        for name in names
        if any(known.startswith(f"{name}.") for known in load_table("deepspeed").rules)
    }
    assert not without_rule(load_table("deepspeed"), names - sections)


def deepspeed_package(folder: Path) -> Path:
    """Its source: installed, or else the sdist of the version that the table names, unpacked and
    not imported.
    """
    spec = find_spec("deepspeed")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    wanted = f"deepspeed=={load_table('deepspeed').version.removeprefix('deepspeed ')}"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--no-build-isolation",
        wanted,
    ]
    ended = subprocess.run(
        [*pip, "-d", str(folder)], capture_output=True, text=True, timeout=200, check=False
    )
    archives = list(folder.glob("deepspeed-*.tar.gz"))
    if not archives:
        pytest.skip(
            f"{wanted} is neither installed nor can its source be had: "
            f"{ended.stderr.strip()[-200:]}"
        )
    with tarfile.open(archives[0]) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
        archive.extractall(folder)
    return next(folder.glob("deepspeed-*/deepspeed"))
