"""The pages that are made from the code: `python -m docs.site.generated` writes them; a test compares them with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.site import api_page, llms_txt, options_page, settings_page, tinker_page
from ft_service.convert import names_page

ROOT = Path(__file__).parents[2]
PAGES: Mapping[str, Callable[[], str]] = {
    "docs/api.md": api_page.page,
    "docs/options.md": options_page.page,
    "docs/settings.md": settings_page.page,
    "docs/from-other-tools.md": names_page.page,
    "docs/tinker-methods.md": tinker_page.page,
    "llms.txt": llms_txt.page,  # last: it quotes the others
}
"""Path from the project's folder → what makes the text."""


def write() -> None:
    """Write every page."""
    for path, made in PAGES.items():
        (ROOT / path).write_text(made())


if __name__ == "__main__":
    write()
