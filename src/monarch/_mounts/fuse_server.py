"""The server of one mount: threads that read requests of the kernel from `/dev/fuse` and let a file system answer them.

    fd = mount("/mnt/code", fsname="code")
    server = FuseServer(fd, tree)
    server.start()
    ...
    unmount("/mnt/code")
    server.stop()

Rules of this file:
    1. A thread that serves waits for nothing but the next request. What takes time is parked.
    2. Every request that wants an answer gets one, whatever the file system does: an exception is EIO.
    3. When the server stops, or its process dies, the kernel ends the connection, and nobody is left waiting.
    4. What the kernel need not ask again it is told so (ENOSYS to OPEN, FLUSH, ACCESS ...): nothing is faster than no request.

The process that serves a mount must not touch it with its interpreter lock held: a page fault in a mapped file of the mount, or
starting a program there, would wait for an answer that nobody can give. Use a mount from other processes, or at most by plain reads.

A signal to who waits for a name or for attributes reaches us as an interrupt, and they get EINTR. Who waits for bytes waits for pages that
the kernel reads ahead: they can be killed at any time, but a program that handles SIGINT itself hears of it when the bytes come or the
patience ends. (With reads that can be interrupted, any signal during a page fault would be a SIGBUS.)

Read next: `fuse_calls.py` for the questions, `fuse_parking.py` for those that wait, `mounting.py` for where the descriptor comes from.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum, auto
from typing import NamedTuple

from monarch._base.errors import InternalError
from monarch._mounts import fuse_negotiation, fuse_protocol
from monarch._mounts.filesystem import FileSystem
from monarch._mounts.fuse_calls import CALLS, Call, Desk
from monarch._mounts.fuse_device import Device
from monarch._mounts.fuse_parking import Parking
from monarch._mounts.fuse_protocol import CHANGES, Header, Opcode, ProtocolError

_logger = logging.getLogger("monarch.mounts")

_BUFFER_BYTES = 64 * 1024
_STOP_S = 5.0
_TURN_S = 0.0005
_NUM_OPCODES = 64
_MOST_COMPLAINTS = 100
_TRY_AGAIN = frozenset({errno.EINTR, errno.EAGAIN, errno.ENOENT})  # the last: the request was interrupted while it was being read
_KEEP_CACHE = 1 << 1
_CACHE_DIR = 1 << 3
_NOBODY_WAITS = frozenset({errno.ENOENT, errno.ENODEV, errno.ECONNABORTED, errno.EPERM, errno.EPIPE, errno.EBADF})


class End(Enum):
    """How the service of a mount ended."""

    UNMOUNTED = auto()
    """Somebody has unmounted it, and nobody has a file of it open any more."""
    ABORTED = auto()
    """The kernel has cut the connection: an unmount by force, or an administrator."""
    STOPPED = auto()
    """`FuseServer.stop`."""
    REFUSED = auto()
    """Kernel and server have no version of the protocol in common; the log says which."""


class Statistics(NamedTuple):
    """What has been going on, for people."""

    requests: dict[str, int]
    """Received ones by their name."""
    parked: int
    """Requests that wait for the file system now."""
    known_nodes: int
    """Nodes that the kernel knows; 0 where they are not counted."""
    passthrough: bool
    """The kernel reads backing files itself."""
    given: int
    """Small files whose bytes the kernel got when they were opened, so that it asked for none of them."""
    threads: int


class _Lane:
    """One thread that reads, and what it alone uses."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.buffer = bytearray(_BUFFER_BYTES)
        self.counts = [0] * _NUM_OPCODES
        self.turn = 0
        """Odd while a request is being handled."""
        self.thread: threading.Thread | None = None


class FuseServer:
    """Serves `filesystem` to whoever uses the mount behind a descriptor. Thread: any, for all public methods."""

    def __init__(self, fd: int, filesystem: FileSystem, *, threads: int = 1, patience_s: float = 60.0, passthrough: bool = False) -> None:
        """
        Args:
            fd: what `mounting.mount` gave; the server owns it from now on.
            threads: that read requests; more than one helps when other processes keep the processors busy, and costs latency when not.
            patience_s: an answer that takes longer is ETIMEDOUT to the reader.
            passthrough: let the kernel read the `backing_fd` of opened files itself, at the speed of those, where it can
                (Linux 6.9, CAP_SYS_ADMIN); every open is then asked for, which costs small files more than it gives.

        Raises:
            ValueError: `threads` < 1 or `patience_s` <= 0.
        """
        if threads < 1 or not patience_s > 0:
            raise ValueError(f"a server needs threads >= 1 and patience_s > 0, not threads={threads} and patience_s={patience_s:g}")
        self.closed: Future[End] = Future()
        """How the service ended, when it has. A callback of it runs on a thread of the server and must not call `stop`."""
        self.closed.set_running_or_notify_cancel()
        self._wants_passthrough = passthrough
        self._num_threads = threads
        self._device = Device(fd)
        self._parking = Parking(self._deliver_parked, patience_s)
        self._desk = Desk(filesystem, self._device, self._parking)
        self._skips_open = not filesystem.habits.opens
        """The file system hears of no OPEN."""
        self._lanes: list[_Lane] = []
        self._lock = threading.Lock()
        self._num_serving = 0
        self._end: End | None = None
        """Once set, lanes end with what they are at."""
        self._complaints: set[object] = set()
        self._plain = self._plain_answers()

    # ---------------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Begin to serve; what uses the mount has waited for this.

        Raises:
            RuntimeError: it was started before.
        """
        with self._lock:
            if self._lanes or self._end is not None:
                raise RuntimeError("a FuseServer is started once; make another one with another descriptor")
            self._lanes = [_Lane(self._device.fd if index == 0 else self._device.another()) for index in range(self._num_threads)]
            self._num_serving = self._num_threads
            for index, lane in enumerate(self._lanes):
                self._device.enter()
                lane.thread = threading.Thread(target=self._serve, args=(lane,), name=f"monarch-fuse-{index}", daemon=True)
                lane.thread.start()

    def stop(self, timeout_s: float = _STOP_S) -> bool:
        """End the service: requests under way get ENOTCONN, and so does from now on whoever uses the mount, if it is still mounted.

        Idempotent. Unmount first, for readers to see an empty directory and not an error.

        Args:
            timeout_s: for methods of the file system that are running.

        Returns:
            Whether all threads have ended; False: one is inside of the file system, and the connection lives until it returns.

        Raises:
            InternalError: called from a thread of the server, which would wait for itself.
        """
        self._forbid_own_thread("stop()")
        with self._lock:
            if self._end is None:
                self._end = End.STOPPED
        self._parking.close()
        self._device.close()
        deadline = time.monotonic() + timeout_s
        self._parking.join(timeout_s)
        for lane in self._lanes:
            if lane.thread is not None:
                lane.thread.join(max(0.0, deadline - time.monotonic()))
        if not self._lanes and not self.closed.done():
            self.closed.set_result(End.STOPPED)
        return not self._device.is_open

    def _forbid_own_thread(self, what: str) -> None:
        if any(lane.thread is threading.current_thread() for lane in self._lanes):
            raise InternalError(f"{what} was called from a thread of the FUSE server, for which it would wait")

    # ---------------------------------------------------------------------------------------------------------- changes

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Make the kernel forget what `name` in the directory `parent` stands for, or that there is no such name.

        The listing of `parent` is another thing: `invalidate_node(parent)`. Blocks while somebody waits for an answer about
        `parent`. No-op when the kernel does not know the name, or the service has ended.

        Raises:
            InternalError: called from a thread of the server.
        """
        self._notify("invalidate_entry()", fuse_protocol.entry_notice(parent, name))

    def invalidate_node(self, node: int, offset: int = 0, length: int = -1) -> None:
        """Make the kernel forget attributes, target, listing and cached bytes of `node`.

        Open files and mappings see the new bytes. Blocks while a read of these bytes is parked. No-op as above.

        Args:
            offset: first byte to forget; -1: attributes only.
            length: bytes; -1: to the end.

        Raises:
            InternalError: called from a thread of the server.
        """
        self._notify("invalidate_node()", fuse_protocol.node_notice(node, offset, length))

    def _notify(self, what: str, notice: bytes) -> None:
        self._forbid_own_thread(what)
        if not self._device.enter():
            return
        try:
            refusal = self._device.write(self._device.fd, [notice])
        finally:
            self._device.leave()
        if refusal and refusal not in _NOBODY_WAITS:
            self._complain(what, "the kernel refused %s: %s", what, os.strerror(refusal))

    def wait_turn(self, timeout_s: float = _STOP_S) -> bool:
        """Wait until every request that is being handled now has been answered or parked; False: one still was after `timeout_s`.

        Raises:
            InternalError: called from a thread of the server.
        """
        self._forbid_own_thread("wait_turn()")
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes:
            turn = lane.turn
            while turn % 2 and lane.turn == turn and self._end is None:
                if time.monotonic() > deadline:
                    return False
                time.sleep(_TURN_S)
        return True

    def knows(self, node: int) -> bool:
        """Whether the kernel may have a reference to `node`; always so where `habits.forgets` is False."""
        references = self._desk.references
        return references is None or node in references

    def statistics(self) -> Statistics:
        """What has been going on; counts of a busy server are a moment old."""
        counts: Counter[int] = Counter()
        for lane in self._lanes:
            counts.update({opcode: count for opcode, count in enumerate(lane.counts) if count})
        desk = self._desk
        return Statistics(
            requests=dict(zip(fuse_protocol.names_of(counts), counts.values(), strict=True)),
            parked=len(self._parking),
            known_nodes=0 if desk.references is None else len(desk.references),
            passthrough=desk.agreement is not None and desk.agreement.passthrough,
            given=desk.num_given,
            threads=len(self._lanes),
        )

    # ---------------------------------------------------------------------------------------------------------- service

    def _serve(self, lane: _Lane) -> None:
        end = End.ABORTED
        try:
            end = self._read_requests(lane)
        except BaseException:
            self._device.close()  # nobody may wait for a thread that is no more
            raise
        finally:
            self._device.leave()
            self._lane_ended(end)

    def _read_requests(self, lane: _Lane) -> End:
        fd, buffers, read = lane.fd, [lane.buffer], os.readv
        wait = self._device.waiter(fd)
        while True:
            wait()
            if self._end is not None:
                return self._end
            try:
                size = read(fd, buffers)
            except OSError as exc:
                if exc.errno in _TRY_AGAIN:
                    continue
                return End.UNMOUNTED if exc.errno == errno.ENODEV else End.ABORTED
            if size == 0:
                return End.UNMOUNTED
            lane.turn += 1
            try:
                self._handle(lane, size)
            except ProtocolError as exc:
                self._complain(str(exc), "malformed request: %s", exc)
                self._refuse_unread(lane, size)
            except Exception as exc:
                self._complain(type(exc), "a request could not be served, which is a defect of monarch", exc_info=exc)
                self._refuse_unread(lane, size)
            lane.turn += 1

    def _lane_ended(self, end: End) -> None:
        with self._lock:
            self._num_serving -= 1
            is_last = self._num_serving == 0
            if self._end is None:
                self._end = end
        if is_last:
            self._parking.close()
            self.closed.set_result(self._end)

    def _handle(self, lane: _Lane, size: int) -> None:
        buffer = lane.buffer
        header = fuse_protocol.decode_header(buffer, size)
        opcode = header[0]
        lane.counts[opcode if opcode < _NUM_OPCODES else 0] += 1
        call_type = CALLS.get(opcode)
        if call_type is not None and not (self._skips_open and opcode == Opcode.OPEN):
            self._ask(call_type(self._desk, lane.fd, header, buffer, size))
            return
        answer = self._plain.get(opcode)
        if answer is not None:
            answer(lane, header, size)
        elif opcode in CHANGES:
            self._refuse(lane, header, errno.EROFS)
        else:
            self._refuse(lane, header, errno.ENOSYS)

    def _ask(self, call: Call) -> None:
        try:
            value = call.ask()
        except Exception as exc:
            self._complain((call.name, type(exc)), "%s() of the file system failed", call.name, exc_info=exc)
            value = errno.EIO
        if value is call:
            self._parking.park(call)
        else:
            call.done = True
            self._deliver(call, value)

    def _deliver_parked(self, call: Call, value: object) -> None:
        if self._device.enter():
            try:
                self._deliver(call, value)
            finally:
                self._device.leave()

    def _deliver(self, call: Call, value: object) -> None:
        if isinstance(value, int):
            self._device.write(call.fd, [call.refuse(value if 0 < value < 512 else errno.EIO)])
            return
        try:
            parts = call.reply(value)
        except Exception as exc:
            text = "%s() of the file system gave what is no answer: %r"
            self._complain((call.name, type(exc)), text, call.name, type(value), exc_info=exc)
            self._device.write(call.fd, [call.refuse(errno.EIO)])
            return
        refusal = self._device.write(call.fd, parts)
        if refusal:
            self._tell("release", call.take_back)
            if refusal not in _NOBODY_WAITS:
                self._complain((call.name, refusal), "the kernel refused an answer of %s(): %s", call.name, os.strerror(refusal))

    def _complain(self, kind: object, text: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log the first of a kind: a broken tree would fill a disk with what it says of each read."""
        if kind not in self._complaints and len(self._complaints) < _MOST_COMPLAINTS:
            self._complaints.add(kind)
            _logger.error(text, *args, exc_info=exc_info)

    # ----------------------------------------------------------------------------------------------- without a file system

    def _plain_answers(self) -> dict[int, Callable[[_Lane, Header, int], None]]:
        """What is answered here. All others are EROFS or ENOSYS; after the latter the kernel does by itself, and does not ask again."""
        return {
            Opcode.INIT: self._on_init,
            Opcode.FORGET: self._on_forget,
            Opcode.BATCH_FORGET: self._on_forget,
            Opcode.INTERRUPT: self._on_interrupt,
            Opcode.OPEN: self._on_open_skipped,
            Opcode.OPENDIR: self._on_opendir,
            Opcode.RELEASE: self._on_release,
            Opcode.RELEASEDIR: self._on_releasedir,
            Opcode.STATFS: lambda lane, header, size: self._write(lane, fuse_protocol.statfs_reply(header.unique)),
            Opcode.IOCTL: lambda lane, header, size: self._refuse(lane, header, errno.ENOTTY),
            Opcode.DESTROY: lambda lane, header, size: self._refuse(lane, header, 0),
        }

    def _write(self, lane: _Lane, reply: bytes) -> None:
        self._device.write(lane.fd, [reply])

    def _refuse(self, lane: _Lane, header: Header, errno: int) -> None:
        if header.unique:
            self._device.write(lane.fd, [fuse_protocol.error_reply(header.unique, errno)])

    def _refuse_unread(self, lane: _Lane, size: int) -> None:
        unique = fuse_protocol.decode_unique(lane.buffer, size)
        if unique:
            self._write(lane, fuse_protocol.error_reply(unique, errno.EIO))

    def _on_init(self, lane: _Lane, header: Header, size: int) -> None:
        offer = fuse_negotiation.decode_init(lane.buffer, size)
        try:
            agreement = fuse_negotiation.agree(offer, self._desk.habits, passthrough=self._wants_passthrough)
        except ProtocolError as exc:
            self._complain("init", "%s", exc)
            self._refuse(lane, header, errno.EPROTO)
            self._end = End.REFUSED
            self._device.close()
            return
        self._desk.agreement = agreement
        self._skips_open = not self._desk.habits.opens and not (agreement is not None and agreement.passthrough)
        self._write(lane, fuse_negotiation.init_reply(header.unique, agreement))

    def _on_forget(self, lane: _Lane, header: Header, size: int) -> None:
        desk = self._desk
        if desk.references is None:
            return
        for node in desk.references.give_back(fuse_protocol.decode_forget(header, lane.buffer, size)):
            self._tell("forget", desk.filesystem.forget, node)

    def _on_interrupt(self, lane: _Lane, header: Header, size: int) -> None:
        self._parking.interrupt(fuse_protocol.decode_interrupt(lane.buffer, size))

    def _on_open_skipped(self, lane: _Lane, header: Header, size: int) -> None:
        agreement = self._desk.agreement
        if fuse_protocol.decode_open_flags(lane.buffer, size) & os.O_ACCMODE != os.O_RDONLY:
            self._refuse(lane, header, errno.EROFS)
        elif agreement is not None and agreement.skips_open:
            self._refuse(lane, header, errno.ENOSYS)
        else:
            self._write(lane, fuse_protocol.open_reply(header.unique, 0, _KEEP_CACHE))

    def _on_opendir(self, lane: _Lane, header: Header, size: int) -> None:
        desk = self._desk
        if desk.habits.opens:
            self._write(lane, fuse_protocol.open_reply(header.unique, next(desk.handles), 0))
        elif desk.agreement is not None and desk.agreement.skips_opendir:
            self._refuse(lane, header, errno.ENOSYS)
        else:
            self._write(lane, fuse_protocol.open_reply(header.unique, 0, _KEEP_CACHE | _CACHE_DIR))

    def _on_release(self, lane: _Lane, header: Header, size: int) -> None:
        handle = fuse_protocol.decode_handle(lane.buffer, size)
        self._refuse(lane, header, 0)
        if not self._skips_open:
            self._desk.openings.remove(header.node)
            self._tell("release", self._desk.filesystem.release, handle)

    def _on_releasedir(self, lane: _Lane, header: Header, size: int) -> None:
        self._desk.listings.pop(fuse_protocol.decode_handle(lane.buffer, size), None)
        self._refuse(lane, header, 0)

    def _tell(self, name: str, method: Callable[..., None], *args: int) -> None:
        try:
            method(*args)
        except Exception as exc:
            self._complain((name, type(exc)), "%s() of the file system failed", name, exc_info=exc)
