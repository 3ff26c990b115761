from __future__ import annotations

import json

from tests.support.command_line import Ft
from tests.support.rest.stub_server import StubServer, job_body, metrics_event


def test_compare_shows_what_differs_and_both_curves_on_one_scale(
    ft: Ft, server: StubServer
) -> None:
    server.jobs["ftjob-1"] = job_body(lora={"r": 8}, training={"learning_rate": 1e-3}, seed=1)
    server.jobs["ftjob-2"] = job_body(
        "ftjob-2",
        lora={"r": 16},
        training={"learning_rate": 1e-3},
        seed=1,
        suffix="mine",
        training_file="file-1",
    )
    server.files = [{"id": "file-1", "filename": "train.jsonl", "bytes": 5}]
    server.events = [metrics_event(step, step, valid_loss=3.0 - step / 10) for step in range(1, 11)]
    title, *rows = ft("compare", "ftjob-1", "last").out.splitlines()
    assert title.split() == ["1", "mine", "(2)"]
    assert rows[0].split() == ["training_file", "file-0", "train.jsonl", "(1)"]
    assert rows.pop(1).split() == ["lora.r", "8", "16"]
    assert not [row for row in rows if row.startswith(("training.learning_rate", "seed"))]
    assert rows[5].split()[:7] == ["lowest", "validation", "loss", "2.0000", "at", "step", "10"]
    curves = [row for row in rows if "→" in row]
    assert [curve.split()[0] for curve in curves] == ["1", "mine"] * 2
    assert [curve.split()[-3:] for curve in curves] == [["1.900", "→", "1.000"]] * 2 + [
        ["2.900", "→", "2.000"]
    ] * 2
    shown = json.loads(ft("compare", "ftjob-1", "ftjob-2", "--json").out)
    assert shown["options"] == {"training_file": ["file-0", "file-1"], "lora.r": [8, 16]}
    assert len(shown["metrics"][1]) == 10


def test_losses_of_other_methods_are_told_apart_and_have_scales_of_their_own(
    ft: Ft, server: StubServer
) -> None:
    pairs = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.1, "loss_type": "sigmoid"}}}
    server.jobs["ftjob-1"] = job_body()
    server.jobs["ftjob-2"] = job_body("ftjob-2", method=pairs)
    server.events = [metrics_event(step, step) for step in range(1, 11)]
    out = ft("compare", "ftjob-1", "ftjob-2").out
    assert "cannot be compared: 1 cross entropy, 2 sigmoid of pairs (beta 0.1)." in out
    assert "training loss, each on its own scale" in out
    server.jobs["ftjob-1"] = job_body(method=pairs)
    assert "scale" not in ft("compare", "ftjob-1", "ftjob-2").out


def test_rewards_are_compared_where_a_job_has_them(ft: Ft, server: StubServer) -> None:
    graded = {
        "type": "reinforcement",
        "reinforcement": {"grader": {"type": "string_check", "name": "right"}},
    }
    server.jobs["ftjob-1"] = job_body(method=graded)
    server.jobs["ftjob-2"] = job_body("ftjob-2", method=graded)
    server.events = [
        metrics_event(step, step, train_loss=None, train_mean_reward=step / 10)
        for step in range(1, 11)
    ]
    lines = ft("compare", "ftjob-1", "ftjob-2").out.splitlines()
    assert ["training", "reward", "1.0", "1.0"] in [line.split() for line in lines]
    assert [
        line.split()[-3:] for line in lines[lines.index("training reward") :] if "→" in line
    ] == [["0.100", "→", "1.000"]] * 2
