"""A Modelfile for Ollama, with the chat template in its own language where that can be shown to
write the same.

Ollama reads no Jinja. A template that puts fixed text around each message can be said in its
language: what that text is comes from rendering a few conversations, and is proven by rendering
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]
"""A conversation's text, and whether the beginning of an answer follows."""

_U = "qzUSERONEzq"
_V = "qzUSERTWOzq"
_A = "qzANSWERzq"
_S = "qzSYSTEMzq"
MODELFILE = "Modelfile"


@dataclass(frozen=True)
class TurnTemplate:
    """A chat template that puts fixed text around each message."""

    around: dict[str, tuple[str, str]]
    """Role → text before and after a message."""
    opening: str
    """Text before the answer."""
    default: str
    """Text before everything if there is no system message."""
    bos: str

    def render(self, messages: Sequence[Message], answer: bool) -> str:
        text = self.bos
        if not messages or messages[0]["role"] != "system":
            text += self.default
        for message in messages:
            before, after = self.around[message["role"]]
            text += before + message["content"] + after
        return text + (self.opening if answer else "")


def turns_of(render: Render, bos: str) -> TurnTemplate | None:
    """The template as turns.

    None: it is not of that kind. `bos`: the tokenizer's, which Ollama puts there itself.
    """
    try:
        turns = _guess(render, bos)
        return turns if turns is not None and _holds(turns, render) else None
    except Exception:  # templates raise what they like
        return None


def _guess(render: Render, bos: str) -> TurnTemplate | None:
    one = _between(render([_say("user", _U)], False), _U)
    opening = render([_say("user", _U)], True)[len(one[0]) + len(_U) + len(one[1]) :]
    two = _between(render([_say("user", _U), _say("assistant", _A)], False), _U, _A)
    three = _between(
        render([_say("user", _U), _say("assistant", _A), _say("user", _V)], False), _U, _A, _V
    )
    after_user = one[1]
    after_answer = two[2]
    if not two[1].startswith(after_user) or not three[2].startswith(after_answer):
        return None
    before_answer = two[1][len(after_user) :]
    before_user = three[2][len(after_answer) :]
    if not one[0].endswith(before_user):
        return None
    first = one[0][: len(one[0]) - len(before_user)]
    found = bos if bos and first.startswith(bos) else ""
    around = {"user": (before_user, after_user), "assistant": (before_answer, after_answer)}
    system = _system(render, found, before_user)
    if system is not None:
        around["system"] = system
    return TurnTemplate(around, opening, first[len(found) :], found)


def _system(render: Render, bos: str, before_user: str) -> tuple[str, str] | None:
    try:
        parts = _between(render([_say("system", _S), _say("user", _U)], False), _S, _U)
    except Exception:  # a template without a place for it
        return None
    if not parts[0].startswith(bos) or not parts[1].endswith(before_user):
        return None
    return parts[0][len(bos) :], parts[1][: len(parts[1]) - len(before_user)]


def _between(text: str, *said: str) -> list[str]:
    parts = []
    rest = text
    for word in said:
        before, found, rest = rest.partition(word)
        if not found:
            raise ValueError(f"the template leaves out {word}")
        parts.append(before)
    return [*parts, rest]


def _say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _holds(turns: TurnTemplate, render: Render) -> bool:
    """Whether the turns write what the template writes, for conversations that they were not made
    from.
    """
    plain = [
        _say("user", "Where is it?\n\nTell me."),
        _say("assistant", "Here."),
        _say("user", "42"),
        _say("assistant", "{}"),
    ]
    tried = [plain[:1], plain[:2], plain[:3], plain]
    if "system" in turns.around:
        tried += [[_say("system", "Be brief."), *some] for some in tried]
    return all(
        turns.render(messages, answer) == render(messages, answer)
        for messages in tried
        for answer in ([True] if messages[-1]["role"] == "user" else [False])
    )


def template_text(turns: TurnTemplate) -> str | None:
    """The turns as a template of Ollama's.

    None: they hold text that its language, or a Modelfile, reads as its own.
    """
    texts = [text for pair in turns.around.values() for text in pair] + [
        turns.opening,
        turns.default,
    ]
    if any(word in text for text in texts for word in ("{{", "}}", '"""')):
        return None
    parts = [f"{{{{ if not .System }}}}{turns.default}{{{{ end }}}}"] if turns.default else []
    parts.append("{{ range .Messages }}")
    for number, (role, (before, after)) in enumerate(turns.around.items()):
        parts.append(
            f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}{before}{{{{ .Content '
            f"}}}}{after}"
        )
    parts.append("{{ end }}{{ end }}" + turns.opening)
    return "".join(parts)


def modelfile(first: Sequence[str], turns: TurnTemplate | None) -> str:
    """A Modelfile. `first`: its lines before the template."""
    lines = list(first)
    text = template_text(turns) if turns is not None else None
    if turns is None or text is None:
        lines.append(
            "# The chat template cannot be said in Ollama's language: it takes one that it knows "
            "by the template in the file."
        )
    else:
        lines.append(f'TEMPLATE """{text}"""')
        if stop := turns.around["assistant"][1].strip():
            lines.append(f'PARAMETER stop "{_quoted(stop)}"')
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
