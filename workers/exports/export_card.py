"""The model card of an export: what it is, how to load it, its results, and where it comes from."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_service.rundir.directory import RunDir
from ft_service.rundir.documents import ExportFormat
from ft_service.rundir.evaluations import evaluated_steps, read_evaluation
from ft_service.rundir.manifest import Manifest
from ft_service.rundir.model_card import (
    UNKNOWN_LICENCE,
    data_section,
    metadata_of,
    options_of,
    results_of,
    table,
)
from ft_service.spec.resolved import vllm_rank
from ft_service.wording import counted

CURVE_ROWS = 12
"""Most rows of the table of losses."""
SAMPLES = 3
_SHOWN = 400
"""Most characters of a prompt or an answer."""
_ADAPTERS = (ExportFormat.PEFT, ExportFormat.VLLM, ExportFormat.GGUF_ADAPTER)
_KINDS = {
    ExportFormat.PEFT: "A LoRA adapter",
    ExportFormat.VLLM: "A LoRA adapter of one rank and one scale",
    ExportFormat.MERGED: "A model in bf16, base and LoRA adapter merged,",
    ExportFormat.MERGED_FP8: "A model in FP8 (compressed-tensors), base and LoRA adapter merged,",
    ExportFormat.MERGED_INT4: "A model in INT4 (compressed-tensors, w4a16), base and LoRA adapter "
    "merged,",
    ExportFormat.MERGED_NVFP4: "A model in NVFP4 (compressed-tensors, w4a16), base and LoRA "
    "adapter merged,",
    ExportFormat.MERGED_MXFP4: "A model in MXFP4, base and LoRA adapter merged,",
    ExportFormat.GGUF: "A GGUF file in bf16, base and LoRA adapter merged,",
    ExportFormat.GGUF_Q8: "A GGUF file in Q8_0, base and LoRA adapter merged,",
    ExportFormat.GGUF_ADAPTER: "A LoRA adapter in GGUF",
    ExportFormat.TORCHAO_INT8: "A model in INT8 (torchao), base and LoRA adapter merged,",
    ExportFormat.TORCHAO_FP8: "A model in FP8 (torchao), base and LoRA adapter merged,",
    ExportFormat.TORCHAO_NVFP4: "A model in NVFP4 (torchao), base and LoRA adapter merged,",
    ExportFormat.TORCHAO_8DA4W: "A model in INT4 for inputs in INT8 (torchao, 8da4w), base and "
    "LoRA adapter merged,",
}
_FROM_HUB = (
    "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\nfolder = "
    '"."  # this one\n{model}\n```'
)
_USE = {
    ExportFormat.PEFT: _FROM_HUB.format(
        model="from peft import PeftModel\n\nmodel = "
        'AutoModelForCausalLM.from_pretrained("{base}", dtype="auto")\n'
        "model = PeftModel.from_pretrained(model, folder)\ntokenizer = "
        "AutoTokenizer.from_pretrained(folder)"
    ),
    ExportFormat.VLLM: "`vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules "
    "tuned=PATH_OF_THIS_FOLDER`",
    ExportFormat.GGUF: "`ollama create NAME -f Modelfile`, or `llama-server -m model.gguf`.",
    ExportFormat.GGUF_ADAPTER: "`llama-server -m BASE.gguf --lora adapter.gguf`, where BASE.gguf "
    "is `{base}` in GGUF; for "
    "Ollama name it in the Modelfile.",
}
_USE_TORCHAO = (
    _FROM_HUB.format(
        model='model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)"
    )
    + "\n\nIt needs `pip install torchao`."
)
_USE_MERGED = (
    _FROM_HUB.format(
        model='model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)"
    )
    + "\n\nWith vLLM: `vllm serve PATH_OF_THIS_FOLDER`"
)


def export_card(
    manifest: Manifest,
    to: ExportFormat,
    report: Mapping[str, Any],
    folder: Path,
    base: str,
    licence: str | None,
) -> str:
    """Return Markdown with the metadata that model hubs read.

    `report`: the export's report; `folder`: the run directory, whose metrics and answers are shown
    if it has them; `base`: the base's portable name; `licence`: the base's, None: unknown.
    """
    run = RunDir(folder)
    whole = _USE_TORCHAO if to.value.startswith("torchao") else _USE_MERGED
    use = _USE.get(ExportFormat.GGUF if to is ExportFormat.GGUF_Q8 else to, whole)
    kind = (
        "peft"
        if to in (ExportFormat.PEFT, ExportFormat.VLLM)
        else "gguf"
        if to.value.startswith("gguf")
        else "transformers"
    )
    sections = [
        "\n".join(metadata_of(base, library=kind, licence=licence)),
        f"# {manifest.tuned_name}\n\n{_KINDS[to]} {'for' if to in _ADAPTERS else 'made from'} "
        f"`{base}`, trained with "
        f"ft-service {manifest.versions.get('ft-service', '')}.".rstrip(),
        "## Use\n\n" + use.format(base=base, rank=vllm_rank(report.get("r", manifest.spec.lora.r))),
        "## Results\n\n" + table(("", ""), results_of(manifest)),
        *_cost(report),
        *_curve(folder),
        *_answers(run),
        data_section(manifest),
        "## Training\n\n| option | value |\n| --- | --- |\n" + "\n".join(options_of(manifest)),
        f"Licence of the base: {licence or UNKNOWN_LICENCE}.",
    ]
    return "\n\n".join(sections) + "\n"


def _cost(report: Mapping[str, Any]) -> Iterator[str]:
    losses = report.get("validation_loss")
    if not losses:
        return
    names = {
        "adapter_on_base_as_trained": "adapter on the base as trained",
        "adapter_on_bf16_base": "adapter on the base in bf16",
        "merged": "this model",
    }
    rows = [(title, f"{losses[name]:.4f}") for name, title in names.items() if name in losses]
    yield (
        "## What this form costs\n\nValidation loss of "
        f"{counted(report.get('samples', 0), 'sample')}:\n\n" + table(("", "loss"), rows)
    )


def _curve(folder: Path) -> Iterator[str]:
    try:
        with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
            rows = [
                row
                for row in csv.DictReader(file)
                if row.get("train_loss") or row.get("valid_loss")
            ]
    except OSError:
        return
    if rows:
        shown = [
            (row["step"], _number(row.get("train_loss")), _number(row.get("valid_loss")))
            for row in thinned(rows)
        ]
        yield "## Losses by step\n\n" + table(("step", "training loss", "validation loss"), shown)


def thinned(rows: Sequence[Any]) -> list[Any]:
    """Return at most CURVE_ROWS rows at even distances, the first and the last included."""
    if len(rows) <= CURVE_ROWS:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (CURVE_ROWS - 1))] for i in range(CURVE_ROWS)]


def _number(text: str | None) -> str:
    return f"{float(text):.4f}" if text else ""


def _answers(run: RunDir) -> Iterator[str]:
    """Yield a section with a few answers of the newest evaluation, before and after training;
    nothing without answers.
    """
    steps = evaluated_steps(run)
    newest = read_evaluation(run, steps[max(steps)]) if steps else None
    shown = [sample for sample in (newest.samples if newest else []) if sample.tuned is not None][
        :SAMPLES
    ]
    parts = [
        f"Prompt: {_quoted(sample.prompt)}\n\nBefore: {_quoted(sample.base)}\n\nAfter: "
        f"{_quoted(sample.tuned or '')}"
        for sample in shown
    ]
    if parts:
        yield "## Samples\n\n" + "\n\n".join(parts)


def _quoted(text: str) -> str:
    short = text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
    return "`" + short.replace("`", "'").replace("\n", " ") + "`"
