"""Jobs that combine options as users do: what each value of a factor puts into a create body, and
the data and bases.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from ft_service.rundir.directory import sha256_of
from ft_service.spec import DataFileRef
from tests.support.training.models import save_tiny, save_tokenizer
from tests.support.training.pairwise import Choice, Value

Body = dict[str, Any]

BASES = {"llama": {"hidden_size": 64}, "gemma3_text": {}, "qwen3_moe": {}, "lfm2": {}}
"""Dense; soft windows and a tied head; experts; convolutions, whose samples are padded."""
MIXED = {
    "default": "nf4",
    "overrides": {r".*\.(k_proj|v_proj)": "fp8", r".*\.layers\.1\..*o(ut)?_proj": "bf16"},
}
DPO = {"ipo": {"loss_type": "ipo"}, "normed": {"loss_type": "sigmoid_norm", "rpo_alpha": 0.2}}


def _dpo(**hyperparameters: Any) -> Body:
    return {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.5, **hyperparameters}}}}


FACTORS: dict[str, dict[str, Body]] = {
    "data": {
        "chats": {},
        "completions": {},
        "texts": {},
        "pairs": _dpo(),
        "pairs, ipo": _dpo(**DPO["ipo"]),
        "pairs, normed": _dpo(**DPO["normed"]),
    },
    "base": {name: {} for name in BASES},
    "precision": {
        "bf16": {},
        "fp8": {"precision": {"default": "fp8"}},
        "nf4": {"precision": {"default": "nf4"}},
        "nf4_fp32": {"precision": {"default": "nf4_fp32"}},
        "mixed": {"precision": MIXED},
        "auto": {"precision": {"default": "auto"}},
    },
    "compute": {"fp32": {"precision": {"compute": "fp32"}}, "bf16": {}},
    "rows": {
        "packed": {},
        "padded": {"training": {"packing": False}},
        "by length": {"training": {"packing": False, "group_by_length": True}},
    },
    "micro-batch": {
        "auto": {},
        "few tokens": {"training": {"tokens_per_micro_batch": 48}},
        "one sample": {"training": {"per_device_train_batch_size": 1}},
    },
    "recomputed": {
        name: {"distributed": {"activation_checkpointing": name}}
        for name in ("none", "full", "selective", "auto")
    },
    "random": {
        "nothing": {},
        "dropout": {"lora": {"lora_dropout": 0.1}},
        "noise": {"training": {"neftune_noise_alpha": 5}},
        "both": {"lora": {"lora_dropout": 0.1}, "training": {"neftune_noise_alpha": 5}},
    },
    "learned": {
        name: {"training": {"train_on": name}}
        for name in ("all_assistant", "last_assistant", "everything")
    },
    "length": {"whole": {}, "cut": {"training": {"max_length": 40}}},
    "validation": {
        "none": {},
        "file": {"validation_file": "validation"},
        "split": {"validation_split": 0.25},
        "of others": {"validation_file": "others"},
    },
    "evaluation": {
        "none": {},
        "of the data": {"evaluation": {"prompts": 3, "max_new_tokens": 4}},
        "asked": {
            "evaluation": {
                "prompts": [
                    {"prompt": "say 1"},
                    {"messages": [{"role": "user", "content": "say 2"}], "reference": "it is 14"},
                ],
                "max_new_tokens": 9,
                "on_validation": True,
                "metrics": ["exact_match", "json_valid"],
            }
        },
    },
    "rate": {
        "linear": {},
        "cosine": {
            "training": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1}
        },
        "constant": {"training": {"lr_scheduler_type": "constant", "warmup_ratio": 0}},
        "falls late": {
            "training": {"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.5}
        },
        "auto": {"training": {"learning_rate": "auto"}},
    },
    "adapter": {
        "plain": {"lora": {"r": 4}},
        "rslora": {
            "lora": {"r": 4, "use_rslora": True},
            "training": {"loraplus_lr_ratio": 4, "weight_decay": 0.1},
        },
        "dora": {"lora": {"r": 4, "use_dora": True}},
        "names": {"lora": {"r": 3, "target_modules": ["q_proj", "v_proj"]}},
        "patterns": {
            "lora": {
                "r": 4,
                "target_modules": r".*\.(q|k|o|out)_proj",
                "rank_pattern": {"q_proj": 2},
                "alpha_pattern": {"k_proj": 4},
            }
        },
        "experts": {
            "lora": {
                "r": 3,
                "target_modules": ["q_proj"],
                "target_parameters": ["mlp.experts.gate_up_proj"],
            }
        },
        "parent's": {"model": "parent"},
    },
    "steps": {
        "5": {"training": {"max_steps": 5, "batch_size": 4}},
        "epochs": {"training": {"n_epochs": 2, "batch_size": 5}},
        "of one sample": {"training": {"max_steps": 4, "batch_size": 1, "max_grad_norm": 0}},
        "auto": {"hyperparameters": {"batch_size": "auto"}, "training": {"n_epochs": 1}},
    },
    "kept": {
        "usual": {},
        "every step": {"checkpoint": {"save_steps": 1, "save_total_limit": 1, "async_save": False}},
        "some": {
            "checkpoint": {"keep_every": 2, "save_total_limit": 1},
            "integrations": [{"type": "tensorboard"}],
        },
        "best": {
            "checkpoint": {"save_steps": 2, "save_total_limit": 1},
            "training": {
                "load_best_model_at_end": True,
                "eval_steps": 2,
                "early_stopping_patience": 1,
            },
        },
    },
    "sharding": {
        "auto": {},
        "whole": {"distributed": {"replicate": -1}},
        "kept": {
            "distributed": {"keep_unsharded": True, "prefetch": {"forward": 2, "backward": 2}}
        },
        "by size": {"distributed": {"wrap": {"min_params": 5000}, "ignored": [r".*norm\.weight"]}},
        "at once": {"distributed": {"wrap": "none"}},
        "not again": {"distributed": {"reshard_after_forward": False}},
    },
    "ranks": {
        "1": {},
        "2": {"distributed": {"nproc_per_node": 2}},
        "1:2": {"distributed": {"nproc_per_node": "1:2"}},
    },
    "tokens": {"by the check": {}, "by the ranks": {}},
}
"""Factor → its values → what they put into a create body."""


def _never(one: tuple[str, str], other: tuple[str, str]) -> list[frozenset[Value]]:
    """Pairs of the values that two factors' names (or `factor`, `value1|value2`) say."""
    ours, theirs = (
        ([(factor, value) for value in values.split("|")]) for factor, values in (one, other)
    )
    return [frozenset(pair) for pair in itertools.product(ours, theirs)]


NEVER = {
    *_never(("kept", "best"), ("validation", "none")),  # it goes by validation loss
    *_never(("adapter", "experts"), ("base", "llama|gemma3_text|lfm2")),
    *_never(("adapter", "experts|dora"), ("random", "dropout|both")),
    *_never(
        ("data", "completions|texts|pairs|pairs, ipo|pairs, normed"), ("learned", "last_assistant")
    ),
    *_never(("data", "texts|pairs|pairs, ipo|pairs, normed"), ("learned", "everything")),
}
"""Pairs that are refused, or mean nothing."""


def merged(*bodies: Body) -> Body:
    """One body of several, section by section; what comes later wins."""
    result: Body = {}
    for body in bodies:
        for key, value in deepcopy(body).items():
            known = result.get(key)
            result[key] = (
                {**known, **value}
                if isinstance(known, Mapping) and isinstance(value, Mapping)
                else value
            )
    return result


def body_of(choice: Choice) -> Body:
    """The create body of a choice. Its model and files are names of this module's."""
    start = {
        "model": choice["base"],
        "training_file": "training",
        "seed": 7,
        "training": {"learning_rate": 1e-3},
    }
    body = merged(start, *(FACTORS[factor][value] for factor, value in choice.items()))
    if body["model"] == "parent":  # its adapter's shape is the parent's
        body["lora"] = {
            name: value for name, value in body.get("lora", {}).items() if name == "lora_dropout"
        }
    return body


def save_base(folder: Path, name: str) -> Path:
    save_tiny(name, folder, vocab_size=259, max_position_embeddings=256, **BASES[name])
    save_tokenizer(folder)
    return folder


def save_data(folder: Path, data: str) -> dict[str, DataFileRef]:
    """The files of a kind of data: for training, for validation, and others for validation of
    another format.
    """
    kind = data.partition(",")[0]
    other = {"chats": "completions", "completions": "texts", "texts": "chats", "pairs": "pairs"}[
        kind
    ]
    files = {
        "training": (kind, range(11)),
        "validation": (kind, range(20, 24)),
        "others": (other, range(30, 33)),
    }
    return {
        name: _save(folder / f"{name}.jsonl", own, numbers)
        for name, (own, numbers) in files.items()
    }


def _save(path: Path, kind: str, numbers: range) -> DataFileRef:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(_record(kind, i)) + "\n" for i in numbers))
    return DataFileRef(name=path.name, path=str(path), sha256=sha256_of(path))


def _record(kind: str, i: int) -> dict[str, Any]:
    """Of different lengths; some are cut by a small max_length, none to nothing."""
    ask = f"say {i}"
    good = f"it is {i * 7}" + "!" * (i % 5) ** 2
    bad = f"no {i}" + "?" * (3 * i % 7)
    asked = [{"role": "user", "content": ask}]
    match kind:
        case "chats":
            more = (
                [{"role": "assistant", "content": bad}, {"role": "user", "content": "so"}]
                if i % 3 == 0
                else []
            )
            return {"messages": [*asked, *more, {"role": "assistant", "content": good}]}
        case "completions":
            return {"prompt": ask + "\n", "completion": good}
        case "texts":
            return {"text": f"{ask}: {good}. {bad}"}
        case _:
            answers = {"preferred_output": good, "non_preferred_output": bad}
            return {
                "input": {"messages": asked},
                **{
                    name: [{"role": "assistant", "content": words}]
                    for name, words in answers.items()
                },
            }
