"""Samples in colours: what is learned, what is only read, what the template writes, what is cut."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from ft_service.data.samples import Role, SamplePage, ShownSample

STYLES: Mapping[Role, str] = {"learned": "bold green", "words": "", "template": "dim cyan", "cut": "red strike"}
_MARKS: Mapping[Role, tuple[str, str]] = {"learned": ("⟦", "⟧"), "cut": ("⟪", "⟫")}
"""Around what is learned or cut, where there are no colours."""


def show_page(console: Console, page: SamplePage, *, ids: bool) -> None:
    """Print samples, each under a line that counts it. `ids`: with the number of every token."""
    legend = Text.assemble(*((f" {role} ", style) for role, style in STYLES.items()))
    console.print(legend if console.color_system else "⟦learned⟧ read and template ⟪cut⟫")
    for sample in page.samples:
        console.print()
        console.print(_title(sample, page.word), style="bold", highlight=False, markup=False)
        console.print(_body(sample, colours=bool(console.color_system), ids=ids), soft_wrap=True)
    if page.has_more and page.samples:
        console.print(f"\nMore: --after {page.samples[-1].line}", highlight=False)


def _title(sample: ShownSample, word: str) -> str:
    place = f"{word} {sample.line}" if sample.line else "the file"
    answer = f", the {sample.answer} answer" if sample.answer else ""
    if sample.error is not None:
        return f"{place}{answer}: {sample.error}"
    cut = f", cut at {sample.cut_at}" if sample.cut_at is not None else ""
    return f"{place}{answer}: {sample.learned:,} of {sample.total:,} tokens learned{cut}"


def _body(sample: ShownSample, *, colours: bool, ids: bool) -> Text:
    body = Text()
    before: Role | None = None
    for token in sample.tokens:
        if not colours and before != token.role:
            body.append(_MARKS[before][1] if before is not None and before in _MARKS else "")
            body.append(_MARKS[token.role][0] if token.role in _MARKS else "")
        body.append(_visible(token.text) if ids else token.text, STYLES[token.role])
        if ids:
            body.append(f"·{token.id} ", "dim")
        before = token.role
    if not colours and before is not None and before in _MARKS:
        body.append(_MARKS[before][1])
    return body


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")
