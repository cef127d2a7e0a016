"""Mounting and unmounting FUSE file systems on Linux, with our own rights or by way of `fusermount3`.

Rules of this file:
    1. Whether something is mounted is read from the kernel's table of mounts. A mount is never looked into from this process: one
       whose server hangs would hold on to whoever looks.
    2. With CAP_SYS_ADMIN we mount ourselves; without, or where that is refused, the set-uid helper of the fuse3 package does.
    3. All mounts are read-only, without devices and set-uid programs.

Who may use a mount: with our own rights everybody, as the modes of its files say (`default_permissions`); by way of the helper
the user who has mounted, who may read everything in it, and nobody else, root included.

Read next: `fuse_server.py`, which serves what is mounted.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import re
import shutil
import socket
import subprocess
from functools import lru_cache
from typing import Literal, NamedTuple

from monarch._base.errors import explain
from monarch._mounts.fuse_device import DEVICE

Audience = Literal["auto", "owner", "everybody"]
Status = Literal["ok", "not_mounted", "busy", "error"]

_HELPERS = ("fusermount3", "fusermount")
_HELPER_S = 20.0
_PROBE_S = 2.0
_CONF = "/etc/fuse.conf"
_CAP_SYS_ADMIN = 21
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_ESCAPE = re.compile(r"\\([0-7]{3})")
_STALE = os.strerror(errno.ENOTCONN)


class Mounted(NamedTuple):
    """A line of the kernel's table of mounts."""

    path: str
    kind: str
    """Type of the file system, such as `fuse.monarch`."""
    source: str
    device: str
    """Its number as the kernel writes it, such as "0:42"."""


def mount(path: str, *, fsname: str, subtype: str = "monarch", audience: Audience = "auto") -> int:
    """Mount a FUSE file system that nobody serves yet; the descriptor to serve it at.

    Whoever uses the mount waits until a `FuseServer` has been started. It lies over what is at `path`, a mount too.

    Args:
        path: an existing directory, absolute.
        fsname: what people see as the mount's source.
        subtype: what people see behind `fuse.` as its type.
        audience: who may use it: "owner", the user who mounts, whatever the modes of its files; "everybody", as far as the modes say
            (other users than root: only where `user_allow_other` is in /etc/fuse.conf); "auto": everybody for root, else owner.

    Raises:
        RuntimeError: `path` is relative or no directory, FUSE is not available, or the kernel or the helper refuses; the text says which.
    """
    if not os.path.isabs(path):
        raise RuntimeError(explain(f"mount_point must be an absolute path, not {path!r}", next="use os.path.abspath(...)"))
    _check_directory(path)
    problem = fuse_problem()
    if problem:
        raise RuntimeError(f"fuse mount failed: {problem}")
    if _may_mount():
        fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        refusal = _mount_ourselves(fd, path, fsname, subtype, audience)
        if not refusal:
            return fd
        os.close(fd)
        if refusal not in (errno.EPERM, errno.EACCES) or _helper() is None:
            raise _refused(path, os.strerror(refusal))
    return _mount_by_helper(path, fsname, subtype, audience)


def _check_directory(path: str) -> None:
    if is_mounted(path):
        return  # looking at it might not return
    if not os.path.isdir(path):
        what = "is not a directory" if os.path.exists(path) else "does not exist"
        raise RuntimeError(explain(f"fuse mount failed: {path!r} {what}", next="make the directory first"))


def _refused(path: str, detail: str) -> RuntimeError:
    next = "mount at a directory of your own; in a container: allow mounts (privileged, or CAP_SYS_ADMIN and no profile against mount)"
    return RuntimeError(explain(f"fuse mount failed: {path!r} was refused", next=next, detail=detail))


def _mount_ourselves(fd: int, path: str, fsname: str, subtype: str, audience: Audience) -> int:
    options = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
    if audience != "owner":
        options += ",allow_other,default_permissions"
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    arguments = (os.fsencode(fsname), os.fsencode(path), os.fsencode(f"fuse.{subtype}"))
    return 0 if _libc().mount(*arguments, ctypes.c_ulong(flags), options.encode()) == 0 else ctypes.get_errno()


def _mount_by_helper(path: str, fsname: str, subtype: str, audience: Audience) -> int:
    helper = _helper()
    if helper is None:
        raise RuntimeError(f"fuse mount failed: {_no_helper()}")
    if audience == "everybody" and os.geteuid() != 0 and not _others_allowed():
        next = f"write user_allow_other into {_CONF}, or mount with audience='owner'"
        raise RuntimeError(explain(f"fuse mount failed: users other than you may not use {path!r}", where=_CONF, next=next))
    options = ["ro", "nosuid", "nodev", f"fsname={_escaped(fsname)}", f"subtype={_escaped(subtype)}"]
    if audience == "everybody" or (audience == "auto" and os.geteuid() == 0):
        options += ["allow_other", "default_permissions"]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        environment = {**os.environ, "_FUSE_COMMFD": str(theirs.fileno()), "LC_ALL": "C"}
        command = [helper, "-o", ",".join(options), "--", path]
        done = _run(command, pass_fds=(theirs.fileno(),), env=environment)
        if done.returncode != 0:
            raise _refused(path, done.stderr.strip() or f"{helper} ended with status {done.returncode}")
        return _received_fd(ours, path)


def _received_fd(sock: socket.socket, path: str) -> int:
    sock.settimeout(_HELPER_S)
    size = array.array("i").itemsize
    _, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(size))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fd = array.array("i", data[:size])[0]
            os.set_inheritable(fd, False)
            return fd
    raise _refused(path, "the helper sent no descriptor")


def _escaped(option: str) -> str:
    return option.replace("\\", "\\\\").replace(",", "\\,")


def unmount(path: str, *, lazy: bool = False) -> tuple[Status, str]:
    """End the mount at `path`, the topmost if there are several.

    Args:
        lazy: take it out of the tree at once; what is open there stays usable until it is closed.

    Returns:
        ("ok", ""), ("not_mounted", ""), ("busy", detail): something is open there, ("error", detail).
    """
    if not is_mounted(path):
        return "not_mounted", ""
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    where = _resolved(path)
    if _libc().umount2(os.fsencode(where), flags) == 0:
        return "ok", ""
    refusal = ctypes.get_errno()
    if refusal == errno.EPERM and _helper() is not None:
        return _unmount_by_helper(where, lazy=lazy)
    if refusal == errno.EINVAL and not is_mounted(path):
        return "not_mounted", ""
    return "busy" if refusal == errno.EBUSY else "error", os.strerror(refusal)


def _unmount_by_helper(path: str, *, lazy: bool) -> tuple[Status, str]:
    command = [_helper() or _HELPERS[0], "-u", *(["-z"] if lazy else []), "--", path]
    try:
        done = _run(command, env={**os.environ, "LC_ALL": "C"})
    except RuntimeError as exc:
        return "error", str(exc)
    detail = done.stderr.strip()
    if done.returncode == 0:
        return "ok", ""
    if not is_mounted(path):
        return "not_mounted", ""
    return "busy" if "busy" in detail.lower() else "error", detail


def is_mounted(path: str) -> bool:
    """Whether something is mounted at `path`. Never waits for a mount, however dead."""
    return mount_at(path) is not None


def mount_at(path: str) -> Mounted | None:
    """What is mounted at `path`, the topmost if there are several; None: nothing. Never waits for that mount."""
    where = _resolved(path)
    return next((found for found in reversed(mounts()) if found.path == where), None)


def mounts() -> list[Mounted]:
    """What this process sees mounted, the oldest first; [] where there is no /proc."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            lines = os.fsdecode(file.read()).split("\n")
    except OSError:
        return []
    return [found for line in lines if (found := parse_mount(line)) is not None]


def parse_mount(line: str) -> Mounted | None:
    """One line of `/proc/self/mountinfo`; None: it is none."""
    head, separator, tail = line.partition(" - ")
    fields, kinds = head.split(" "), tail.split(" ")
    if not separator or len(fields) < 6 or len(kinds) < 2:
        return None
    return Mounted(_unescaped(fields[4]), kinds[0], _unescaped(kinds[1]), fields[2])


def _unescaped(text: str) -> str:
    """The kernel writes white space and backslashes as three octal digits, and nothing else."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _resolved(path: str) -> str:
    """`path` without links in its parent; its last part is not looked at."""
    parent, name = os.path.split(os.path.normpath(os.path.abspath(path)))
    return os.path.join(os.path.realpath(parent), name)


def is_stale(path: str) -> bool:
    """Whether a FUSE file system is mounted at `path` whose server is gone (ENOTCONN).

    Cost: a process that asks the kernel, 2 ms; one that gets no answer within 2 s is left to itself, and the mount is taken for alive.
    """
    found = mount_at(path)
    if found is None or not found.kind.startswith("fuse"):
        return False
    # A child asks: if the server is alive but hangs, whoever asks hangs with it, and cannot be killed.
    command = ["stat", "-f", "-c", "%T", "--", found.path]
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"}
        )
    except OSError:
        return False
    with child.stderr or open(os.devnull, "rb") as stderr:
        try:
            child.wait(_PROBE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return False
        return child.returncode != 0 and _STALE in os.fsdecode(stderr.read())


def set_readahead(path: str, num_bytes: int) -> bool:
    """Let the kernel ask the mount at `path` for up to `num_bytes` ahead of a reader, in requests of up to 1 MiB; False: it may not.

    The kernel's own 128 KiB are too few where an answer takes a network's round trip. Needs root; call it when the server has started.
    """
    found = mount_at(path)
    if found is None or not found.kind.startswith("fuse"):
        return False
    try:
        with open(f"/sys/class/bdi/{found.device}/read_ahead_kb", "w", encoding="ascii") as file:
            file.write(str(num_bytes >> 10))
    except OSError:
        return False
    return True


def prepare_mount_point(path: str) -> None:
    """Make the directory `path` to mount at, and take away FUSE mounts there whose server is gone.

    Raises:
        OSError: it can't be made.
        RuntimeError: what a dead server has left there can't be unmounted.
    """
    while is_stale(path):
        status, detail = unmount(path, lazy=True)
        if status not in ("ok", "not_mounted"):
            next = f"as root: umount -l {path}"
            raise RuntimeError(explain(f"the mount that a dead server has left at {path!r} can't be removed", next=next, detail=detail))
    if not is_mounted(path):
        try:
            os.makedirs(path, exist_ok=True)
        except FileExistsError:
            what = f"{path!r} is no directory, so nothing can be mounted there"
            raise FileExistsError(errno.EEXIST, explain(what, next="pass another mount point")) from None


def fuse_problem() -> str:
    """Why there can be no FUSE mount here, and what to do; "" when there can."""
    if not os.path.exists("/proc/self/mountinfo"):
        return explain("FUSE needs Linux with /proc mounted", next="run on Linux")
    if not os.path.exists(DEVICE):
        return explain(f"there is no {DEVICE}", next="load the kernel module (modprobe fuse); in a container: --device /dev/fuse")
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        next = f"in a container: --device {DEVICE}" if os.geteuid() == 0 else f"as root: chmod 666 {DEVICE}"
        return explain(f"{DEVICE} can't be opened: {exc.strerror}", next=next)
    return "" if _may_mount() or _helper() is not None else _no_helper()


def _no_helper() -> str:
    return explain("neither the right to mount (CAP_SYS_ADMIN) nor fusermount3 is here", next="install the package fuse3")


def _helper() -> str | None:
    return next((found for name in _HELPERS if (found := shutil.which(name))), None)


def _may_mount() -> bool:
    """We have CAP_SYS_ADMIN, in whatever user namespace."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            match = re.search(r"^CapEff:\s*([0-9a-f]+)", file.read(), re.MULTILINE)
    except OSError:
        return False
    return match is not None and bool(int(match[1], 16) >> _CAP_SYS_ADMIN & 1)


def _others_allowed() -> bool:
    try:
        with open(_CONF, encoding="utf-8", errors="replace") as file:
            return any(line.strip() == "user_allow_other" for line in file)
    except OSError:
        return False


def _run(command: list[str], *, env: dict[str, str], pass_fds: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    none = subprocess.DEVNULL
    try:
        return subprocess.run(
            command, stdin=none, capture_output=True, text=True, errors="replace", env=env, pass_fds=pass_fds, timeout=_HELPER_S
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise RuntimeError(explain(f"fuse mount failed: {command[0]} could not be run", detail=str(exc))) from exc


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """What processes have in common that see the same mounts."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return ""


def is_root_of_machine() -> bool:
    """Whether this process is root, and not only inside of a user namespace: the kernel reads backing files for no other."""
    if os.geteuid() != 0:
        return False
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() == ["0", "0", str((1 << 32) - 1)]
    except OSError:
        return True
