"""A base and its adapter as one model: `python -m workers.tasks.merge ADAPTER OUT --to bf16|fp8`.

Row by row: merged = base + scaling · B · A in fp32, then cast, so that memory does not grow with the model. No GPU is used,
and no process group. What is written has the base's own tensor names, config and tokenizer, and loads wherever the base does;
`--to fp8` stores the linear layers of the decoder layers in compressed-tensors' `float-quantized` layout, codes [out, in] with
one scale a row (the layout known as FP8-dynamic), which vLLM and transformers load.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ft_service.errors import FtError, SpecError
from ft_service.rundir.file_digest import FileDigest
from ft_service.rundir.manifest import MANIFEST, Manifest, base_files, base_of, spec_beside
from ft_service.spec import JobSpec, PrecisionOptions
from workers.base.load import Safetensors
from workers.base.names import find_pieces
from workers.base.stored import StoredBase as StoredBase
from workers.layers.experts import experts_of
from workers.model.adapted_experts import ExpertsUpdate, expected_shapes, updates_by_tensor
from workers.model.build import base_on_meta, decoder_layers
from workers.model.peft_adapter import PeftAdapter, Update
from workers.model.precision import precision_map
from workers.model.wrapped import names_of_towers
from workers.output.export import new_folder
from workers.output.model_shards import DTYPES, TensorPlan, in_files, write_file, write_index
from workers.quant.fp8 import LARGEST
from workers.tasks.fidelity import measure

CHUNK_BYTES = 16 * 1024**2
"""fp32 rows that are worked on at once."""
GIB = 1024**3
COPIED = (
    *("tokenizer*", "chat_template*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)
"""Files of the base that the merged model needs, or must carry."""
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass
class Rounding:
    """The loss by the cast to the stored format: squared 2-norms over all weights that the adapter changes."""

    exact: float = 0.0
    update: float = 0.0
    lost: float = 0.0

    def add(self, base: Tensor, exact: Tensor, stored: Tensor) -> None:
        self.exact += _squared_norm(exact)
        self.update += _squared_norm(exact - base)
        self.lost += _squared_norm(stored - exact)

    def report(self) -> dict[str, float]:
        """2-norm of the loss, as a share of the merged weights, and of the adapter's update to them."""
        return {
            "relative_to_weights": math.sqrt(self.lost / self.exact) if self.exact else 0.0,
            "relative_to_update": math.sqrt(self.lost / self.update) if self.update else 0.0,
        }


def _squared_norm(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2


def merge(base: Path, adapter_folder: Path, out: Path, *, to: str, max_file_bytes: int = 5 * GIB) -> Rounding:
    """Write the merged model to the new folder `out`. Raises SpecError for an adapter that does not fit the base."""
    adapter, model = PeftAdapter(adapter_folder), base_on_meta(str(base))
    with Safetensors(base) as tensors, new_folder(out) as folder:
        if StoredBase.open(tensors, base).declared:
            raise SpecError(
                f"The base in {base} is stored quantised, and an adapter can only be merged into plain weights: "
                "name the base that it was made of.",
                param="base",
            )
        targets = Targets(base, model, tensors, adapter)
        quantised = linears_of_layers(model, tensors) if to == "fp8" else set[str]()
        files = in_files([_unit(name, tensors, quantised) for name in tensors.names()], max_file_bytes)
        rounding = Rounding()
        for file, units in files.items():
            pieces = (piece for unit in units for piece in _pieces(unit[0], tensors, targets, rounding))
            write_file(folder / file, [plan for unit in units for plan in unit], pieces)
        write_index(folder, files)
        _write_config(base, model, folder, quantised)
        for path in (path for pattern in COPIED for path in base.glob(pattern) if path.is_file()):
            shutil.copy(path, folder)
    return rounding


class Targets:
    """The tensors of the base's files that an adapter changes: files may hold other names than the model has."""

    def __init__(self, base: Path, model: PreTrainedModel, tensors: Safetensors, adapter: PeftAdapter) -> None:
        """Raises SpecError naming the first weight that the base does not hold, or holds in another shape."""
        self._stack_of = adapter.stacks(model)
        weights = {name: module for name, module in adapter.weights().items() if module not in self._stack_of}
        wanted = [*weights, *adapter.replaced]
        pieces = find_pieces(model, wanted, tensors.names())
        missing = [name for name in wanted if len(pieces.get(name, [])) != 1]
        if missing:
            raise SpecError(
                f"The adapter changes {len(missing)} weights that {base} does not hold as one tensor, the first: {missing[0]}. "
                "It belongs to another base, or the base's layout is not supported.",
                param="base",
            )
        self.adapter = adapter
        self.stacks = self._of_stacks(model, tensors)
        self.modules = {pieces[name][0].tensor: module for name, module in weights.items()}
        self.replaced = {pieces[name][0].tensor: theirs for name, theirs in adapter.replaced.items()}
        for name, module in self.modules.items():
            shape = (adapter.shape(f"{module}.lora_B.weight")[0], adapter.shape(f"{module}.lora_A.weight")[1])
            if tensors.shape(name) != shape:
                raise SpecError(f"The adapter changes {name} of shape {shape}; {base} has {tensors.shape(name)}.", param="base")

    def _of_stacks(self, model: PreTrainedModel, tensors: Safetensors) -> dict[str, Callable[[], ExpertsUpdate]]:
        """Tensor → what the adapters on experts change in it."""
        pieces = find_pieces(model, self._stack_of.values(), tensors.names())
        updates: dict[str, Callable[[], ExpertsUpdate]] = {}
        for module, stack in self._stack_of.items():
            parameter = model.get_parameter(stack)
            transposed = bool(getattr(model.get_submodule(stack.rpartition(".")[0]), "is_transposed", False))
            r = self.adapter.rank(stack)
            found = self.adapter.shape(f"{module}.lora_A.weight"), self.adapter.shape(f"{module}.lora_B.weight")
            if stack not in pieces or found != expected_shapes(parameter.shape, parameter.shape[0], r, transposed):
                raise SpecError(f"The adapter changes {stack}, which the base does not hold in this shape.", param="base")
            whole = partial(self.adapter.experts_update, module, stack, parameter.shape[0], transposed)
            updates |= updates_by_tensor(pieces[stack], lambda name: tensors.shape(name)[0], whole)
        return updates

    def update(self, name: str) -> Update | ExpertsUpdate | None:
        if name in self.stacks:
            return self.stacks[name]()
        return self.adapter.update(self.modules[name]) if name in self.modules else None


def linears_of_layers(model: PreTrainedModel, tensors: Safetensors) -> set[str]:
    """Weights of the linear layers inside the decoder layers. Raises SpecError where they cannot be stored in FP8 here."""
    layers = decoder_layers(model)
    if names_of_towers(model):
        raise SpecError(
            "The base is made of several models, of which merging to fp8 would leave some as they are; no reader of that "
            "layout knows which: merge to bf16.",
            param="to",
        )
    names = {f"{name}.weight" for name in precision_map(model, layers, PrecisionOptions())}
    missing = sorted(name for name in names if name not in tensors)
    if missing or experts_of(layers):
        what = f"does not hold {missing[0]} by that name" if missing else "is a mixture of experts"
        raise SpecError(f"The base {what}, which merging to fp8 does not support: merge to bf16.", param="to")
    return names


def _unit(name: str, tensors: Safetensors, quantised: set[str]) -> tuple[TensorPlan, ...]:
    """The planned tensors for one tensor of the base: itself, or codes and scales."""
    shape, dtype = tensors.shape(name), tensors.dtype(name)
    if name in quantised:
        return TensorPlan(name, shape, "F8_E4M3"), TensorPlan(f"{name}_scale", (shape[0], 1), "BF16")
    return (TensorPlan(name, shape, "BF16" if dtype in FLOATS else dtype),)


def _pieces(plan: TensorPlan, tensors: Safetensors, targets: Targets, rounding: Rounding) -> Iterator[Tensor]:
    """A tensor's rows in their stored form, CHUNK_BYTES of fp32 at a time; scales come last."""
    replacement = targets.replaced.get(plan.name)
    if tensors.dtype(plan.name) not in FLOATS or replacement or not plan.shape:
        whole = targets.adapter.read(replacement) if replacement else tensors.whole(plan.name)
        yield whole.to(DTYPES[plan.dtype])
        return
    update = targets.update(plan.name)
    height = max(1, CHUNK_BYTES // (4 * math.prod(plan.shape[1:])))
    scales = []
    for start in range(0, plan.shape[0], height):
        base = tensors.rows(plan.name, start, min(start + height, plan.shape[0])).float()
        exact = update.rows(base, start, start + len(base)) if update else base
        stored, scale = to_fp8(exact) if plan.dtype == "F8_E4M3" else (exact.bfloat16(), None)
        if update:
            rounding.add(base, exact, stored.float() if scale is None else stored.float() * scale.float())
        yield stored
        if scale is not None:
            scales.append(scale)
    if scales:
        yield torch.cat(scales)


def to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [rows, cols] e4m3 and scales [rows, 1] bf16 of fp32 rows. The codes belong to the scale as stored."""
    scale = (rows.abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
    return (rows / scale.float()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def _write_config(base: Path, model: PreTrainedModel, folder: Path, quantised: set[str]) -> None:
    """The base's config, with the dtype and layout of what was written."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    if quantised:
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        config["quantization_config"] = fp8_layout([name for name in linears if f"{name}.weight" not in quantised])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def fp8_layout(ignored: list[str]) -> dict[str, Any]:
    """How compressed-tensors describes e4m3 weights with one scale a row; inputs are scaled by token where they are in FP8."""
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**fp8, "strategy": "channel", "dynamic": False},
        "input_activations": {**fp8, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def main(arguments: list[str]) -> int:
    """Merge, measure, and leave `fidelity.json` in the merged model's folder; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m workers.tasks.merge", description=__doc__)
    parser.add_argument("adapter", type=Path, help="an adapter's folder with its manifest")
    parser.add_argument("out", type=Path)
    parser.add_argument("--to", choices=("bf16", "fp8"), required=True)
    parser.add_argument("--base", type=Path, help="the base's folder; default: where the job found it")
    parser.add_argument("--max-file-gib", type=float, default=5.0)
    parser.add_argument("--samples", type=int, default=64, help="of the validation file, for the fidelity report; 0: none")
    given = parser.parse_args(arguments)
    try:
        manifest = Manifest.model_validate_json((given.adapter / MANIFEST).read_bytes())
        spec = spec_beside(given.adapter, manifest)
        base = given.base or _base_of(spec)
        check_base(manifest, base)
        rounding = merge(base, given.adapter, given.out, to=given.to, max_file_bytes=int(given.max_file_gib * GIB))
        shutil.copy(given.adapter / MANIFEST, given.out / "adapter_manifest.json")
        report = {
            "to": given.to,
            "rounding": rounding.report(),
            **measure(spec, base, given.adapter, given.out, given.samples),
        }
        (given.out / "fidelity.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except FtError as error:
        print(json.dumps({"error": error.message, "code": error.code, "param": error.param}))
        return 64
    print(json.dumps(report))
    return 0


def _base_of(spec: JobSpec) -> Path:
    """The base's folder. Raises SpecError where the adapter lies in no run directory, and tells of none."""
    if not spec.model.path:
        raise SpecError(f"Where the base {spec.model.name} lies is not known here: name its folder with --base.", param="base")
    return Path(spec.model.path)


def check_base(manifest: Manifest, base: Path) -> None:
    """Raises SpecError if `base` is not the one that the adapter was trained on."""
    there = base_of(manifest.base.name, base, {path.name: FileDigest.of(path) for path in base_files(base)})
    if there.digest != manifest.base.digest:
        theirs, ours = manifest.base.files, there.files
        changed = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        raise SpecError(f"{base} is not the base that the adapter was trained on: {', '.join(changed)} differ.", param="base")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
