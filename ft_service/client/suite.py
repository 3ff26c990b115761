"""Suites of tasks for lm-eval, which runs as a process in an environment of its own and asks a
server for log-probabilities.

A task is a file of multiple-choice questions, one JSON object a line: `query`, `choices`, and
`answer`, the number of the right choice from 0. Those of the package were written for this project;
licence: CC0-1.0.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from ft_service.client.connection import Connection
from ft_service.errors import FtError, SpecError
from ft_service.rundir.evaluations import MOST_QUESTIONS, SuiteAccuracy, Suites, SuiteTask
from ft_service.spec import Strict, spec_error

TASKS = Path(__file__).parents[1] / "data/suites"
"""Folder of the package's tasks."""
MOST_BYTES = 32 * 1024**2
INSTALL = (
    "python3 -m venv lm-eval && lm-eval/bin/pip install 'lm-eval[api]>=0.4.10,<0.5' transformers"
)


class TaskQuestion(Strict):
    """One line of a task."""

    query: Annotated[str, Field(min_length=1, max_length=100_000)]
    choices: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=10_000)]],
        Field(min_length=2, max_length=64),
    ]
    answer: Annotated[int, Field(ge=0)]
    """Number of the right choice, from 0."""


@dataclass(frozen=True)
class TaskAccuracy:
    """Result of a task, as lm-eval reports it."""

    accuracy: float
    """Share of questions whose right choice is the likeliest."""
    error: float | None
    """Standard error of the accuracy; None: a single question."""
    questions: int


def package_tasks() -> list[str]:
    return sorted(path.stem for path in TASKS.glob("*.jsonl"))


def find_tasks(words: Sequence[str]) -> dict[str, Path]:
    """Return name → file of tasks that words mean: names of the package's, `all` of these, or
    files. Raises SpecError.
    """
    known = package_tasks()
    found: dict[str, Path] = {}
    for word in words:
        if word == "all":
            found |= {name: TASKS / f"{name}.jsonl" for name in known}
        elif word in known:
            found[word] = TASKS / f"{word}.jsonl"
        elif Path(word).is_file():
            name = re.sub(r"\W+", "_", Path(word).stem)
            if name in found:
                raise SpecError(
                    f"--suite {word}: another task is called {name} too. Rename the file.",
                    param="suite",
                )
            check_task(Path(word))
            found[name] = Path(word).resolve()
        else:
            raise SpecError(
                f"--suite {word}: is neither a task of the package ({', '.join(known)}, all) nor "
                "a file.",
                param="suite",
            )
    return found


def check_task(path: Path) -> None:
    """Raise SpecError naming the line and field that are not as they must be."""
    if path.stat().st_size > MOST_BYTES:
        raise SpecError(
            f"{path} has {path.stat().st_size:,} bytes, and at most {MOST_BYTES:,} are read.",
            param="suite",
        )
    count = 0
    for number, line in enumerate(
        path.read_text(encoding="utf-8", errors="replace").split("\n"), 1
    ):
        if not line.strip():
            continue
        count += 1
        try:
            question = TaskQuestion.model_validate_json(line)
        except ValidationError as error:
            message = spec_error(error, TaskQuestion).message
            raise SpecError(f"{path}, line {number}: {message}", param="suite") from None
        if question.answer >= len(question.choices):
            text = (
                f"answer = {question.answer}: must be below {len(question.choices)}, the "
                "number of choices"
            )
            raise SpecError(f"{path}, line {number}: {text}.", param="suite")
    if not 0 < count <= MOST_QUESTIONS:
        raise SpecError(
            f"{path} has {count:,} questions: a task has 1 to {MOST_QUESTIONS:,}.", param="suite"
        )


def task_file(name: str, data: Path) -> dict[str, Any]:
    """Return lm-eval's description of a task."""
    return {
        "task": f"ft_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def require_lm_eval(program: str) -> str:
    """Return the path of lm-eval's program. Raises SpecError with how to install it."""
    found = shutil.which(program)
    if found is None:
        raise SpecError(
            f"--lm-eval {program}: there is no such program. lm-eval runs in an environment of "
            f"its own: {INSTALL}; then name "
            "it: --lm-eval lm-eval/bin/lm_eval",
            param="lm_eval",
        )
    return str(Path(found).absolute())


@dataclass(frozen=True)
class SuiteRun:
    """What lm-eval is run with. `tokenizer`: a folder with the tokenizer of the models' base."""

    program: str
    connection: Connection
    tokenizer: Path
    tasks: Mapping[str, Path]
    scratch: Path
    """An empty folder for its files."""

    def scores(self, model: str) -> dict[str, TaskAccuracy]:
        """Run all tasks on a model, by its name at the server.

        Raises FtError with the end of lm-eval's output if it fails.
        """
        folder = self.scratch / re.sub(r"\W+", "-", model)
        folder.mkdir()
        for name, data in self.tasks.items():
            (folder / f"{name}.yaml").write_text(
                yaml.safe_dump(task_file(name, data)), encoding="utf-8"
            )
        url = f"{self.connection.base_url}/completions"
        arguments = (
            f"model={model},base_url={url},tokenizer={self.tokenizer},tokenizer_backend=huggingface"
        )
        wanted = ",".join(f"ft_{name}" for name in self.tasks)
        command = [
            self.program,
            "--model",
            "local-completions",
            "--model_args",
            arguments,
            "--tasks",
            wanted,
        ]
        command += ["--include_path", str(folder), "--output_path", str(folder / "results")]
        ended = subprocess.run(
            command,
            env=self._environment(),
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if ended.returncode:
            last = "\n".join((ended.stdout + ended.stderr).splitlines()[-8:])
            raise FtError(
                f"lm-eval failed with exit code {ended.returncode}:\n{last}", code="lm_eval_failed"
            )
        return read_scores(folder / "results", self.tasks)

    def _environment(self) -> dict[str, str]:
        """Without the environment of this program, whose packages are others; nothing is
        fetched.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE")
        }
        caches = {
            "HF_HOME": str(self.scratch / "cache"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
        }
        return {**kept, **caches, "OPENAI_API_KEY": self.connection.api_key, "NO_PROXY": "*"}


def read_scores(folder: Path, tasks: Mapping[str, Path]) -> dict[str, TaskAccuracy]:
    """Read the newest results that lm-eval has written below a folder.

    Raises FtError if there are none of a task.
    """
    files = sorted(folder.rglob("results*.json"))
    if not files:
        raise FtError("lm-eval has written no results.", code="lm_eval_failed")
    results = json.loads(files[-1].read_text(encoding="utf-8"))
    scores: dict[str, TaskAccuracy] = {}
    for name, data in tasks.items():
        found = results["results"].get(f"ft_{name}", {})
        accuracy = found.get("acc,none")
        error = found.get("acc_stderr,none")
        if not isinstance(accuracy, int | float):
            raise FtError(
                f"lm-eval has written no accuracy of the task {name}.", code="lm_eval_failed"
            )
        count = sum(1 for line in data.read_text(encoding="utf-8").split("\n") if line.strip())
        scores[name] = TaskAccuracy(
            float(accuracy), float(error) if isinstance(error, int | float) else None, count
        )
    return scores


def suites_of(base: Mapping[str, TaskAccuracy], tuned: Mapping[str, TaskAccuracy]) -> Suites:
    """Return the results of the two models as they are kept with the job."""
    tasks = {
        name: SuiteTask(questions=score.questions, base=_kept(base[name]), tuned=_kept(score))
        for name, score in tuned.items()
    }
    return Suites(tasks=tasks)


def _kept(score: TaskAccuracy) -> SuiteAccuracy:
    return SuiteAccuracy(accuracy=score.accuracy, error=score.error)
