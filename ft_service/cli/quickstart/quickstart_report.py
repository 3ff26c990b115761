"""Report at the end of the quickstart: accuracy before and after, the loss curve, and the
adapter.
"""

from __future__ import annotations

import base64
import csv
import io
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Point = tuple[int, float]

LOADING = """\
Load it with plain PEFT:

  from peft import PeftModel
  from transformers import AutoModelForCausalLM

  model = AutoModelForCausalLM.from_pretrained("{model}")
  model = PeftModel.from_pretrained(model, "{adapter}")
"""


def new_folder(folder: Path) -> Path:
    """The folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def decode_metrics(content: bytes) -> list[dict[str, str]]:
    """The rows of a job's result file, which is base64 of a CSV as OpenAI's is."""
    return list(csv.DictReader(io.StringIO(base64.b64decode(content).decode())))


def curve(rows: Sequence[dict[str, str]], column: str) -> list[Point]:
    """(step, value) of the steps at which a column was measured."""
    return [(int(row["step"]), float(row[column])) for row in rows if row.get(column)]


def draw_losses(rows: Sequence[dict[str, str]], path: Path) -> Path:
    """The training and validation loss over the steps, as a PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for column, label, marker in (
        ("train_loss", "training", ""),
        ("valid_loss", "validation", "o"),
    ):
        points = curve(rows, column)
        axes.plot(
            [step for step, _ in points], [loss for _, loss in points], label=label, marker=marker
        )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


def change(points: Sequence[Point]) -> str:
    """`2.31 → 0.04`: the first value and the last."""
    return f"{points[0][1]:.2f} → {points[-1][1]:.2f}" if points else "not measured"


def percent(score: tuple[int, int]) -> str:
    correct, total = score
    return f"{correct / total:.0%}"


def side_by_side(answers: Sequence[tuple[str, str, str]], width: int) -> list[str]:
    """Lines for (message, the base's answer, the tuned model's) each, of at most `width`
    columns.
    """
    lines: list[str] = []
    for rows in answers:
        lines.append("")
        for title, text in zip(("message", "base", "tuned"), rows, strict=True):
            whole = " ".join(text.split()) or "(nothing)"
            lines += textwrap.wrap(
                whole, width, initial_indent=f"  {title:<10}", subsequent_indent=" " * 12
            )
    return lines
