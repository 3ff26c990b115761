"""Metrics that compare an answer with the expected one, and graders as in OpenAI's API. Pure.

OpenAI's similarities that need a model are not available. ROUGE and GLEU are implemented here in a few lines each, since their
packages require a language toolkit or are not maintained.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ft_service.errors import SpecError
from ft_service.spec import AnswerMetric
from ft_service.spec.evaluation import Grader, Metric, Multi, StringCheck, TextSimilarity, metric_name


def exact_match(answer: str, expected: str) -> float:
    """1 if they are equal, except for surrounding white space."""
    return float(answer.strip() == expected.strip())


def contains(answer: str, expected: str) -> float:
    """1 if the answer contains the expected one, ignoring case."""
    return float(expected.strip().casefold() in answer.casefold())


def json_valid(answer: str, expected: str) -> float:
    """1 if the answer is valid JSON."""
    return float(_json(answer) is not _NO_JSON)


def rouge_l(answer: str, expected: str) -> float:
    """ROUGE-L's F1: the longest common subsequence of words, in lower case, split at white space."""
    from rapidfuzz.distance import LCSseq  # in C++: in Python it may take minutes and block a server

    ours, theirs = answer.lower().split(), expected.lower().split()
    common = LCSseq.similarity(ours, theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def rouge_n(answer: str, expected: str, n: int) -> float:
    """ROUGE-N's F1: common sequences of n words, in lower case, split at white space."""
    ours, theirs = _grams(answer.lower().split(), n), _grams(expected.lower().split(), n)
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def bleu(answer: str, expected: str) -> float:
    """BLEU of one sentence, by sacrebleu, with sequences of up to four words, or as many as the shorter text has."""
    from sacrebleu import sentence_bleu  # a slow import that most jobs do not need

    return sentence_bleu(answer, [expected]).score / 100


def gleu(answer: str, expected: str) -> float:
    """Google's BLEU of one sentence: the share of common sequences of one to four words, for the text that has more of them."""
    ours, theirs = answer.split(), expected.split()
    grams = [(_grams(ours, n), _grams(theirs, n)) for n in range(1, 5)]
    common = sum((own & other).total() for own, other in grams)
    most = max(sum(own.total() for own, _ in grams), sum(other.total() for _, other in grams))
    return common / most if most else 0.0


def fuzzy_match(answer: str, expected: str) -> float:
    """1 minus the share of characters to insert or delete, by rapidfuzz."""
    from rapidfuzz import fuzz

    return fuzz.ratio(answer, expected) / 100


METRICS: Mapping[AnswerMetric, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "contains": contains,
    "json_valid": json_valid,
    "rouge_l": rouge_l,
    "bleu": bleu,
}
SIMILARITIES: Mapping[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    "rouge_l": rouge_l,
    **{f"rouge_{n}": lambda answer, expected, n=n: rouge_n(answer, expected, n) for n in range(1, 6)},
}
NEED_REFERENCE: Collection[AnswerMetric] = ("exact_match", "contains", "rouge_l", "bleu")


def score(
    answer: str, reference: str | None, metrics: Sequence[Metric], item: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """An answer's score by each metric. Left out: without a reference, metrics that need one; graders that use a field which
    the item does not have. An answer of another form than a grader reads scores 0.
    """
    fields: dict[str, Any] = dict(item or {})
    if reference is not None:
        fields |= {"reference": reference, "reference_answer": reference}
    scores: dict[str, float] = {}
    for metric in metrics:
        if not isinstance(metric, str):
            graded = grade(metric, answer, fields)
            if not graded.errors & {"invalid_variable_error", "formula_parse_error", "other_error"}:
                scores[metric_name(metric)] = graded.reward
        elif reference is not None or metric not in NEED_REFERENCE:
            scores[metric] = METRICS[metric](answer, reference or "")
    return scores


@dataclass(frozen=True)
class Graded:
    """The result of a grader for one answer."""

    reward: float
    scores: dict[str, float]
    """Name of each single grader → its score."""
    errors: frozenset[str] = field(default_factory=frozenset)
    """OpenAI's names of errors: invalid_variable_error, sample_parse_error, formula_parse_error, other_error (texts that are
    too long to be compared). With an error the reward is 0."""


class _Missing(Exception):
    """A value to compare is missing or cannot be compared. The argument is the error's name."""


MOST_COMPARED = 65_536
"""Characters of a text to compare, at most: the time is quadratic, and the server is blocked meanwhile."""

MOST_FILLED = 2**20
"""Characters of all values filled into a template, at most: it may name an answer hundreds of times."""

_NO_JSON = object()
_VARIABLE = re.compile(r"\{\{\s*(.*?)\s*\}\}", re.DOTALL)
_PATH = re.compile(r"(item|sample)((?:\.\w+|\[\d+\])+)")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def grade(grader: Grader, answer: str, item: Mapping[str, Any]) -> Graded:
    """Grade an answer (`sample`) to an `item`."""
    try:
        if isinstance(grader, Multi):
            scores = {name: _single(own, answer, item) for name, own in grader.graders.items()}
            return Graded(_calculated(grader.calculate_output, scores), scores)
        reward = _single(grader, answer, item)
    except _Missing as missing:
        return Graded(0.0, {}, frozenset({str(missing)}))
    except (FormulaError, ArithmeticError, ValueError):
        return Graded(0.0, {}, frozenset({"formula_parse_error"}))
    return Graded(reward, {grader.name: reward})


def refuse_impossible(grader: Grader) -> None:
    """Raise ValueError for a template or a formula that is wrong for every answer."""
    singles = grader.graders.values() if isinstance(grader, Multi) else [grader]
    for own in singles:
        for name in ("input", "reference"):
            for text in _VARIABLE.findall(getattr(own, name)):
                match = _PATH.fullmatch(text)
                steps = _STEP.findall(match[2]) if match else []
                if not match or (match[1] == "sample" and steps[0][0] not in ("output_text", "output_json")):
                    raise ValueError(
                        f"{own.name}.{name}: {{{{ {text} }}}} names nothing; there are sample.output_text, "
                        "sample.output_json.KEY and item.KEY"
                    )
    if isinstance(grader, Multi):
        try:
            _calculated(grader.calculate_output, dict.fromkeys(grader.graders, 1.0))
        except FormulaError as error:
            raise ValueError(f"calculate_output: {error}") from None
        except (ArithmeticError, ValueError):
            pass  # with these numbers; others may be valid


def check_metrics(metrics: Sequence[Metric]) -> None:
    """Raise SpecError for a grader of a job's evaluation that is wrong for every answer."""
    for number, metric in enumerate(metrics):
        if isinstance(metric, str):
            continue
        try:
            refuse_impossible(metric)
        except ValueError as error:
            place = f"evaluation.metrics.{number}"
            raise SpecError(f"{place}: {error}.", param=place) from None


def _single(grader: StringCheck | TextSimilarity, answer: str, item: Mapping[str, Any]) -> float:
    given, reference = (_filled(text, answer, item) for text in (grader.input, grader.reference))
    if isinstance(grader, TextSimilarity):
        if max(len(given), len(reference)) > MOST_COMPARED:
            raise _Missing("other_error")
        return SIMILARITIES[grader.evaluation_metric](given, reference)
    if grader.operation in ("like", "ilike"):
        low = grader.operation == "ilike"
        return float((reference.casefold() in given.casefold()) if low else reference in given)
    return float((given == reference) == (grader.operation == "eq"))


def _filled(template: str, answer: str, item: Mapping[str, Any]) -> str:
    """A template with its values. Raises _Missing for a missing value, and for more than MOST_FILLED characters."""
    size = 0

    def value(found: re.Match[str]) -> str:
        nonlocal size
        text = _value(found[1], answer, item)
        size += len(text)
        if size > MOST_FILLED:
            raise _Missing("other_error")
        return text

    return _VARIABLE.sub(value, template)


def _value(text: str, answer: str, item: Mapping[str, Any]) -> str:
    match = _PATH.fullmatch(text)
    if match is None:
        raise _Missing("invalid_variable_error")
    steps = [key if key else int(index) for key, index in _STEP.findall(match[2])]
    if match[1] == "item":
        return _text(_walked(item, steps, "invalid_variable_error"))
    if steps == ["output_text"]:
        return answer
    if steps[0] != "output_json":
        raise _Missing("invalid_variable_error")
    return _text(_walked(_json(answer), steps[1:], "sample_parse_error"))


def _walked(value: Any, steps: Sequence[str | int], missing: str) -> Any:
    for step in steps:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            raise _Missing(missing) from None
    if value is _NO_JSON:
        raise _Missing(missing)
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NO_JSON


class FormulaError(ValueError):
    """A formula is invalid; the message says why."""


_CALLS: Mapping[str, Callable[..., Any]] = {
    **{"min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil},
    **{"exp": math.exp, "sqrt": math.sqrt, "log": math.log},
}
_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: math.pow(a, b),
}


def _calculated(formula: str, scores: Mapping[str, float]) -> float:
    """The formula's value. Raises FormulaError, ArithmeticError, ValueError."""
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
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _CALLS and arguments:
            try:
                return float(_CALLS[name](*(_evaluated(argument, scores) for argument in arguments)))
            except TypeError:
                raise FormulaError(f"{name} does not take {len(arguments)} values") from None
    raise FormulaError(f"{ast.unparse(node)!r} cannot stand in it: only numbers, graders, + - * / ^ and {', '.join(_CALLS)}")


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
