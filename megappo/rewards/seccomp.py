"""The system calls that code in the sandbox may not make, as a seccomp filter (classic BPF) for bubblewrap.

Namespaces hide files, network and processes, and resource limits bound what a process takes. This closes the ways
around them: namespaces of one's own (and with them mounts of any size), memory that belongs to no process, sockets that
no network namespace covers, and corners of the kernel that no program to be scored needs.
"""

from __future__ import annotations

import errno
import platform
import struct

# Numbers from Linux's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
DENIED = {
    "x86_64": {
        "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "ptrace": 101,
        "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "keyctl": 250, "add_key": 248, "request_key": 249, "memfd_create": 319, "shmget": 29, "msgget": 68,
    },
    "aarch64": {
        "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "ptrace": 117,
        "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "keyctl": 219, "add_key": 217, "request_key": 218, "memfd_create": 279, "shmget": 194, "msgget": 186,
    },
}  # fmt: skip
DENIED_EVERYWHERE = {
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "mount_setattr": 442,
    "memfd_secret": 447,
}  # fmt: skip
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198}
CLONE3 = 435
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

X32_CALLS = 0x40000000
CLONE_NEWUSER = 0x10000000
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: the network namespace covers them

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, KILL = 0x7FFF0000, 0x80000000


def seccomp_filter(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`, for `machine` or the one this runs on.

    Raises:
        KeyError: a processor whose system calls are not known here.
    """
    machine = machine or platform.machine()
    denied = [*DENIED[machine].values(), *DENIED_EVERYWHERE.values()]
    first, second, third = FAMILIES
    return b"".join(
        [
            _step(LOAD, ARCH),
            _step(EQUAL, AUDIT_ARCH[machine], then=1),
            _step(RETURN, KILL),  # 32-bit calls have other numbers
            _step(LOAD, NUMBER),
            _step(AT_LEAST, X32_CALLS, otherwise=1),
            _refuse(errno.EPERM),
            *(_step(EQUAL, number, otherwise=1) + _refuse(errno.EPERM) for number in denied),
            _step(EQUAL, CLONE3, otherwise=1),
            _refuse(errno.ENOSYS),  # its flags lie in memory, out of a filter's reach; libc falls back to clone
            _step(EQUAL, CLONE[machine], otherwise=4),
            _step(LOAD, FIRST_ARGUMENT),
            _step(ANY_BIT, CLONE_NEWUSER, otherwise=1),
            _refuse(errno.EPERM),
            _step(RETURN, ALLOW),
            _step(EQUAL, SOCKET[machine], otherwise=5),
            _step(LOAD, FIRST_ARGUMENT),
            _step(EQUAL, first, then=3),
            _step(EQUAL, second, then=2),
            _step(EQUAL, third, then=1),
            _refuse(errno.EPERM),
            _step(RETURN, ALLOW),
        ]
    )


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; `then` and `otherwise` are how many it skips where a test holds, or does not."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def _refuse(error: int) -> bytes:
    return _step(RETURN, 0x00050000 | error)
