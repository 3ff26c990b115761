"""Rules for the data sets that a file names. Tables name them with `rule:`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from ft_service.convert.verdicts import (
    Named,
    NoEffect,
    Source,
    Taken,
    ToCheck,
    ToDo,
    Verdict,
    as_plain,
)
from ft_service.data.formats.columns import SPEAKERS
from ft_service.data.formats.detect_format import may_hold_data
from ft_service.data.hub_data import PREFIX

_WHOLE = {
    "split": "train",
    "weight": 1.0,
    "name": "default",
    "config": "default",
    "field_messages": "messages",
    "trust_remote_code": False,
    "roles_to_train": ["assistant"],
    "train_on_eos": "turn",
}
"""Options of a data set that have no effect at these values."""
_SAYS_NOTHING = {"path", "id", "ds_type", "revision"}
_FORMATS = ("chat_template", "completion", "sharegpt", "chat_template.default")
"""Axolotl's formats whose texts are the same here."""
_ALPACA = (
    'type: alpaca, whose prompts are not of the chat template ("Below is an instruction '
    '…"): keep them by prompt and completion'
)


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def datasets(value: Any, source: Source) -> Verdict:
    """Data by name. Other options (a part of the data, other names of columns, a mixture) are to be
    replaced by hand.
    """
    columns, rest = _axolotl_columns(value, source)
    return _chosen(list(_data_sets(rest)), value, columns)


def _chosen(
    shown: list[tuple[str, list[str]]], value: Any, columns: Mapping[str, str], on_hub: bool = True
) -> Verdict:
    """The verdict on data sets.

    `shown`: name of each, and the options that change which of its data are used. `columns`: our
    options for the names of its columns. `on_hub`: whether a name like ORG/NAME is one of Hugging
    Face's hub.
    """
    if len(shown) != 1 or shown[0][1]:
        said = "; ".join(
            f"{name} ({', '.join(options)})" if options else name for name, options in shown
        )
        what = (
            "write that part of it, under names that `ft data check` knows,"
            if len(shown) == 1
            else "write them"
        )
        return ToDo(
            f"this was {said or json.dumps(value, default=str)}: {what} into one file and name it "
            "as training_file"
        )
    name = shown[0][0]
    if on_hub and _HUB_NAME.fullmatch(name) and not may_hold_data(name):
        return Taken(
            {"training_file": f"{PREFIX}{name}", **columns}, f"`ft pull --data {name}` fetches it"
        )
    return Taken(columns, f"of {name}, to be named as training_file") if columns else Named(name)


def _axolotl_columns(value: Any, source: Source) -> tuple[dict[str, str], Any]:
    """Our names for the columns of Axolotl's only data set, if it is one of chats, and what else it
    says. ShareGPT's names are known without.
    """
    one = value[0] if isinstance(value, list) and len(value) == 1 else None
    mapping = one.get("message_property_mappings") or {} if isinstance(one, Mapping) else None
    plain = (
        isinstance(mapping, Mapping)
        and mapping.keys() <= {"role", "content"}
        and source.method == "supervised"
    )
    if (
        not plain
        or one is None
        or mapping is None
        or one.get("type", "chat_template") not in _FORMATS
        or "completion" in one.values()
    ):
        return {}, value
    names = {
        "messages": one.get("field_messages", "messages"),
        "role": mapping.get("role", one.get("message_field_role", "role")),
        "content": mapping.get("content", one.get("message_field_content", "content")),
    }
    rest = {key: item for key, item in one.items() if key not in _COLUMN_OPTIONS}
    if one.get("type") == "sharegpt" or names == {
        "messages": "conversations",
        "role": "from",
        "content": "value",
    }:
        return {}, [rest]
    return {f"data.{ours}": str(theirs) for ours, theirs in names.items() if theirs != ours}, [rest]


_COLUMN_OPTIONS = (
    "field_messages",
    "message_property_mappings",
    "message_field_role",
    "message_field_content",
)
_SWIFT_DATA = re.compile(r"(HF::|MS::)?(.+?)(?::([\w/-]+))?(?:#(\d+))?")


def swift_datasets(value: Any, source: Source) -> Verdict:
    """ms-swift's data sets: `NAME:SUBSET#SAMPLES`, from ModelScope unless use_hf says otherwise."""
    found = [
        _SWIFT_DATA.fullmatch(str(item)) for item in (value if isinstance(value, list) else [value])
    ]
    shown = [
        (
            one[2],
            [*([f"subset {one[3]}"] if one[3] else []), *([f"{one[4]} samples"] if one[4] else [])],
        )
        for one in found
        if one
    ]
    hub = as_plain(source.get("use_hf")) is True or any(one and one[1] == "HF::" for one in found)
    return _chosen(shown, value, {}, on_hub=hub)


def factory_datasets(value: Any, source: Source) -> Verdict:
    """LLaMA-Factory's data sets, by what its dataset_info.json beside the file says of them."""
    names = [name for name, _ in _data_sets(value)]
    described = source.data_sets.get(names[0]) if len(names) == 1 else None
    if not isinstance(described, Mapping):
        return _chosen([(name, []) for name in names], value, {})
    columns, other = _factory_columns(described)
    if described.get("split", "train") == "train":
        other.pop("split", None)
    said = [
        f"{key}: {json.dumps(item, ensure_ascii=False, default=str)}" for key, item in other.items()
    ]
    if name := described.get("hf_hub_url"):
        return _chosen([(str(name), said)], value, columns)
    path = str(
        PurePosixPath(described["folder_of_file"]) / str(described.get("file_name", names[0]))
    )
    if said or "file_name" not in described:
        return _chosen([(path, said or ["no file_name"])], value, columns)
    return Taken({"training_file": path, **columns}, "by dataset_info.json")


_FACTORY_ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "tools": "tools",
}
_FACTORY_PAIRS = ("chosen", "rejected")
_FACTORY_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
}
_FACTORY_KNOWN = {
    "hf_hub_url",
    "ms_hub_url",
    "om_hub_url",
    "file_name",
    "folder_of_file",
    "formatting",
    "columns",
    "tags",
    "ranking",
}


def _factory_columns(described: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Our names for the columns of a data set of dataset_info.json, and what it says that has no
    name here.
    """
    columns, tags = (dict(described.get(key) or {}) for key in ("columns", "tags"))
    other = {key: item for key, item in described.items() if key not in _FACTORY_KNOWN}
    chats = described.get("formatting", "alpaca") == "sharegpt"
    named = {name: str(columns.pop(name)) for name in _FACTORY_PAIRS if name in columns}
    if "kto_tag" in columns:
        named["label"] = str(columns.pop("kto_tag"))
    if not chats:
        named |= {
            _FACTORY_ALPACA[name]: str(columns.pop(name))
            for name in list(columns)
            if name in _FACTORY_ALPACA
        }
    else:
        named |= {name: str(columns.pop(name)) for name in ("system", "tools") if name in columns}
        whole = str(columns.pop("messages", "conversations"))
        written = {**_FACTORY_TAGS, **{key: tags.pop(key) for key in _FACTORY_TAGS if key in tags}}
        if written == _FACTORY_TAGS:
            named["conversations"] = whole
        elif all(
            SPEAKERS.get(str(written[f"{role}_tag"])) == role
            for role in ("user", "assistant", "system")
        ):
            named |= {
                "messages": whole,
                "role": str(written["role_tag"]),
                "content": str(written["content_tag"]),
            }
        else:
            other["tags"] = written
    other |= {f"columns.{key}": item for key, item in columns.items()} | {
        f"tags.{key}": item for key, item in tags.items()
    }
    return {f"data.{ours}": theirs for ours, theirs in named.items() if ours != theirs}, other


_BY_TEMPLATE = ("chat_dataset", "preference_dataset")
"""torchtune's builders of data sets that the base's chat template writes."""


def torchtune_dataset(value: Any, source: Source) -> Verdict:
    """The function that builds torchtune's data set."""
    name = str(value).rpartition(".")[2]
    if name == "text_completion_dataset":
        return NoEffect("documents are learnt whole")
    if name in _BY_TEMPLATE:
        return ToCheck("chats are written by the base's own chat template: see with `ft data show`")
    return ToDo(
        f"{name} writes and names its data by code: write them into training_file, as it did, by "
        "prompt and completion"
    )


def _data_sets(value: Any) -> Iterator[tuple[str, list[str]]]:
    """The name of each data set, with the options that change which of its data are used."""
    if isinstance(value, str):
        yield from ((name.strip(), []) for name in value.split(",") if name.strip())
    elif isinstance(value, list):
        for item in value:
            yield from _data_sets(item) if isinstance(item, str) else [_data_set(item)]
    elif isinstance(value, Mapping) and "datasets" in value:
        yield from _data_sets(value["datasets"])
    elif isinstance(value, Mapping):  # alignment-handbook's mixer: name → share
        yield from (
            (str(name), [] if share == 1 else [f"a share of {share}"])
            for name, share in value.items()
        )


def _data_set(one: Any) -> tuple[str, list[str]]:
    if not isinstance(one, Mapping):
        return str(one), []
    said = [
        _ALPACA
        if (key, value) == ("type", "alpaca")
        else f"{key}: {json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list) else value}"
        for key, value in one.items()
        if key not in _SAYS_NOTHING
        and value not in (None, "", [], {})
        and _WHOLE.get(str(key)) != value
        and not (key == "type" and value in _FORMATS)
    ]
    return str(one.get("path") or one.get("id") or "data without a name"), said
