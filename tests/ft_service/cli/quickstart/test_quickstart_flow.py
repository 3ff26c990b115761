"""The quickstart's decisions and drawings; test_quickstart_processes.py runs it."""

from __future__ import annotations

import base64
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from openai.resources.fine_tuning.jobs import Jobs

from ft_service.cli.quickstart.quickstart_flow import (
    OPENAI_FIELDS,
    Remembered,
    choose,
    create_arguments,
    openai_client,
)
from ft_service.cli.quickstart.quickstart_report import (
    change,
    curve,
    decode_metrics,
    draw_losses,
    percent,
    side_by_side,
)
from ft_service.client.connection import Connection
from ft_service.installation import SAMPLE_SPEC
from ft_service.spec_files.spec_file import load_spec_file

LAST = Remembered("ftjob-1", "digest")


@pytest.mark.parametrize(
    ("remembered", "inputs", "status", "action", "word"),
    [
        (None, "digest", None, "start", "a new job"),
        (LAST, "digest", None, "start", "gone"),
        (LAST, "other", "paused", "start", "changed"),
        (LAST, "digest", "succeeded", "start", "finished"),
        (LAST, "digest", "failed", "start", "failed"),
        (LAST, "digest", "cancelled", "start", "cancelled"),
        (LAST, "digest", "paused", "resume", "resumed from its checkpoint"),
        (LAST, "digest", "running", "join", "still running"),
        (LAST, "digest", "queued", "join", "still queued"),
    ],
)
def test_a_second_run_goes_on_only_where_that_makes_sense(
    remembered: Remembered | None, inputs: str, status: str | None, action: str, word: str
) -> None:
    choice = choose(remembered, inputs, status)
    assert choice.action == action
    assert word in choice.text


def test_what_openais_client_has_no_argument_for_rides_in_extra_body() -> None:
    arguments = create_arguments(load_spec_file(SAMPLE_SPEC).body, "file-1", "file-2")
    assert (arguments["training_file"], arguments["validation_file"]) == ("file-1", "file-2")
    assert arguments["extra_body"]["precision"] == {"default": "nf4", "compute": "fp32"}
    known = set(Jobs.create.__code__.co_varnames)
    assert set(arguments) <= known
    assert known >= OPENAI_FIELDS
    assert not set(arguments["extra_body"]) & known


CSV = b"step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy\n1,2.5,0.1,,\n2,1.25,0.2,1.5,0.3\n"


def test_the_loss_curve_is_drawn_from_the_result_file(tmp_path: Path) -> None:
    rows = decode_metrics(base64.b64encode(CSV))
    assert curve(rows, "train_loss") == [(1, 2.5), (2, 1.25)]
    assert curve(rows, "valid_loss") == [(2, 1.5)]
    assert change(curve(rows, "train_loss")) == "2.50 → 1.25"
    assert draw_losses(rows, tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_validation_there_is_still_a_curve(tmp_path: Path) -> None:
    assert change([]) == "not measured"
    assert draw_losses([{"step": "1", "train_loss": "2.0"}], tmp_path / "loss.png").is_file()


class _NoModels(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": []}')

    def log_message(self, format: str, *args: object) -> None: ...


def test_its_own_server_is_reached_past_a_proxy_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with ThreadingHTTPServer(("127.0.0.1", 0), _NoModels) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with openai_client(
                Connection(f"http://127.0.0.1:{server.server_port}/v1", "ft-key")
            ) as client:
                assert client.models.list().data == []
        finally:
            server.shutdown()
            thread.join()


def test_percent() -> None:
    assert percent((97, 100)) == "97%"


def test_answers_stand_below_each_other_and_fit_the_screen() -> None:
    lines = side_by_side([("Book a\ntable for two.", "", '{"action": "book", "guests": 2}')], 30)
    assert lines == [
        "",
        "  message   Book a table for",
        "            two.",
        "  base      (nothing)",
        '  tuned     {"action": "book",',
        '            "guests": 2}',
    ]
