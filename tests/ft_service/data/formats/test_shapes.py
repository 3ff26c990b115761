"""Small files of shapes found in public: each is what it is, or is told what it is. None is silently something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.data.formats.reading import open_data
from ft_service.data.line_errors import Fault
from ft_service.data.sample_kinds import Conversation, Pair, Record, Text

SHAPES = Path(__file__).parents[3] / "fixtures/shapes"

LEARNED = {
    "alpaca-history.jsonl": "suAuA",
    "alpaca.jsonl": "uA",
    "anthropic-blocks.jsonl": "suA",
    "anthropic-system.jsonl": "suA",
    "array-pretty.json": "uA",
    "bedrock-converse.jsonl": "suA",
    "gemini-contents.jsonl": "suA",
    "hh-rlhf.jsonl": "uauA uauA",
    "messages-as-string.jsonl": "uA",
    "messages-role-human.jsonl": "uA",
    "no-pictures.jsonl": "uA",
    "openai-chat.jsonl": "suA",
    "openai-preference.jsonl": "uA uA",
    "openai-tools.jsonl": "uAtA",
    "openai-weights.jsonl": "uauA",
    "pairs-system.jsonl": "suA suA",
    "prompt-completion-messages.jsonl": "uA",
    "semicolons.csv": "uA",
    "sharegpt-roles.jsonl": "uA",
    "sharegpt-system.jsonl": "suA",
    "sharegpt-tools.jsonl": "uAtA",
    "sharegpt.jsonl": "uA",
    "text.jsonl": "TEXT",
    "trl-implicit.jsonl": "uA uA",
    "trl-pairs.jsonl": "uA uA",
    "ultrafeedback.jsonl": "uA uA",
}
"""File → the roles of its first record's messages by their first letters, capitals where they are learned."""
TOLD = {
    "chatgpt-export.json": (1, "", "ChatGPT's export"),
    "cut.jsonl": (2, "", "is it cut off?"),
    "dolly.jsonl": (1, "", "data: {instruction: instruction, input: context, output: response}"),
    "excel.csv": (0, "", "UTF-16"),
    "gemini-picture.jsonl": (1, "contents.0.parts.0", "fileData"),
    "gemini-tools.jsonl": (1, "tools", "OpenAI"),
    "kto.jsonl": (2, "label", "make pairs"),
    "lfs-pointer.jsonl": (0, "", "git lfs pull"),
    "llama-factory-images.jsonl": (1, "images", "a picture"),
    "llama-factory-video.jsonl": (1, "videos", "a film"),
    "llava-words-only.jsonl": (1, "conversations.0.value", "<image>"),
    "llava.json": (1, "image", "a picture"),
    "messages-capitals.jsonl": (1, "", "data: {messages: Messages}"),
    "mixed.jsonl": (2, "", "is Alpaca"),
    "no-header.csv": (0, "", "its first row is data"),
    "notes.md": (0, "", "plain text"),
    "notes.txt": (0, "", "plain text"),
    "numina-math.jsonl": (1, "", "data: {instruction: problem, output: solution}"),
    "openai-batch-reply.jsonl": (1, "", "Batch API"),
    "openai-batch-request.jsonl": (1, "", "Batch API"),
    "openai-image-url.jsonl": (1, "messages.0.content.1.type", "image_url"),
    "orca-pairs.jsonl": (1, "prompt", "data: {prompt: question}"),
    "own-names.csv": (1, "", "'Kundenfrage', 'Antwort des Supports'"),
    "page.html": (0, "", "a web page"),
    "pairs-without-prompt.jsonl": (1, "prompt", "give there what both answer"),
    "paper.pdf": (0, "", "a PDF"),
    "pretty.json": (0, "", "jq -c . FILE"),
    "python.jsonl": (1, "", "single quote"),
    "question-answer.jsonl": (1, "", "data: {instruction: question, output: answer}"),
    "qwen-audio.jsonl": (1, "audios", "sound"),
    "records.pkl": (0, "", "a pickle"),
    "system-twice.jsonl": (1, "system", "keep one"),
    "written-alpaca.jsonl": (1, "text", "Below is an instruction"),
    "written-chatml.jsonl": (1, "text", "<|im_start|>"),
    "written-gemma.jsonl": (1, "text", "<start_of_turn>"),
    "written-guanaco.jsonl": (1, "text", "### Human:"),
    "written-llama.jsonl": (1, "text", "<|start_header_id|>"),
    "written-mistral.jsonl": (1, "prompt", "[INST]"),
    "wrapped-pretty.json": (0, "", "jq -c '.data[]' FILE"),
    "wrapped.json": (0, "", "jq -c '.data[]' FILE"),
}
"""File → the line, the field and a part of the reason of its first fault."""


def read(name: str) -> list[tuple[int, Record | Fault]]:
    with open_data(SHAPES / name) as reader:
        return list(reader)


def outline(record: Record | Fault) -> str:
    match record:
        case Conversation():
            letters = ((message["role"][0], weight) for message, weight in zip(record.messages, record.weights, strict=True))
            return "".join(letter.upper() if weight else letter for letter, weight in letters)
        case Pair():
            return f"{outline(record.preferred)} {outline(record.rejected)}"
        case Text():
            return "TEXT"
        case _:
            return repr(record)


def test_every_shape_has_one_verdict() -> None:
    assert sorted([*LEARNED, *TOLD]) == sorted(path.name for path in SHAPES.iterdir())


@pytest.mark.parametrize("name", LEARNED)
def test_a_shape_is_learned_as_it_stands(name: str) -> None:
    assert [outline(record) for _, record in read(name)] == [LEARNED[name]]


@pytest.mark.parametrize("name", TOLD)
def test_a_shape_is_told_by_line_and_place(name: str) -> None:
    line, field, part = TOLD[name]
    fault = next(record for _, record in read(name) if isinstance(record, Fault))
    assert (fault.line, fault.field) == (line, field)
    assert part in fault.reason


def test_system_prompts_and_texts_arrive_whole() -> None:
    for name in ("anthropic-blocks.jsonl", "bedrock-converse.jsonl", "gemini-contents.jsonl", "sharegpt-system.jsonl"):
        (_, chat), *_ = read(name)
        assert isinstance(chat, Conversation)
        texts = [message["content"] for message in chat.messages]
        assert texts == ["You guide visitors.", "Which way to the harbour?", "Down the hill, then left."], name
    (_, pair), *_ = read("hh-rlhf.jsonl")
    assert isinstance(pair, Pair)
    assert [message["content"] for message in pair.rejected.messages][2:] == ["Which way to the harbour?", "Up the hill."]
