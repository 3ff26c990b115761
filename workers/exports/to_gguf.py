"""A merged model, or an adapter alone, as a GGUF file with a Modelfile.

Each is read again and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFType, GGUFWriter, Keys
from torch import Tensor

from ft_service.data.line_errors import LineError
from ft_service.data.template_process import TemplateProcess
from ft_service.data.tokens.chat_template import ChatTemplate
from ft_service.data.tokens.tokenize import load_tokenizer
from ft_service.errors import SpecError
from workers.base.base_tensors import Safetensors
from workers.base.parameter_sources import find_pieces, share_pieces
from workers.exports.compressed_tensors import RestoredFolder
from workers.exports.gguf_file import (
    Planned,
    Stored,
    add_layout,
    add_vocabulary,
    as_ordered,
    as_stored_there,
    compare,
    kind_of,
    names_in,
    write,
)
from workers.exports.gguf_layout import GgufLayout, layout_of, refusal
from workers.exports.gguf_vocabulary import Vocabulary, read_vocabulary
from workers.exports.ollama import MODELFILE, Message, TurnTemplate, modelfile, turns_of
from workers.model.build import base_on_meta
from workers.model.multimodal import text_decoder
from workers.model.peft_adapter import PeftAdapter

MODEL = "model.gguf"
ADAPTER = "adapter.gguf"
_IN_WRAPPED = "language_model."
"""What stands in the names of a text decoder that is published with others."""
_FREQUENCIES = "rope_freqs.weight"
_OTHER_DAY = date(2001, 2, 3)
"""Day on which a chat template that writes no date writes what it does today."""


class GgufModel:
    """What is known of a model's GGUF before its weights are read."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of a model in Hugging Face layout.

        Raises SpecError for one that llama.cpp would not compute the same.
        """
        self.folder = folder
        self.model = base_on_meta(str(folder))
        config = text_decoder(self.model).config.to_dict()
        self.layout: GgufLayout = layout_of(config)
        self.name = names_in(self.layout)
        self.parameters = dict(self.model.named_parameters())

    def name_of(self, parameter: str) -> str:
        return self.name(parameter.replace(_IN_WRAPPED, ""))

    @property
    def vocabulary_rows(self) -> int:
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])


def export_model(
    merged: Path,
    out: Path,
    stored: Stored,
    *,
    title: str,
    chat_template: str = "",
    restored: Path | None = None,
) -> dict[str, Any]:
    """Write `model.gguf` and a Modelfile into `out` from a merged model in bf16; the report on what
    was read again.

    `restored`: a new folder that gets the weights as they are read from the file, in the layout of
    `merged`. Raises SpecError for a model or tokenizer that llama.cpp would not compute the same.
    """
    model = GgufModel(merged)
    chat = _chat_of(merged, chat_template)
    vocabulary = _begun(read_vocabulary(merged, model.vocabulary_rows, chat_template), chat)
    with Safetensors(merged) as tensors:
        names = (name for name, _ in model.model.named_parameters(remove_duplicate=False))
        pieces = find_pieces(model.model, names, tensors.names())
        share_pieces(pieces, model.model)
        missing = [name for name in model.parameters if len(pieces.get(name, [])) != 1]
        if missing:
            raise refusal(f"the model's files do not hold {missing[0]} as one tensor")

        def planned(name: str) -> Planned:
            def read() -> Tensor:
                whole = tensors.whole(pieces[name][0].tensor).float()
                return as_ordered(whole, name, model.layout)

            shape = tuple(model.parameters[name].shape)
            return Planned(model.name_of(name), shape, kind_of(shape, stored), read)

        plan = [planned(name) for name in model.parameters]
        if model.layout.divided:
            divisors = torch.tensor(model.layout.divided)
            plan.append(
                Planned(
                    _FREQUENCIES, tuple(divisors.shape), GGMLQuantizationType.F32, lambda: divisors
                )
            )

        def add(writer: GGUFWriter) -> None:
            writer.add_type(GGUFType.MODEL)
            writer.add_name(title)
            add_layout(writer, model.layout)
            add_vocabulary(writer, vocabulary)

        write(out / MODEL, model.layout, plan, add, stored)
        origin = {model.name_of(name): (name, pieces[name][0].tensor) for name in model.parameters}
        target = None if restored is None else RestoredFolder(restored, merged)

        def keep(name: str, values: Tensor) -> None:
            if target is not None and name in origin:
                parameter, tensor = origin[name]
                target.put(tensor, as_stored_there(values, parameter, model.layout))

        compared = compare(out / MODEL, plan, keep)
        if target is not None:
            target.close()
    _write_modelfile(out, chat, ["FROM ./" + MODEL])
    notes = [*model.layout.notes, *vocabulary.notes]
    return {
        "file": MODEL,
        "architecture": model.layout.architecture,
        **asdict(compared),
        "notes": notes,
    }


def export_adapter(
    base: Path, adapter_folder: Path, out: Path, *, title: str, chat_template: str = ""
) -> dict[str, Any]:
    """Write `adapter.gguf` and a Modelfile into `out`; the report on what was read again.

    Of the base only its configuration and tokenizer are read. Raises SpecError for an adapter that
    is more than A and B on weights that llama.cpp has.
    """
    model = GgufModel(base)
    adapter = PeftAdapter(adapter_folder)
    if adapter.replaced:
        raise refusal(
            f"the adapter replaces whole weights ({next(iter(adapter.replaced))}): export the "
            "merged model (gguf)"
        )
    alpha = float(adapter.config.lora_alpha)
    plan: list[Planned] = []
    for weight, module in adapter.weights().items():
        _require_fitting(model, adapter, weight, module)
        plan += _planned_pair(model, adapter, weight, module, alpha)

    def add(writer: GGUFWriter) -> None:
        writer.add_type(GGUFType.ADAPTER)
        writer.add_name(title)
        writer.add_string(Keys.Adapter.TYPE, "lora")
        writer.add_float32(Keys.Adapter.LORA_ALPHA, alpha)

    write(out / ADAPTER, model.layout, plan, add)
    compared = compare(out / ADAPTER, plan)
    first = [
        f"# The base: a GGUF file of {title.split(':')[1] if ':' in title else 'it'}, or its name "
        "in Ollama.",
        "FROM ./base.gguf",
    ]
    _write_modelfile(out, _chat_of(base, chat_template), [*first, "ADAPTER ./" + ADAPTER])
    return {
        "file": ADAPTER,
        "architecture": model.layout.architecture,
        **asdict(compared),
        "notes": list(model.layout.notes),
    }


def _planned_pair(
    model: GgufModel, adapter: PeftAdapter, weight: str, module: str, alpha: float
) -> list[Planned]:
    """The two matrices of one weight. llama.cpp scales by alpha over the rank, whatever patterns
    and rsLoRA say: the rest goes into B.
    """
    rank = adapter.shape(f"{module}.lora_A.weight")[0]
    factor = adapter.scaling(module.removeprefix("base_model.model.")) * rank / alpha
    name = model.name_of(weight)

    def b() -> Tensor:
        rows = adapter.read(f"{module}.lora_B.weight")
        return as_ordered(rows if abs(factor - 1) < 1e-9 else rows * factor, weight, model.layout)

    return [
        Planned(
            f"{name}.lora_a",
            adapter.shape(f"{module}.lora_A.weight"),
            GGMLQuantizationType.F32,
            lambda: adapter.read(f"{module}.lora_A.weight"),
        ),
        Planned(
            f"{name}.lora_b", adapter.shape(f"{module}.lora_B.weight"), GGMLQuantizationType.F32, b
        ),
    ]


def _require_fitting(model: GgufModel, adapter: PeftAdapter, weight: str, module: str) -> None:
    parameter = model.parameters.get(weight)
    if parameter is None:
        raise refusal(
            f"the adapter changes {weight.removesuffix('.weight')}, which llama.cpp has as no "
            "matrix of its own"
        )
    if adapter.update(module).magnitude is not None:
        raise refusal(
            f"the adapter has a magnitude for {module} (DoRA): export the merged model (gguf)"
        )
    shape = adapter.shape(f"{module}.lora_B.weight")[0], adapter.shape(f"{module}.lora_A.weight")[1]
    if shape != tuple(parameter.shape):
        raise SpecError(
            f"The adapter changes {weight} of shape {shape}; the base has "
            f"{tuple(parameter.shape)}.",
            param="base",
        )


@dataclass(frozen=True)
class _Chat:
    """A chat template as far as a GGUF file and a Modelfile say it."""

    turns: TurnTemplate | None
    """None: it cannot be said in Ollama's language."""
    begins: bool | None
    """Whether the tokenizer's beginning of text is to be put before conversations.

    None: as before other texts.
    """


def _chat_of(folder: Path, chat_template: str) -> _Chat:
    tokenizer: Any = load_tokenizer(str(folder), chat_template)
    template = ChatTemplate.of(tokenizer)
    bos = tokenizer.bos_token or ""
    if template is None:
        return _Chat(None, None)
    with closing(TemplateProcess(template.sources, template.special_tokens)) as process:

        def render(messages: Sequence[Message], answer: bool, day: date | None = None) -> str:
            return process.write(messages, None, day or date.today(), prompt=answer)

        turns = turns_of(render, bos)
        if template.writes_date and turns != turns_of(partial(render, day=_OTHER_DAY), bos):
            turns = None  # it would say the day of the export for ever
        if turns is not None or not bos:
            return _Chat(turns, None if turns is None or not bos else bool(turns.bos))
        try:  # a beginning that it writes is not repeated by llama.cpp, whatever the file says
            return _Chat(
                None,
                None
                if render([{"role": "user", "content": "Hi"}], True).startswith(bos)
                else False,
            )
        except LineError:  # the template refuses it
            return _Chat(None, None)


def _begun(vocabulary: Vocabulary, chat: _Chat) -> Vocabulary:
    """The vocabulary with the beginning of text before a conversation only if its template writes
    one: llama.cpp and Ollama go by what the file says of all texts, and chats are what jobs train
    on.
    """
    said = vocabulary.values["add_bos_token"]
    if chat.begins is None or chat.begins == said:
        return vocabulary
    why = (
        "the chat template begins with it"
        if chat.begins
        else "the chat template does not, which the model was trained with"
    )
    note = (
        f"a text {'begins' if chat.begins else 'does not begin'} with the beginning-of-text "
        f"token here: {why}"
    )
    values = {**vocabulary.values, "add_bos_token": chat.begins}
    return replace(vocabulary, values=values, notes=(*vocabulary.notes, note))


def _write_modelfile(out: Path, chat: _Chat, first: list[str]) -> None:
    (out / MODELFILE).write_text(modelfile(first, chat.turns), encoding="utf-8")
