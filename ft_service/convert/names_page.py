"""The page docs/from-other-tools.md: our names for the usual options of other tools, from the tables of `ft convert`.

`python -m ft_service.convert.names_page` prints the page; a test compares the page with it.
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

`ft convert FILE` turns a configuration of TRL, Axolotl, LLaMA-Factory, Accelerate, DeepSpeed or Transformers into a SPEC. For
every option it says what became of it, what is lost, and what you have to do first. Where the tool's default differs from
ours, the SPEC states the value, with a comment. The exit code is

- 0 if nothing that changes the result is lost,
- 1 if something is not supported or is left to you, so that the result may differ until then,
- 64 if nothing is written: the file is of an unknown kind, or asks for a method that this service does not have (KTO, ORPO,
  SimPO, PPO, GRPO, reward models, pre-training).

`--gpus N` gives the number of GPUs that trained together: the batch size depends on it, and most files do not state it.
`--method dpo` says that a TRL file is for DPO if the file does not show it. `--out SPEC` writes a file; `--force` overwrites
one.

The tables below are generated from the rules in `ft_service/convert/tables/` (one line of YAML per option; you can add
lines), each with an example value. They list the usual options; the command knows more. Unsloth is configured in Python: its
arguments are those of `from_pretrained`, `get_peft_model` and the trainer's configuration. `ft submit` and `ft run` recognise
these names too: for `lora.rank` they answer that it is called `lora.r` here.

What all of them have in common:

- **Data** is one training file and optionally one for validation, in any of [these formats](data.md), with columns of other
  names under `data`. The base's own chat template renders chats, and the model learns the assistant's messages. Write a
  mixture of data sets, or a part of one, into one file first.
- **A step** is `training.batch_size` samples over all ranks: another tool's micro-batch times accumulation times processes. The
  memory decides how many samples go through the model at once.
- **Packing** is on, and no sample sees another: the results are those of padded samples.
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
            f"If a file leaves an option out, {table.tool} uses the default below; the SPEC states it where ours differs:\n\n"
            f"| option | {table.tool}'s default |\n| --- | --- |\n{there}\n"
        )
    return "\n".join(parts)


def _verdict(table: Table, name: str, usual: Mapping[str, Any]) -> Verdict:
    """The verdict on an option, with only those other options on which its meaning depends."""
    related = {
        "gradient_accumulation_steps": _MICRO,
        "val_set_size": (),
        "evals_per_epoch": ("val_set_size",),
        "loss_type": ("loss_weights",),
    }
    source = Source({option: usual[option] for option in (name, *related.get(name, ())) if option in usual})
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
