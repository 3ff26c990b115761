"""Every kernel in Triton is compiled for the GPUs that are in use, as it is launched, without a
GPU.
"""

from __future__ import annotations

import ast
import importlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.triton_programs import run_with_triton
from workers.model.kernel_faults import KERNEL_USES
from workers.quant import fp8_products
from workers.quant.gpu_kernels import AS_WRITTEN

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib, json, sys, traceback
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compile_for_all(given):
    kernel = getattr(importlib.import_module(given["module"]), given["name"])
    first, *others = given["constants"]
    for capability in given["capabilities"]:
        for constants in (first, *others) if capability == 90 else (first,):
            for aligned in given["aligned"] if capability == 90 else given["aligned"][-1:]:
                places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
                types = {name: given["types"].get(name, "constexpr") for name in kernel.arg_names}
                whole = [["tt.divisibility", 16]]
                attrs = {(kernel.arg_names.index(name),): whole for name in aligned}
                source = ASTSource(fn=kernel, signature=types, constexprs=places, attrs=attrs)
                target = GPUTarget("cuda", capability, 32)
                asm = triton.compile(source, target=target, options=given["options"]).asm
                assert asm["cubin"]
                for instructions in given["has"].get(str(capability), given["has"].get("", [])):
                    assert any(one in asm["ptx"] for one in instructions), (capability, instructions)
                for instruction in given["has_not"].get(str(capability), given["has_not"].get("", [])):
                    assert instruction not in asm["ptx"], (capability, instruction)

faults = []
for given in json.loads(sys.argv[1]):
    try:
        compile_for_all(given)
        faults.append("")
    except Exception:
        faults.append(traceback.format_exc())
Path(sys.argv[2]).write_text(json.dumps(faults))
"""


@dataclass(frozen=True)
class Compiled:
    """A kernel as it is launched."""

    module: str
    name: str
    types: dict[str, str]
    """Argument → type; those that are not here are constants."""
    constants: tuple[dict[str, Any], ...]
    """All for GPUs of compute capability 9.0, the first for others."""
    warps: int = 4
    fuses: bool = False
    """Whether a product and a sum may be one instruction, which rounds once."""
    aligned: tuple[tuple[str, ...], ...] = ((),)
    """Arguments that are multiples of 16, likewise; the last for others."""
    capabilities: tuple[int, ...] = (80, 89, 90, 100)
    has: Any = None
    """Capability, or empty for all others → groups of instructions, one of each of which is in
    it.
    """
    has_not: Any = None
    """The same → instructions that are not in it."""


def types(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


_ROWS = types("i32", "rows", "cols", "stride")
_ROTATED = (
    *("length", "half", "angle_row"),
    *(f"{tensor}_{dim}" for tensor in ("query", "key") for dim in ("row", "head", "token")),
)
_FORMS = tuple({"form": form, "height": 1, "block": 4096} for form in range(4))
# Before 9.0, products and sums in bf16 are such instructions too, with a zero or a one.
_ROUNDS_TWICE = {capability: ["fma.rn.bf16"] for capability in ("90", "100")}
_DIVIDES = [["div.rn.f32"]]
_FP8_CAPABILITY = 10 * fp8_products.CAPABILITY[0] + fp8_products.CAPABILITY[1]
_IN_ONE_STEP = "cvt.rn.satfinite.e4m3x2.f32"
_BY_FP16 = "cvt.rn.satfinite.e4m3x2.f16x2"

KERNELS = [
    Compiled(
        "workers.layers.mask_kernel",
        "_kept",
        types("*i32", "tokens", "channels") | {"kept": "*i1"} | types("i32", "width", "lowest"),
        ({"block": 1024},),
        fuses=True,
    ),
    Compiled(
        "workers.layers.loss_kernel",
        "_cross_entropy",
        {"logits": "*bf16", "targets": "*i64", "correct": "*i1", "words": "i32"}
        | types("*fp32", "factors", "logs"),
        tuple(
            {"graded": graded, "weighted": weighted, "steps": 16, "block": 8192}
            for graded, weighted in ((True, True), (True, False), (False, False))
        ),
        warps=16,
        fuses=True,
    ),
    Compiled(
        "workers.layers.low_rank_kernel",
        "_added",
        types("*bf16", "y", "one", "two", "left", "right")
        | types("i32", "rows", "cols", "rank", "left_stride", "right_stride", "column_stride")
        | {"scale": "fp32"},
        (
            {"more": 2, "depth": 64, "height": 64, "width": 64},
            {"more": 0, "depth": 16, "height": 64, "width": 64},
        ),
        aligned=(("y", "one", "two", "left", "right", "cols", "rank", "left_stride"),),
        has={"": [["bf16"], ["mma", "tcgen05"]]},  # by tensor cores
    ),
    Compiled(
        "workers.layers.fused_kernels",
        "_normed",
        types("*bf16", "x", "weight", "y")
        | {"root": "*fp32"}
        | _ROWS
        | types("fp32", "share", "eps"),
        _FORMS,
        warps=8,
        has_not=_ROUNDS_TWICE,
    ),
    Compiled(
        "workers.layers.fused_kernels",
        "_normed_grad",
        types("*bf16", "grad", "x", "weight", "of_x") | {"root": "*fp32", "share": "fp32"} | _ROWS,
        _FORMS,
        warps=8,
        has_not=_ROUNDS_TWICE,
    ),
    Compiled(
        "workers.layers.fused_kernels",
        "_rotated",
        types("*bf16", "query", "key", "turned_query", "turned_key", "cos", "sin")
        | types("i32", *_ROTATED),
        tuple(
            {"queries": 32, "keys": 8, "back": back, "several": 8, "block": 64}
            for back in (False, True)
        ),
        has_not=_ROUNDS_TWICE,
    ),
    *(
        Compiled(
            "workers.layers.fused_kernels",
            name,
            types("*bf16", *tensors) | {"count": "i32"},
            ({"block": 1024},),
            has={"": _DIVIDES},
            has_not=_ROUNDS_TWICE,
        )
        for name, tensors in (
            ("_gated", ("gate", "up", "y")),
            ("_gated_grad", ("grad", "gate", "up", "of_gate", "of_up")),
        )
    ),
    *(
        Compiled(
            "workers.layers.expert_rows_kernels",
            name,
            types("*bf16", *tensors) | types("i32", "rows", "width"),
            ({"height": 4, "block": 1024},),
            warps=8,
            aligned=((*tensors, "width"),),
            has={"": _DIVIDES},
            has_not=_ROUNDS_TWICE,
        )
        for name, tensors in (
            ("_gated_halves", ("both", "y")),
            ("_gated_halves_grad", ("grad", "both", "of_both")),
        )
    ),
    Compiled(
        "workers.layers.expert_rows_kernels",
        "_summed",
        types("*bf16", "y", "shares", "total") | {"rows": "*i64", "width": "i32"},
        tuple({"k": 8, "scaled": scaled, "block": 1024} for scaled in (True, False)),
        aligned=(("y", "rows", "shares", "total", "width"),),
    ),
    Compiled(
        "workers.layers.expert_rows_kernels",
        "_sums_grad",
        types("*bf16", "grad", "y", "of_y")
        | types("*fp32", "shares", "of_shares")
        | {"choices": "*i64", "width": "i32"},
        ({"k": 8, "steps": 2, "block": 1024},),
        aligned=(("grad", "y", "of_y", "shares", "of_shares", "choices", "width"),),
    ),
    Compiled(
        "workers.quant.code_kernels",
        "_decoded",
        types("*fp32", "scales", "values")
        | {"codes": "*u8", "weight": "*bf16"}
        | types("i32", "rows", "width", "blocks", "cols", "in_block"),
        tuple({"paired": paired, "height": 1, "block": 1024} for paired in (True, False)),
        aligned=(("codes", "scales", "values", "weight", "width", "cols", "in_block"),),
        has_not={"": ["div.full", ".ftz"]},
    ),
    Compiled(
        "workers.quant.nf4_kernels",
        "_dequantised",
        types("*u8", "codes", "scales")
        | types("*fp32", "row_max", "values")
        | {"weight": "*bf16", "largest": "fp32"}
        | types("i32", "width", "blocks", "cols"),
        ({"block": 1024},),
        has={"": _DIVIDES},
    ),
    Compiled(
        "workers.quant.fp8_kernels",
        "_turned",
        types("*u8", "codes", "turned") | types("i32", "rows", "cols"),
        ({"tile": 64},),
        warps=32,
    ),
    *(
        Compiled(
            "workers.quant.fp8_kernels",
            "_quantised",
            {"x": "*bf16", "codes": "*fp8e4nv"}
            | types("*fp32", "factors", "scales")
            | types("i32", "rows", "width", "stride")
            | types("fp32", "tiny", "largest_code"),
            tuple(
                {"scaled": scaled, "twice": twice, "steps": steps, "block": 16384}
                for scaled, steps in ((True, 1), (False, 1), (True, 2), (False, 2))
            ),
            warps=32,
            aligned=((), ("x", "factors", "codes", "scales", "width", "stride")),
            capabilities=tuple(own for own in capabilities if own >= _FP8_CAPABILITY),
            has={"": [*_DIVIDES, [_BY_FP16 if twice else _IN_ONE_STEP]]},
            has_not={"": ["div.full", ".ftz"]},
        )
        for twice, capabilities in ((True, (80, 89)), (False, (90, 100)))
    ),
]
PARTS = {
    ("workers.quant.fp8_kernels", "_representable"),
    ("workers.quant.fp8_kernels", "_scaled"),
    ("workers.layers.fused_kernels", "_turned_heads"),
}
"""Functions that kernels call, and that are compiled with them."""


OFTEN = (80, 90)
"""The oldest GPU in use, and the one of which every variant of a kernel is compiled."""


class Faults:
    """What keeps each kernel from being compiled, or is wrong with what it becomes: found for all
    of them in one process, which has to import Triton.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._found: dict[bool, list[str]] = {}

    def of(self, kernel: Compiled, *, often: bool) -> str:
        """`often`: for the GPUs of `OFTEN`, and else for the others."""
        if often not in self._found:
            folder = self._folders.mktemp("compiled")
            given = [
                asdict(own)
                | {
                    "options": {"num_warps": own.warps} | ({} if own.fuses else AS_WRITTEN),
                    "has": own.has or {},
                    "has_not": own.has_not or {},
                    "capabilities": [one for one in own.capabilities if (one in OFTEN) == often],
                }
                for own in KERNELS
            ]
            found = folder / "faults.json"
            run_with_triton(PROGRAM, folder, json.dumps(given), str(found))
            self._found[often] = json.loads(found.read_text())
        return self._found[often][KERNELS.index(kernel)]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory)


@pytest.mark.parametrize("often", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda own: own.name)
def test_it_compiles_for_every_gpu(kernel: Compiled, often: bool, faults: Faults) -> None:
    assert not faults.of(kernel, often=often)


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(one) for one in function.decorator_list)


def test_no_kernel_is_left_out() -> None:
    found = set[tuple[str, str]]()
    checked = set[str]()
    for path in (ROOT / "workers").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if "= gpu_kernels.CheckedKernel(" in text:
            checked.add(module)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and is_kernel(node):
                found.add((module, node.name))
    assert found == {(kernel.module, kernel.name) for kernel in KERNELS} | PARTS
    assert {kernel.module for kernel in KERNELS} < {use.kernel.module for use in KERNEL_USES}
    modules = [importlib.import_module(name) for name in checked]
    assert {id(module.KERNEL) for module in modules} == {id(use.kernel) for use in KERNEL_USES}
