from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_service.convert import convert_file
from ft_service.convert.verdicts import Named, ToDo
from ft_service.errors import SpecError

FLAGS = "--model_name_or_path org/base --use_peft --lora_r 8 --assistant_only_loss"
FACTORY = (
    "model_name_or_path: org/base\nstage: sft\nfinetuning_type: lora\nlora_rank: "
    "8\ntemplate: qwen\n"
)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def refusal(path: Path, **asked: Any) -> str:
    with pytest.raises(SpecError) as caught:
        convert_file(path, **asked)
    return caught.value.message


def test_gpus_of_the_command_count_unless_others_are_asked_for(tmp_path: Path) -> None:
    path = write(
        tmp_path / "train.sh",
        f"accelerate launch --num_processes 4 sft.py {FLAGS} --per_device_train_batch_size 2",
    )
    assert convert_file(path).body["training"]["batch_size"] == 8
    assert convert_file(path, gpus=16).body["training"]["batch_size"] == 32


def test_what_is_known_only_when_the_script_runs_is_told(tmp_path: Path) -> None:
    path = write(
        tmp_path / "train.sh",
        f"trl sft $MORE {FLAGS} --learning_rate $LR --output_dir $OUT --dataset_name $DATA",
    )
    found = convert_file(path)
    verdicts = {decision.option: decision.verdict for decision in found.decisions}
    assert found.open() == ["$MORE", "learning_rate"]
    assert verdicts["learning_rate"] == ToDo(
        "it is known only when the script runs: set training.learning_rate"
    )
    assert verdicts["dataset_name"] == Named("$DATA")
    assert found.body["training"].get("learning_rate") is None, "neither is it the tool's default"


def test_the_method_of_a_command_is_taken_and_no_other_may_be_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "train.sh", f"trl dpo {FLAGS}")
    assert convert_file(path).body["method"] == {"type": "dpo"}
    assert "--method supervised: line 1: trl dpo is for dpo" in refusal(path, method="supervised")
    unknown = write(
        tmp_path / "lf.sh",
        "llamafactory-cli train --model_name_or_path m --stage $STAGE --finetuning_type lora",
    )
    assert "stage: $STAGE is known only when the script runs" in refusal(unknown)


def test_a_file_that_a_command_names_is_read_and_its_flags_go_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write(
        tmp_path / "scripts" / "train.sh",
        "llamafactory-cli train conf/a.yaml lora_rank=16 --cutoff_len 512",
    )
    assert "has its options in conf/a.yaml" in refusal(script)
    write(tmp_path / "conf" / "a.yaml", FACTORY)
    monkeypatch.chdir(tmp_path)
    body = convert_file(script).body
    assert (body["model"], body["lora"]["r"], body["training"]["max_length"]) == (
        "org/base",
        16,
        512,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"trl sft {FLAGS}\ntrl dpo {FLAGS}", "trains 2 times (line 1: trl sft; line 2: trl dpo)"),
        (
            "python other.py --colour red --size 3",
            "no command that trains with a known tool: line 1: other.py cannot be told",
        ),
        ("echo hello", "no command that trains with a known tool. Known are trl, swift"),
        ("trl sft 'a", "is not closed; it is no shell script"),
        ("megatron sft --model m", "no command that trains with a known tool"),
    ],
)
def test_scripts_of_other_kinds_are_refused_by_what_they_are(
    tmp_path: Path, text: str, says: str
) -> None:
    assert says in refusal(write(tmp_path / "train.sh", text))


def test_data_and_long_files_are_told_apart_from_settings(tmp_path: Path) -> None:
    assert "is a data file" in refusal(write(tmp_path / "train.jsonl", "{}\n{}\n"))
    assert "more than 4,194,304 bytes" in refusal(write(tmp_path / "long.yaml", "#" * 2**22 + "\n"))


@pytest.mark.parametrize(
    ("described", "taken", "is_open"),
    [
        ({"file_name": "a.json"}, {"training_file": "{}/a.json"}, False),
        ({"hf_hub_url": "org/name"}, {"training_file": "hf://org/name"}, False),
        (
            {
                "file_name": "a.json",
                "columns": {"prompt": "q", "query": "input", "response": "a", "system": "s"},
            },
            {
                "training_file": "{}/a.json",
                "data": {"instruction": "q", "output": "a", "system": "s"},
            },
            False,
        ),
        (
            {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "turns"}},
            {"training_file": "{}/a.json", "data": {"conversations": "turns"}},
            False,
        ),
        (
            {
                "file_name": "a.json",
                "formatting": "sharegpt",
                "columns": {"messages": "turns", "kto_tag": "thumb"},
            },
            {
                "training_file": "{}/a.json",
                "data": {"conversations": "turns", "label": "thumb"},
            },
            False,
        ),
        (
            {
                "file_name": "a.json",
                "formatting": "sharegpt",
                "columns": {"messages": "messages", "tools": "tools"},
            }
            | {
                "tags": {
                    "role_tag": "who",
                    "content_tag": "text",
                    "user_tag": "user",
                    "assistant_tag": "assistant",
                }
            },
            {"training_file": "{}/a.json", "data": {"role": "who", "content": "text"}},
            False,
        ),
        ({"file_name": "a.json", "num_samples": 10}, {}, True),
        ({"file_name": "a.json", "columns": {"history": "h"}}, {}, True),
        (
            {
                "file_name": "a.json",
                "formatting": "sharegpt",
                "tags": {"user_tag": "Q", "assistant_tag": "A"},
            },
            {},
            True,
        ),
        ({"script_url": "org/name"}, {}, True),
    ],
)
@pytest.mark.parametrize("place", ["data", ""])
def test_llama_factorys_data_sets_are_those_of_the_file_beside(
    tmp_path: Path, described: dict[str, Any], taken: dict[str, Any], is_open: bool, place: str
) -> None:
    folder = tmp_path / place
    write(folder / "dataset_info.json", json.dumps({"mine": described}))
    found = convert_file(write(tmp_path / "config.yaml", FACTORY + "dataset: mine\n"))
    kept = {name: found.body[name] for name in ("training_file", "data") if name in found.body}
    assert kept == {
        name: value.format(folder) if isinstance(value, str) else value
        for name, value in taken.items()
    }
    assert found.open() == (["dataset"] if is_open else [])


@pytest.mark.parametrize(
    ("dataset", "taken"),
    [
        ("org/name", "hf://org/name"),
        ("data/train.jsonl", None),
        ("./data/folder", None),
        ("alone", None),
        ("org/name/part", None),
    ],
)
def test_names_of_the_hub_are_filled_in(tmp_path: Path, dataset: str, taken: str | None) -> None:
    found = convert_file(
        write(
            tmp_path / "c.yaml",
            f"dataset_name: {dataset}\nuse_peft: true\nassistant_only_loss: true\n",
        )
    )
    assert found.body.get("training_file") == taken
    assert found.open() == []


def test_keys_are_not_shown(tmp_path: Path) -> None:
    found = convert_file(
        write(tmp_path / "c.yaml", "dataset_name: a/b\nuse_peft: true\nhub_token: hf_secret\n")
    )
    assert "hub_token" in found.spec_yaml()
    assert "hf_secret" not in found.spec_yaml()
