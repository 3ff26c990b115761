from __future__ import annotations

from typing import Any

import pytest

from ft_service.convert.training_command import Program, training_programs
from ft_service.convert.verdicts import Unread
from ft_service.errors import SpecError


def only(text: str) -> Program:
    programs = training_programs(text, "train.sh")
    assert len(programs) == 1
    return programs[0]


@pytest.mark.parametrize(
    ("text", "tool", "method", "gpus"),
    [
        ("trl sft --lr 1", "trl", "supervised", None),
        ("trl dpo --lr 1", "trl", "dpo", None),
        (
            "accelerate launch --num_processes 8 --config_file z.yaml scripts/run_grpo.py --lr 1",
            "",
            "reinforcement",
            8,
        ),
        ("uv run torchrun --nproc_per_node=4 --nnodes 2 train.py --lr 1", "", None, 8),
        (
            "python3 -m torch.distributed.run --nproc-per-node 2 -m verl.trainer.main_ppo lr=1",
            "verl",
            None,
            2,
        ),
        ("nohup python -u train.py --lr 1 &", "", None, None),
        ("deepspeed --num_gpus=2 src/dpo.py --lr 1", "", "dpo", 2),
        ("NPROC_PER_NODE=2 NNODES=$N swift sft --lr 1", "ms_swift", None, 2),
        (
            "export CUDA_VISIBLE_DEVICES=0,1\nllamafactory-cli train --lr 1",
            "llama_factory",
            None,
            2,
        ),
        ("CUDA_VISIBLE_DEVICES=0,1 swift rlhf --lr 1", "ms_swift", None, None),
        ("accelerate launch -m axolotl.cli.train c.yml --lr 1", "axolotl", None, None),
        (
            "tune run --nproc_per_node 2 lora_finetune_distributed --config c.yaml lr=1",
            "torchtune",
            None,
            2,
        ),
        ("python3 -m verl.trainer.main_ppo lr=1", "verl", None, None),
        ("accelerate launch --num_processes 2 swift/cli/sft.py --lr 1", "ms_swift", None, 2),
        ("python -m swift.cli.rlhf --lr 1", "ms_swift", None, None),
    ],
)
def test_the_tool_its_method_and_its_gpus_are_those_of_the_command(
    text: str, tool: str, method: str | None, gpus: int | None
) -> None:
    program = only(text)
    assert (program.tool, program.method, program.gpus) == (tool, method, gpus)
    assert program.options["lr"] == 1


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (
            "--a 1 --b=2.5 --c --d x y --e-f g",
            {"a": 1, "b": 2.5, "c": True, "d": ["x", "y"], "e_f": "g"},
        ),
        (
            "--a -1 --b '{\"c\": 1e-3}' --d 'You: me' --e 1e-4",
            {"a": -1, "b": {"c": "1e-3"}, "d": "You: me", "e": "1e-4"},
        ),
        ("--a 1 --a 2 --b false --c null", {"a": 2, "b": False, "c": None}),
        ("--a $X --b y $X --$Y", {"a": "$X", "b": "y $X", "--$Y": "--$Y"}),
    ],
)
def test_flags_have_their_values(arguments: str, options: dict[str, Any]) -> None:
    found = only(f"trl sft {arguments}").options
    assert found == options
    assert all(isinstance(value, Unread) for value in found.values() if "$" in str(value))


def test_overrides_are_hydras() -> None:
    found = only(
        "python3 -m verl.trainer.main_ppo a.b=c +d=[x,y] ++e=null ~f=1 g='{h: 1}' i=$HOME/x j="
    ).options
    assert found == {
        "a.b": "c",
        "d": ["x", "y"],
        "e": None,
        "f": None,
        "g": {"h": 1},
        "i": "$HOME/x",
        "j": "",
    }
    assert isinstance(found["i"], Unread)


def test_what_ms_swifts_commands_differ_in_is_said() -> None:
    assert only("swift pt --model m").options == {"loss_scale": "all", "model": "m"}
    assert only("swift rlhf --model m").options["rlhf_type"] == "dpo"
    assert only("python swift/cli/pt.py --model m").options == {"loss_scale": "all", "model": "m"}
    assert only("swift rlhf --rlhf_type kto").options["rlhf_type"] == "kto"
    assert only("trl kto --beta 1").method == "kto"


def test_a_file_of_options_is_named() -> None:
    assert only("trl sft --config c.yaml --lr 1").config == "c.yaml"
    tune = only("tune run r --config llama/8B x.y=1")
    assert (tune.config, tune.said_by, tune.options) == (
        "llama/8B",
        "line 1: tune run r",
        {"x.y": 1},
    )
    assert only("llamafactory-cli train examples/a.yaml lr=1").config == "examples/a.yaml"


@pytest.mark.parametrize(
    "text", ["trl cpo --beta 1", "python run_cpo.py", "accelerate launch examples/ppo.py"]
)
def test_other_methods_are_refused_by_the_command(text: str) -> None:
    with pytest.raises(
        SpecError, match="is not converted: methods are sft, dpo, simpo, orpo, kto and"
    ):
        training_programs(text, "train.sh")


@pytest.mark.parametrize(
    "text",
    ["pip install trl accelerate", "python -c 'x'", "echo hello", "cd x && ls", "swift infer"],
)
def test_other_commands_do_not_train(text: str) -> None:
    assert training_programs(text, "train.sh") == []
