"""Rounds a merged model by torchao, and writes it as transformers saves torchao's tensors:
`python -m workers.tasks.round_by_torchao MERGED OUT --form FORM [--restored DIR] [--codes DIR]`.

int8     weights in INT8 by rows, symmetric                      (vLLM, transformers)
fp8      weights in e4m3 by rows                                 (vLLM, transformers)
nvfp4    weights in NVFP4: e2m1, an e4m3 scale for 16 columns    (transformers)
8da4w    weights in INT4 by 32 columns, of the head too; inputs are rounded to INT8 by token where
         it runs; embedding in INT8 by rows                      (ExecuTorch: phones)

torchao takes seconds to import, prints, and asks the GPU: this program is the one place that
imports it. The whole model is in memory, in bf16 and rounded.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TorchAoConfig
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from ft_service.bases.safetensors_folder import read_tensors
from ft_service.errors import SpecError
from ft_service.host.hardware import available_memory
from ft_service.wording import bytes_text
from workers.base.base_tensors import Safetensors
from workers.exports.compressed_tensors import CODES, SCALE, RestoredFolder
from workers.model.build import base_on_meta
from workers.model.merged_linears import merged_linears
from workers.tasks import print_result

FORMS = ("int8", "fp8", "nvfp4", "8da4w")
PHONE = "8da4w"
GROUPS = {"nvfp4": 16, PHONE: 32}
"""Form → columns that share a scale, where these are not the whole row."""
_MEMORY = 2.0
"""Bytes that are needed while it works, as a multiple of the merged model's: the rounded model is
read again beside the first.
"""


def write_torchao(
    merged: Path, out: Path, form: str, restored: Path | None, codes: Path | None = None
) -> dict[str, Any]:
    """Write the new folder `out`, and read it again; the report.

    `restored`: a new folder that gets the weights as they were read again, in the layout of
    `merged`, those of rounded ones in bf16; None: there is none.

    `codes`: a folder with the codes and scales of the linear layers, which a job was trained with,
    and which are then written in place of torchao's own. Nothing else is rounded: neither embedding
    nor head.

    Raises SpecError for a model that torchao would round in part, for a layer whose width its
    groups do not divide, and where memory is missing.
    """
    if find_spec("torchao") is None:
        raise SpecError(
            "torchao is not installed here: pip install 'ft-service[torchao]'.", param="format"
        )
    import torchao.quantization as quantization  # it takes seconds, and prints

    refuse_without_memory(merged)
    with Safetensors(merged) as files:
        linears = merged_linears(
            base_on_meta(str(merged)),
            files,
            f"torchao-{form}",
            param="format",
            instead="export it as merged, or merged-fp8",
        )
    ends = form == PHONE and codes is None
    model = untied(merged) if ends else _loaded(merged)
    chosen = {name: model.get_submodule(name) for name in linears}
    if ends:
        chosen |= _ends(model)
    _refuse_widths(chosen, form)
    layers, embedding = _configs(form)
    embedding = embedding if ends else None
    for config, kind in ((layers, nn.Linear), (embedding, nn.Embedding)):
        if config is not None:
            quantization.quantize_(model, config, filter_fn=_named(chosen, kind))
    if codes is not None:
        _put_codes(model, codes, chosen)
    _save(model, out, _described(model, layers, embedding))
    again = _loaded(out)
    report = _compared(merged, model, again, chosen, restored and RestoredFolder(restored, out))
    notes = [_INPUTS] if form == PHONE else []
    if codes is not None:
        notes.append(_AS_TRAINED)
    return {**report, **({"notes": notes} if notes else {})}


_INPUTS = (
    "What runs it also rounds the inputs of each layer to 8 bits, token by token; the loss here "
    "is that of its weights alone."
)


_AS_TRAINED = (
    "The linear layers hold the codes that the job was trained with; embedding and head are as in "
    "training, in bf16."
)


def _put_codes(model: PreTrainedModel, folder: Path, chosen: Iterable[str]) -> None:
    """Put codes and scales from a folder in place of those that torchao has found."""
    with Safetensors(folder) as files:
        for name in chosen:
            weight: Any = model.get_parameter(f"{name}.weight")
            for own, theirs in ((weight.qdata, CODES), (weight.scale, SCALE)):
                values = files.whole(f"{name}.weight{theirs}")
                assert (own.shape, own.dtype) == (values.shape, values.dtype), name
                own.copy_(values)


def refuse_without_memory(merged: Path) -> None:
    """Raise SpecError where the host has no room for the model."""
    elements = sum(math.prod(tensor.shape) for tensor in read_tensors(merged).values())
    needed = int(_MEMORY * 2 * elements)
    room = available_memory()
    if needed > room:
        raise SpecError(
            f"torchao rounds a whole model in memory, this one in {bytes_text(needed)}, and "
            f"{bytes_text(room)} are free: export it as merged-fp8 or merged-int4, which are "
            "written by rows, or where there is more memory.",
            param="format",
        )


def _loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def untied(merged: Path) -> PreTrainedModel:
    """The merged model in bf16, its head a matrix of its own, since embedding and head are rounded
    in different ways.
    """
    config = AutoConfig.from_pretrained(merged)
    tied = config.tie_word_embeddings
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_pretrained(merged, config=config, dtype=torch.bfloat16)
    if tied:
        embedding, head = _ends(model).values()
        with torch.no_grad():
            head.get_parameter("weight").copy_(embedding.get_parameter("weight"))
    return model


def _ends(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Name → module, of the embedding and then the head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(end)]: end for end in ends if end is not None}


def _refuse_widths(chosen: Mapping[str, nn.Module], form: str) -> None:
    group = GROUPS.get(form)
    for name, module in chosen.items():
        width = module.get_parameter("weight").shape[1]
        if group is not None and isinstance(module, nn.Linear) and width % group:
            raise SpecError(
                f"torchao-{form} stores groups of {group} columns; {name} has {width}: export it "
                "as torchao-int8 or torchao-fp8.",
                param="format",
            )


def _configs(form: str) -> tuple[Any, Any]:
    """torchao's configurations of the linear layers, and of the embedding (None: it stays)."""
    import torchao.quantization as quantization
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

    if form == "int8":
        return quantization.Int8WeightOnlyConfig(version=2), None
    if form == "fp8":
        return quantization.Float8WeightOnlyConfig(), None
    if form == "nvfp4":
        return NVFP4WeightOnlyConfig(), None
    layers = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4,  # pyright: ignore[reportAttributeAccessIssue]  # no stub has it
        weight_granularity=quantization.PerGroup(GROUPS[PHONE]),
    )
    embedding = quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int8, granularity=quantization.PerAxis(0)
    )
    return layers, embedding


def _named(
    chosen: Mapping[str, nn.Module], kind: type[nn.Module]
) -> Callable[[nn.Module, str], bool]:
    return lambda module, name: name in chosen and isinstance(module, kind)


def _described(model: PreTrainedModel, layers: Any, embedding: Any) -> TorchAoConfig:
    """What `config.json` says of the tensors."""
    import torchao.quantization as quantization

    if embedding is None:
        heads = [name for name, module in _ends(model).items() if isinstance(module, nn.Linear)]
        return TorchAoConfig(layers, modules_to_not_convert=heads)
    names = [name for name, module in _ends(model).items() if isinstance(module, nn.Embedding)]
    return TorchAoConfig(
        # As releases for phones have it: vLLM fuses layers, whose own names are then not found.
        quantization.FqnToConfig(OrderedDict(_default=layers, **dict.fromkeys(names, embedding))),
        include_input_output_embeddings=True,
        untie_embedding_weights=True,
    )


def _save(model: PreTrainedModel, out: Path, described: TorchAoConfig) -> None:
    model.hf_quantizer = AutoHfQuantizer.from_config(described, pre_quantized=False)
    model.config.quantization_config = described
    model.save_pretrained(out)


def _compared(
    merged: Path,
    written: PreTrainedModel,
    read: PreTrainedModel,
    chosen: Iterable[str],
    target: RestoredFolder | None,
) -> dict[str, Any]:
    """How many rounded tensors are read as they were written, and the 2-norm of what rounding
    changed as a share of the norm of what it was applied to; one tensor at a time.

    `target`: gets all tensors as they were read; None: nothing does.
    """
    rounded = sorted(f"{name}.weight" for name in chosen)
    exact = 0
    lost = whole = 0.0
    with Safetensors(merged) as files:
        for name in rounded:
            values = _values(read, name)
            exact += torch.equal(values, _values(written, name))
            if name in files:  # a head that the merged model ties is not
                before = files.whole(name).float()
                lost += float((values.float() - before).square().sum(dtype=torch.float64))
                whole += float(before.square().sum(dtype=torch.float64))
            if target is not None:
                target.put(name, values)
        if target is not None:
            for name in set(files.names()) - set(rounded):
                target.put(name, files.whole(name))
            target.close()
    return {"tensors": len(rounded), "exact": exact, "relative_error": math.sqrt(lost / whole)}


def _values(model: PreTrainedModel, name: str) -> Tensor:
    """What a tensor of torchao's stands for, in bf16."""
    return model.get_parameter(name).dequantize()


def main(arguments: list[str]) -> int:
    """Print one line of JSON: the report, or the error. Exit code 0 or 64."""
    parser = argparse.ArgumentParser(prog="python -m workers.tasks.round_by_torchao")
    parser.add_argument("merged", type=Path, help="a merged model in bf16")
    parser.add_argument("out", type=Path)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--restored", type=Path, help="gets the weights as they are read again")
    parser.add_argument("--codes", type=Path, help="of the linear layers, as they were trained")
    given = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    def task() -> dict[str, Any]:
        with contextlib.redirect_stdout(sys.stderr):
            return write_torchao(given.merged, given.out, given.form, given.restored, given.codes)

    return print_result(task)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
