"""Lanes: forwards of several jobs on one base, in lockstep, so that every group of weights is
gathered once for all of them.

Each lane runs the model's own forward in a greenlet. Where that calls a unit (a decoder layer, the
embedding, the last norm, the head), the lane waits; when all lanes wait, FSDP2's hooks run once
around the unit, and it computes the lanes one after the other:

    unit's call  ─▶ wait ─▶ [hooks: gather ─▶ lane 1, lane 2, … ─▶ free] ─▶ each lane goes on

Lanes share gathers and dequantised weights but no product: each one has the shape that it has when
the job trains alone, so that its bits are the same, and nothing of a lane reaches another. What a
forward leaves in objects of the process (the segments of its micro-batch, a replaced head) belongs
to its lane: it is put there while the lane runs, and taken away while it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from workers.layers.segments import CURRENT
from workers.model.multimodal import text_decoder
from workers.patches.forward import replace_forward
from workers.patches.head_forward import CAP
from workers.patches.module_call import call_itself, replace_call
from workers.patches.unchecked_config import set_unchecked
from workers.quant.frozen_linear import DenseWeights

T = TypeVar("T")
Forward = Callable[..., Any]
_Left = dict[str, Any]


@dataclass(eq=False)
class Lane:
    """One forward of one job."""

    linears: Mapping[nn.Module, Forward]
    """Linear layer of the base → the job's adapted layer in its place."""
    left: _Left = field(default_factory=dict[str, Any])
    """What its forward has left in objects of the process."""


class LaneModel:
    """A base without adapters, sharded or not, that computes several lanes at once."""

    def __init__(
        self,
        base: PreTrainedModel,
        layers: Sequence[nn.Module],
        outer: Sequence[nn.Module],
        *,
        checkpointed: bool = False,
    ) -> None:
        """`layers`: the decoder layers.

        `outer`: the other modules of FSDP2's groups: embeddings, the last norm, the head.
        `checkpointed`: whether backward computes the layers again.
        """
        self.base = base
        head = base.get_output_embeddings()
        assert isinstance(head, nn.Module)
        self._head, self._config = head, text_decoder(base).config
        self._capped = getattr(self._config, CAP, None) is not None
        self._lane: Lane | None = None
        self._calls: list[tuple[Lane, _Left]] = []
        """Lane of each call of the unit that computes now, and what the lane's forward has left
        behind until then.
        """
        for module in base.modules():
            if isinstance(module, nn.Linear) and module not in outer:
                replace_forward(module, partial(self._linear, module, module.forward))
        for unit in (*layers, *outer):
            again = checkpointed and unit in layers
            self._make_unit(
                unit, partial(self._compute, unit, unit.forward, again), bounded=unit in layers
            )
        self._make_unit(base, partial(self._compute_all, base.forward), bounded=False)
        self._head_forward = head.forward
        self._outside = self._take()

    def run(self, lanes: Sequence[Lane], forwards: Sequence[Callable[[], T]]) -> list[T]:
        """Run the forward of each lane, which calls the base.

        Called by all ranks together, with as many lanes of the same jobs.
        """
        threads = [(lane, greenlet(forward)) for lane, forward in zip(lanes, forwards, strict=True)]
        given: dict[Lane, tuple[Any, ...]] = dict.fromkeys(lanes, ())
        made: dict[Lane, T] = {}
        while len(made) < len(threads):
            waiting: dict[Forward, list[tuple[Lane, Any]]] = {}
            for lane, thread in threads:
                if lane in made:
                    continue
                reached: Any = self.resume(lane, thread, *given[lane])
                if thread.dead:
                    made[lane] = reached
                else:
                    call, arguments = reached
                    waiting.setdefault(call, []).append((lane, arguments))
            for call, calls in waiting.items():
                outputs = self.compute(call, calls)
                given.update(
                    {lane: (output,) for (lane, _), output in zip(calls, outputs, strict=True)}
                )
        return [made[lane] for lane in lanes]

    def resume(self, lane: Lane, thread: greenlet, *given: Any) -> Any:
        """Let a lane's thread go on until it ends, or waits for a call: then (call, arguments),
        which `compute` takes. `given`: the result of the call that it has waited for.
        """
        with self._entered(lane, lane.left):
            return thread.switch(*given)

    def end(self, lane: Lane, thread: greenlet, error: BaseException) -> None:
        """Raise an error in a lane's thread, where it waits."""
        with self._entered(lane, lane.left):
            thread.throw(error)

    def compute(self, call: Forward, calls: Sequence[tuple[Lane, Any]]) -> Sequence[Any]:
        """Make one call for all lanes that wait for it. Returns their results."""
        self._calls = [(lane, dict(lane.left)) for lane, _ in calls]
        try:
            return call([arguments for _, arguments in calls])
        finally:
            self._calls = []  # a job that ends next would leave its adapters here

    def backward(self, losses: Sequence[Tensor]) -> None:
        """The backward of all lanes of a `run`.

        A loss that is not a number changes the gradients of its own lane alone.
        """
        torch.stack([loss.reshape(()) for loss in losses]).sum().backward()
        DenseWeights.end()

    def wait_for_backward(self, loss: Tensor) -> None:
        """The backward of a loss: in a lane's thread together with those of the other lanes."""
        parent = getcurrent().parent
        if parent is None:
            self.backward([loss])
        else:
            parent.switch((self.backward_of_lanes, loss))

    def backward_of_lanes(self, losses: Sequence[Tensor]) -> Sequence[None]:
        """The call that `wait_for_backward` waits for."""
        self.backward(losses)
        return [None] * len(losses)

    @contextmanager
    def alone(self, lane: Lane) -> Iterator[None]:
        """While it is entered, a call of the base computes this lane."""
        with self._entered(lane, lane.left):
            yield

    @contextmanager
    def _entered(self, lane: Lane | None, left: _Left) -> Iterator[None]:
        before = self._lane
        outside = self._take()
        self._lane = lane
        if left:
            self._put(left)
        try:
            yield
        finally:
            left.update(self._take())
            self._put(outside)
            self._lane = before

    def _make_unit(self, unit: nn.Module, forward: Forward, *, bounded: bool) -> None:
        """Let a module's call wait for all lanes. `forward`: takes the arguments of every lane, in
        place of the module's own."""
        replace_forward(unit, forward)
        replace_call(
            unit, partial(self._wait, partial(_call_bounded if bounded else call_itself, unit))
        )

    def _wait(self, call: Forward, *args: Any, **kwargs: Any) -> Any:
        """In place of a unit's call."""
        parent = getcurrent().parent
        if parent is not None:
            return parent.switch((call, (args, kwargs)))
        assert self._lane is not None, "a base of an engine computes for a lane"
        self._calls = [(self._lane, self._take())]
        with self._entered(None, {**self._outside, "grad": torch.is_grad_enabled()}):
            (output,) = call([(args, kwargs)])
        return output

    def _compute_all(self, own: Forward, arguments: Sequence[Any]) -> list[Any]:
        """In place of the base's forward: that of every lane, in lockstep."""
        inner = [Lane(lane.linears, dict(left)) for lane, left in self._calls]
        return self.run(inner, [partial(own, *args, **kwargs) for args, kwargs in arguments])

    def _compute(
        self, unit: nn.Module, own: Forward, checkpointed: bool, arguments: Sequence[Any]
    ) -> list[Any]:
        """In place of a unit's forward: that of every lane."""
        outputs = []
        if len(arguments) > 1:
            DenseWeights.begin()
        for (lane, left), (args, kwargs) in zip(self._calls, arguments, strict=True):
            run = partial(self._compute_lane, unit, own, lane, left)
            outputs.append(
                checkpoint(run, *args, use_reentrant=False, **kwargs)
                if checkpointed
                else run(*args, **kwargs)
            )
        DenseWeights.end()
        return outputs

    def _compute_lane(
        self, unit: nn.Module, own: Forward, lane: Lane, left: _Left, *args: Any, **kwargs: Any
    ) -> Any:
        with self._entered(lane, dict(left)):
            replaced = vars(unit).get("forward") if unit is self._head else None
            adapted = lane.linears.get(unit, own)  # a unit may be a linear layer itself
            return (adapted if replaced in (None, self._head_forward) else replaced)(
                *args, **kwargs
            )

    def _linear(self, module: nn.Module, own: Forward, x: Tensor) -> Tensor:
        """In place of the forward of a linear layer."""
        assert self._lane is not None, "a base of an engine computes for a lane"
        return self._lane.linears.get(module, own)(x)

    def _take(self) -> _Left:
        """What is in the process's objects now: whether gradients are recorded, segments, the
        head's forward, the cap of its logits.
        """
        taken = {
            "segments": dict(vars(CURRENT)),
            "head": vars(self._head).get("forward"),
            "grad": torch.is_grad_enabled(),
        }
        return {**taken, "cap": getattr(self._config, CAP)} if self._capped else taken

    def _put(self, left: _Left) -> None:
        torch.set_grad_enabled(left["grad"])
        vars(CURRENT).update(left["segments"])
        if left["head"] is None:
            vars(self._head).pop("forward", None)
        else:
            vars(self._head)["forward"] = left["head"]
        if self._capped:
            set_unchecked(self._config, CAP, left["cap"])


def _call_bounded(unit: nn.Module, arguments: list[Any]) -> Sequence[Any]:
    """Call a unit for several lanes, whose backward begins and ends for all of them together."""
    if len(arguments) == 1:
        return call_itself(unit, arguments)
    return _through(_Begin, call_itself(unit, _through(_End, arguments)))


def _through(function: type[Function], tree: Any) -> Any:
    """The same values, with `function` between all tensors that need a gradient and what
    follows.
    """
    leaves, structure = tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if places:
        for i, leaf in zip(places, function.apply(*(leaves[i] for i in places)), strict=True):
            leaves[i] = leaf
    return tree_unflatten(leaves, structure)


class _Begin(Function):
    """Behind a unit: its backward begins when the gradients of all lanes are there."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        DenseWeights.begin()
        return grads


class _End(_Begin):
    """Before a unit: its backward is over for all lanes."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        DenseWeights.end()
        return grads
