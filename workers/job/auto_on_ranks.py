"""Options that are "auto" in a job, chosen by the ranks: they know their number, GPUs' memory, and
lengths of samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from ft_service.bases.description import Description
from ft_service.data.tokens.token_set import TokenSet
from ft_service.plan.auto_options import Ranks, Settled, is_settled, settle
from ft_service.plan.fitting_settings import COMPILE, COMPUTE, FITTED, value_of, with_options
from ft_service.plan.machines import Machine, host_cpu, machine_of_gpu, measured
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.rundir.events import SettledOption
from ft_service.spec import JobSpec
from workers.model.products import products


def settle_on_ranks(
    spec: JobSpec,
    device: torch.device,
    train: TokenSet,
    describe: Callable[[str], Description],
    *,
    with_images: bool = False,
) -> Settled:
    """The spec without "auto", the same on all ranks, which call this together.

    `describe`: builds a base and describes it, and is only called if anything is to be chosen.
    `with_images`: whether any sample has an image.
    Raises SpecError as `settle` does, on all.
    """
    machine = _smallest(_machine(device))
    tokens = int(train.lengths.sum())
    lengths = (
        SampleLengths(tokens, len(train), int(train.lengths.max()), with_images=with_images)
        if len(train)
        else None
    )
    world = dist.get_world_size()
    nodes = world // int(os.environ.get("LOCAL_WORLD_SIZE", world // spec.distributed.nnodes or 1))
    ranks = Ranks(world, nodes)
    if is_settled(spec, lengths, ranks):
        return Settled(spec)
    # Results depend on it: the ranks do not choose it.
    decided = with_options(spec, {COMPUTE: spec.precision.compute})
    return settle(describe(spec.model.path), decided, machine, lengths, ranks)


def settled_options(spec: JobSpec) -> dict[str, SettledOption]:
    """What was chosen for the ranks that train, by the option's dotted name."""
    options = (option for option in (*FITTED, COMPILE) if option in spec.chosen)
    return {
        option: SettledOption(value=value_of(spec, option), why=spec.chosen[option])
        for option in options
    }


def _machine(device: torch.device) -> Machine:
    if device.type != "cuda":
        return measured(host_cpu(), products())
    return machine_of_gpu(
        torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    )


def _smallest(machine: Machine) -> Machine:
    """The machine of the rank with least memory, by which all choose alike."""
    machines: list[Machine | None] = [None] * dist.get_world_size()
    dist.all_gather_object(machines, machine)
    return min(
        (other for other in machines if other is not None),
        key=lambda other: (other.memory or 0, other.name),
    )
