from __future__ import annotations

import json

import pytest

from ft_service.convert.unsloth_script import notebook_code, unsloth_program
from ft_service.convert.verdicts import Unread
from ft_service.errors import SpecError

LOAD = (
    "from unsloth import FastLanguageModel\nlength = 2048\n"
    "model, tok = FastLanguageModel.from_pretrained('org/base', max_seq_length=length)\n"
)


def test_arguments_are_constants_or_as_they_are_written() -> None:
    program = unsloth_program(
        "!pip install unsloth\n%cd x\nimport os, torch\n"
        + LOAD
        + "r = 8\nfor i in range(3):\n    r = i\nnames = ['q_proj', 'v_proj']\nrest = "
        "{'use_rslora': True}\n"
        "model = FastLanguageModel.get_peft_model(\n"
        "    model, r=r, target_modules=names, lora_alpha=os.environ['A'], **rest, **more)\n"
        "args = SFTConfig(learning_rate=-2e-4, max_steps=length - 8 * 6, "
        "bf16=is_bfloat16_supported(),\n"
        "                 fp16=not torch.cuda.is_bf16_supported(),\n"
        "                 hub_token='secret', token='secret')\n"
        "trainer = SFTTrainer(model=model, args=args, packing=True, data_collator=x)\n",
        "train.py",
    )
    assert (program.tool, program.method) == ("unsloth", "supervised")
    assert program.options == {
        **{
            "model_name": "org/base",
            "max_seq_length": 2048,
            "r": "r",
            "target_modules": ["q_proj", "v_proj"],
        },
        **{
            "lora_alpha": "os.environ['A']",
            "use_rslora": True,
            "**more": "**more",
            "learning_rate": -2e-4,
            "max_steps": 2000,
        },
        **{"bf16": True, "fp16": False, "hub_token": "secret", "packing": True},
    }
    assert {name for name, value in program.options.items() if isinstance(value, Unread)} == {
        "r",
        "lora_alpha",
        "**more",
    }


def test_data_and_what_code_does_to_them() -> None:
    text = (
        LOAD
        + "data = load_dataset('org/data', split='train[:5%]')\ntest = load_dataset('org/test')\n"
    )
    found = unsloth_program(
        text + "data = data.map(write)\ntrain_on_responses_only(t)\nDPOConfig(beta=0.1)", "train.py"
    )
    assert found.method == "dpo"
    assert (
        found.options.items()
        >= {"dataset_name": "org/data", "dataset_train_split": "train[:5%]", "beta": 0.1}.items()
    )
    assert (found.options["map"], found.options["train_on_responses_only"]) == (
        "data.map(write)",
        True,
    )
    parts = unsloth_program(
        text + "data = data.select(range(9)).filter(f).train_test_split(0.1)\nlist(map(f, data))",
        "train.py",
    )
    assert {"select", "filter", "train_test_split"} <= parts.options.keys()
    assert "map" not in parts.options
    made = unsloth_program(
        text + "data = [write(one) for one in data]\nSFTTrainer(train_dataset=data)", "train.py"
    )
    assert made.options["map"] == "[write(one) for one in data]"
    chats = unsloth_program(text + "data.map(lambda x: tok.apply_chat_template(x))", "train.py")
    assert chats.options["map"] == "apply_chat_template"


def test_a_tuned_model_that_is_loaded_later_is_not_the_base() -> None:
    assert (
        unsloth_program(LOAD + "FastLanguageModel.from_pretrained('lora')", "train.py").options[
            "model_name"
        ]
        == "org/base"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import trl", "is a program, and none of Unsloth's"),
        ("x = (", "train.py, line 1: this is no Python"),
        (LOAD + "CPOTrainer()", "line 4: CPOTrainer is not converted"),
        (
            LOAD + "SFTTrainer()\nGRPOTrainer()",
            r"trains 2 times \(line 4: SFTTrainer; line 5: GRPOTrainer\)",
        ),
    ],
)
def test_other_programs_are_refused(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        unsloth_program(text, "train.py")


def test_a_notebook_is_its_cells_of_code() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# x"]},
        {"cell_type": "code", "source": ["a = 1\n", "b"]},
    ]
    assert notebook_code(json.dumps({"cells": cells}), "a.ipynb") == "a = 1\nb"
    for text in ("{}", "[", '{"cells": [{}]}', '{"cells": 1}'):
        with pytest.raises(SpecError, match="not a Jupyter notebook"):
            notebook_code(text, "a.ipynb")
