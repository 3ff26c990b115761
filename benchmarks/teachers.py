"""What is learned from a teacher's probabilities, and from thumbs, on the sample base.

    python benchmarks/teachers.py [--parts student,thumbs] [--seeds 3] [--no-save]

student: a model that was shown some sums (sums-shown.yaml) learns from one that knows them, by its
own answers (student.yaml). Several settings are tried with the first seed, and the best of them
with all seeds. Its steps are compared with those of the same beginner that learned from rewards, as
reinforcement.py has measured them. Accuracies are those of answers sampled at temperature 1 to all
sums, as rewards are.

thumbs: a model that knows the sample task has a bad habit: half of the answers that it was taught
began with FAULT. It answers other messages at temperature 1, each answer gets a thumb by whether it
is exactly right, and 80 good and 80 bad ones go into KTO or APO, which go on from that model;
beside it the good ones alone, supervised, with as many steps, both at several rates: the first seed
tries all, and the other seeds the best of each way. Accuracies are those of answers sampled at
temperature 1 to messages that are in no file.

Everything goes through a real server, as a user's job does. The picture is
docs/pictures/teachers.png.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "examples")]

from benchmarks.held_out import TRAINING, write_messages
from benchmarks.machine import RESULTS, machine, save
from benchmarks.reinforcement import trained
from tests.support.service import Server, upload

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples/data"
PICTURE = ROOT / "docs/pictures/teachers.png"
STUDENTS: dict[str, dict[str, Any]] = {
    "as the example": {},
    "with 8 answers": {"num_generations": 8},
}
"""Hyperparameters that are tried in place of the example's. Of rewards 16 answers to each prompt
were learned from.
"""
EVERY = 3
"""Steps between two measurements of a student."""
NEVER = 10**6
POINTS = 0.02
"""So much less than its teacher's is a student's accuracy, at most."""
TEACHER_EPOCHS = 12
STUDENT_STEPS = 12
"""A third of what rewards needed, and one step more or less."""
ANSWERS = 4
"""Sampled to each sum by a request, which may have no more, and two requests."""
AT_ONCE = 32
MESSAGES = 200
FAULT = "Sure, here it is: "
TAUGHT = 800
"""Messages of the sample's training file that the model with the habit is taught; it answers the
others.
"""
OF_EACH = 80
"""Answers with each thumb."""
PARENT_STEPS = 480
"""After which few of its answers are wrong but for the habit."""
RATES = (3e-4, 1e-3)
WAYS: dict[str, dict[str, Any] | None] = {
    "good alone": None,
    "thumbs": {"beta": 1.0},
    "thumbs, bad a fifth": {"beta": 0.1, "undesirable_weight": 0.2},
    "thumbs, APO, bad a fifth": {
        "loss_type": "apo_zero_unpaired",
        "beta": 1.0,
        "undesirable_weight": 0.2,
    },
}
"""KTO's hyperparameters; None: the good answers, supervised. With a large beta the push of bad
answers ends soon, before it has unlearned their right words; with KTO's usual 0.1 only a small
weight keeps it low.
"""
ON_ONE_RANK: dict[str, Any] = {
    "distributed": {"nproc_per_node": 1},
    "validation_file": None,
    "checkpoint": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", default="student,thumbs")
    parser.add_argument("--seeds", type=int, default=3, help="of students")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    parts = {"student": students, "thumbs": thumbs}
    with tempfile.TemporaryDirectory(prefix="ft-teachers-") as folder:
        server = Server(Path(folder), ROOT / "examples/models")
        server.start()
        try:
            for name in options.parts.split(","):
                found = parts[name](server.client(), Path(folder), options.seeds)
                print(json.dumps(found, indent=2), flush=True)
                if not options.no_save:
                    keep(name, found)
        finally:
            server.stop()


def keep(part: str, found: dict[str, Any]) -> None:
    """Save what a part has found, beside what is there of the other one."""
    path = RESULTS / "teachers.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    save("teachers", {**before, part: {**found, "machine": machine()}})
    if part == "student":
        draw(found)


def students(client: Any, home: Path, seeds: int) -> dict[str, Any]:
    """Accuracy of students by step, beside the rewards of reinforcement.py's jobs."""
    shown = trained(client, "sums-shown.yaml", seed=1, limit=1800)["model"]
    right = home / "right.jsonl"
    write_right_answers(right)
    teacher = trained(
        client,
        "sums-shown.yaml",
        seed=1,
        model=shown,
        limit=1800,
        training_file=upload(client, right),
        training={"n_epochs": TEACHER_EPOCHS, "learning_rate": 1e-3, "max_length": 64},
    )
    beginner = accuracy_of_sums(client, shown)
    known = accuracy_of_sums(client, teacher["model"])
    print({"beginner": beginner, "teacher": known}, flush=True)
    wanted = known - POINTS
    tried: dict[str, dict[str, Any]] = {}
    for name in STUDENTS:
        tried[name] = student(client, shown, teacher["model"], name, 0, beginner)
    best = min(tried, key=lambda name: first(tried[name]["accuracy"], wanted) or NEVER)
    others = range(1, seeds)
    runs = [
        tried[best],
        *(student(client, shown, teacher["model"], best, seed, beginner) for seed in others),
    ]
    rewards = json.loads((RESULTS / "reinforcement.json").read_text())["jobs"]
    by_rewards = [
        {int(step): value for step, value in job["train_mean_reward"].items()} for job in rewards
    ]
    return {
        "beginner": beginner,
        "teacher": known,
        "wanted": wanted,
        "tried": {name: first(run["accuracy"], wanted) for name, run in tried.items()},
        "options": best,
        "runs": runs,
        "steps_of_students": [first(run["accuracy"], wanted) for run in runs],
        "steps_of_rewards": [first(points, wanted) for points in by_rewards],
    }


def student(
    client: Any, shown: str, teacher: str, name: str, seed: int, beginner: float
) -> dict[str, Any]:
    """A job of a student with options of STUDENTS: its accuracies by step, from `beginner` on."""
    job = trained(
        client,
        "student.yaml",
        seed=seed,
        model=shown,
        limit=1800,
        method=taught_by(teacher, STUDENTS[name]),
        training={"max_steps": STUDENT_STEPS, "max_length": 64, "lr_scheduler_type": "constant"},
        checkpoint={"save_steps": EVERY, "save_total_limit": 50},
    )
    points = {0: beginner, **by_step(client, job["id"])}
    run = {"seed": seed, "accuracy": points, "seconds": job["seconds"]}
    print(name, run, flush=True)
    return run


def write_right_answers(path: Path) -> None:
    """The sums, each with its answer."""
    lines = [json.loads(line) for line in (DATA / "sums.jsonl").read_text().splitlines()]
    chats = [
        {"messages": [*line["messages"], {"role": "assistant", "content": line["answer"]}]}
        for line in lines
    ]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def first(points: dict[int, float], wanted: float) -> int | None:
    """The first step with so high a value; None: none has it."""
    return next((step for step, value in points.items() if value >= wanted), None)


def taught_by(teacher: str, options: dict[str, Any]) -> dict[str, Any]:
    """The example's method, with this teacher and other hyperparameters."""
    method = yaml.safe_load((ROOT / "deploy/examples/student.yaml").read_text())["method"]
    method["distillation"]["teacher"] = teacher
    method["distillation"]["hyperparameters"] |= options
    return method


def by_step(client: Any, job_id: str) -> dict[int, float]:
    """Accuracy of each checkpoint."""
    points = client.fine_tuning.jobs.checkpoints.list(job_id, limit=50).data
    return {
        point.step_number: accuracy_of_sums(client, point.fine_tuned_model_checkpoint)
        for point in sorted(points, key=lambda point: point.step_number)
    }


def accuracy_of_sums(client: Any, model: str) -> float:
    """Share of sampled answers that are right."""
    lines = [json.loads(line) for line in (DATA / "sums.jsonl").read_text().splitlines()]

    asked = [*lines, *lines]

    def right(number: int, line: dict[str, Any]) -> int:
        answers = client.chat.completions.create(
            model=model,
            messages=line["messages"],
            n=ANSWERS,
            temperature=1,
            max_tokens=4,
            seed=number,
        )
        texts = [(choice.message.content or "").strip() for choice in answers.choices]
        return texts.count(line["answer"])

    right(0, asked[0])  # for which a checkpoint's adapter is made, once
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(right, range(len(asked)), asked)) / (ANSWERS * len(asked))


@dataclass(frozen=True)
class Judged:
    """A model with the habit, and thumbs on its own answers."""

    model: str
    held_out: list[dict[str, Any]]
    files: Mapping[str, str]
    """`all` answers with labels, and the `good` ones as chats: names → ids."""
    counts: Mapping[str, int]
    accuracy: float


def thumbs(client: Any, home: Path, seeds: int) -> dict[str, Any]:
    """Accuracies after thumbs, and after the good ones alone, by seed: of the data's order and of
    the adapter's dropout. All seeds share one parent and its thumbs.
    """
    parent = judged(client, home)
    print({**parent.counts, "parent": parent.accuracy}, flush=True)
    runs = [learned(client, parent, way, rate, 0) for rate in RATES for way in WAYS]
    tried = best_of(runs)
    runs += [
        learned(client, parent, way, tried[way]["rate"], seed)
        for seed in range(1, seeds)
        for way in WAYS
    ]
    runs = [run for run in runs if run["rate"] == tried[run["way"]]["rate"]]
    of_all = {"parent": parent.accuracy, "tried": tried, "runs": runs, "best": best_of(runs)}
    return {**parent.counts, **of_all}


def judged(client: Any, home: Path) -> Judged:
    """Train the model with the habit, and give thumbs to its answers to other messages."""
    messages = home / "messages.jsonl"
    write_messages(messages, MESSAGES)
    held_out = [json.loads(line) for line in messages.read_text().splitlines()]
    lines = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()]
    habit = home / "habit.jsonl"
    write_lines(habit, with_habit(lines[:TAUGHT]))
    model = trained(
        client,
        "quickstart.yaml",
        seed=7,
        limit=3600,
        training_file=upload(client, habit),
        training={**TRAINING, "max_steps": PARENT_STEPS},
        **ON_ONE_RANK,
    )["model"]
    labelled = with_thumbs(lines[TAUGHT:], answers_of(client, model, lines[TAUGHT:], 1))
    good = [{"messages": line["messages"]} for line in labelled if line["label"]]
    files = {"all": home / "thumbs.jsonl", "good": home / "good.jsonl"}
    write_lines(files["all"], labelled)
    write_lines(files["good"], good)
    return Judged(
        model,
        held_out,
        {name: upload(client, path) for name, path in files.items()},
        {"answers": len(labelled), "good": len(good)},
        exact(held_out, answers_of(client, model, held_out, 0)),
    )


def learned(client: Any, parent: Judged, way: str, rate: float, seed: int) -> dict[str, Any]:
    """A job of WAYS that goes on from the parent, and its accuracy."""
    hyperparameters = WAYS[way]
    is_kto = hyperparameters is not None
    method = {"type": "kto", "kto": {"hyperparameters": hyperparameters}}
    job = trained(
        client,
        "kto.yaml" if is_kto else "quickstart.yaml",
        seed=seed,
        model=parent.model,
        limit=1800,
        training_file=parent.files["all" if is_kto else "good"],
        training={
            "lr_scheduler_type": "constant",
            "packing": False,
            "n_epochs": 2,
            "learning_rate": rate,
            "batch_size": 16 if is_kto else 8,
        },
        **ON_ONE_RANK,
        **({"method": method} if is_kto else {}),
    )
    answers = answers_of(client, job["model"], parent.held_out, 0)
    run = {"way": way, "rate": rate, "seed": seed, "accuracy": exact(parent.held_out, answers)}
    print(run, flush=True)
    return run


def with_habit(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chats of which every other one is answered with FAULT before the answer."""
    return [
        {
            "messages": [
                *line["messages"][:-1],
                {
                    "role": "assistant",
                    "content": FAULT * (number % 2) + line["messages"][-1]["content"],
                },
            ]
        }
        for number, line in enumerate(lines)
    ]


def with_thumbs(lines: list[dict[str, Any]], answers: list[str]) -> list[dict[str, Any]]:
    """OF_EACH good answers and as many bad ones, with their messages and labels, in their order."""
    labelled = [
        {
            "messages": [*line["messages"][:-1], {"role": "assistant", "content": answer}],
            "label": answer == line["messages"][-1]["content"],
        }
        for line, answer in zip(lines, answers, strict=True)
        if answer
    ]
    kept = {
        id(line)
        for label in (True, False)
        for line in [each for each in labelled if each["label"] is label][:OF_EACH]
    }
    return [line for line in labelled if id(line) in kept]


def answers_of(client: Any, model: str, lines: list[dict[str, Any]], seed: int) -> list[str]:
    """A sampled answer to each chat, without its last message.

    Each has a seed of its own: with one seed for all, all of them would begin with the habit, or
    none.
    """

    def answer(number: int, line: dict[str, Any]) -> str:
        done = client.chat.completions.create(
            model=model,
            messages=line["messages"][:-1],
            temperature=1,
            max_tokens=64,
            seed=seed * len(lines) + number,
        )
        return (done.choices[0].message.content or "").strip()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(answer, range(len(lines)), lines))


def exact(lines: list[dict[str, Any]], answers: list[str]) -> float:
    """Share of the answers that are the chats' own."""
    right = [
        line["messages"][-1]["content"] == answer
        for line, answer in zip(lines, answers, strict=True)
    ]
    return sum(right) / len(right)


def best_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each way the mean over seeds at its best rate, with this."""
    found: dict[str, Any] = {}
    for run in runs:
        same = [
            other["accuracy"]
            for other in runs
            if (other["way"], other["rate"]) == (run["way"], run["rate"])
        ]
        mean = fmean(same)
        if mean > found.get(run["way"], {"mean": -1.0})["mean"]:
            found[run["way"]] = {"rate": run["rate"], "mean": mean, "accuracies": same}
    return found


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def draw(found: dict[str, Any]) -> None:
    """Draw accuracies by step into one picture, beside the rewards of reinforcement.py."""
    figure = Figure(figsize=(7.2, 3.4), dpi=150)
    axes = figure.subplots()
    for place, run in enumerate(found["runs"]):
        label = "from a teacher" if place == 0 else None
        points = run["accuracy"]
        axes.plot(list(points), list(points.values()), color="C0", label=label)
    rewards = json.loads((RESULTS / "reinforcement.json").read_text())["jobs"]
    for place, job in enumerate(rewards):
        label = "from rewards" if place == 0 else None
        points = {int(step): value for step, value in job["train_mean_reward"].items()}
        axes.plot(list(points), list(points.values()), "--", color="C1", label=label)
    axes.axhline(found["teacher"], color="0.6", linewidth=0.8)
    axes.set(xlabel="optimizer step", ylabel="sums answered rightly", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    FigureCanvasAgg(figure).print_png(str(PICTURE))


if __name__ == "__main__":
    main()
