"""The data service of a host agent: it reads and writes published memory of the host's processes for readers on other hosts.

    reader ---- TCP, proved ---- a thread of the agent ---- process_vm_readv ---- the owner, which takes no part

Rules of this file:
    1. One thread per connection, `PIECE_BYTES` of memory each, at most `rdma_data_max_connections` of them. Who comes then is told so,
       `_MOST_REFUSALS` at a time; others find their connection closed.
    2. Bytes leave only after the owner's table has vouched for them, so a reader never gets those of a dropped region. Of a region that
       is a memory file they leave from there, which is one copy less; then the table vouches before and after, and the reader waits for it.
    3. Bytes of a write go to the owner as they come; what follows a failure is read and thrown away, and the reply says so.
    4. A connection without a request for `rdma_idle_limit`, or that stands still within one for `_STALLED_S`, is closed.

Read next: `owners.py` for the memory, `data_frames.py` for the protocol, `tcp_transport.py` for the other end.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from monarch import config
from monarch._wire.memory_messages import ShareFile, ShareMemory
from monarch.rdma import vm
from monarch.rdma.channel import Channel
from monarch.rdma.data_frames import (
    REQUEST_BYTES,
    Code,
    DataFrameError,
    Verb,
    WireSpan,
    decode_head,
    decode_rest,
    encode_failure,
    encode_reply,
)
from monarch.rdma.errors import DeadlineError, OwnerGoneError, TransferError
from monarch.rdma.mapped_regions import MappedRegions
from monarch.rdma.memory import FilePlace
from monarch.rdma.owners import SharedOwner

_logger = logging.getLogger("monarch.rdma")
PIECE_BYTES = 2 << 20
_LEAST_MAPPED = 256 << 10
"""A shorter span is copied sooner than mapped."""
_SEND_BYTES = 4 << 20
"""What has a deadline of its own while it leaves."""
_STALLED_S = 60.0
_SLACK_S = 5.0
"""A reader closes idle connections first, as a rule, so that none is closed while it is being used again."""
_CLOSE_S = 1.0
_MOST_REFUSALS = 16
_REFUSAL_S = 2.0
"""How long somebody who is refused may take to ask for something; before that he would not read the answer."""


class DataService:
    """See the head of this file. Thread: the agent's loop; connections have threads of their own."""

    def __init__(self, slack_s: float = _SLACK_S) -> None:
        """Args:
        slack_s: how much longer than `rdma_idle_limit` an idle connection stays.
        """
        self._owners: dict[str, SharedOwner] = {}
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        self._most = config.value("rdma_data_max_connections")
        self._idle_s = config.seconds("rdma_idle_limit") + slack_s
        self._closed = False
        self._mapped = MappedRegions(config.seconds("rdma_idle_limit"))
        """Regions that are files; as long as there are connections, which idle readers close."""

    def share(self, uid: str, pid: int, message: ShareMemory | ShareFile) -> None:
        """A process of this host has made a table of regions, or a region that is a file."""
        old = self._owners.get(uid)
        if isinstance(message, ShareFile):
            if old is not None and (old.pid, old.nonce) == (pid, message.nonce):
                old.share_file(message.generation, FilePlace(message.fd, message.offset))
            return
        if old is not None and (old.pid, old.nonce) == (pid, message.nonce):
            return
        self._owners[uid] = SharedOwner(uid, pid, message.table, message.nonce, self._mapped)
        if old is not None:
            old.close()

    def on_lost(self, uid: str, pid: int) -> None:
        """A process has closed its link to the agent: it has ended, or is about to."""
        owner = self._owners.get(uid)
        if owner is not None and owner.pid == pid:
            del self._owners[uid]
            owner.close()

    def find(self, uid: str, nonce: bytes) -> SharedOwner:
        """The owner that a request means. Thread: any.

        Raises:
            OwnerGoneError: it is not here (any more).
        """
        owner = self._owners.get(uid)
        if owner is None:
            raise OwnerGoneError("its process has ended")
        if owner.nonce != nonce:
            raise OwnerGoneError("its process has ended, and another one was started in its place")
        return owner

    def on_connection(self, sock: Any, peer: str, greeting: bytes = b"") -> None:
        """Serve a connection on a thread of its own, which sends `greeting` first."""
        with self._lock:
            over = len(self._connections) - self._most
            why = f"this host agent serves {self._most} data connections already (rdma_data_max_connections)" if over >= 0 else ""
            if self._closed or over >= _MOST_REFUSALS:
                sock.close()
                return
            connection = _Connection(self, Channel(sock), peer, self._idle_s, greeting, why)
            try:
                connection.thread.start()
            except RuntimeError as exc:  # at the limit of threads or memory; the reader tries again, and says so in the end
                _logger.warning("data connection closed: peer=%s reason=%s", peer, exc)
                connection.channel.close()
                return
            self._connections.add(connection)

    def forget(self, connection: _Connection) -> None:
        """A connection is over. Thread: its own."""
        with self._lock:
            self._connections.discard(connection)
            if not self._connections:
                self._mapped.close()

    @property
    def num_connections(self) -> int:
        """How many are served now."""
        return len(self._connections)

    def close(self) -> None:
        """Break all connections, and wait a moment for their threads."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for connection in connections:
            connection.channel.interrupt()
        deadline_s = time.monotonic() + _CLOSE_S
        for connection in connections:
            connection.thread.join(max(0.0, deadline_s - time.monotonic()))
        for owner in self._owners.values():
            owner.close()
        self._owners.clear()

    def abandon(self) -> None:
        """Close the descriptors only; for a fork, which has no threads to serve them."""
        for connection in self._connections:
            connection.channel.abandon()
        for owner in self._owners.values():
            owner.abandon()


class _Connection:
    """One reader's connection. Thread: its own."""

    def __init__(self, service: DataService, channel: Channel, peer: str, idle_s: float, greeting: bytes, refusal: str) -> None:
        """Args:
        greeting: what is sent first.
        refusal: why nothing is served here; "" if it is.
        """
        self.channel = channel
        self.thread = threading.Thread(target=self._serve, name="monarch-data", daemon=True)
        self._service = service
        self._peer = peer
        self._greeting = greeting
        self._refusal = refusal
        self._idle_s = _REFUSAL_S if refusal else idle_s
        self._buffer = bytearray()
        self._view = memoryview(self._buffer)
        self._address = 0

    def _serve(self) -> None:
        head = memoryview(bytearray(REQUEST_BYTES))
        try:
            self.channel.send([self._greeting], _soon())
            while True:
                self.channel.receive(head, time.monotonic() + self._idle_s)
                if self._refusal:
                    self._refuse()
                    return
                self._answer(head)
        except DeadlineError:
            _logger.debug("data connection closed: peer=%s reason=idle", self._peer)
        except DataFrameError as exc:
            _logger.warning("data connection closed: peer=%s reason=%s", self._peer, exc)
        except OSError as exc:
            _logger.debug("data connection closed: peer=%s reason=%s", self._peer, exc)
        except Exception:
            _logger.exception("data connection broke: peer=%s", self._peer)
        finally:
            self.channel.close()
            self._service.forget(self)

    def _refuse(self) -> None:
        text = self._refusal.encode()
        self.channel.send([encode_reply(Code.BUSY, len(text)), text], _soon())
        self.channel.finish(time.monotonic() + _REFUSAL_S)

    def _answer(self, data: memoryview) -> None:
        head = decode_head(data)
        rest = memoryview(bytearray(head.rest_bytes))
        self.channel.receive(rest, _soon())
        uid, spans = decode_rest(head, rest)
        if head.verb is Verb.WRITE:
            self._write(uid, head.nonce, spans)
            return
        try:
            owner = self._service.find(uid, head.nonce)
            if head.verb is Verb.READ:
                self._read(owner, spans)
            else:
                owner.check()
                self.channel.send([encode_reply(Code.OK, 0)], _soon())
        except DeadlineError:
            raise
        except TransferError as exc:
            self.channel.send([encode_failure(exc)], _soon())

    def _read(self, owner: SharedOwner, spans: Sequence[WireSpan]) -> None:
        to_copy: list[vm.Span] = []
        for span in owner.resolve(spans, to_write=False):
            view = owner.view_of(span) if span.nbytes >= _LEAST_MAPPED else None
            if view is None:
                to_copy.append(span)
            else:
                self._copy(owner, to_copy)
                to_copy = []
                self._send_file(owner, span, view)
        self._copy(owner, to_copy)

    def _copy(self, owner: SharedOwner, spans: Sequence[vm.Span]) -> None:
        self._prepare(sum(span.nbytes for span in spans))
        for piece, nbytes in self._pieces(spans):
            vm.read_spans(owner.pid, piece)
            self.channel.send([encode_reply(Code.OK, nbytes), self._view[:nbytes]], _soon())

    def _send_file(self, owner: SharedOwner, span: vm.Span, view: memoryview) -> None:
        owner.check_span(span)
        head = encode_reply(Code.STREAM, span.nbytes)
        for start in range(0, span.nbytes, _SEND_BYTES):
            self.channel.send([head, view[start : start + _SEND_BYTES]], _soon())
            head = b""
        owner.check_span(span)
        self.channel.send([encode_reply(Code.OK, 0)], _soon())

    def _write(self, uid: str, nonce: bytes, spans: Sequence[WireSpan]) -> None:
        left = sum(span.nbytes for span in spans)
        self._prepare(left)
        failure: TransferError | None = None
        try:
            owner = self._service.find(uid, nonce)
            locks = owner.locks()
            for piece, nbytes in self._pieces(owner.resolve(spans, to_write=True)):
                self.channel.receive(self._view[:nbytes], _soon())
                left -= nbytes
                vm.write_spans(owner.pid, piece, locks)
        except DeadlineError:
            raise
        except TransferError as exc:
            failure = exc
        while left:
            nbytes = min(left, len(self._view))
            self.channel.receive(self._view[:nbytes], _soon())
            left -= nbytes
        self.channel.send([encode_reply(Code.OK, 0) if failure is None else encode_failure(failure)], _soon())

    def _prepare(self, nbytes: int) -> None:
        """Have room for a piece; it grows to `PIECE_BYTES` when somebody needs that, and stays."""
        wanted = min(nbytes, PIECE_BYTES)
        if len(self._buffer) < wanted:
            self._view.release()
            self._buffer = bytearray(wanted)
            self._view = memoryview(self._buffer)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))

    def _pieces(self, spans: Sequence[vm.Span]) -> Iterator[tuple[list[vm.Span], int]]:
        """Spans over the buffer, as many as fit, and their bytes, one after the other."""
        room = len(self._view)
        piece: list[vm.Span] = []
        used = 0
        for span in spans:
            done = 0
            while done < span.nbytes:
                nbytes = min(span.nbytes - done, room - used)
                piece.append(span._replace(local=self._address + used, remote=span.remote + done, nbytes=nbytes))
                done += nbytes
                used += nbytes
                if used == room:
                    yield piece, used
                    piece, used = [], 0
        if piece:
            yield piece, used


def _soon() -> float:
    return time.monotonic() + _STALLED_S


def make_service() -> DataService:
    """The service of this agent."""
    return DataService()
