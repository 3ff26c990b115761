"""Suites: which tasks words mean, how lm-eval is started, and what is read of its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ft_service.client.connection import Connection
from ft_service.client.suite import (
    SuiteRun,
    TaskAccuracy,
    check_task,
    find_tasks,
    package_tasks,
    read_scores,
    require_lm_eval,
    suites_of,
)
from ft_service.errors import FtError, SpecError

PROGRAM = """#!/bin/sh
"exec" "{python}" "$0" "$@"
import json, os, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
folder = pathlib.Path(given["--output_path"]) / "model"
folder.mkdir(parents=True)
(folder.parent.parent / "seen.json").write_text(json.dumps([given, dict(os.environ)]))
if os.environ["OPENAI_API_KEY"] == "wrong":
    sys.exit("the key is wrong")
results = {{name: {{"acc,none": 0.75, "acc_stderr,none": 0.1}} for name in given["--tasks"].split(",")}}
(folder / "results_2026.json").write_text(json.dumps({{"results": results}}))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "lm_eval"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return require_lm_eval(str(path))


def run_of(program: str, tmp_path: Path, key: str = "key") -> SuiteRun:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return SuiteRun(
        program,
        Connection("http://127.0.0.1:1/v1", key),
        tmp_path / "tokenizer",
        find_tasks(["facts"]),
        scratch,
    )


def test_lm_eval_is_asked_for_the_tasks_in_an_environment_without_ours(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    run = run_of(program, tmp_path)
    assert run.scores("ft:tiny:me::1") == {"facts": TaskAccuracy(0.75, 0.1, 20)}
    (folder,) = (path for path in run.scratch.iterdir() if path.is_dir())
    given, environment = json.loads((folder / "seen.json").read_text())
    assert given["--model_args"].startswith(
        "model=ft:tiny:me::1,base_url=http://127.0.0.1:1/v1/completions,tokenizer="
    )
    assert (environment["OPENAI_API_KEY"], environment["HF_HUB_OFFLINE"]) == ("key", "1")
    assert "PYTHONPATH" not in environment
    task = yaml.safe_load((folder / "facts.yaml").read_text())
    assert task["task"] == given["--tasks"] == "ft_facts"
    assert Path(task["dataset_kwargs"]["data_files"]["test"]).is_file()


def test_a_failure_of_lm_eval_comes_with_its_last_words(program: str, tmp_path: Path) -> None:
    with pytest.raises(FtError, match="exit code 1:\nthe key is wrong"):
        run_of(program, tmp_path, "wrong").scores("tiny")


def test_the_package_has_three_tasks_that_are_as_files_must_be() -> None:
    assert package_tasks() == ["arithmetic", "common_sense", "facts"]
    tasks = find_tasks(["all"])
    assert list(tasks) == package_tasks()
    for path in tasks.values():
        check_task(path)
        answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
        assert max(map(answers.count, answers)) < 0.6 * len(answers), (
            "no place is right more often than not"
        )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"query": "a", "choices": ["b"], "answer": 0}, "choices"),
        ({"query": "a", "choices": ["b", "c"], "answer": 2}, "answer = 2: must be below 2"),
        ({"query": "a", "choices": ["b", "c"]}, "answer is required"),
        ({"query": "a", "choices": ["b", "c"], "answer": 0, "gold": 1}, "gold"),
    ],
)
def test_a_file_is_refused_with_its_line_and_field(
    line: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jsonl"
    good = {"query": "a", "choices": ["b", "c"], "answer": 1}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(line)}\n")
    with pytest.raises(SpecError, match=f"line 2: .*{says}"):
        find_tasks([str(path)])
    path.write_text(json.dumps(good))
    assert find_tasks([str(path), "facts"]).keys() == {"mine", "facts"}


def test_only_line_feeds_end_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    question = {"query": "a\u2028b\u2029c\x85d", "choices": ["b", "c"], "answer": 1}
    path.write_text(f"{json.dumps(question, ensure_ascii=False)}\r\n\n" * 3, newline="")
    assert find_tasks([str(path)]) == {"mine": path}
    (tmp_path / "results_1.json").write_text(
        json.dumps({"results": {"ft_mine": {"acc,none": 0.5}}})
    )
    assert read_scores(tmp_path, {"mine": path}) == {"mine": TaskAccuracy(0.5, None, 3)}


def test_what_is_neither_a_task_nor_a_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError,
        match=r"neither a task of the package \(arithmetic, common_sense, facts, all\) nor a file",
    ):
        find_tasks(["mmlu"])
    with pytest.raises(SpecError, match="in an environment of its own: python3 -m venv"):
        require_lm_eval(str(tmp_path / "none"))


def test_results_of_both_models_are_kept_together() -> None:
    kept = suites_of({"facts": TaskAccuracy(0.5, 0.1, 20)}, {"facts": TaskAccuracy(0.75, None, 20)})
    assert kept.tasks["facts"].text == "0.750 (base: 0.500), 20 questions"
    assert (kept.tasks["facts"].base.error, kept.tasks["facts"].tuned.error) == (0.1, None)
