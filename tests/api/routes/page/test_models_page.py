"""The table of bases, whose descriptions are made after the server has started."""

from __future__ import annotations

import re
from dataclasses import replace

import httpx2
import pytest

from ft_service.bases.catalogue import Catalogue
from ft_service.bases.describing import Descriptions
from tests.support.bases import save_base
from tests.support.describing import described_here
from tests.support.rest.service import Service


def rows(html: str) -> dict[str, str]:
    """Name of a base → its row."""
    table = html[html.index('id="bases"') :]
    return {
        found[1]: found[0]
        for found in re.finditer(r'<tr><td class="name"><b>([^<]*)</b>.*?</tr>', table, re.DOTALL)
    }


@pytest.fixture
def undescribed(service: Service) -> Descriptions:
    """The service's descriptions, of which another process has made none yet."""
    services = service.app.state.services
    descriptions = Descriptions(None, "tests")
    catalogue = Catalogue.from_settings(service.settings, descriptions)
    service.app.state.services = replace(services, catalogue=catalogue)
    return descriptions


def test_a_base_is_shown_as_being_examined_until_it_was(
    service: Service, undescribed: Descriptions, browser: httpx2.Client
) -> None:
    page = browser.get("/models").text
    assert "being examined" in rows(page)["tiny"]
    assert "/new?model=tiny" in rows(page)["tiny"], "a job can be created meanwhile"
    [part] = re.findall(r'hx-get="(/page/live/bases[^"]*)"', page)
    folder = save_base(service.settings.models[0] / "small", num_hidden_layers=1)
    undescribed.add(folder, described_here(folder))
    later = rows(browser.get(part).text)
    assert "possible" in later["small"]
    assert "being examined" not in later["small"]
    assert "being examined" in later["tiny"], "whose files are others"


def test_a_refused_base_is_shown_with_the_reason_and_not_offered(
    service: Service, browser: httpx2.Client
) -> None:
    save_base(service.settings.models[0] / "<b>no-decoder", model_type="t5")
    row = rows(browser.get("/models").text)
    assert "t5" in row["&lt;b&gt;no-decoder"]
    assert "refused" in row["&lt;b&gt;no-decoder"]
    assert "/new?model=" not in row["&lt;b&gt;no-decoder"]
    assert "hx-get" not in browser.get("/page/live/bases").text, "nothing is left to wait for"
