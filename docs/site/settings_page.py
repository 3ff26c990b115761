"""The page docs/settings.md: every setting of the service, from ft_service/settings.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docs.site.schema_text import default_text, description_text, row, values_text
from ft_service.settings import Settings

_HEAD = """\
# Every setting

<!-- made by docs.site.generated -->

The settings of `ft serve`, `ft reconcile` and the commands that work without a server: environment variables, read once at the
start. A value that cannot be used is refused by name; an empty one counts as none. [Operating](operating.md#settings) names
those that a new server needs, and those of clients.

| variable | values | default | |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The page, as Markdown."""
    properties: dict[str, dict[str, Any]] = Settings.model_json_schema()["properties"]
    rows = [_row(name, schema) for name, schema in properties.items()]
    return _HEAD + "\n".join(rows) + "\n"


def _row(name: str, schema: dict[str, Any]) -> str:
    default = Settings.model_fields[name].default
    shown = {**schema, "default": str(default) if isinstance(default, Path) else default}
    empty = default in ("", [], None)
    return row(
        f"`FT_{name.upper()}`",
        values_text(schema, lambda of: of).removesuffix(" or none"),
        "none" if empty else default_text(shown, required=False),
        description_text(schema),
    )
