"""Exports over REST: requested, made next to the server, fetched as a tar, and private to the
project.
"""

from __future__ import annotations

import io
import re
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from api.http.sessions import token_of
from ft_service.jobs.reasons import Reason
from ft_service.jobs.states import State
from ft_service.rundir.documents import ExportFormat
from ft_service.serving import exporting
from ft_service.store.records import NewKey
from tests.support.rest.service import Service, put, run_dir


@pytest.fixture
def job_id(service: Service, client: openai.OpenAI, training_file: str) -> str:
    """Of a job that has succeeded."""
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    run_dir(service, job_id).put("adapter/adapter_config.json", b"{}")
    put(service, job_id, state=State.SUCCEEDED, reason=Reason.SUCCEEDED, attempt=1, finished_at=1e9)
    return job_id


LOSSES = {"adapter_on_base_as_trained": 1.25, "adapter_on_bf16_base": 1.25, "merged": 1.375}


def made(adapter: Path, out: Path, to: ExportFormat, stop: Callable[[], bool]) -> dict[str, Any]:
    out.mkdir(parents=True)
    (out / "model.gguf").write_bytes(b"12345")
    return {"validation_loss": LOSSES}


def test_an_export_is_asked_for_made_and_fetched(service: Service, job_id: str) -> None:
    address = f"/v1/fine_tuning/jobs/{job_id}/exports"
    asked = service.http("POST", address, json={"format": "gguf"})
    assert asked.status_code == 200
    assert {name: asked.json()[name] for name in ("id", "status", "bytes")} == {
        "id": "gguf",
        "status": "queued",
        "bytes": None,
    }
    assert service.http("GET", f"{address}/gguf/content").json()["error"]["code"] == "no_export"
    exporting.make_all(service.settings, service.store, threading.Event(), made)
    [listed] = service.http("GET", address).json()["data"]
    assert listed == service.http("GET", f"{address}/gguf").json()
    assert (listed["status"], listed["bytes"], listed["report"]) == (
        "succeeded",
        5,
        {"validation_loss": LOSSES},
    )
    fetched = service.http("GET", f"{address}/gguf/content")
    assert fetched.headers["content-disposition"] == f'attachment; filename="{job_id}-gguf.tar"'
    with tarfile.open(fileobj=io.BytesIO(fetched.content)) as archive:
        assert archive.getnames() == ["gguf/model.gguf"]
    assert service.http("DELETE", f"{address}/gguf").json() == {
        "object": "fine_tuning.job.export",
        "id": "gguf",
        "deleted": True,
    }
    assert service.http("GET", f"{address}/gguf").status_code == 404


def test_another_project_gets_the_404_of_a_job_that_never_was(
    service: Service, job_id: str
) -> None:
    service.store.projects.ensure_project("other", "rival")
    other = service.store.keys.create_key(NewKey(project_id="other", name="k", scope="admin"))[1]
    for method, path in (
        ("POST", ""),
        ("GET", ""),
        ("GET", "/gguf"),
        ("GET", "/gguf/content"),
        ("DELETE", "/gguf"),
    ):
        body = {"json": {"format": "gguf"}} if method == "POST" else {}
        theirs = service.http(
            method, f"/v1/fine_tuning/jobs/{job_id}/exports{path}", key=other, **body
        )
        nobodys = service.http(
            method, f"/v1/fine_tuning/jobs/ftjob-none/exports{path}", key=other, **body
        )
        assert (theirs.status_code, theirs.text) == (
            404,
            nobodys.text.replace("ftjob-none", job_id),
        )


def test_what_cannot_be_exported_is_refused(
    service: Service, client: openai.OpenAI, job_id: str, training_file: str
) -> None:
    address = f"/v1/fine_tuning/jobs/{job_id}/exports"
    assert (
        "is at …/adapter"
        in service.http("POST", address, json={"format": "peft"}).json()["error"]["message"]
    )
    assert (
        service.http("POST", address, json={"format": "onnx"}).json()["error"]["param"] == "format"
    )
    unfinished = client.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    refused = service.http(
        "POST", f"/v1/fine_tuning/jobs/{unfinished}/exports", json={"format": "gguf"}
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_adapter")
    client.models.delete(str(client.fine_tuning.jobs.retrieve(job_id).fine_tuned_model))
    assert service.http("POST", address, json={"format": "gguf"}).status_code == 404


def test_the_page_has_them_made_shown_and_removed(service: Service, job_id: str) -> None:
    with httpx2.Client(base_url=service.url, trust_env=False, timeout=60.0) as browser:
        browser.post("/sign-in", data={"key": service.key})
        (secret,) = browser.cookies.values()
        token = {"x-csrf-token": token_of(secret)}
        asking = browser.get(f"/jobs/{job_id}/exports").text
        assert ("Where will it run?" in asking, ">Make</button>" in asking) == (True, False)
        offered = {
            where: browser.get(f"/jobs/{job_id}/exports?where={where}").text
            for where in re.findall(r'href="\?where=(\w+)"', asking)
        }
        counts = {where: text.count(">Make</button>") for where, text in offered.items()}
        assert counts == {"laptop": 3, "server": 5, "transformers": 4, "phone": 1}
        assert f"tar xf {job_id}-gguf-q8_0.tar\nollama create" in offered["laptop"]
        assert "vllm serve tiny --enable-lora" in offered["server"]
        assert browser.get(f"/jobs/{job_id}/exports?where=moon").status_code == 400
        asked = browser.post(f"/jobs/{job_id}/exports?form=gguf&where=laptop", headers=token).text
        assert "queued" in asked
        again = f'hx-get="/page/live/jobs/{job_id}/exports?where=laptop&amp;made="'
        assert again in asked, "it looks again"
        assert 'hx-trigger="every 3s"' in asked
        assert asked.count(">Make</button>") == 2, "the other forms for there"
        exporting.make_all(service.settings, service.store, threading.Event(), made)
        shown = browser.get(f"/page/live/jobs/{job_id}/exports").text
        assert f'href="/v1/fine_tuning/jobs/{job_id}/exports/gguf/content" download' in shown
        assert "every 3s" not in shown
        assert re.findall(r'<td class="num">([^<]+)</td>', shown) == [
            *("1.25", "1.25", "+0.0000"),
            *("1.25", "1.375", "+0.1250"),
        ]
        assert browser.get(f"/v1/fine_tuning/jobs/{job_id}/exports/gguf/content").status_code == 200
        assert (
            "queued" not in browser.post(f"/jobs/{job_id}/exports/gguf/delete", headers=token).text
        )
        assert browser.get(f"/v1/fine_tuning/jobs/{job_id}/exports").json()["data"] == []
