"""What DeepSpeed's source says its options are, read as text: importing it would need CUDA, or
compile against it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SECTIONS = {
    "DeepSpeedZeroConfig": "zero_optimization.",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param.",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer.",
    "DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module.",
    "ZenFlowConfig": "zero_optimization.zenflow.",
    "DeepSpeedFP16Config": "fp16.",
    "DeepSpeedBF16Config": "bf16.",
    "CompileConfig": "compile.",
    "CommsLoggerConfig": "comms_logger.",
    "TensorBoardConfig": "tensorboard.",
    "WandbConfig": "wandb.",
    "CometConfig": "comet.",
    "CSVConfig": "csv_monitor.",
    "HybridEngineConfig": "hybrid_engine.",
    "TPTrainingConfig": "tensor_parallel.",
    "DeepSpeedThroughputTimerConfig": "timers.throughput.",
}
"""pydantic class → where its fields stand in the JSON."""

READERS = ("get_scalar_param", "get_list_param", "get_dict_param")


def options(package: Path) -> set[str]:
    """Dotted names: fields of the classes above (by alias where they have one), and every name read
    from the top level.
    """
    modules = [
        ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))
    ]
    constants = dict(pair for module in modules for pair in _constants(module))
    classes = {
        node.name: node
        for module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
    }
    missing = SECTIONS.keys() - classes.keys()
    assert not missing, f"this DeepSpeed has no {sorted(missing)}: its options are elsewhere"
    names = {
        prefix + field for name, prefix in SECTIONS.items() for field in _fields(classes[name])
    }
    config = ast.parse((package / "runtime/config.py").read_text(encoding="utf-8"))
    return names | set(_top_level(config, constants))


def _constants(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in module.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value.value


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            keywords = line.value.keywords if isinstance(line.value, ast.Call) else []
            alias = [
                k.value.value
                for k in keywords
                if k.arg == "alias" and isinstance(k.value, ast.Constant)
            ]
            yield str(alias[0]) if alias else line.target.id


def _top_level(module: ast.Module, constants: dict[str, str]) -> Iterator[str]:
    """Names that functions of runtime/config.py read from `param_dict` itself."""
    for node in ast.walk(module):
        key: ast.expr | None = None
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in READERS
        ):
            key = node.args[1] if _is_whole(node.args[0]) else None
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
        ):
            key = node.args[0] if _is_whole(node.func.value) else None
        elif isinstance(node, ast.Subscript) and _is_whole(node.value):
            key = node.slice
        if isinstance(key, ast.Constant):
            yield str(key.value)
        elif isinstance(key, ast.Name) and key.id.isupper():
            yield constants[key.id]


def _is_whole(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "param_dict"
