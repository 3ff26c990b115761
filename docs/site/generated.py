"""The pages that are made from the code, and the Helm chart: `python -m docs.site.generated` writes
them; a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from deploy.helm import generate as chart
from docs.site import api_page, llms_txt, options_page, settings_page, tinker_page
from ft_service.convert import names_page

ROOT = Path(__file__).parents[2]
PAGES: Mapping[str, Callable[[], str]] = {
    "docs/api.md": api_page.page,
    "docs/options.md": options_page.page,
    "docs/settings.md": settings_page.page,
    "docs/from-other-tools.md": names_page.page,
    "docs/tinker-methods.md": tinker_page.page,
    f"{chart.CHART}/Chart.yaml": chart.chart_yaml,
    f"{chart.CHART}/values.schema.json": chart.values_schema,
    **{
        f"{chart.CHART}/templates/{name}.yaml": partial(chart.template, name)
        for name in chart.TEMPLATES
    },
    **{
        f"{chart.VALUES}/{name}.yaml": partial(chart.overlay_values, name)
        for name in chart.OVERLAYS
    },
    "llms.txt": llms_txt.page,  # last: it quotes the others
}
"""Path from the project's folder → what makes the text."""


def write() -> None:
    """Write every page."""
    for path, made in PAGES.items():
        (ROOT / path).write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    write()
