"""Setting of glibc's allocator for ranks on the CPU: it keeps blocks that are freed, since the next
step wants them again.

By default free memory at the end of the heap is given back above 64 MiB, and each step faults it in
again. Blocks of more than 32 MiB, glibc's own limit, are still mapped one by one and given back at
once: in the heap, aligned blocks of one size that come and go leave gaps (glibc before 2.38), and
memory would grow.

Set in the process and not by its environment, which what a rank starts would inherit.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 2**30
"""Free memory at the heap's end that a rank keeps at most."""
_MAPPED_BYTES = 2**25
# of glibc's <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, up to KEPT_BYTES.

    Returns whether it does: not without glibc, and that is fine.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  another library's `mallopt`, if it has one, may mean something else
        mallopt = libc.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return (
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES) == 1
        and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES) == 1
    )
