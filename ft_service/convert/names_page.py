"""The page docs/from-other-tools.md: our names for the usual options of other tools, from the
tables of `ft convert`.

`python -m ft_service.convert.names_page` prints the page; a test compares the page with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ft_service.convert.rules import ONLY, Table, for_method, load_table, verdict_on
from ft_service.convert.verdicts import (
    ONLY_DPO,
    Lost,
    Named,
    NoEffect,
    Refused,
    Source,
    Taken,
    ToCheck,
    ToDo,
    Verdict,
)

PAGES = ("trl", "axolotl", "llama_factory", "ms_swift", "torchtune", "unsloth")
GROUPS = ("trl", "verl")
"""Tables of tools whose reinforcement learning (GRPO) is converted."""

_HEAD = """\
# From TRL, verl, Axolotl, LLaMA-Factory, ms-swift, torchtune and Unsloth

`ft convert FILE` turns what you have into a SPEC:

- a configuration (YAML, JSON) of TRL, verl, Axolotl, LLaMA-Factory, ms-swift, torchtune, Accelerate, DeepSpeed or Transformers,
- a shell script with a training command: `trl`, `swift`, `llamafactory-cli train`, `axolotl train`, `tune run`,
  `python -m verl.trainer.main_ppo`, or a script of TRL or LLaMA-Factory by `accelerate launch`, `torchrun`, `deepspeed` or
  `python`,
- a Python script or notebook of Unsloth.

Scripts are read and never run. Variables count that the script itself sets to constants, and `${NAME:-value}` as its value; an
option whose value is known only when the script runs is named as one to set. A file of options that a command names is read
from beside the script, or from the working directory, and LLaMA-Factory's `dataset_info.json` from beside its config.

For every option it says what became of it, what is lost, and what you have to do first. Where the tool's default
differs from ours, the SPEC states the value, with a comment. The exit code is

- 0 if nothing that changes the result is lost: what is left is names to fill in, or notes to check,
- 1 if something is not supported or is left to you, so that the result may differ until then,
- 64 if nothing is written: the file is of an unknown kind, trains several times, or asks for a method that is
  not taken over: ORPO and SimPO, for which you write `method: orpo` or `simpo` yourself, and those that this service does not
  have (PPO, RLOO, reward models).

[What becomes of public configs](converted-configs.md) has thirty of them, with what differs.

`--gpus N` gives the number of GPUs that trained together: the batch size depends on it. A script often says it
(`--nproc_per_node`, `--num_processes`); most files do not.
`--method dpo`, `--method kto` or `--method reinforcement` says what a TRL file is for if the file does not show it.
`--out SPEC` writes a file; `--force` overwrites one.

The tables below are generated from the rules in `ft_service/convert/tables/` (one line of YAML per option; you can add
lines), each with an example value. They list the usual options; the command knows more. Unsloth is configured in Python: its
arguments are those of `from_pretrained`, `get_peft_model` and the trainer's configuration. `ft submit` and `ft run` recognise
these names too: for `lora.rank` they answer that it is called `lora.r` here.

What all of them have in common:

- **Data** is one training file and optionally one for validation, in any of [these formats](data.md), with columns of other
  names under `data`. A data set of Hugging Face's hub becomes `training_file: hf://ORG/NAME`, which `ft pull --data ORG/NAME`
  fetches. The base's own chat template renders chats, and the model learns the assistant's messages. Preference
  pairs of strings, bare text in TRL, are chats of one turn here. Write a mixture of data sets, or a part of one, into one
  file first.
- **A step** is `training.batch_size` samples over all ranks: another tool's micro-batch times accumulation times processes. The
  memory decides how many samples go through the model at once.
- **Packing** is on, and no sample sees another: the results are those of padded samples. Where other tools pack, a row counts
  as one sample of their batch; here every sample in it counts. Only packed [documents](data.md#documents) count as rows, so
  where all of a sample is learned and the tool did not pack, the SPEC says `packing: false`.
- **Warm-up** of n steps begins with 1/n of the rate. Transformers' begins with 0: its first step changes nothing.
"""

_WORDS: Mapping[type, str] = {
    Lost: "**no**: ",
    ToDo: "**to do**: ",
    Refused: "**refused**: ",
    ToCheck: "to check: ",
    NoEffect: "no effect: ",
}


_GROUPS_HEAD = """\
## Reinforcement learning (GRPO) of TRL and verl

Such a file becomes a SPEC of [`method: reinforcement`](reinforcement.md). Rewards are Python code there and a
[grader](graders.md) here, so that there is always one thing to do: the SPEC has a grader that parses, to be replaced by
yours. A line of data is a prompt of messages; its other columns are the `item` that the grader reads.

- **A step** is `training.batch_size` prompts, each with `num_generations` answers. TRL's batch counts answers.
- **A step is one update**, of answers that were sampled from the weights before it. There is no ratio to clip; several
  updates by the same answers (`num_iterations`, `ppo_epochs`, mini-batches) are listed as not supported.
- **The KL divergence** is a penalty in each token's advantage, not a term of the loss. Its mean gradient is the same.
- **The sampler** is the service's own, or the server at its `FT_INFERENCE_URL`. It draws from all tokens.
- verl's file may be the whole config that Hydra writes (`.hydra/config.yaml`), or one with some of the options.
"""


def page() -> str:
    """The page, as Markdown."""
    parts = [_HEAD]
    for table in map(load_table, PAGES):
        own = table.name in ("axolotl", "torchtune")  # names of their own for nearly all options
        usual = (
            dict(table.examples)
            if own
            else {**table.examples, **load_table("transformers").examples}
        )
        parts.append(f"## {table.tool}\n\n{_tables(table, usual)}")
    parts.append(_GROUPS_HEAD)
    for name in GROUPS:
        table = for_method(load_table(name), "reinforcement")
        parts.append(f"### {table.tool}, GRPO\n\n{_tables(table, table.examples)}")
    return "\n".join(parts)


def _tables(table: Table, usual: Mapping[str, Any]) -> str:
    """Usual options and what becomes of them, and the tool's defaults."""
    rows = "\n".join(
        f"| `{name}: {_shown(value)}` | {_text(_verdict(table, name, usual))} |"
        for name, value in usual.items()
    )
    there = "\n".join(f"| `{option}` | {text} |" for option, text in _defaults(table))
    return (
        f"| {table.tool} | here |\n| --- | --- |\n{rows}\n\n"
        f"If a file leaves an option out, {table.tool} uses the default below; the SPEC states it "
        "where ours differs:\n\n"
        f"| option | {table.tool}'s default |\n| --- | --- |\n{there}\n"
    )


def _verdict(table: Table, name: str, usual: Mapping[str, Any]) -> Verdict:
    """The verdict on an option, with only those other options on which its meaning depends."""
    related = {
        "gradient_accumulation_steps": (*_MICRO, "num_generations"),
        "val_set_size": (),
        "evals_per_epoch": ("val_set_size",),
        "loss_type": ("loss_weights",),
        "per_device_train_batch_size": ("num_generations",),
        "steps_per_generation": ("gradient_accumulation_steps",),
        "max_prompt_length": ("max_completion_length",),
        **{
            name: tuple(other for other in usual if other.startswith(("data.", "actor_")))
            for name in usual
            if "." in name
        },
    }
    source = Source(
        {option: usual[option] for option in (name, *related.get(name, ())) if option in usual}
    )
    source.tool = table.tool
    source.micro_batch = table.micro_batch
    verdict = verdict_on(table, source, name)
    if verdict == ONLY_DPO or (name == "loss_type" and not isinstance(verdict, Taken)):
        source.method = "dpo"
        verdict = verdict_on(table, source, name)
    for method, said in ONLY.items():
        if verdict == said and method != "dpo":
            source.method = method
            return verdict_on(table, source, name)
    return verdict


_MICRO = ("per_device_train_batch_size", "micro_batch_size", "batch_size")
_COMPUTED = {
    "adapter_dropout": "0.05 (supervised), 0 (dpo and kto, where disable_dropout is on)",
    "batch_size": "{} x 1 x your number of GPUs",
    "prompts_of_step": "{} x 1 x your number of GPUs, divided by `num_generations`",
    "prompt_length": "the longest prompt and the longest answer: 1024",
}
"""Rule → the default that it computes; {}: the tool's samples of a micro-batch."""


def _defaults(table: Table) -> list[tuple[str, str]]:
    rows = []
    for option, default in table.defaults.items():
        if default.value is None and not default.rule:
            continue
        value = (
            default.value
            if not isinstance(default.value, Mapping)
            else ", ".join(f"{_shown(v)} ({k})" for k, v in default.value.items())
        )
        text = _COMPUTED.get(default.rule, "").format(table.micro_batch) or _shown(value)
        if default.rule == "batch_size" and table.least_batch:
            text = f"as many accumulated as make {table.least_batch}, over all GPUs"
        rows.append(
            (
                option,
                default.note
                if default.rule and default.note
                else text + (f" ({default.note})" if default.note else ""),
            )
        )
    return rows


def _text(verdict: Verdict) -> str:
    if isinstance(verdict, Taken):
        options = ", ".join(f"`{name}: {_shown(value)}`" for name, value in verdict.options.items())
        return options + (f" ({verdict.remark})" if verdict.remark else "")
    return (
        "name your file as `training_file`"
        if isinstance(verdict, Named)
        else _WORDS[type(verdict)] + verdict.reason
    )


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    print(page(), end="")
