"""What one rank has room for: the longest sample that need not be shared
(distributed.context_parallel), and how many ranks a longer one takes.
"""

from __future__ import annotations

from bisect import bisect_right

from ft_service.bases.description import Description
from ft_service.plan.auto_options import with_format_open
from ft_service.plan.context_parallel import why_whole
from ft_service.plan.fitting_settings import CONTEXT, best_setting, with_options
from ft_service.plan.machines import Machine, usable_bytes
from ft_service.plan.sample_lengths import SampleLengths
from ft_service.spec import JobSpec

RANKS_OF_A_HOST = (2, 4, 8, 16)
"""Numbers of ranks that are tried for a sample."""
PARTS = 1000
"""Parts of training.max_length, in whole numbers of which it is said what has room."""


def one_rank_tokens(base: Description, spec: JobSpec, machine: Machine) -> int | None:
    """Tokens of the longest sample that a rank of the job has room for by itself, in any setting
    that the job may take; 0: not even the shortest has. None: any of training.max_length tokens
    has, or the machine's memory is not known.

    Raises SpecError as `best_setting` does.
    """
    alone = with_options(with_format_open(spec, machine), {CONTEXT: 1})
    if usable_bytes(machine, alone) is None:
        return None

    def fits(tokens: int) -> bool:
        return best_setting(base, alone, machine, _only(tokens))[1]

    most = spec.training.max_length
    if fits(most):
        return None
    step = max(1, most // PARTS)
    tried = range(step, most, step)
    return step * bisect_right(tried, False, key=lambda tokens: not fits(tokens))


def ranks_for(base: Description, spec: JobSpec, machine: Machine, tokens: int) -> int | None:
    """The fewest ranks of a host that have room for a sample of so many tokens together; None: no
    number that is tried has, or ranks cannot share the job's samples.

    The machine's memory must be known. Raises SpecError as `best_setting` does.
    """
    lengths = _only(min(tokens, spec.training.max_length))
    if why_whole(base, spec, lengths) is not None:
        return None
    for ranks in RANKS_OF_A_HOST:
        options = {"distributed.nproc_per_node": ranks, CONTEXT: ranks}
        shared = with_options(with_format_open(spec, machine), options)
        if best_setting(base, shared, machine, lengths)[1]:
            return ranks
    return None


def _only(tokens: int) -> SampleLengths:
    """The lengths of data of one sample."""
    return SampleLengths(tokens, 1, tokens)
