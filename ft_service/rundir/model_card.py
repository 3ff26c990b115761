"""Files that describe an adapter in its folder: a model card for people, and the manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ft_service.bases.origin import is_published, licence_of, portable_name
from ft_service.rundir.directory import RunDir
from ft_service.rundir.manifest import AdapterSource, Manifest, manifest_of, write_manifest
from ft_service.spec import JobOptions, JobSpec
from ft_service.spec.resolved import vllm_rank
from ft_service.wording import counted

CARD = "README.md"
UNKNOWN_LICENCE = "not stated in its files; see where it was published"

_USAGE = """\
## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

adapter = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(adapter)
model = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto")
model = PeftModel.from_pretrained(model, adapter)

messages = [{{"role": "user", "content": "Hello!"}}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
answer = model.generate(**prompt, max_new_tokens=200)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```

With vLLM: `vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules tuned=PATH_OF_THIS_FOLDER`
"""


def describe_adapter(run: RunDir, folder: Path, source: AdapterSource) -> Manifest:
    """Write the card and the manifest of the adapter in `folder`, whose other files are
    complete.
    """
    draft = manifest_of(run, source)
    spec = run.read("spec.json", JobSpec)
    assert spec is not None, "the manifest was made of it"
    base = portable_name(Path(spec.model.path), spec.model.name)
    (folder / CARD).write_text(
        model_card(draft, base, licence_of(Path(spec.model.path))), encoding="utf-8"
    )
    return write_manifest(draft, folder)


def model_card(manifest: Manifest, base: str, licence: str | None = None) -> str:
    """Return Markdown with the metadata that model hubs read.

    `base`: the base's portable name; the metadata leave it out unless it has the form of a
    published model's. `licence`: the base's; None: not known.
    """
    sections = (
        "\n".join(metadata_of(base, library="peft", licence=licence)),
        f"# {manifest.tuned_name}\n\nA LoRA adapter for `{base}`, trained with ft-service "
        f"{manifest.versions.get('ft-service', '')}.".rstrip(),
        _USAGE.format(base=base, rank=_rank_for_vllm(manifest)).rstrip(),
        "## Results\n\n" + table(("", ""), results_of(manifest)),
        data_section(manifest),
        "\n".join(
            ["## Training", "", "| option | value |", "| --- | --- |", *options_of(manifest)]
        ),
        f"Licence of the base: {licence or UNKNOWN_LICENCE}. `manifest.json` in this folder "
        "records exactly how it was made; "
        "`ft verify` checks it.",
    )
    return "\n\n".join(sections) + "\n"


def metadata_of(base: str, *, library: str, licence: str | None) -> Iterator[str]:
    """Yield the metadata that model hubs read, as lines of YAML."""
    yield "---"
    if is_published(base):
        yield f"base_model: {base}"
    if licence is not None:
        yield f"license: {licence}"
    yield from (
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        "tags:",
        "- lora",
        "- ft-service",
        "---",
    )


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def data_section(manifest: Manifest) -> str:
    """Return the section on the training data, with digests of the files."""
    rows = [(f"{file.role}: {file.name}", f"`{file.sha256}`") for file in manifest.data]
    return "## Data\n\n" + table(("file", "SHA-256"), rows)


def results_of(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the results; losses in nats per token."""
    metrics = manifest.metrics
    total = (
        f" of {metrics.total_steps:,}" if metrics and metrics.total_steps != manifest.step else ""
    )
    yield "step", f"{manifest.step:,}{total}"
    if metrics is not None:
        figures = (
            ("training loss", metrics.train_loss, ".4f"),
            ("validation loss", metrics.valid_loss, ".4f"),
            ("validation accuracy, by token", metrics.valid_mean_token_accuracy, ".1%"),
            ("epochs", metrics.epoch, ".2f"),
            ("trained tokens", metrics.trained_tokens, ","),
        )
        yield from (
            (name, format(value, shape)) for name, value, shape in figures if value is not None
        )
    if manifest.forgetting is not None:
        yield from manifest.forgetting.figures
        yield from (("warning", text) for text in manifest.forgetting.warnings)
    for file in manifest.data:
        yield (
            f"{file.role} data",
            f"{counted(file.samples, 'sample')}, {counted(file.tokens, 'token')}, "
            f"{file.targets:,} of them learned",
        )


def options_of(manifest: Manifest) -> Iterator[str]:
    """Yield table rows of the options that define the adapter, and of all others that differ from
    their defaults.
    """
    shown = {
        "lora": ("r", "lora_alpha"),
        "precision": ("default",),
        "training": ("learning_rate", "batch_size", "max_length"),
    }
    defaults = JobOptions()
    for section in ("lora", "precision", "training"):
        given = getattr(manifest.spec, section).model_dump(mode="json")
        default = getattr(defaults, section).model_dump(mode="json")
        for name, value in given.items():
            if name in shown[section] or (
                value != default[name] and f"{section}.{name}" not in manifest.spec.chosen
            ):
                yield f"| `{section}.{name}` | {_plain(value)} |"
    yield f"| `seed` | {manifest.seed} |"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value).replace("|", "\\|")


def _rank_for_vllm(manifest: Manifest) -> int:
    return vllm_rank(manifest.spec.lora.r, *manifest.spec.lora.rank_pattern.values())
