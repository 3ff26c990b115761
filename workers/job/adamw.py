"""AdamW on a rank's own rows of the adapters, without the host waiting for the device.

Parameters may be plain or sharded (DTensors): what is done to a number depends on that number
alone, but for the norm of all gradients. So everything works on lists of local tensors, in a few
kernels for all of them, and one all-reduce of one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from ft_service.bases.adapter_names import MAGNITUDE
from ft_service.spec import TrainingOptions
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


class AdamW:
    """The moments of fp32 parameters, and what is done with a gradient.

    Which parameters are sharded must not change.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], options: AdamOptions, ratio_of_b: float = 1.0
    ) -> None:
        """`options`: of steps that have none of their own. `ratio_of_b`: LoRA+'s, by which the
        matrices B learn faster, and DoRA's magnitudes, as PEFT has it."""
        self._parameters = dict(parameters)
        self._ratio_of_b = ratio_of_b
        self._options = options
        self.exp_avg = {name: torch.zeros_like(p).detach() for name, p in self._parameters.items()}
        self.exp_avg_sq = {
            name: torch.zeros_like(p).detach() for name, p in self._parameters.items()
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
        for i, (name, p) in enumerate(self._parameters.items()):
            if p.grad is not None and local_rows(p.grad).numel() > 0:
                moments = local_rows(self.exp_avg[name]), local_rows(self.exp_avg_sq[name])
                ratio = self._ratio_of_b if ".lora_B." in name or f".{MAGNITUDE}." in name else 1.0
                rows.setdefault(ratio, []).append(
                    (local_rows(p), local_rows(p.grad), *moments, steps[i])
                )
        norm = global_norm(self._parameters.values(), self.steps.device)
        for ratio, alike in rows.items():
            self._update(
                alike, norm, learning_rate * ratio, max_grad_norm, options or self._options
            )
        return norm

    def forget(self) -> None:
        """Begin again: without moments, as before the first step."""
        self.steps.zero_()
        for name in self._parameters:
            local_rows(self.exp_avg[name]).zero_()
            local_rows(self.exp_avg_sq[name]).zero_()

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
