"""The formula of a multi grader: numbers and graders' names, the four operations, powers, and the
functions that OpenAI documents. Its syntax tree is walked, and nothing of it is executed. Pure.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

from ft_service.wording import counted


class FormulaError(ValueError):
    """A formula is invalid; the message says why."""


_CALLS: Mapping[str, Callable[..., Any]] = {
    **{"min": lambda *values: min(values), "max": lambda *values: max(values), "abs": abs},
    **{"floor": math.floor, "ceil": math.ceil},
    **{"exp": math.exp, "sqrt": math.sqrt, "log": math.log},
}
_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: math.pow(a, b),
}


def calculated(formula: str, scores: Mapping[str, float]) -> float:
    """The formula's value, which is finite.

    Raises FormulaError for a formula that is wrong for all scores, ArithmeticError and ValueError
    for one that has no value for these.
    """
    try:
        tree = ast.parse(formula.replace("^", "**").strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise FormulaError(f"{formula!r} is not a formula of + - * / ^ and functions") from None
    try:
        value = float(_evaluated(tree.body, scores))
    except RecursionError:
        raise FormulaError("it is nested too deeply") from None
    if not math.isfinite(value):
        raise OverflowError("it is not finite")
    return value


def _evaluated(node: ast.expr, scores: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.Name(id=name):
            if name not in scores:
                raise FormulaError(f"there is no grader {name!r}; there are {', '.join(scores)}")
            return scores[name]
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATIONS:
            return _OPERATIONS[type(operator)](_evaluated(left, scores), _evaluated(right, scores))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            value = _evaluated(inner, scores)
            return -value if isinstance(sign, ast.USub) else value
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if (
            name in _CALLS and arguments
        ):
            try:
                return float(
                    _CALLS[name](*(_evaluated(argument, scores) for argument in arguments))
                )
            except TypeError:
                raise FormulaError(
                    f"{name} does not take {counted(len(arguments), 'value')}"
                ) from None
    raise FormulaError(
        f"{ast.unparse(node)!r} cannot stand in it: only numbers, graders, + - * / ^ and "
        f"{', '.join(_CALLS)}"
    )
