"""What containers and hardened kernels forbid, made true for the process that asks and all that it starts.

    forbid_calls()         `process_vm_readv` and `process_vm_writev` are EPERM, by a seccomp filter: containers with an old profile
    forbid_tracing()       not even root may look into processes that do not want it, which `hide()` says: users of a strict Yama

Neither can be undone.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_NUMBERS = {"x86_64": (310, 311), "aarch64": (270, 271)}
"""Of the two calls."""
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CAP_SYS_PTRACE = 19
_CAPABILITIES_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def forbid_calls() -> None:
    """See the head of this file."""
    numbers = _NUMBERS[platform.machine()]
    code = [(_LOAD, 0, 0, 0)]
    code += [(_JUMP_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program := _Program(len(code), ctypes.addressof(packed))))
    assert program.length == len(code)


def forbid_tracing() -> None:
    """See the head of this file; nothing to do for who is not root."""
    head = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
    sets = ctypes.create_string_buffer(24)
    assert _libc.capget(head, sets) == 0
    words = list(struct.unpack("6I", sets))
    if words[0] & 1 << _CAP_SYS_PTRACE:
        _prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE)
        words[:3] = [word & ~(1 << _CAP_SYS_PTRACE) for word in words[:3]]
        assert _libc.capset(head, struct.pack("6I", *words)) == 0


def hide() -> None:
    """Let nobody look into this process but who may look into all."""
    _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, first: int, second: int = 0) -> None:
    if _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(first), ctypes.c_ulong(second), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
