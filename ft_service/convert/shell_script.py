"""Commands of shell scripts, with the values of variables that the same file sets to constants.

Nothing is run.

A value that is known only when the script runs, such as `$1`, `$(nproc)` or a variable that an `if`
sets, stays as it is written, and is an `Unread`. `${NAME:-value}` counts as its value, and is
listed, because the environment may have another.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ft_service.convert.verdicts import Unread
from ft_service.errors import SpecError

_OPENS = ("if", "for", "while", "until", "case", "select", "{")
_CLOSES = ("fi", "done", "esac", "}")
_BEFORE = (
    "then",
    "else",
    "elif",
    "do",
    "!",
    "time",
    "export",
    "local",
    "declare",
    "readonly",
    "typeset",
)
"""Words that stand before a command, or before an assignment."""
_SPACE = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_REDIRECTION = re.compile(r"(?:\d*(?:<<<|<<-?|>>|>\||<|>)|&>>?)(&[\d-]+)?")
_END = re.compile(r"\n|;+|&&|\|\||\|&?|&|[()]")
_PIECE = re.compile(
    r"(?P<single>\$?'[^']*')|(?P<double>\")|(?P<value>\$\(\(|\$\(|`[^`]*`|\$\{|\$\w+|\$[@*#?$!-])"
    r"|(?P<escape>\\.)|(?P<bare>[^\s'\"$`\\;&|<>()]+|\$)",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_PARAMETER = re.compile(r"(\w+)(?:\[([@*])\])?(?:(:?[-=])(.*))?", re.DOTALL)
_INSIDE = re.compile(r"\\([\"$`\\\n])|(\$\(\(|\$\(|`[^`]*`|\$\{|\$\w+|\$[@*#?$!-])")
_CLOSING = {"$((": "))", "$(": ")", "${": "}"}


@dataclass(frozen=True)
class Command:
    """A command of a script."""

    line: int
    """The line on which it begins, from 1."""
    words: list[str]
    """The command and its arguments.

    Those that are known only when the script runs are `Unread`.
    """
    environment: Mapping[str, str]
    """The variables that are set before it, or for it alone."""


@dataclass
class Script:
    """The commands of a script."""

    commands: list[Command] = field(default_factory=list)
    defaults: dict[str, str] = field(default_factory=dict)
    """Variables that have their values from `${NAME:-value}`."""


def read_script(text: str, name: str) -> Script:
    """The commands of a shell script.

    `name`: for messages. Raises SpecError, with the line, for quotes or brackets that are not
    closed.
    """
    try:
        return _Reader(text).script()
    except _NotClosedError as error:
        raise SpecError(f"{name}, {error}; it is no shell script.") from None
    except (_TooLongError, RecursionError):
        raise SpecError(
            f"{name} has variables that hold more than {_MAX_LENGTH:,} letters, or too deep in "
            "each other."
        ) from None


class _NotClosedError(Exception):
    """Quotes or brackets that are not closed."""


class _TooLongError(Exception):
    """Values that double each other."""


_MAX_LENGTH = 2**18
"""Letters of a value, and words of an array, at most."""


class _Reader:
    """A reader of a text from `at` on."""

    def __init__(self, text: str, around: _Reader | None = None) -> None:
        """`around`: the reader of the text of which this is a part."""
        self._text = text.removesuffix("\n") + "\n"
        self.at = 0
        self._values: dict[str, str | list[str]] = around._values if around else {}
        self._script: Script = around._script if around else Script()
        self._depth = 0
        """How many blocks are open whose commands may not run, or run several times."""

    def script(self) -> Script:
        while self.at < len(self._text):
            line = self._text.count("\n", 0, self.at) + 1
            self._take(line, self._words())
        return self._script

    def _take(self, line: int, words: list[str]) -> None:
        """Follow one command: a block that it opens or closes, the variables that it sets."""
        while words and words[0] in (*_OPENS, *_CLOSES, *_BEFORE):
            first = words.pop(0)
            self._depth += (first in _OPENS) - (first in _CLOSES and self._depth > 0)
            if first in ("for", "select") and words:
                self._values[words[0]] = Unread(f"${words[0]}")
                return
        own: dict[str, str] = {}
        while words and (found := _ASSIGNMENT.match(words[0])):
            word = words.pop(0)
            own[found[1]] = _of(word, word[found.end() :])
        if not words:
            for name, value in own.items():
                self._values[name] = (
                    Unread(f"${name}") if self._depth and self._values.get(name) != value else value
                )
        elif words[0] != ":":
            flat = {name: value for name, value in self._values.items() if isinstance(value, str)}
            self._script.commands.append(Command(line, words, flat | own))

    def _words(self) -> list[str]:
        """The words up to the end of a command. An array that is set is no word."""
        words: list[str] = []
        documents: list[str] = []
        while self.at < len(self._text):
            if self._skip(_SPACE) or self._skip(_COMMENT):
                continue
            if redirection := self._skip(_REDIRECTION):
                if redirection[1] is None:
                    self._skip(_SPACE)
                    target = self._word() if _PIECE.match(self._text, self.at) else []
                    documents += target[:1] if redirection[0].endswith(("<<", "<<-")) else []
                continue
            if end := self._skip(_END):
                if end[0] == "\n":
                    self._skip_documents(documents)
                    documents = []
                break
            array = _ASSIGNMENT.match(self._text, self.at)
            if array and self._text[array.end() : array.end() + 1] == "(":
                self.at = array.end() + 1
                self._set_array(array[1], bool(array[2]), self._items())
                continue
            words += self._word()
        return words

    def _skip(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if found := pattern.match(self._text, self.at):
            self.at = found.end()
        return found

    def _skip_documents(self, names: list[str]) -> None:
        """Go behind the here-documents that a line has announced."""
        for name in names:
            end = re.compile(rf"^\t*{re.escape(name)}$", re.MULTILINE).search(self._text, self.at)
            self.at = end.end() if end else len(self._text)

    def _items(self) -> list[str]:
        """The words of an array, up to its bracket."""
        items: list[str] = []
        while not self._text.startswith(")", self.at):
            if self.at >= len(self._text):
                raise self._unclosed("(")
            if not (self._skip(_SPACE) or self._skip(_COMMENT) or self._skip(_END)):
                items += self._word()
        self.at += 1
        return items

    def _set_array(self, name: str, adds: bool, items: list[str]) -> None:
        before = self._values.get(name, []) if adds else []
        unsure = [Unread(item) for item in items] if self._depth else items
        items = [*(before if isinstance(before, list) else [before]), *unsure]
        if sum(map(len, items)) + len(items) > _MAX_LENGTH:
            raise _TooLongError
        self._values[name] = items

    def _word(self) -> list[str]:
        """One word; several where a variable without quotes, or an array, holds several; none where
        it is empty.
        """
        fields: list[list[str]] = []

        def add(parts: list[str]) -> None:
            if parts and fields:
                fields[-1].append(parts.pop(0))
            fields.extend([part] for part in parts)

        start = self.at
        while self.at < len(self._text) and (piece := _PIECE.match(self._text, self.at)):
            self.at = piece.end()
            if piece["value"]:
                add([part for item in self.value(piece["value"]) for part in _split(item)])
            elif piece["double"]:
                add(self._inside(self._quoted()))
            else:
                text = piece[0]
                plain = (
                    text.lstrip("$")[1:-1]
                    if piece["single"]
                    else text[1:]
                    if piece["escape"]
                    else text
                )
                add(["" if text == "\\\n" else plain])
        if self.at == start:
            raise self._unclosed(self._text[start : start + 1])
        return [_joined(parts) for parts in fields]

    def _quoted(self) -> str:
        """The text up to the quotes that end it. Those in a `$(…)` do not."""
        start = self.at
        while self.at < len(self._text):
            letter = self._text[self.at]
            if letter == '"':
                self.at += 1
                return self._text[start : self.at - 1]
            self.at += 2 if letter == "\\" else 1
            if self._text.startswith("$(", self.at - 1):
                self.at += 1
                self._balanced("$(")
        self.at = start
        raise self._unclosed('"')

    def _inside(self, text: str) -> list[str]:
        """What stands between double quotes: one text, or the items of an array."""
        parts: list[str] = []
        at = 0
        whole = re.fullmatch(r"\$(?:\{(\w+)\[@\](?::\d+)?\}|@|\{@(?::\d+)?\})", text)
        if whole:
            items = self._values.get(whole[1] or "@", [] if whole[1] is None else Unread(text))
            return items if isinstance(items, list) else [items]
        inner = _Reader(text, self)
        while found := _INSIDE.search(text, at):
            parts.append(text[at : found.start()])
            if found[1]:
                parts.append("" if found[1] == "\n" else found[1])
                at = found.end()
            else:
                inner.at = found.end()
                parts += _between(inner.value(found[2]), " ")
                at = min(inner.at, len(text))
        return [_joined([*parts, text[at:]])]

    def value(self, opening: str) -> list[str]:
        """The value of an expansion that begins with `opening`, which was read; several if it is an
        array.
        """
        start = self.at - len(opening)
        if opening in _CLOSING:
            inner = self._balanced(opening)
            if inner is None:
                self.at = len(self._text)
                return [Unread(self._text[start:].strip())]
            written = self._text[start : self.at]
            if opening == "$((":
                number = _arithmetic(inner, self._values)
                return [Unread(written)] if number is None else [str(number)]
            if opening == "${":
                return self._parameter(inner, written)
            number = _arithmetic(inner[5:], self._values) if inner.startswith("expr ") else None
            return [Unread(written)] if number is None else [str(number)]
        return (
            [Unread(opening)] if opening.startswith("`") else self._parameter(opening[1:], opening)
        )

    def _balanced(self, opening: str) -> str | None:
        """The text up to the bracket that closes `opening`. None: nothing closes it."""
        closing = _CLOSING[opening]
        left, right = ("{", "}") if opening == "${" else ("(", ")")
        depth = len(closing)
        start = self.at
        for index in range(start, len(self._text)):
            depth += (self._text[index] == left) - (self._text[index] == right)
            if depth == 0:
                self.at = index + 1
                return self._text[start : self.at - len(closing)]
        return None

    def _parameter(self, text: str, written: str) -> list[str]:
        if text[:1] in ("@", "*"):
            return []
        found = _PARAMETER.fullmatch(text)
        if found is None:
            return [Unread(written)]
        name, items, instead, other = found.groups()
        value = self._values.get(name)
        if isinstance(value, Unread) and ("$(" in value or "`" in value):
            return [Unread(written)]  # its name says more than the command from which it comes
        if value is not None and not (instead and instead.startswith(":") and not value):
            return [value] if isinstance(value, str) else value if items else value[:1]
        if instead is None:
            return [Unread(written)]
        default = _joined(self._inside(other.strip("\"'")))
        self._script.defaults[name] = default
        if instead.endswith("="):
            self._values[name] = default
        return [default]

    def _unclosed(self, what: str) -> _NotClosedError:
        line = self._text.count("\n", 0, min(self.at, len(self._text) - 1)) + 1
        return _NotClosedError(f"line {line}: {what!r} is not closed")


def _of(word: str, text: str) -> str:
    """A part of a word, which is unread if the word is."""
    return Unread(text) if isinstance(word, Unread) else text


def _joined(parts: list[str]) -> str:
    text = "".join(parts)
    if len(text) > _MAX_LENGTH:
        raise _TooLongError
    return Unread(text) if any(isinstance(part, Unread) for part in parts) else text


def _between(items: list[str], separator: str) -> list[str]:
    return [
        part
        for index, item in enumerate(items)
        for part in ([separator, item] if index else [item])
    ]


def _split(value: str) -> list[str]:
    """A value without quotes: the words in it."""
    if not isinstance(value, Unread):
        return value.split()
    whole = "$" not in value or "$(" in value
    return [value] if whole else [Unread(part) if "$" in part else part for part in value.split()]


_OPERATIONS = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.FloorDiv: int.__floordiv__,
    ast.Mod: int.__mod__,
}
_MAX_DIGITS = 15


def _arithmetic(text: str, values: Mapping[str, str | list[str]]) -> int | None:
    """The value of `$((…))` with integers, variables and + - * / %.

    None: it is not known, or too large.
    """
    try:
        tree = ast.parse(
            re.sub(r"\$\{?(\w+)\}?", r"\1", text).replace("/", "//").strip(), mode="eval"
        ).body
        return _integer(tree, values)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _integer(node: ast.expr, values: Mapping[str, str | list[str]]) -> int:
    """Raises ValueError for what is no integer."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        number = _OPERATIONS[type(node.op)](
            _integer(node.left, values), _integer(node.right, values)
        )
    elif isinstance(node, ast.Name):
        value = values.get(node.id)
        number = int(value) if isinstance(value, str) and len(value) <= _MAX_DIGITS else int("")
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        number = node.value
    else:
        raise ValueError("no integer")
    if abs(number) >= 10**_MAX_DIGITS:
        raise ValueError("too large")
    return number
