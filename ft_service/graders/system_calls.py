"""The system calls that a python grader may make, as a filter for the kernel (seccomp), made by
libseccomp.

An allow list: what Python needs to start, to read its libraries, to compute, and to answer. Not in
it are processes and threads, sockets, files in memory, limits, signals to others, namespaces,
mounts, and all that is added to kernels later.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

_ALLOWED = (
    *(
        "read",
        "readv",
        "pread64",
        "write",
        "writev",
        "lseek",
        "close",
        "close_range",
        "dup",
        "dup2",
        "dup3",
        "fcntl",
        "pipe2",
    ),
    *(
        "open",
        "openat",
        "stat",
        "fstat",
        "lstat",
        "newfstatat",
        "statx",
        "access",
        "faccessat",
        "faccessat2",
        "readlink",
    ),
    *("readlinkat", "getdents64", "getcwd", "chdir", "fadvise64", "statfs", "fstatfs", "umask"),
    *(
        "poll",
        "ppoll",
        "select",
        "pselect6",
        "epoll_create1",
        "epoll_ctl",
        "epoll_wait",
        "epoll_pwait",
    ),
    *("mmap", "munmap", "mprotect", "mremap", "madvise", "brk", "futex", "getrandom"),
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "restart_syscall", "tgkill"),
    *(
        "clock_gettime",
        "clock_getres",
        "gettimeofday",
        "time",
        "nanosleep",
        "clock_nanosleep",
        "times",
        "getrusage",
    ),
    *(
        "getpid",
        "gettid",
        "getppid",
        "getuid",
        "geteuid",
        "getgid",
        "getegid",
        "getpgrp",
        "getpgid",
        "getsid",
        "getgroups",
    ),
    *("getrlimit", "prlimit64", "sched_yield", "sched_getaffinity", "uname", "sysinfo", "getcpu"),
    *(
        "set_tid_address",
        "set_robust_list",
        "rseq",
        "arch_prctl",
        "execve",
        "exit",
        "exit_group",
        "wait4",
    ),
)
"""bubblewrap itself makes the last two, and execve, under the filter. prlimit64 raises no limit
without a capability.
"""

_LIBRARY = "libseccomp.so.2"
_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
"""SCMP_ACT_ALLOW, and SCMP_ACT_ERRNO without its number, of seccomp.h."""


@cache
def filter_program() -> bytes:
    """Return the filter for this machine's processor, which refuses all other calls with EPERM.

    Raises OSError without libseccomp.
    """
    library = ctypes.CDLL(_LIBRARY, use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    made = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ERROR | errno.EPERM)))
    if not made:
        raise OSError(errno.EINVAL, f"{_LIBRARY} makes no filter")
    try:
        # Python asks every stream whether it is a terminal.
        _add(library, made, _ERROR | errno.ENOTTY, "ioctl")
        for name in _ALLOWED:
            _add(library, made, _ALLOW, name)
        return _exported(library, made)
    finally:
        library.seccomp_release(made)


def _add(library: ctypes.CDLL, made: ctypes.c_void_p, action: int, name: str) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number < 0:  # another processor's, or unknown to this version of the library
        return
    if code := library.seccomp_rule_add_array(made, ctypes.c_uint32(action), number, 0, None):
        raise OSError(-code, f"{_LIBRARY} takes no rule for {name}")


def _exported(library: ctypes.CDLL, made: ctypes.c_void_p) -> bytes:
    descriptor = os.memfd_create("filter")
    try:
        if code := library.seccomp_export_bpf(made, descriptor):
            raise OSError(-code, f"{_LIBRARY} writes no filter")
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)
