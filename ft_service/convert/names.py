"""Our names of the usual options of other tools: docs/from-other-tools.md, made from the tables of `ft convert`.

`python -m ft_service.convert.names` prints the page; a test holds the page to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ft_service.convert.rules import Table, load_table, verdict_on
from ft_service.convert.verdicts import ONLY_DPO, Lost, Named, NoEffect, Refused, Source, Taken, ToCheck, ToDo, Verdict

PAGES = ("trl", "axolotl", "llama_factory", "unsloth")

_HEAD = """\
# From TRL, Axolotl, LLaMA-Factory and Unsloth

`ft convert FILE` turns a configuration of TRL, Axolotl, LLaMA-Factory, Accelerate, DeepSpeed or Transformers into a SPEC, and
says of every option what became of it, what is lost or to be done first. Where that tool has another default than this service,
the SPEC says it, with a comment. It exits with

- 0 where nothing that changes the result is lost,
- 1 where something is to be done by hand or is not supported, and the result may differ until then,
- 64 where the file is not converted: it is of no known kind, or asks for a method that there is not (KTO, ORPO, SimPO, PPO,
  GRPO, reward models, pre-training). Nothing is written then.

`--gpus N` says how many GPUs trained together, which the batch size counts and most files do not say; `--method dpo` what a
file of TRL is for that does not show it; `--out SPEC` writes a file, and overwrites one with `--force`.

These tables are made from its rules (`ft_service/convert/tables/`: a line of YAML for an option, which you can add), with a
value as an example; they hold the usual options, and the command knows more. Unsloth is set up in Python: its arguments are
`from_pretrained`'s, `get_peft_model`'s and the trainer's configuration. `ft submit` and `ft run` know these names too: who
writes `lora.rank` is told that it is `lora.r` here.

What is the same for all of them:

- **Data** are [chat lines](jobs.md#data), one file. The base's own chat template renders them, and the assistant's messages are
  learned. A part of a data set, columns by other names or a mixture are to be written into that file.
- **A step** is defined by `training.batch_size`: samples over all ranks. What another tool calls micro-batch, times
  accumulation, times processes, is that number. How many go through the model at once is chosen by memory.
- **Packing** is on, and no sample sees another: results are those of padded samples.
"""

_WORDS: Mapping[type, str] = {
    Lost: "**no**: ",
    ToDo: "**to do**: ",
    Refused: "**refused**: ",
    ToCheck: "to check: ",
    NoEffect: "no effect: ",
}


def page() -> str:
    """The page, as Markdown."""
    parts = [_HEAD]
    for table in map(load_table, PAGES):
        usual = dict(table.examples) if table.name == "axolotl" else {**table.examples, **load_table("transformers").examples}
        rows = "\n".join(
            f"| `{name}: {_shown(value)}` | {_text(_verdict(table, name, usual))} |" for name, value in usual.items()
        )
        there = "\n".join(f"| `{option}` | {text} |" for option, text in _defaults(table))
        parts.append(
            f"## {table.tool}\n\n| {table.tool} | here |\n| --- | --- |\n{rows}\n\n"
            f"Where a file does not say it, {table.tool} takes this, and the SPEC has it where another value is taken here:\n\n"
            f"| option | {table.tool}'s default |\n| --- | --- |\n{there}\n"
        )
    return "\n".join(parts)


def _verdict(table: Table, name: str, usual: Mapping[str, Any]) -> Verdict:
    """The verdict on an option by itself, but for the options that its meaning depends on."""
    beside = {
        "gradient_accumulation_steps": _MICRO,
        "val_set_size": (),
        "evals_per_epoch": ("val_set_size",),
        "loss_type": ("loss_weights",),
    }
    source = Source({one: usual[one] for one in (name, *beside.get(name, ())) if one in usual})
    source.tool, source.micro_batch = table.tool, table.micro_batch
    verdict = verdict_on(table, source, name)
    if verdict == ONLY_DPO or name == "loss_type":
        source.method = "dpo"
        verdict = verdict_on(table, source, name)
    return verdict


_MICRO = ("per_device_train_batch_size", "micro_batch_size")


def _defaults(table: Table) -> list[tuple[str, str]]:
    rows = []
    for option, default in table.defaults.items():
        value = (
            default.value
            if not isinstance(default.value, Mapping)
            else ", ".join(f"{_shown(v)} ({k})" for k, v in default.value.items())
        )
        text = f"{table.micro_batch} x 1 x your number of GPUs" if option == "training.batch_size" else _shown(value)
        rows.append(
            (option, default.note if default.rule and default.note else text + (f" ({default.note})" if default.note else ""))
        )
    return rows


def _text(verdict: Verdict) -> str:
    if isinstance(verdict, Taken):
        options = ", ".join(f"`{name}: {_shown(value)}`" for name, value in verdict.options.items())
        return options + (f" ({verdict.remark})" if verdict.remark else "")
    return "name your file as `training_file`" if isinstance(verdict, Named) else _WORDS[type(verdict)] + verdict.reason


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    print(page(), end="")
