"""Describes a base: `python -m workers.describe FOLDER` prints the description
(ft_service/bases/description.py) as JSON.

The base is built on meta by the functions that training calls, so that what the description says of
names, shapes and formats is what training finds. No weight is read. Facts that no config says are
found on a small copy (workers/model/probes.py).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft_service.host.quick_imports import begin_imports, end_imports
from workers.patches.absent_torchao import keep_torchao_out

if __name__ == "__main__":  # before transformers is imported
    keep_torchao_out()
    begin_imports()
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ft_service.bases.base_files import read_config
from ft_service.bases.description import (
    Described,
    Description,
    Dimensions,
    FusedParts,
    Kind,
    Refusal,
    Versions,
    Weight,
    description_key,
    write_described,
)
from ft_service.bases.module_rules import ROUTERS, last_name
from ft_service.bases.safetensors_folder import INDEX, SINGLE, files_of, read_index
from ft_service.errors import SpecError
from ft_service.spec import LoraOptions, PrecisionOptions, WeightFormat
from workers.base.base_tensors import Safetensors
from workers.base.layouts import (
    announced_formats,
    is_companion,
    quantization_of,
    refuse_what_changes_values,
)
from workers.base.load import base_tensor_name, check_complete
from workers.base.parameter_sources import NamedBase, find_pieces
from workers.base.quantized_rows import StoredBase
from workers.images.trial import try_images
from workers.layers import fused
from workers.layers.experts import GATED, ExpertsLinear, FrozenExperts
from workers.model.attention import why_whole
from workers.model.build import base_on_meta
from workers.model.lora import adapted_modules
from workers.model.multimodal import (
    decoder_layers,
    linears_of_towers,
    text_decoder,
)
from workers.model.precision import formats_of_base, precision_map, swap, weighted_modules
from workers.model.probes import Probed, probe
from workers.model.products import products
from workers.model.whole_modules import outer_modules
from workers.patches.fused_layers import norms_and_gates
from workers.ranks.runtime import quiet_libraries

_DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_COUNTS_OF_CHOSEN = (
    "num_experts_per_tok",
    "top_k_experts",
    "moe_k",
    "moe_topk",
    "num_experts_per_token",
)
"""Names under which configs say how many experts a token meets."""
_NORMS_OF_HEADS = ("q_norm", "k_norm")


def main(folder: str) -> None:
    """Print the description of a base, or why it cannot be tuned, as one JSON document on a line of
    its own.
    """
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what libraries print goes to stderr
        quiet_libraries()
        out.write(write_described(_document(folder)) + b"\n")


def _document(folder: str) -> Described:
    versions = Versions.installed()
    path = Path(folder)
    try:
        base = replace(describe(folder), products=products())
        return Described(description_key(path, versions), versions, base=base)
    except SpecError as error:
        refusal = Refusal(error.message, error.param, error.code, _model_type(path))
    except OSError as error:
        refusal = Refusal(
            f"The base in {folder} cannot be read: {error.strerror or error}.",
            "model",
            "model_unreadable",
        )
    return Described(_key_or_none(path, versions), versions, refused=refusal)


def describe(folder: str) -> Description:
    """The description of a base as training builds it.

    Raises SpecError for a base that cannot be tuned; OSError.
    """
    base = base_on_meta(folder)
    layers = decoder_layers(base)
    downloaded = _is_downloaded(Path(folder))
    held = (
        formats_of_base(base, layers, folder)
        if downloaded
        else _announced_formats(base, layers, Path(folder))
    )
    formats = precision_map(base, layers, PrecisionOptions(default="bf16"), held)
    probed = probe(base)
    if probed.refused is not None:
        raise SpecError(probed.refused, param="model")
    images = None if text_decoder(base) is base else try_images(base, folder)
    swap(base.requires_grad_(False), layers, dict.fromkeys(formats, "bf16"))
    described = describe_model(base, layers, folder, held, probed, downloaded=downloaded)
    if isinstance(images, str):
        return replace(described, no_images_because=images)
    return replace(described, images=images, tower_linears=linears_of_towers(base))


def describe_model(
    model: PreTrainedModel,
    layers: list[nn.Module],
    folder: str,
    held: Mapping[str, WeightFormat],
    probed: Probed,
    *,
    downloaded: bool,
) -> Description:
    """The description of a model on meta whose experts are those of training (`swap`).

    `held`: formats of the base's files.
    """
    weights = _weights(model, layers, held, probed.not_adapted)
    layout = "not downloaded"
    unkept = dict[str, str]()
    if downloaded:
        weights, layout, unkept = _with_files(model, weights, folder)
    decoder = text_decoder(model)
    return Description(
        model_type=str(decoder.config.model_type),
        architecture=type(model).__name__,
        dimensions=_dimensions(decoder.config, model, layers, weights),
        weights=tuple(
            sorted(weights, key=lambda weight: -1 if weight.layer is None else weight.layer)
        ),
        layout=layout,
        outer=outer_modules(model),
        loss_in_chunks=probed.loss_in_chunks,
        padded_because=probed.padded_because,
        whole_because=probed.padded_because or why_whole(decoder.config, type(decoder)),
        not_adapted=probed.not_adapted,
        row_wise=probed.row_wise,
        unkept=unkept,
        downloaded=downloaded,
        warnings=probed.warnings,
    )


def _weights(
    model: PreTrainedModel,
    layers: list[nn.Module],
    held: Mapping[str, WeightFormat],
    not_adapted: Mapping[str, str],
) -> list[Weight]:
    """Every frozen parameter, tied ones once, without the names in the files."""
    adapted = set(
        adapted_modules(model, LoraOptions(), shared_experts=True, not_adapted=not_adapted)
    )
    layer_of = {
        id(module): number for number, layer in enumerate(layers) for module in layer.modules()
    }
    head = model.get_output_embeddings()
    seen: set[int] = set()
    weights: list[Weight] = []
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            layer = layer_of.get(id(module))
            kind = _kind(
                name,
                module,
                parameter_name,
                parameter,
                is_head=module is head,
                in_layer=layer is not None,
            )
            weights.append(
                Weight(
                    module=name,
                    parameter=parameter_name,
                    shape=tuple(parameter.shape),
                    kind=kind,
                    layer=layer,
                    held=held.get(name) if parameter_name == "weight" else None,
                    adapted=name in adapted and parameter_name == "weight",
                    kept_fp32=parameter.dtype == torch.float32,
                )
            )
    return weights


def _kind(
    name: str, module: nn.Module, parameter: str, tensor: Tensor, *, is_head: bool, in_layer: bool
) -> Kind:
    last = last_name(name)
    if parameter == "bias":
        return "bias"
    if isinstance(module, ExpertsLinear):
        return "experts"
    if is_head:
        return "head"
    if isinstance(module, nn.Embedding):
        return "other" if in_layer else "embedding"
    if type(module) is nn.Linear:
        return "linear"
    if tensor.ndim == 2 and last in ROUTERS:
        return "router"
    is_norm = "norm" in type(module).__name__.lower() or "norm" in last or last.startswith("ln")
    return "norm" if is_norm and tensor.ndim <= 2 else "other"


def _with_files(
    model: PreTrainedModel, weights: list[Weight], folder: str
) -> tuple[list[Weight], str, dict[str, str]]:
    """The weights with the names and dtypes of their tensors in the base's files, the layout of
    most of their bytes, and `Description.unkept`.

    Raises SpecError for a tensor that the files lack, or that has another shape there.
    """
    with Safetensors(folder) as files:
        base = StoredBase.open(files, folder)
        named = NamedBase(model, base, base_tensor_name)
        check_complete({weight.name: weight.shape for weight in weights}, named)
        layouts: Counter[str] = Counter()
        found: list[Weight] = []
        unkept: dict[str, str] = {}
        for weight in weights:
            tensors = [piece.tensor for piece in named.pieces(weight.name)]
            stored = named.stored(weight.name)
            dtype = files.dtype(tensors[0])
            layouts[_DTYPES.get(dtype, dtype.lower()) if stored is None else stored.layout] += (
                weight.numel
            )
            found.append(replace(weight, files=_pattern(tensors), dtype=dtype))
            if stored is not None and stored.format is None:
                unkept[weight.module] = stored.layout
    return found, layouts.most_common(1)[0][0], unkept


def _pattern(tensors: list[str]) -> str:
    """One name for the tensors that make a parameter: `*` replaces the parts of names in which they
    differ.
    """
    parts = [name.split(".") for name in dict.fromkeys(tensors)]
    if len({len(names) for names in parts}) > 1:
        return f"{tensors[0]}, … ({len(tensors)})"
    return ".".join(names[0] if len(set(names)) == 1 else "*" for names in zip(*parts, strict=True))


def _dimensions(
    config: Any, model: PreTrainedModel, layers: list[nn.Module], weights: list[Weight]
) -> Dimensions:
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    rows, width = embedding.weight.shape
    hidden = _size(config, "hidden_size", "n_embd", "d_model") or int(width)
    heads = _size(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    if heads is None:
        raise SpecError(
            f"The base is a {config.model_type} model without attention, by which memory and time "
            "are planned: it cannot be "
            "tuned here.",
            param="model",
        )
    # Keys and values of all heads come from one latent vector, whatever the number of their groups
    # says.
    latent = (_size(config, "qk_nope_head_dim") or 0) + (_size(config, "qk_rope_head_dim") or 0)
    head_size = latent or _size(config, "head_dim") or hidden // heads
    inside = [weight for weight in weights if weight.layer is not None]
    first = min((weight.layer for weight in inside if weight.layer is not None), default=0)
    linears = [
        last_name(weight.module) for weight in inside if weight.kind in ("linear", "experts")
    ]
    intermediate = _size(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    stacks = {
        name: module for name, module in model.named_modules() if isinstance(module, ExpertsLinear)
    }
    experts = max((stack.num_experts for stack in stacks.values()), default=0)
    mixtures = [module for module in model.modules() if isinstance(module, FrozenExperts)]
    inner = [stack.in_features for name, stack in stacks.items() if last_name(name) == GATED[1]]
    gated = any("gate" in name for name in linears)
    beside = _beside_experts(model, layers, inside)
    shared = Counter[int | None]()
    for weight in beside:
        shared[weight.layer] += weight.numel
    return Dimensions(
        layers=len(layers),
        hidden=hidden,
        heads=heads,
        q=heads * head_size,
        kv=(heads if latent else _size(config, "num_key_value_heads") or heads) * head_size,
        intermediate=intermediate,
        vocabulary=max(int(rows), int(head.weight.shape[0])),
        norms=sum(
            weight.kind == "norm" and weight.layer == first and weight.shape == (hidden,)
            for weight in inside
        ),
        head_norms=any(weight.module.endswith(_NORMS_OF_HEADS) for weight in weights),
        gated=gated,
        experts=experts,
        experts_per_token=min(experts, _size(config, *_COUNTS_OF_CHOSEN) or 1),
        expert_intermediate=max(inner, default=intermediate),
        max_positions=_max_positions(config),
        fused=_fused_parts(model, layers, hidden),
        shared_intermediate=max(shared.values(), default=0) // (hidden * (3 if gated else 2)),
        shared_scaled=any(weight.rows == 1 for weight in beside),
        silu_experts=bool(mixtures) and all(mixture.gated_by_silu for mixture in mixtures),
    )


def _beside_experts(
    model: PreTrainedModel, layers: list[nn.Module], inside: list[Weight]
) -> list[Weight]:
    """The linear layers that every token passes in decoder layers with experts, without attention:
    they lie next to the stacks, or in a part of the layer that is named a feed-forward. `inside`:
    the weights of all decoder layers.
    """
    names = {module: name for name, module in model.named_modules()}

    def part(weight: Weight) -> tuple[int | None, str]:
        assert weight.layer is not None
        return weight.layer, weight.module.removeprefix(
            f"{names[layers[weight.layer]]}."
        ).partition(".")[0]

    with_experts = {part(weight) for weight in inside if weight.kind == "experts"}
    numbers = {number for number, _ in with_experts}
    linears = [
        weight
        for weight in inside
        if weight.kind == "linear" and last_name(weight.module) not in ROUTERS
    ]
    return [
        w
        for w in linears
        if w.layer in numbers and (part(w) in with_experts or "mlp" in part(w)[1])
    ]


def _fused_parts(model: PreTrainedModel, layers: list[nn.Module], hidden: int) -> FusedParts:
    """What kernels compute on a GPU: where layers differ, what they compute in each."""
    by_kernel, gates = norms_and_gates(model)
    of_layers = {module for layer in layers for module in layer.modules()}
    of_heads = [module for name, module in model.named_modules() if name.endswith(_NORMS_OF_HEADS)]

    def of_hidden(module: nn.Module) -> bool:
        shapes = [tuple(weight.shape) for weight in module.parameters(recurse=False)]
        return module in by_kernel and shapes == [(hidden,)] and hidden <= fused.WIDEST

    return FusedParts(
        norms=min((sum(map(of_hidden, layer.modules())) for layer in layers), default=0),
        head_norms=bool(of_heads) and all(module in by_kernel for module in of_heads),
        last_norm=any(of_hidden(module) for module in model.modules() if module not in of_layers),
        gate=all(any(module in gates for module in layer.modules()) for layer in layers),
    )


_SCALED_TO_CONTEXT = ("yarn", "longrope")
"""Kinds of rotary positions whose factor is the ratio of the scaled context to the first."""


def _max_positions(config: Any) -> int | None:
    """The context that a config says, or to which it scales rotary positions, if that is longer: of
    bases that are published for a scaling which their users add (YaRN, LongRoPE), the config has
    only the context without it. The factor of another kind is no ratio of contexts: llama3's
    divides frequencies, 32 in Llama 3.2 for 16 times its first context, and of "linear" and
    "dynamic" some bases are published with the scaled context and some without.
    """
    named = _size(config, "max_position_embeddings", "n_positions")
    given = getattr(config, "rope_parameters", None) or {}
    # Some have one for each kind of layer.
    kinds = [own for own in (given, *given.values()) if isinstance(own, dict)]
    scaled = [
        int(own["factor"] * own["original_max_position_embeddings"])
        for own in kinds
        if own.get("rope_type") in _SCALED_TO_CONTEXT
        and own.get("factor")
        and own.get("original_max_position_embeddings")
    ]
    return named if named is None else max(named, *scaled, 0)


def _size(config: Any, *names: str) -> int | None:
    """The first of these attributes that is a positive integer; of a list with one for each layer
    the largest.
    """
    return next((size for name in names for size in _sizes(_value(config, name))), None)


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a config with a value for each layer refuses to name one for all
        return config.to_dict().get(name)


def _sizes(value: Any) -> Iterator[int]:
    values = value if isinstance(value, list) else [value]
    sizes = [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0]
    if sizes:
        yield max(sizes)


def _is_downloaded(folder: Path) -> bool:
    """Whether all files with weights are in the folder."""
    if not (folder / INDEX).is_file():
        return (folder / SINGLE).exists()
    return all(path.exists() for path in files_of(folder, read_index(folder)))


def _announced_formats(
    model: PreTrainedModel, layers: list[nn.Module], folder: Path
) -> dict[str, WeightFormat]:
    """Formats of the weights of a base whose files are not downloaded, by its config.json and
    index.

    Raises SpecError where these do not say enough.
    """
    quantization = quantization_of(folder)
    if quantization is None:
        return {}
    names = list(read_index(folder)) if (folder / INDEX).is_file() else []
    refuse_what_changes_values(names)
    announced = announced_formats(names, quantization)
    if not announced:
        raise SpecError(
            f"The weights of the base in {folder} are not here, and without them it cannot be "
            "planned: of a quantised base "
            f"the plan needs its files, or for FP8, NVFP4 and MXFP4 {INDEX}.",
            param="model",
            code="model_unreadable",
        )
    module_of = weighted_modules(model, layers)
    plain = [name for name in names if not is_companion(name)]
    pieces = find_pieces(model, module_of, dict.fromkeys([*announced, *plain]))
    held: dict[str, WeightFormat] = {}
    for parameter, placed in pieces.items():
        first = announced.get(placed[0].tensor)
        if first is not None and all(announced.get(piece.tensor) == first for piece in placed):
            held[module_of[parameter]] = first
    return held


def _model_type(folder: Path) -> str | None:
    try:
        kind = read_config(folder).get("model_type")
    except (SpecError, OSError):
        return None
    return kind[:80] if isinstance(kind, str) else None


def _key_or_none(folder: Path, versions: Versions) -> str:
    """The key; empty for a folder of which not even that can be read."""
    try:
        return description_key(folder, versions)
    except (SpecError, OSError):
        return ""


if __name__ == "__main__":
    end_imports()
    main(sys.argv[1])
    os._exit(0)  # the document is written; to take torch down takes seconds on a busy host
