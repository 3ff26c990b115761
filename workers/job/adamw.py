"""AdamW on a rank's own rows of the adapters, without the host waiting for the device.

Parameters may be plain or sharded (DTensors): what is done to a number depends on that number
alone, but for the norm of all gradients. So everything works on lists of local tensors, in a few
kernels for all of them, and one all-reduce of one number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from ft_service.bases.adapter_names import MAGNITUDE
from ft_service.kernel_limits import moments_in_8_bits
from ft_service.spec import TrainingOptions
from workers.quant.dynamic8 import blocks_of, decode, encode, zero_code
from workers.quant.local_rows import local_rows


@dataclass(frozen=True)
class AdamOptions:
    """What AdamW takes besides the learning rate (Loshchilov and Hutter, 2019)."""

    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float

    @classmethod
    def of(cls, training: TrainingOptions) -> AdamOptions:
        """Those of a job."""
        return cls(
            training.weight_decay, training.adam_beta1, training.adam_beta2, training.adam_epsilon
        )


_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""Moment → whether it has a sign."""


@dataclass(frozen=True)
class Moment8:
    """A moment of a matrix in 8 bits (`workers.quant.dynamic8`), sharded as the matrix is."""

    codes: Tensor
    scales: Tensor
    signed: bool

    @classmethod
    def zeros(cls, parameter: nn.Parameter, *, signed: bool) -> Moment8:
        """That of no gradient."""
        codes = _beside(parameter, parameter.shape[1], torch.uint8)
        scales = _beside(parameter, blocks_of(parameter.shape[1]), torch.float32)
        moment = cls(codes, scales, signed)
        moment.forget()
        return moment

    def forget(self) -> None:
        local_rows(self.codes).fill_(zero_code(self.signed))
        local_rows(self.scales).zero_()

    def read(self) -> Tensor:
        """A rank's rows, fp32."""
        return decode(local_rows(self.codes), local_rows(self.scales), signed=self.signed)

    def write(self, rows: Tensor, changed: Tensor) -> None:
        """Keep a rank's rows, fp32, if `changed`, bool [] on the device."""
        found = encode(rows, signed=self.signed)
        for kept, new in zip((self.codes, self.scales), found, strict=True):
            kept = local_rows(kept)
            kept.copy_(torch.where(changed, new, kept))


def _beside(parameter: nn.Parameter, cols: int, dtype: torch.dtype) -> Tensor:
    """Zeros [rows, cols], sharded as a matrix of as many rows is."""
    own = local_rows(parameter.detach())
    zeros = torch.zeros(own.shape[0], cols, dtype=dtype, device=own.device)
    if not isinstance(parameter, DTensor):
        return zeros
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size((parameter.shape[0], cols)),
        stride=(cols, 1),
    )


class AdamW:
    """The moments of fp32 parameters, and what is done with a gradient.

    Which parameters are sharded must not change.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: AdamOptions,
        ratio_of_b: float = 1.0,
        *,
        in_8_bits: bool = False,
    ) -> None:
        """`options`: of steps that have none of their own. `ratio_of_b`: LoRA+'s, by which the
        matrices B learn faster, and DoRA's magnitudes, as PEFT has it. `in_8_bits`: whether moments
        of matrices are kept in 8 bits, by blocks within rows: of as many bits on any number of
        ranks."""
        self._parameters = dict(parameters)
        self._ratio_of_b = ratio_of_b
        self._options = options
        wide = {
            name: p
            for name, p in self._parameters.items()
            if not (in_8_bits and p.ndim == 2 and moments_in_8_bits(p.shape[1]))
        }
        self.exp_avg = {name: torch.zeros_like(p).detach() for name, p in wide.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p).detach() for name, p in wide.items()}
        self._moments8 = {
            name: {kind: Moment8.zeros(p, signed=signed) for kind, signed in _SIGNED.items()}
            for name, p in self._parameters.items()
            if name not in wide
        }
        device = next(
            (local_rows(p).device for p in self._parameters.values()), torch.device("cpu")
        )
        self.steps = torch.zeros(len(self._parameters), device=device)
        """How often each parameter was updated, fp32 on the parameters' device: what takes the
        moments' bias away.
        """

    @torch.no_grad()
    def step(
        self, learning_rate: float, max_grad_norm: float, options: AdamOptions | None = None
    ) -> Tensor:
        """Clip the gradients and update.

        Returns their global 2-norm before clipping: fp32 [], on the parameters' device.

        Called by all ranks together. Where the norm is not finite neither parameters nor moments
        change, which is decided on the device. `max_grad_norm`: 0 or less clips nothing. `options`:
        of this step; None: the optimizer's own. Gradients are overwritten.
        """
        steps = self.steps.unbind()
        rows: dict[float, list[tuple[Tensor, ...]]] = {}
        packed: list[tuple[float, Sequence[Moment8], tuple[Tensor, Tensor, Tensor]]] = []
        for i, (name, p) in enumerate(self._parameters.items()):
            if p.grad is None or local_rows(p.grad).numel() == 0:
                continue
            ratio = self._ratio_of_b if ".lora_B." in name or f".{MAGNITUDE}." in name else 1.0
            own, gradient = local_rows(p), local_rows(p.grad)
            if name in self._moments8:
                moments8 = tuple(self._moments8[name].values())
                packed.append((ratio, moments8, (own, gradient, steps[i])))
                continue
            moments = local_rows(self.exp_avg[name]), local_rows(self.exp_avg_sq[name])
            rows.setdefault(ratio, []).append((own, gradient, *moments, steps[i]))
        norm = global_norm(self._parameters.values(), self.steps.device)
        adam = options or self._options
        for ratio, alike in rows.items():
            self._update(alike, norm, learning_rate * ratio, max_grad_norm, adam)
        for ratio, moments8, (own, gradient, own_steps) in packed:  # one at a time: fp32 meanwhile
            wide = [moment.read() for moment in moments8]
            alike = [(own, gradient, *wide, own_steps)]
            self._update(alike, norm, learning_rate * ratio, max_grad_norm, adam)
            for moment, values in zip(moments8, wide, strict=True):
                moment.write(values, norm.isfinite())
        return norm

    def state(self, name: str) -> dict[str, Tensor]:
        """What is kept of a parameter's moments, by kinds that are the same on any number of
        ranks.
        """
        if name not in self._moments8:
            return {"exp_avg": self.exp_avg[name], "exp_avg_sq": self.exp_avg_sq[name]}
        found: dict[str, Tensor] = {}
        for kind, moment in self._moments8[name].items():
            found |= {f"{kind}_codes": moment.codes, f"{kind}_scales": moment.scales}
        return found

    def first_moment(self, name: str) -> Tensor:
        """A tensor that is zero until a gradient has come: the first moment, or its scales."""
        packed = self._moments8.get(name)
        return self.exp_avg[name] if packed is None else packed["exp_avg"].scales

    def forget(self) -> None:
        """Begin again: without moments, as before the first step."""
        self.steps.zero_()
        for moment in (*self.exp_avg.values(), *self.exp_avg_sq.values()):
            local_rows(moment).zero_()
        for packed in self._moments8.values():
            for moment in packed.values():
                moment.forget()

    def _update(
        self,
        rows: list[tuple[Tensor, ...]],
        norm: Tensor,
        learning_rate: float,
        max_grad_norm: float,
        options: AdamOptions,
    ) -> None:
        """`rows`: parameter, gradient, both moments and steps of each parameter that learns at this
        rate.
        """
        own, grads, exp_avg, exp_avg_sq, own_steps = (
            list(column) for column in zip(*rows, strict=True)
        )
        if max_grad_norm > 0:
            coefficient = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # `clip_grad_norm_`'s
            torch._foreach_mul_(grads, coefficient)  # pyright: ignore[reportPrivateImportUsage]
        adamw(
            own,
            grads,
            exp_avg,
            exp_avg_sq,
            [],
            own_steps,
            fused=True,
            found_inf=norm.isfinite().logical_not().float(),
            amsgrad=False,
            beta1=options.beta1,
            beta2=options.beta2,
            lr=learning_rate,
            weight_decay=options.weight_decay,
            eps=options.epsilon,
            maximize=False,
        )


def global_norm(parameters: Any, device: torch.device) -> Tensor:
    """2-norm of all gradients of plain and sharded parameters: fp32 [] on `device`, the gradients'
    own.

    Gradients of plain parameters, and those of copies of a shard, must be equal on all ranks.
    Called by all ranks together.
    """
    plain = []
    sharded = []
    meshes = []
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            meshes.append(parameter.device_mesh)
        if parameter.grad is not None and local_rows(parameter.grad).numel() > 0:
            (sharded if isinstance(parameter, DTensor) else plain).append(
                local_rows(parameter.grad)
            )
    squares = _squares(sharded, device)
    if meshes:  # whatever this rank's shards hold: the others wait for it
        dist.all_reduce(squares, group=meshes[0].get_group(meshes[0].ndim - 1))
    return (squares + _squares(plain, device)).sqrt()


def _squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).float().square().sum()
