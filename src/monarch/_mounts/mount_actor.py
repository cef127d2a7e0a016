"""One host's end of a pushed directory, as an actor in a process of its own: the mount, its bytes, and who gets them from here.

Read next: `pushed.py` and `store.py` for what is mounted, `delivery.py` for where the bytes come from.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Collection
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import msgspec

from monarch._base.errors import explain
from monarch._base.rows import before
from monarch._mounts import mounting, notes
from monarch._mounts.delivery import Delivery, DeliveryStatistics, Piece, stall_s
from monarch._mounts.fuse_server import FuseServer
from monarch._mounts.hashing import Digests
from monarch._mounts.index import BIG_FILE_THRESHOLD
from monarch._mounts.mount_users import users_of
from monarch._mounts.pushed import PushedFileSystem
from monarch._mounts.ranges import Span
from monarch._mounts.snapshot import Snapshot
from monarch._mounts.store import Store, StoreStatistics
from monarch.actor import Actor, ActorMesh, Port, context, endpoint

_logger = logging.getLogger("monarch.mounts")
SUBDIR = "$SUBDIR"
Mode = Literal["fuse", "copy"]
_PATIENCE_S = 60.0
_KIND = "fuse.monarch"
_BIG_BYTES = 16 << 10
"""Where there is so much in big files for each small one, the kernel reads the big ones itself, if it may. For 1 MiB that saves 0.5 ms
once, and the memory of a second copy; in return every opening of a small file costs 20 us more. Programs open few of the small files of
their environment, and map most of the big ones: `import torch` from one with 28 KiB for each takes 2.5 s that way, and 3.0 s otherwise."""
_AWAITED_BYTES = 64 << 20
"""Of big files that have changed: a refresh takes this much longer, and a reader behind it does not lose them to the next change."""
_PREFETCH_SHARE = 0.25
"""Of the memory that is free: what is fetched before anybody reads it."""


class MountStatistics(msgspec.Struct, frozen=True):
    """What one host has, and has done."""

    path: str
    pid: int
    """Of the process that serves the mount."""
    store: StoreStatistics
    delivery: DeliveryStatistics
    passthrough: bool = False
    """The kernel reads big files itself, and asks for each opening of a small one."""


class MountActor(Actor):
    """The directory on one host."""

    def __init__(self, source: ActorMesh[Any]) -> None:
        self._source = source
        self._path = ""
        self._mode: Mode = "fuse"
        self._ahead_bytes: int | None = None
        self._awaited: list[Span] = []
        """Pieces that came with the version of now, and without which it is not complete."""
        self._store = Store()
        self._delivery: Delivery | None = None
        self._filesystem: PushedFileSystem | None = None
        self._copied: Snapshot | None = None
        self._server: FuseServer | None = None
        self._watchers: list[Port[None]] = []

    @endpoint
    def place(self, path: str) -> tuple[str, str]:
        """Where `path` is, as of `mount`: the path without links in front of its last name, and the machine."""
        return _without_links(_path_here(path)), mounting.machine()

    @endpoint
    def mount(
        self, mesh: ActorMesh[MountActor], path: str, snapshot: bytes, mode: Mode, ahead_bytes: int | None, origin: tuple[str, str]
    ) -> str:
        """Show the directory at `path`; the small files come by themselves, and then the big ones.

        Args:
            mesh: the same actor on all hosts.
            path: `$SUBDIR` stands for the coordinates of this host.
            ahead_bytes: at most so much of the big files before somebody reads them; None: a share of the memory that is free.
            origin: path of the directory that is shown, and the machine that it is on.

        Returns:
            The path on this host.

        Raises:
            RuntimeError: there is no FUSE here, or the directory would be shown over itself.
            OSError: the mount point can't be made.
        """
        rank = context().actor_instance.rank
        self._path = _path_here(path)
        _check_nesting(self._path, *origin, mode)
        self._mode = mode
        decoded = Snapshot.decode(snapshot)
        passthrough = mode == "fuse" and mounting.is_root_of_machine() and is_mostly_big(decoded)
        self._filesystem = PushedFileSystem(decoded, self._store)
        self._delivery = Delivery(self._store, self._upstreams(mesh, rank.rank), stall_s=stall_s(rank.rank))
        self._delivery.start()
        self._ahead_bytes = ahead_bytes
        self._fetch(self._delivery, decoded.spans, awaited_bytes=0)
        if mode == "fuse":
            self._mount(self._filesystem, passthrough=passthrough)
        return self._path

    def _upstreams(self, mesh: ActorMesh[MountActor], rank: int) -> list[Any]:
        position = before(rank)
        found = [] if position is None else [mesh.flatten("rank").slice(rank=position)]
        return [each.piece.call_one for each in (*found, self._source)]

    def _fetch(self, delivery: Delivery, files: Collection[Span], *, awaited_bytes: int) -> None:
        """Begin to fetch files that are new: the small ones, and then as much as there is room for of the big ones.

        Args:
            awaited_bytes: so much of the big ones is waited for as well.
        """
        small, big = self._store.pieces(sorted(files))
        if awaited_bytes:  # of a file that has changed most may be here
            big = [piece for piece in big if self._store.missing(*piece)]
        self._awaited = small + _within(big, awaited_bytes)
        delivery.prefetch(self._awaited)
        delivery.prefetch(_within(big, _free_bytes() * _PREFETCH_SHARE if self._ahead_bytes is None else self._ahead_bytes))

    def _mount(self, filesystem: PushedFileSystem, *, passthrough: bool) -> None:
        problem = mounting.fuse_problem()
        if problem:
            raise RuntimeError(explain(f"there is no FUSE on this host: {problem}", next='or use remotemount(..., mode="copy")'))
        mounting.prepare_mount_point(self._path)
        found = mounting.mount_at(self._path)
        if found is not None and found.kind == _KIND:
            next = "close() that mount first; or pass another mount point, one for each host of this machine: mntpoint='/tmp/there/$SUBDIR'"
            raise RuntimeError(explain(f"a directory is mounted at {self._path!r} already", next=next))
        notes.remember(self._path)
        fd = mounting.mount(self._path, fsname="monarch")
        self._server = FuseServer(fd, filesystem, patience_s=_PATIENCE_S, passthrough=passthrough)
        filesystem.knows = self._server.knows  # type: ignore[method-assign]
        self._server.start()

    @endpoint(explicit_response_port=True)
    def live(self, port: Port[None]) -> None:
        """Not answered: whoever asks hears of the end of this."""
        self._watchers.append(port)

    @endpoint(explicit_response_port=True)
    def wait_code(self, port: Port[None]) -> None:
        """Answered when what is to be waited for in the version of now is here."""
        if self._delivery is None:  # it could not be mounted, and that was told
            port.send(None)
        else:
            self._delivery.prefetch(self._awaited, lambda: port.send(None))

    @endpoint
    def copy(self) -> int:
        """Write the files of the version of now, in copy mode; how many were written."""
        from monarch._mounts import copy_mode

        assert self._filesystem is not None
        now = self._filesystem.snapshot
        done = copy_mode.copy(now, self._store, self._path, before=self._copied, patience_s=_PATIENCE_S)
        self._copied = now
        return done.num_written

    @endpoint
    def refresh(self, snapshot: bytes, digests: Digests | None) -> None:
        """Show another version, all of it at once."""
        filesystem, delivery = self._filesystem, self._delivery
        assert filesystem is not None and delivery is not None
        before, now = filesystem.snapshot, Snapshot.decode(snapshot)
        gone = filesystem.refresh(now, digests)
        self._fetch(delivery, now.spans - before.spans, awaited_bytes=_AWAITED_BYTES)
        server = self._server
        if server is not None:
            for parent, name, node in gone:
                if name:
                    server.invalidate_entry(parent, name)
                if node:
                    server.invalidate_node(node, -1 if name else 0)
            server.wait_turn()
        filesystem.settle()

    @endpoint(explicit_response_port=True)
    def piece(self, port: Port[Piece], offset: int, length: int) -> None:
        """Bytes for the host behind this one, as soon as they are here."""
        delivery = self._delivery
        if delivery is None:
            port.send(Piece([], []))
        else:
            delivery.serve(offset, length, partial(_send, port))

    @endpoint
    def unmount(self) -> tuple[str, str]:
        """End the mount: one of "ok", "not_mounted", "busy" and "error", and what uses it, or what the system said."""
        outcome: tuple[str, str] = ("not_mounted", "")
        if self._server is not None:
            outcome = mounting.unmount(self._path)
            if outcome[0] == "busy":
                return "busy", "; ".join(users_of(self._path)) or outcome[1]
            if outcome[0] == "error":
                return outcome
            notes.forget(self._path)
            self._server.stop()
            self._server = None
        elif self._mode == "copy" and self._filesystem is not None:
            outcome = ("ok", "")
        self._end()
        return outcome

    @endpoint
    def statistics(self) -> MountStatistics:
        """What is here, and what was done."""
        assert self._delivery is not None
        passthrough = self._server is not None and self._server.statistics().passthrough
        return MountStatistics(self._path, os.getpid(), self._store.statistics(), self._delivery.statistics(), passthrough)

    def _end(self) -> None:
        if self._delivery is not None:
            self._delivery.close()
            self._delivery = None
        self._filesystem = None
        self._store.close()

    def __cleanup__(self, exc: Exception | None) -> None:
        if self._server is not None:
            mounting.unmount(self._path, lazy=True)
            notes.forget(self._path)
            self._server.stop()
        self._end()


def _send(port: Port[Piece], piece: Piece) -> None:
    port.send(Piece([(offset, pickle.PickleBuffer(data)) for offset, data in piece.parts], piece.lost, piece.holes))  # type: ignore[misc]


def _path_here(path: str) -> str:
    return path.replace(SUBDIR, "_".join(f"{dim}_{at}" for dim, at in context().actor_instance.rank.items()))


def _without_links(path: str) -> str:
    parent, name = os.path.split(path)  # what is mounted there already is not looked at, it may hang
    return os.path.join(os.path.realpath(parent), name)


def _check_nesting(path: str, source: str, machine: str, mode: Mode) -> None:
    """Who reads below the mount would be answered by who reads below the mount."""
    ours, theirs = _without_links(path).rstrip("/") + "/", source.rstrip("/") + "/"
    if machine == mounting.machine() and (theirs.startswith(ours) or (mode == "copy" and ours.startswith(theirs))):
        what = f"{source!r} can't be shown at {path!r}: on this machine that is itself, or one is in the other"
        raise RuntimeError(explain(what, next="pass another mount point, one for each host of this machine: mntpoint='/tmp/there/$SUBDIR'"))


def is_mostly_big(snapshot: Snapshot) -> bool:
    """Whether a directory is read faster when the kernel reads the big files itself and asks for each opening of the small ones."""
    sizes = [span.length for span in snapshot.spans]
    big = [size for size in sizes if size >= BIG_FILE_THRESHOLD]
    return sum(big) > _BIG_BYTES * (len(sizes) - len(big))


def _within(pieces: list[Span], num_bytes: float) -> list[Span]:
    """The first of them, up to so many bytes."""
    ends = accumulate(piece.length for piece in pieces)
    return [piece for piece, end in zip(pieces, ends, strict=True) if end <= num_bytes]


def _free_bytes() -> int:
    """Memory that programs of this machine can still have."""
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return 1 << 30
