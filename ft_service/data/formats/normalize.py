"""Records of every format as one of the kinds in ft_service/data/sample_kinds.py. Pure.

prompt, completion    strings: bare text; messages: a conversation of which the completion is
                      learned
text                  bare text
contents              Gemini's conversation, whose turns have parts
conversations         a conversation whose turns have `from` and `value` (or role and content)
instruction, output   a conversation: instruction and input are the user's message, output the
                      assistant's
preference pairs      two conversations, or bare texts, that begin alike (LLaMA-Factory's: an
                      instruction or turns, and answers)
label                 beside a prompt with its completion, or a conversation: whether the answer is
                      a good one
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ft_service.data import chat_line
from ft_service.data.chat_line import (
    VARIABLES,
    parse_chat,
    parse_messages,
    parse_tools,
    parse_variables,
    require_answered_calls,
)
from ft_service.data.formats import media
from ft_service.data.formats.columns import LABELS, PEOPLE, QUESTIONS, SPEAKERS
from ft_service.data.formats.detect_format import FORMAT_KEYS, Format, recognise
from ft_service.data.formats.media import refuse_media
from ft_service.data.image_part import COLUMNS as PICTURES
from ft_service.data.image_part import LineImages, refuse_paths
from ft_service.data.line_errors import LineError, required, text_of
from ft_service.data.preference_line import parse_pair
from ft_service.data.sample_kinds import (
    Conversation,
    Pair,
    PromptCompletion,
    Record,
    Text,
    Variable,
)
from ft_service.wording import kind, shown_value

Fields = Mapping[str, Any]

_SYSTEM_INSTRUCTION = ("systemInstruction", "system_instruction")
_TOOLS = ("tools", "parallel_tool_calls", "functions")
_COLUMNS: Mapping[Format, Sequence[str]] = {
    Format.CHAT: (*chat_line.KEYS, "system", *PICTURES),
    Format.PROMPTS: chat_line.KEYS,
    Format.PROMPT_COMPLETION: ("prompt", "completion", *_TOOLS, *PICTURES, VARIABLES),
    Format.TEXT: ("text", VARIABLES),
    Format.SHAREGPT: ("conversations", "conversation", "system", *_TOOLS, *PICTURES, VARIABLES),
    Format.GEMINI: ("contents", *_SYSTEM_INSTRUCTION, "tools", VARIABLES),
    Format.ALPACA: ("instruction", "input", "output", "system", "history", VARIABLES),
    Format.OPENAI_PAIRS: (
        *(
            "input",
            "preferred_output",
            "non_preferred_output",
            "preferred_completion",
            "non_preferred_completion",
        ),
        VARIABLES,
    ),
    Format.TRL_PAIRS: (
        *("prompt", "chosen", "rejected", "tools", *PICTURES, VARIABLES),
        *("conversations", "conversation", "instruction", "input", "system", "history"),
    ),
}


_BEGUN = "initial_reason_steps"
_OF_A_MESSAGE = ("role", "user", "ts")
LOOKED_AT = (*LABELS, _BEGUN, *_OF_A_MESSAGE)
"""Keys that say what a record is, and are left out: whether an answer of TRL's unpaired preferences
is a good one; the beginning of both answers of Step-DPO; and what exports of OpenAssistant and
Slack have beside the text of a message.
"""


def columns_of(format: Format) -> Sequence[str]:
    """The keys of a format's records; other keys are left out."""
    return _COLUMNS[format]


def as_record(
    format: Format, fields: Fields, *, paths: bool = False, labels: bool | None = False
) -> Record:
    """A record of this format, without keys that the format does not have.

    `paths`: pictures may be in files of their own. `labels`: as of Columns. Raises LineError with
    its first fault.
    """
    own_keys = set().union(*(keys for other, keys in FORMAT_KEYS if other is format))
    other = recognise(fields) if own_keys.isdisjoint(fields) else None
    if other is not None:
        raise LineError(
            "",
            f"is {other.value}, and this file began as {format.value}: put each format into a "
            "file of its own",
        )
    if labels is False and format in _LABELLED:
        refused = next((name for name in LABELS if fields.get(name) is False), None)
        if refused is not None:
            raise LineError(
                refused,
                "is false, and the answer would be learned like a good one: method: {type: kto} "
                "learns from good and bad ones; or remove such records",
            )
    if format is Format.TRL_PAIRS:
        _refuse_without_prompt(fields)
        if fields.get(_BEGUN) and "full_chosen" in fields:
            reason = (
                "begins both answers, and would be left out: data: {chosen: full_chosen, "
                "rejected: full_rejected} has it"
            )
            raise LineError(_BEGUN, f"{reason} in them")
    if format is Format.TEXT and (
        fields.get("role") in ("prompter", *SPEAKERS) or {"user", "ts"} <= fields.keys()
    ):
        raise LineError(
            "text",
            "is a message of a conversation, by its role or its user: give all messages of a "
            "conversation in one record, as "
            "messages with role and content; or leave those columns out if each text is a document",
        )
    refuse_media(
        {
            name: value
            for name, value in fields.items()
            if name in _COLUMNS[format] or name in media.COLUMNS
        },
        columns=[name for name in media.COLUMNS if name not in _COLUMNS[format]],
        placed=any(fields.get(name) for name in PICTURES),
    )
    own = {
        name: _listed(value) if name in PICTURES else value
        for name, value in fields.items()
        if name in _COLUMNS[format] and name != VARIABLES
    }
    record = _setting(_PARSERS[format](own), parse_variables(fields))
    if labels is not False:
        record = _labelled(record, format, fields, required=labels is True)
    chat = record.preferred if isinstance(record, Pair) else record
    if isinstance(chat, Conversation) and not paths:
        refuse_paths(chat.images, chat.image_places)
    return record


_LABELLED = (Format.CHAT, Format.PROMPT_COMPLETION, Format.SHAREGPT, Format.ALPACA, Format.GEMINI)
"""Formats of records with one answer, which may have a label."""


def _labelled(record: Record, format: Format, fields: Fields, *, required: bool) -> Record:
    """The record with its label, if it has one. Only what the label is of is learned then: the
    completion, or what follows the user's last message.

    `required`: it must have one. Raises LineError.
    """
    if not isinstance(record, Conversation | PromptCompletion):
        if required and isinstance(record, Text):
            reason = "is a document, and a label is of an answer: give prompt and completion"
            raise LineError("text", f"{reason}, or messages")
        return record
    label = _label(fields, required=required)
    if label is None:
        return record
    if isinstance(record, PromptCompletion) or format is Format.PROMPT_COMPLETION:
        return replace(record, label=label)
    asked = max(
        (n for n, message in enumerate(record.messages) if message["role"] == "user"), default=-1
    )
    weights = tuple(weight if number > asked else 0 for number, weight in enumerate(record.weights))
    if not any(weights):
        raise LineError(
            "",
            "has no answer to learn after the user's last message, and the label is of that answer",
        )
    return replace(record, weights=weights, label=label)


def _label(fields: Fields, *, required: bool) -> bool | None:
    """The record's label. None: it has none, and none is required. Raises LineError."""
    name = next((name for name in LABELS if name in fields), None)
    if name is None:
        if not required:
            return None
        raise LineError(
            LABELS[0],
            "is required by method kto: true for a good answer, false for a bad one (data: {label: "
            "COLUMN} names it where it is called otherwise)",
        )
    value = fields[name]
    if isinstance(value, str):  # a cell of a table
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    if isinstance(value, bool):
        return value
    if not required and name == LABELS[0]:  # a column of another meaning
        return None
    raise LineError(
        name, f"must be true for a good answer or false for a bad one, not {shown_value(value)}"
    )


def _setting(record: Record, variables: dict[str, Variable]) -> Record:
    """The record, whose chat template reads these variables.

    Raises LineError for one that is not written by a template.
    """
    if not variables:
        return record
    if isinstance(record, Conversation):
        return replace(record, variables=variables)
    if isinstance(record, Pair):
        answers = (
            replace(answer, variables=variables) for answer in (record.preferred, record.rejected)
        )
        return Pair(*answers)
    raise LineError(
        VARIABLES,
        "sets variables of a chat template, which does not write bare text: give the record as "
        "messages",
    )


def _prompt_completion(fields: Fields) -> Record:
    prompt = required(fields, "prompt")
    completion = required(fields, "completion")
    images = LineImages.of(fields)
    if isinstance(prompt, str) and isinstance(completion, str):
        if images.column:
            raise LineError(
                images.column,
                "holds a picture, which bare text does not show: give prompt and completion as "
                "messages",
            )
        _refuse_written(text_of(prompt, "prompt"), "prompt", words=False)
        if not text_of(completion, "completion"):
            raise LineError("completion", "is empty, so there is nothing to train on")
        return PromptCompletion(prompt, completion)
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise LineError(
            "completion",
            f"is {kind(completion)} and the prompt {kind(prompt)}: both are strings, or both "
            "messages",
        )
    prompt = _of_people(prompt, "prompt")
    completion = _of_people(completion, "completion")
    before = parse_messages(prompt, "prompt", images) if prompt else []
    require_answered_calls(before, "prompt")
    answer = parse_messages(completion, "completion", images)
    require_answered_calls(answer, "completion")
    if not any(weight for _, weight in answer):
        raise LineError("completion", "holds no assistant message to learn")
    messages = tuple(message for message, _ in images.complete([*before, *answer]))
    weights = (*(0 for _ in before), *(weight for _, weight in answer))
    return Conversation(
        messages,
        weights,
        tuple(parse_tools(fields)),
        images=tuple(images.pictures),
        image_places=tuple(images.places),
    )


_WRITTEN = re.compile(
    r"(?:<s>|<bos>|<\|begin_of_text\|>)?\s*(<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]"
    r"|### (?:Human|User|Instruction):|Below is an instruction)"
)
"""The beginning of a text that a chat template has written: ChatML's, Llama's, Gemma's, Mistral's,
Guanaco's or Alpaca's.
"""


def _refuse_written(text: str, place: str, *, words: bool = True) -> None:
    """Raise LineError for a text that a chat template has written.

    `words`: one that marks its turns by words is refused too, since what the user says would be
    learned.
    """
    if (found := _WRITTEN.match(text)) is not None and (words or found[1][0] in "<["):
        raise LineError(
            place,
            f"was written by a chat template: it begins with {found[1]}. Give its turns as "
            "messages, which the base's own "
            'template writes; or, to learn these very words, give prompt: "" and completion: the '
            "text",
        )


def _text(fields: Fields) -> Record:
    text = text_of(required(fields, "text"), "text")
    _refuse_written(text, "text")
    if not text.strip():
        raise LineError("text", "is empty, so there is nothing to train on")
    return Text(text)


def _alpaca(fields: Fields) -> Record:
    question = _question(fields)
    output = text_of(required(fields, "output"), "output")
    if not output.strip():
        raise LineError("output", "is empty, so there is nothing to train on")
    turns = (*_system(fields), *question, {"role": "assistant", "content": output})
    return Conversation(turns, tuple(int(turn["role"] == "assistant") for turn in turns))


def _question(fields: Fields) -> list[dict[str, Any]]:
    """The user's message of one of Alpaca's records, its instruction and its input, after
    LLaMA-Factory's `history`: a list of earlier questions with their answers.
    """
    instruction = text_of(required(fields, "instruction"), "instruction")
    context = text_of(fields.get("input") or "", "input")
    question = "\n\n".join(text for text in (instruction, context) if text.strip())
    if not question:
        raise LineError("instruction", "is empty, and so is the input")
    turns: list[dict[str, Any]] = []
    history = fields.get("history") or []
    if not isinstance(history, list):
        raise LineError(
            "history",
            f"must be a list of earlier questions with their answers, not {kind(history)}",
        )
    for number, earlier in enumerate(history):
        if not isinstance(earlier, list) or len(earlier) != 2:
            raise LineError(
                f"history.{number}",
                f"must be a list of a question and its answer, not {shown_value(earlier)}",
            )
        for role, text in zip(("user", "assistant"), earlier, strict=True):
            turns.append({"role": role, "content": text_of(text, f"history.{number}")})
    return [*turns, {"role": "user", "content": question}]


def _system(fields: Fields) -> list[dict[str, Any]]:
    """The system message of a record whose `system` is a text, or a list of Anthropic's or
    Bedrock's parts of text.
    """
    given = fields.get("system") or ""
    if isinstance(given, list):
        given = "\n\n".join(_part(part, f"system.{number}") for number, part in enumerate(given))
    system = text_of(given, "system")
    return [{"role": "system", "content": system}] if system.strip() else []


def _part(part: Any, place: str) -> str:
    """The text of a part without a type, or with the type text. Raises LineError."""
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        raise LineError(
            place, f'must be {{"text": …}}, not {shown_value(part)}: only text can be trained on'
        )
    if (
        other := next((key for key in part if key not in ("type", "text", "cache_control")), None)
    ) is not None:
        raise LineError(
            place,
            f"holds {shown_value(other)}, and only text can be trained on: leave the line out",
        )
    return text_of(required(part, "text", f"{place}."), f"{place}.text")


def _with_system(chat: Conversation, fields: Fields) -> Conversation:
    """The conversation after the record's own system prompt.

    Raises LineError if it begins with another one.
    """
    system = tuple(_system(fields))
    if not system or chat.messages[:1] == system:
        return chat
    if chat.messages[0]["role"] == "system":
        raise LineError("system", "and a system message of other words are both given: keep one")
    return replace(chat, messages=(*system, *chat.messages), weights=(0, *chat.weights))


def _listed(value: Any) -> Any:
    """A list that is written as a string of JSON. All else is left as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _of_people(messages: Any, place: str) -> Any:
    """Messages with OpenAI's roles and parts, where they have those of other tools: human for user,
    LLaMA-Factory's function_call and observation, and Bedrock's parts without a type. All else is
    left as it is. Raises LineError.
    """
    if not isinstance(messages, list):
        return messages
    return [
        _of_person(message, f"{place}.{number}") if isinstance(message, dict) else message
        for number, message in enumerate(messages)
    ]


def _of_person(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    content = message.get("content")
    if role == "function_call" and isinstance(content, str):
        return {
            **message,
            "role": "assistant",
            "content": None,
            "function_call": _function_call(content, f"{place}.content"),
        }
    if role == "observation":
        return {"name": "tool", **message, "role": "function"}
    if isinstance(role, str) and role in PEOPLE:
        message = {**message, "role": PEOPLE[role]}
    if isinstance(content, list) and any(
        isinstance(part, dict) and part.keys() == {"text"} for part in content
    ):
        parts = [
            {"type": "text", **part} if isinstance(part, dict) and part.keys() == {"text"} else part
            for part in content
        ]
        message = {**message, "content": parts}
    return message


def _chat(fields: Fields) -> Record:
    messages = (
        {"messages": _of_people(_listed(fields["messages"]), "messages")}
        if "messages" in fields
        else {}
    )
    return _with_system(
        parse_chat({key: value for key, value in fields.items() if key != "system"} | messages),
        fields,
    )


def _gemini(fields: Fields) -> Record:
    """A record of Gemini's API or Vertex AI. Raises LineError for parts that are not text."""
    if fields.get("tools"):
        raise LineError(
            "tools",
            "are Gemini's declarations: write the record as messages with tools, as OpenAI has "
            "them",
        )
    contents = required(fields, "contents")
    if not isinstance(contents, list) or not contents:
        raise LineError("contents", f"must be a list with at least one turn, not {kind(contents)}")
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(contents):
        place = f"contents.{number}"
        content = _parts_text(turn, place)
        role = turn.get("role")
        if role not in ("user", "model"):
            raise LineError(f"{place}.role", f"must be user or model, not {shown_value(role)}")
        messages.append({"role": SPEAKERS[role], "content": content})
    try:
        chat = parse_chat({"messages": messages})
    except LineError as error:
        raise LineError(error.field.replace("messages", "contents", 1), error.reason) from None
    given = next(((key, fields[key]) for key in _SYSTEM_INSTRUCTION if fields.get(key)), None)
    system = (
        ""
        if given is None
        else given[1]
        if isinstance(given[1], str)
        else _parts_text(given[1], given[0])
    )
    return _with_system(chat, {"system": system})


def _parts_text(turn: Any, place: str) -> str:
    parts = required(turn, "parts", f"{place}.") if isinstance(turn, dict) else None
    if not isinstance(parts, list) or not parts:
        raise LineError(
            place,
            f"must be an object with a list of parts, not {kind(turn if parts is None else parts)}",
        )
    return "".join(_part(part, f"{place}.parts.{number}") for number, part in enumerate(parts))


def _sharegpt(fields: Fields) -> Record:
    key = "conversations" if "conversations" in fields else "conversation"
    messages = _messages_of(_listed(required(fields, key)), key)
    others = {name: fields[name] for name in (*_TOOLS, *PICTURES) if name in fields}
    try:
        chat = parse_chat({"messages": messages, **others}, lead=False)
        places = tuple(place.replace("messages", key, 1) for place in chat.image_places)
        return _with_system(replace(chat, image_places=places), fields)
    except LineError as error:
        raise LineError(error.field.replace("messages", key, 1), error.reason) from None


def _messages_of(turns: Any, key: str) -> list[Any]:
    """ShareGPT's turns as messages in OpenAI's format; they may be that already.

    Raises LineError.
    """
    if not isinstance(turns, list) or not turns:
        raise LineError(key, f"must be a list with at least one turn, not {kind(turns)}")
    if all(isinstance(turn, dict) and "role" in turn and "from" not in turn for turn in turns):
        return _of_people(turns, key)
    return [_turn(turn, f"{key}.{number}") for number, turn in enumerate(turns)]


def _trl_pair(fields: Fields) -> Record:
    """A preference pair in TRL's format, or in one of LLaMA-Factory's, which have its prompt as
    ShareGPT's turns or as Alpaca's instruction, and each answer as a text or as one turn. Axolotl's
    pairs of one message each are read so too.
    """
    if "prompt" not in fields:
        fields = _taken_apart(fields)
    answers = {
        name: _answer(fields[name], name) for name in ("chosen", "rejected") if name in fields
    }
    is_answer = all(isinstance(fields.get(name), str | dict) for name in ("chosen", "rejected"))
    key = next(
        (
            name
            for name in ("conversations", "conversation", "instruction")
            if fields.get(name) is not None
        ),
        None,
    )
    given = {name: _of_people(fields[name], name) for name in ("prompt", "tools") if name in fields}
    given |= {name: fields[name] for name in PICTURES if name in fields}
    if is_answer and isinstance(given.get("prompt"), str) and not isinstance(fields["chosen"], str):
        given["prompt"] = [{"role": "user", "content": given["prompt"]}]
    if not is_answer or "prompt" in fields or key is None:
        pair = parse_pair({**given, **answers})
        return Pair(_with_system(pair.preferred, fields), _with_system(pair.rejected, fields))
    prompt = _question(fields) if key == "instruction" else _messages_of(fields[key], key)
    try:
        return parse_pair({**given, "prompt": [*_system(fields), *prompt], **answers})
    except LineError as error:
        raise LineError(error.field.replace("prompt", key, 1), error.reason) from None


_HH_TURN = re.compile(r"(?:\A|\n)\s*\n?(Human|Assistant):")
"""The beginning of a turn in texts of HH-RLHF."""


def _taken_apart(fields: Fields) -> Fields:
    """The record with its answers as messages, if they are whole conversations as HH-RLHF writes
    them.
    """
    names = ("chosen", "rejected")
    texts = [fields.get(name) for name in names]
    turns = [_HH_TURN.split(text) if isinstance(text, str) else [] for text in texts]
    if not all(len(own) > 1 and not own[0].strip() and own[1] == "Human" for own in turns):
        return fields
    messages = [
        [_hh_turn(who, text) for who, text in zip(own[1::2], own[2::2], strict=True)]
        for own in turns
    ]
    return {**fields, **dict(zip(names, messages, strict=True))}


def _hh_turn(who: str, text: str) -> dict[str, Any]:
    return {"role": "user" if who == "Human" else "assistant", "content": text.strip()}


def _refuse_without_prompt(fields: Fields) -> None:
    """Raise LineError for a pair of texts whose prompt stands in a column of another name."""
    answers = [fields.get(name) for name in ("chosen", "rejected")]
    own = ("prompt", "conversations", "conversation", "instruction")
    other = next((name for name in QUESTIONS if isinstance(fields.get(name), str)), None)
    if (
        other is not None
        and all(isinstance(answer, str) for answer in answers)
        and not any(name in fields for name in own)
    ):
        raise LineError(
            "prompt",
            f"is required where chosen and rejected are texts: data: {{prompt: {other}}} takes it "
            "there",
        )


def _answer(value: Any, place: str) -> Any:
    """An answer of a pair as messages, if it is one message or has ShareGPT's turns.

    All else is left as it is.
    """
    if isinstance(value, dict):
        value = [value]
    value = _of_people(value, place)
    if isinstance(value, list) and all(
        isinstance(turn, dict) and "from" in turn and "role" not in turn for turn in value
    ):
        return [_turn(turn, f"{place}.{number}") for number, turn in enumerate(value)]
    return value


def _turn(turn: Any, place: str) -> dict[str, Any]:
    """One of ShareGPT's turns as a message in OpenAI's format. Raises LineError."""
    if not isinstance(turn, dict):
        raise LineError(place, f"must be an object with from and value, not {kind(turn)}")
    speaker = required(turn, "from", f"{place}.")
    value = required(turn, "value", f"{place}.")
    content = text_of(value, f"{place}.value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise LineError(
            f"{place}.from", f"must be one of {', '.join(SPEAKERS)}, not {shown_value(speaker)}"
        )
    weight = {
        key: turn[key] for key in ("weight", "train", "train_detail") if turn.get(key) is not None
    }
    if speaker == "function_call":
        return {
            "role": "assistant",
            "content": None,
            "function_call": _function_call(content, f"{place}.value"),
            **weight,
        }
    if SPEAKERS[speaker] == "tool":
        return {"role": "function", "name": "tool", "content": content, **weight}
    return {"role": SPEAKERS[speaker], "content": content, **weight}


def _function_call(text: str, place: str) -> dict[str, Any]:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        call = None
    if not isinstance(call, dict) or "name" not in call:
        raise LineError(place, "must be a call in JSON: an object with name and arguments")
    return {
        "name": call["name"],
        "arguments": json.dumps(call.get("arguments") or {}, ensure_ascii=False),
    }


_PARSERS: Mapping[Format, Callable[[Fields], Record]] = {
    Format.CHAT: _chat,
    Format.PROMPT_COMPLETION: _prompt_completion,
    Format.TEXT: _text,
    Format.SHAREGPT: _sharegpt,
    Format.GEMINI: _gemini,
    Format.ALPACA: _alpaca,
    Format.OPENAI_PAIRS: parse_pair,
    Format.TRL_PAIRS: _trl_pair,
}
