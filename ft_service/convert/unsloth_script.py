"""Arguments that a Python script of Unsloth gives to its calls, as far as they are constants.

The script is parsed, never run.

The calls are the public ones of Unsloth's documentation: FastLanguageModel.from_pretrained and
get_peft_model, with TRL's configurations and trainers. Their arguments have different names, so
that one flat mapping holds all of them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from operator import add, mul, sub
from typing import Any

from ft_service.convert.training_command import Program
from ft_service.convert.verdicts import Method, Unread
from ft_service.errors import SpecError

_SETTINGS = (
    "from_pretrained",
    "get_peft_model",
    "SFTConfig",
    "DPOConfig",
    "KTOConfig",
    "ORPOConfig",
    "GRPOConfig",
    "TrainingArguments",
)
_TRAINERS = (
    *("SFTTrainer", "DPOTrainer", "KTOTrainer", "ORPOTrainer"),
    *("GRPOTrainer", "UnslothTrainer", "Trainer"),
)
_OF_TRAINER = (
    "packing",
    "max_seq_length",
    "max_length",
    "dataset_text_field",
    "beta",
    "max_prompt_length",
    "neftune_noise_alpha",
)
"""Arguments of trainers that are settings; the others are objects."""
_METHODS: Mapping[str, Method] = {
    "DPO": "dpo",
    "KTO": "kto",
    "ORPO": "orpo",
    "GRPO": "reinforcement",
    "SFT": "supervised",
}
_OTHER_METHODS = ("CPO", "RLOO", "PPO", "Reward")
_OBJECTS = (
    "model",
    "tokenizer",
    "processing_class",
    "train_dataset",
    "eval_dataset",
    "args",
    "callbacks",
    "token",
)
"""Arguments that are objects, or secrets."""
_HARDWARE = ("is_bfloat16_supported", "is_bf16_supported")
"""Calls that ask the GPU for bf16, which every one since 2020 has: they count as true."""
_ANSWERS_ONLY = "train_on_responses_only"
_OPERATIONS: Mapping[type, Callable[[Any, Any], Any]] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul}
_REWRITES = ("map", "filter", "select", "train_test_split")
"""Methods of a data set that change what is trained on."""
_TEMPLATE = "apply_chat_template"
_MODELS = ("FastLanguageModel", "FastModel", "FastVisionModel")


def notebook_code(text: str, name: str) -> str:
    """The code of a Jupyter notebook. Raises SpecError if it is none."""
    try:
        cells = json.loads(text)["cells"]
        sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        raise SpecError(f"{name} is not a Jupyter notebook: it has no cells of code.") from None
    return "\n".join(
        "".join(source) if isinstance(source, list) else str(source) for source in sources
    )


def unsloth_program(text: str, name: str) -> Program:
    """The arguments of a script.

    Raises SpecError for one that is not Unsloth's, or trains by another method than those
    converted.
    """
    try:
        tree = ast.parse(
            "\n".join(
                "" if line.lstrip().startswith(("!", "%")) else line for line in text.splitlines()
            )
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise SpecError(
            f"{name}{line}: this is no Python, so its arguments cannot be read."
        ) from None
    calls = list(_calls(tree))
    loads = [
        call for call, _ in calls if _name(call) == "from_pretrained" and _owner(call) in _MODELS
    ]
    if not loads:
        raise SpecError(
            f"{name} is a program, and none of Unsloth's, whose calls are read: write its "
            "arguments into a file of YAML "
            "(max_length: 2048), or convert the command that starts it."
        )
    options: dict[str, Any] = {}
    methods: dict[Method, ast.Call] = {}
    for call, constants in calls:
        called = _name(call)
        if called.removesuffix("Config").removesuffix("Trainer") in _OTHER_METHODS:
            raise SpecError(
                f"{name}, line {call.lineno}: {called} is not converted: methods are SFT, DPO, "
                "ORPO, KTO and GRPO."
            )
        methods |= {
            method: call
            for prefix, method in _METHODS.items()
            if called in (f"{prefix}Config", f"{prefix}Trainer")
        }
        if called == _ANSWERS_ONLY:
            options[_ANSWERS_ONLY] = True
        elif called == "load_dataset":
            options = _data(call, constants) | options  # the first is trained on
        elif called in _REWRITES and _is_method(call):
            by_template = called == "map" and any(_name(each) == _TEMPLATE for each, _ in calls)
            options[called] = _TEMPLATE if by_template else ast.unparse(call)
        elif called == "get_chat_template":
            options |= {
                key: value
                for key, value in _arguments(call, constants).items()
                if key == "chat_template"
            }
        elif called in _TRAINERS or (
            called in _SETTINGS and (called != "from_pretrained" or call is loads[0])
        ):
            given = _arguments(call, constants, "model_name" if called == "from_pretrained" else "")
            wanted = _OF_TRAINER if called in _TRAINERS else given.keys() - set(_OBJECTS)
            options |= {key: value for key, value in given.items() if key in wanted}
    if made := _made_by_code(tree, calls):
        options["map"] = made
    if options.get("max_length"):
        options.pop("max_seq_length", None)  # the base's context, and not the length of samples
    if len(methods) > 1:
        lines = "; ".join(f"line {call.lineno}: {_name(call)}" for call in methods.values())
        raise SpecError(
            f"{name} trains {len(methods)} times ({lines}): keep one of them in a file of its "
            "own, and convert that."
        )
    method, call = next(iter(methods.items()), ("supervised", loads[0]))
    return Program("unsloth", options, f"line {call.lineno}: {_name(call)}", method)


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, dict[str, Any]]]:
    """Each call, in the order of the text, with the constants that names have before its
    statement.
    """
    constants: dict[str, Any] = {}
    for statement in tree.body:
        for node in sorted(
            (node for node in ast.walk(statement) if isinstance(node, ast.Call)),
            key=lambda call: (call.lineno, call.col_offset),
        ):
            yield node, constants
        constants = dict(constants)
        for node in ast.walk(statement):
            for target in _targets(node):
                given = (
                    node.value
                    if node is statement and isinstance(node, ast.Assign | ast.AnnAssign)
                    else None
                )
                value = Unread(target) if given is None else _value(given, constants)
                if isinstance(value, Unread):
                    constants.pop(target, None)
                else:
                    constants[target] = value


def _targets(node: ast.AST) -> list[str]:
    """The names that a statement sets."""
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr)
        else []
    )
    return [
        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
    ]


def _name(call: ast.Call) -> str:
    function = call.func
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )


def _owner(call: ast.Call) -> str:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return (
        owner.attr
        if isinstance(owner, ast.Attribute)
        else owner.id
        if isinstance(owner, ast.Name)
        else ""
    )


def _is_method(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute)


def _made_by_code(tree: ast.Module, calls: list[tuple[ast.Call, dict[str, Any]]]) -> str:
    """The list comprehension that makes the data of a trainer. Empty: there is none."""
    keywords = [
        keyword for call, _ in calls if _name(call) in _TRAINERS for keyword in call.keywords
    ]
    trained = {
        word.value.id
        for word in keywords
        if word.arg == "train_dataset" and isinstance(word.value, ast.Name)
    }
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.ListComp)
    ]
    return next((ast.unparse(node.value) for node in made if trained & set(_targets(node))), "")


def _arguments(call: ast.Call, constants: Mapping[str, Any], first: str = "") -> dict[str, Any]:
    """The named arguments of a call.

    `first`: the name of the first one that has none; empty: it is an object.
    """
    options = {first: _value(call.args[0], constants)} if first and call.args else {}
    for keyword in call.keywords:
        value = _value(keyword.value, constants)
        if keyword.arg is None:  # `**options`
            options |= value if isinstance(value, dict) else {f"**{value}": Unread(f"**{value}")}
        else:
            options[keyword.arg] = value
    return options


def _data(call: ast.Call, constants: Mapping[str, Any]) -> dict[str, Any]:
    """The data set that `load_dataset` names, as TRL's options."""
    named = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
    given = dict(
        zip(("path", "name"), (_value(value, constants) for value in call.args), strict=False)
    )
    given |= {word.arg: _value(word.value, constants) for word in call.keywords if word.arg}
    return {ours: given[theirs] for theirs, ours in named.items() if given.get(theirs) is not None}


def _value(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """The value of an expression of constants. `Unread`: it is known only when the script runs."""
    if isinstance(node, ast.Name):
        return constants.get(node.id, Unread(node.id))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _value(node.operand, constants)
        return Unread(ast.unparse(node)) if isinstance(inner, Unread) else not inner
    if isinstance(node, ast.Call) and _name(node) in _HARDWARE:
        return True
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left = _value(node.left, constants)
        right = _value(node.right, constants)
        numbers = type(left) in (int, float) and type(right) in (int, float)
        return _OPERATIONS[type(node.op)](left, right) if numbers else Unread(ast.unparse(node))
    if isinstance(node, ast.Attribute) and _is_torch(node):
        return node.attr  # torch.bfloat16
    try:
        value = ast.literal_eval(node)
        return list(value) if isinstance(value, tuple) else value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        items = (
            [_value(item, constants) for item in node.elts]
            if isinstance(node, ast.List | ast.Tuple)
            else []
        )
        plain = items and not any(isinstance(item, Unread | list | dict) for item in items)
        return items if plain else Unread(ast.unparse(node))


def _is_torch(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "torch"
