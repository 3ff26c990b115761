"""A GPU that computes nothing: the workers' own code for CUDA on fake tensors, forward and
backward, its operators recorded.

    with fake_cuda() as device, recording() as record:
        loss = ...                                    # of `build_on(device, spec)`
        backward(loss)

Fake tensors know shape, strides, dtype and device. PyTorch refuses operators on tensors of two
devices, and for products the strides and alignments that the hardware does not take. What no build
without CUDA can do is stood in for:

* Triton's kernels are not compiled but recorded: each reads or writes every tensor that it is given
  once.
* The backward is walked here, node by node. PyTorch's own asks CUDA for streams.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
import torch._functorch.config
from functorch.compile import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from peft import PeftModel
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ft_service.spec import JobSpec
from workers.base.load import _owners
from workers.data import batches
from workers.layers import packed_attention, segments
from workers.model import build
from workers.quant import decoding, e2m1, fp8_products, frozen_linear, gpu_kernels, nf4
from workers.quant.rowwise import RowQuantized

KERNEL_MODULES = (
    "workers.layers.expert_rows_kernels",
    "workers.layers.fused_kernels",
    "workers.layers.loss_kernel",
    "workers.layers.low_rank_kernel",
    "workers.layers.mask_kernel",
    "workers.quant.code_kernels",
    "workers.quant.fp8_kernels",
    "workers.quant.nf4_kernels",
)
"""Modules that import Triton."""
IN_PLACE = ("_added",)
"""Kernels that read their first tensor and write it."""
WITHOUT_WORK = frozenset(
    "aten." + name
    for name in [
        "view",
        "t",
        "transpose",
        "unsqueeze",
        "expand",
        "slice",
        "detach",
        "alias",
        "as_strided",
        "reshape",
        "_unsafe_view",
        "select",
        "split",
        "squeeze",
        "permute",
        "unbind",
        "_reshape_alias",
        "unsafe_split",
        "split_with_sizes",
        "lift_fresh",
        "narrow",
        "is_pinned",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "sym_size",
    ]
)
"""Operators that launch nothing."""
SPARSE = frozenset("aten." + name for name in ("embedding", "gather", "scatter_", "index_select"))
"""Operators that touch as many numbers of their first tensor as there are indices."""
WRITES_ONLY = frozenset(
    "aten." + name
    for name in ("zeros", "zero_", "fill_", "full", "ones", "arange", "zeros_like", "new_zeros")
)
PRODUCTS = frozenset(
    "aten." + name for name in ("mm", "addmm", "addmm_", "bmm", "_scaled_mm", "_grouped_mm")
)


@dataclass(frozen=True)
class Operation:
    """One launch."""

    backward: bool
    name: str
    read: int
    """Bytes."""
    written: int
    flops: int
    """Of a product."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors that it takes."""
    where: str
    """Module of the workers that calls it, such as quant.nf4; empty: another package, or PyTorch's
    graph in backward.
    """

    @property
    def moved(self) -> int:
        return self.read + self.written


@dataclass
class Record:
    """The launches of a forward and a backward."""

    operations: list[Operation] = field(default_factory=list)
    backward: bool = False

    def counted(self) -> Counter[str]:
        return Counter(operation.name for operation in self.operations)

    def add(self, name: str, taken: list[Tensor], made: list[Tensor], flops: int = 0) -> None:
        """Record an operation that reads what it takes, and writes what it makes."""
        shapes = tuple(tuple(t.shape) for t in taken)
        read = sum(map(_bytes, taken))
        written = sum(map(_bytes, made))
        if name in SPARSE:
            touched = made if name != "aten.scatter_" else taken[1:]
            read = sum(map(_bytes, taken[1:])) + sum(map(_bytes, touched))
            written = sum(map(_bytes, touched))
        self.operations.append(
            Operation(self.backward, name, read, written, flops, shapes, _caller())
        )


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("workers."):
            return name.removeprefix("workers.")
        if name.startswith("torch.nn.modules"):
            return ""
        frame = frame.f_back
    return ""


def _bytes(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor: a number that is repeated along a dimension is one."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


class _Recorder(TorchDispatchMode):
    """Records operators. Those of the workers themselves are taken apart into the ones that they
    are made of.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "ft_service":
            with self:
                return OPDEFS[
                    func._name.rpartition(".")[0] if "." in func._name else func._name
                ]._init_fn(*args, **kwargs)
        made = func(*args, **kwargs)
        name = str(func).rsplit(".", 1)[0]
        if name not in WITHOUT_WORK and func.namespace != "prim":
            taken = list(
                dict.fromkeys(
                    leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
                )
            )
            if name.endswith(".copy_"):
                taken = taken[-1:]
            if name.startswith("aten.addmm") and kwargs.get("beta") == 0:
                taken = taken[1:]  # what is overwritten is not read
            if name in WRITES_ONLY:
                taken = []
            self._record.add(
                name,
                taken,
                [t for t in tree_leaves(made) if isinstance(t, Tensor)],
                _flops(name, args),
            )
        return made


def _flops(name: str, args: Any) -> int:
    """Operations of a product of two matrices, or of one with that of each group."""
    if name not in PRODUCTS:
        return 0
    matrices = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() >= 2]
    left, right = matrices[:2] if name in ("aten._scaled_mm", "aten._grouped_mm") else matrices[-2:]
    return 2 * left.numel() * right.shape[-1]


@contextmanager
def recording(record: Record | None = None) -> Iterator[Record]:
    """Record what is launched while this is entered, by Triton too inside `fake_cuda`.

    None: a new record.
    """
    record = record or Record()
    _RECORDS.append(record)
    try:
        with _Recorder(record):
            yield record
    finally:
        _RECORDS.pop()


_RECORDS: list[Record] = []


@contextmanager
def compiling(record: Record) -> Iterator[None]:
    """Let torch.compile make its graphs, forward and backward, while this is entered, and record
    their operators one by one: a GPU's compiler would fuse them.
    """

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            with recording(record):
                return graph(*args)

        return make_boxed_func(run)

    with (
        patch.object(
            torch, "compile", partial(torch.compile, backend=aot_autograd(fw_compiler=backend))
        ),
        patch.object(torch.autograd, "grad", gradients),
        torch._functorch.config.patch(donated_buffer=False),  # of an engine that is not used
        warnings.catch_warnings(),
    ):
        # By Dynamo, which hides it where it is no error.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        # else the tests of a process compile one layer together, which has a limit
        torch._dynamo.reset()
        yield


class _Kernel:
    """A kernel of Triton that is recorded when it is launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **options: Any) -> None:
        tensors = list(
            dict.fromkeys(a for a in (*args, *options.values()) if isinstance(a, Tensor))
        )
        tensors += tensors[:1] * (self._function.__name__ in IN_PLACE)
        assert len({tensor.device for tensor in tensors}) == 1, (
            f"{self._function.__name__} is given tensors of two devices"
        )
        for record in _RECORDS[-1:]:
            record.add(f"triton.{self._function.__name__}", tensors, [])


def _launch_anew(
    self: Any, grid: Any, tensors: Any, numbers: Any, *constants: Any, num_warps: int = 4
) -> None:
    """In place of a launcher, which asks tensors for their addresses: fake ones have none."""
    self._kernel[grid](*tensors, *numbers, *constants)


def _dry_triton() -> dict[str, ModuleType]:
    """Modules in place of Triton's."""
    triton: Any = ModuleType("triton")
    language: Any = ModuleType("triton.language")
    language.constexpr = int
    triton.language = language
    triton.jit = lambda function=None, **_: _Kernel if function is None else _Kernel(function)
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    return {"triton": triton, "triton.language": language}


@contextmanager
def _in_place_of_modules(others: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Put modules in place of those of these names; None: to be imported anew."""
    before = {name: sys.modules.pop(name, None) for name in others}
    sys.modules.update({name: module for name, module in others.items() if module is not None})
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@contextmanager
def _device_guard() -> Iterator[None]:
    """What PyTorch asks before each operator on a GPU: which device and stream is current.

    Builds without CUDA have nobody to ask, and here get the processor's answer. Builds with it have
    their own.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    # By c10::DeviceType.
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[1]
    guards[1] = before or guards[0]
    try:
        yield
    finally:
        guards[1] = before


@contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[torch.device]:
    """While it is entered, tensors are fake, and the device that is given is a GPU of this compute
    capability.
    """
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_device_guard())
        enter(_in_place_of_modules(_dry_triton() | dict.fromkeys(KERNEL_MODULES)))
        enter(patch.object(torch.cuda, "get_device_capability", lambda device=None: capability))
        enter(
            patch.object(
                torch.cuda, "get_device_name", lambda device=None: "a GPU that computes nothing"
            )
        )
        enter(
            patch.object(
                batches, "_moved", lambda values, device: torch.from_numpy(values).to(device)
            )
        )
        enter(patch.object(segments, "_has_kernel", lambda device: True))
        enter(patch.object(gpu_kernels.KernelLauncher, "__call__", _launch_anew))
        enter(
            patch.object(
                gpu_kernels,
                "checked",
                lambda module, compare, device: (importlib.import_module(module), None),
            )
        )
        tables = nf4.values, decoding.e4m3_values, e2m1._values
        for cached in (*tables, fp8_products.ones, packed_attention.no_dropout):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        # By no mode but this one.
        enter(patch.object(frozen_linear, "watched", torch.compiler.is_compiling))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        yield torch.device("cuda", 0)


def build_on(device: torch.device, spec: JobSpec) -> PeftModel:
    """A job's model on the device, uninitialised, whose layers compute as they do there.

    Inside `fake_cuda`.
    """
    chosen = build.choose_arithmetic
    with (
        unset_fake_temporarily(),
        patch.object(build, "choose_arithmetic", lambda base, spec, _: chosen(base, spec, device)),
    ):
        model = build.build(spec, torch.device("cpu")).peft_model  # buffers have values
    _place(model, device)
    return model.train()


def _place(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    for _, parameter, places in _owners(model):
        face = parameter.data
        if isinstance(face, RowQuantized):
            own: Tensor = type(face).empty(face.shape, torch.bfloat16, device)
        else:
            own = torch.empty(
                face.shape,
                dtype=torch.float32 if parameter.requires_grad else torch.bfloat16,
                device=device,
            )
        placed = nn.Parameter(own, requires_grad=parameter.requires_grad)
        for module, name in places:
            module._parameters[name] = placed


def backward(loss: Tensor) -> dict[Tensor, Tensor]:
    """The gradients of all leaves of a scalar."""
    assert loss.grad_fn is not None
    found = _walked({loss.grad_fn: {0: torch.ones_like(loss)}})
    return {node.variable: grads[0] for node, grads in found.items() if hasattr(node, "variable")}


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor], **_: Any
) -> tuple[Tensor | None, ...]:
    """Return what torch.autograd.grad does, without its engine."""
    given: dict[Any, dict[int, Tensor]] = {}
    for output, grad in zip(outputs, grad_outputs, strict=True):
        edge = get_gradient_edge(output)
        given.setdefault(edge.node, {})[edge.output_nr] = grad
    edges = [get_gradient_edge(own) for own in inputs]
    found = _walked(given, {edge.node for edge in edges})
    return tuple(found.get(edge.node, {}).get(edge.output_nr) for edge in edges)


@torch.no_grad()
def _walked(
    given: dict[Any, dict[int, Tensor]], last: Collection[Any] = ()
) -> dict[Any, dict[int, Tensor]]:
    """The gradients that come to each node of a graph, by output of its forward, from those at some
    of them: what PyTorch's own engine adds up and calls, in an order that it could take. `last`:
    nodes that are not called.
    """
    waiting: Counter[Any] = Counter()
    seen = set(given)
    stack = list(given)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                waiting[following] += 1
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    ready: list[Any] = [node for node in given if not waiting[node]]
    while ready:
        node = ready.pop()
        grads = given.get(node, {})
        if hasattr(node, "variable") or node in last:
            continue
        made = _called(node, grads) if grads else [None] * len(node.next_functions)
        for (following, place), grad in zip(node.next_functions, made, strict=True):
            if following is None:
                continue
            if grad is not None:
                own = given.setdefault(following, {})
                own[place] = own[place] + grad if place in own else grad
            waiting[following] -= 1
            if not waiting[following]:
                ready.append(following)
    return given


def _called(node: Any, grads: dict[int, Tensor]) -> list[Tensor | None]:
    """The gradients that a node gives to those that follow. `grads`: by output of its forward."""
    own = [grads.get(place) for place in range(len(node._input_metadata))]
    if (
        type(node).__name__ == "SiluBackward0"
    ):  # one kernel on CUDA, which builds without it take apart
        for record in _RECORDS[-1:]:
            record.add("aten.silu_backward", [grads[0], node._saved_self], [node._saved_self])
        return [torch.empty_like(node._saved_self)]
    if not hasattr(node, "apply"):  # one of PyTorch
        made: Any = node(*own)
        return list(made) if isinstance(made, tuple) else [made]
    # A Python function's, for all of its arguments, also such as are no tensors and have no node.
    made = node.apply(*own)
    made = made if isinstance(made, tuple) else (made,)
    needed = node.needs_input_grad
    assert not any(grad is not None for grad in made[len(needed) :])
    wanted = iter([grad for grad, is_needed in zip(made, needed, strict=False) if is_needed])
    return [None if following is None else next(wanted) for following, _ in node.next_functions]
