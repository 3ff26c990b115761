"""Jobs side by side, and sweeps."""

from __future__ import annotations

import re

import httpx2
import openai

from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.store.records import NewEvent
from tests.support.rest.service import METRICS, Service, put


def test_a_comparison_begins_with_what_was_different(
    service: Service, client: openai.OpenAI, browser: httpx2.Client, training_file: str
) -> None:
    made = []
    for rank, losses in ((4, (0.5, 0.9)), (8, (0.7, 0.8))):
        body = {"model": "tiny", "training_file": training_file, "lora": {"r": rank}}
        made.append(service.http("POST", "/v1/fine_tuning/jobs", json=body).json()["id"])
        events = [
            NewEvent(
                level="info",
                message=f"Step {step}",
                metrics=METRICS.model_copy(update={"step": step, "valid_loss": loss}),
            )
            for step, loss in enumerate(losses, 1)
        ]
        over = {"state": State.SUCCEEDED, "reason": Reason.SUCCEEDED, "finished_at": 1e9}
        put(service, made[-1], *events, attempt=1, **over)
    page = browser.get("/compare", params={"job": made[::-1]}).text
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == ["What was different", "Results", "Curves"]
    differs = page[page.index('class="differs"') : page.index("<h2>Results")]
    assert re.findall(r'<th scope="row">(.*?)</th>', differs) == ["lora.r", "seed"]
    assert re.findall(r"<code>(.*?)</code>", differs)[:2] == ["4", "8"], "best first"
    results = page[page.index("<h2>Results") : page.index("<h2>Curves")]
    assert re.findall(r'data-label="Lowest validation loss">([\d.]+)', results) == ["0.5", "0.7"]
    assert "Last training" not in page
