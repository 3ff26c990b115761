"""The table of bases, whose descriptions are made after the server has started."""

from __future__ import annotations

import re
from dataclasses import replace

import httpx2
import openai
import pytest

from api.page.formatting import NONE
from ft_service.bases.catalogue import Catalogue
from ft_service.bases.describing import Descriptions
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.store.records import NewEvent
from tests.support.bases import save_base
from tests.support.describing import described_here
from tests.support.rest.service import METRICS, Service, put


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


def test_tuned_models_tell_their_best_loss_and_every_view_is_in_the_navigation(
    service: Service, client: openai.OpenAI, browser: httpx2.Client, training_file: str
) -> None:
    names = []
    for losses in ((0.7, 0.4, 0.6), (None,)):
        job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
        events = [
            NewEvent(
                level="info",
                message=f"Step {step}",
                metrics=METRICS.model_copy(update={"step": step, "valid_loss": loss}),
            )
            for step, loss in enumerate(losses, 1)
        ]
        over = {"state": State.SUCCEEDED, "reason": Reason.SUCCEEDED, "finished_at": 1e9}
        names.append(str(put(service, job_id, *events, attempt=1, **over).tuned_name))
    page = browser.get("/models").text
    cells = {
        name: re.search(r'data-label="Best loss">([^<]*)', page[page.index(name) :])
        for name in names
    }
    assert [found[1] if found else None for found in cells.values()] == ["0.4", NONE]
    navigation = page[page.index('aria-label="Main"') :]
    for address in ("/jobs", "/sweeps", "/engines", "/models"):
        assert f'<a href="{address}"' in navigation
        current = re.findall(r'href="([^"]*)" aria-current="page"', browser.get(address).text)
        assert current[0] == address


def test_a_refused_base_is_shown_with_the_reason_and_not_offered(
    service: Service, browser: httpx2.Client
) -> None:
    save_base(service.settings.models[0] / "<b>no-decoder", model_type="t5")
    row = rows(browser.get("/models").text)
    assert "t5" in row["&lt;b&gt;no-decoder"]
    assert "refused" in row["&lt;b&gt;no-decoder"]
    assert "/new?model=" not in row["&lt;b&gt;no-decoder"]
    assert "hx-get" not in browser.get("/page/live/bases").text, "nothing is left to wait for"
