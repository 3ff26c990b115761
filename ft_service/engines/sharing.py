"""Choice of the jobs that share an engine, and of those that share one again after it was lost.

Pure.

A lost engine says nothing about which of its jobs ended it. Its jobs return in two halves, each a
*fault group* that shares engines only within itself, so that the guilty one soon runs alone and
fails with its own reason: of N jobs one that ends every engine ends at most log2(N) of them, and
then its own attempts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from ft_service.jobs.states import ALONE
from ft_service.plan.fitting_settings import COMPILE, CONTEXT, FITTED, RATE, is_open
from ft_service.rundir.engine import SeatSize
from ft_service.spec import JobSpec
from ft_service.spec.mesh import mesh_shape
from ft_service.spec.options import FOR_LONG_SAMPLES

WORTH_GAIN = 1.15
"""Least gain of a job that shares (`SeatSize.gain`): it also waits for the validation and the last
writes of the others.
"""
_SHAPE = {
    *("nnodes", "max_nnodes", "nproc_per_node", "max_nproc_per_node"),
    *("replicate", "context_parallel"),
}


def share_key(
    spec: JobSpec, seat: SeatSize | None = None, files: str = "", *, shares_adapters: bool = True
) -> str | None:
    """Return the key of what all jobs of an engine have in common, with the same project: base,
    precision, ranks and how these hold the base. None: the job runs alone. `seat`: as planned;
    None: not planned. `files`: state of the base's files, so that no job is trained on a base that
    was replaced since. `shares_adapters`: False: an engine's ranks do not see the adapters that
    jobs continue from.

    Alone run jobs with `engine: off`, on several hosts or on a number of ranks that may change, and
    those that do something to the base itself or its groups which an engine does not: NEFTune,
    adapters on stacks of experts, DoRA, modules that are trained whole, weights that are rounded
    with their adapter (precision.served_as), compiled layers, other groups than decoder layers,
    weights that stay gathered, are gathered ahead or are offloaded, layers that are computed by
    tiles, samples that ranks share, and a teacher beside the base or a student whose answers are
    sampled. So do jobs whose ranks still choose what is "auto", that
    gain less than WORTH_GAIN, or whose seat has no room beside the base. The gain does not matter
    to a job whose client runs the training loop: it would hold its ranks while it waits for its
    client.
    """
    if seat is not None and not _is_worth(seat, by_gain=spec.training_data is not None):
        return None
    options = spec.distributed
    if spec.parent is not None and not shares_adapters:
        return None
    if (
        spec.engine == "off"
        or spec.training.neftune_noise_alpha is not None
        or spec.lora.target_parameters
        or spec.lora.use_dora
        or spec.lora.modules_to_save
        or spec.precision.served_as is not None
        or spec.teacher is not None
        or spec.sampled_for == "teacher"
    ):
        return None
    if (
        options.nnodes > 1
        or (options.max_nnodes or 1) > 1
        or options.max_nproc_per_node not in (None, options.nproc_per_node)
    ):
        return None
    if (
        options.wrap != "layers"
        or options.keep_unsharded
        or options.prefetch is not None
        or options.offload
        or options.ranks_per_sample > 1
        or options.activation_checkpointing in FOR_LONG_SAMPLES
    ):
        return None
    if options_left_open(spec) or options.compile:
        return None
    common = {
        "model": spec.model.model_dump(mode="json"),
        "files": files,
        "precision": spec.precision.model_dump(mode="json"),
        "distributed": options.model_dump(mode="json", exclude=_SHAPE),
        "ranks": spec.world_size,
        "copies": mesh_shape(options.replicate, spec.world_size)[0],
        # An engine finds the features of a picture by the picture alone.
        **(
            {"pixels": bounds}
            if any(bounds := (spec.data.min_pixels, spec.data.max_pixels))
            else {}
        ),
    }
    return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()


def options_left_open(spec: JobSpec) -> list[str]:
    """Return the options (dotted) that ranks still choose: a job with one has no share_key.

    Ranks of an engine share no samples: "auto" leaves a job stored before that option as it was.
    """
    return [
        option for option in (*FITTED, COMPILE, RATE) if option != CONTEXT and is_open(spec, option)
    ]


def _is_worth(seat: SeatSize, *, by_gain: bool) -> bool:
    has_room = seat.room is None or seat.held + seat.batch <= seat.room
    return has_room and (not by_gain or seat.gain is None or seat.gain >= WORTH_GAIN)


def fault_groups(engine_id: str, job_ids: Sequence[str]) -> dict[str, str]:
    """Return the fault group of each job of a lost engine: one of two halves, or ALONE where a half
    is a single job.
    """
    ordered = sorted(job_ids)
    middle = (len(ordered) + 1) // 2
    groups: dict[str, str] = {}
    for number, half in enumerate((ordered[:middle], ordered[middle:])):
        groups |= dict.fromkeys(half, ALONE if len(half) == 1 else f"{engine_id}/{number}")
    return groups
