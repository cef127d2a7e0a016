"""The engine: runs submits. Small ones on the thread of the caller, others on workers; in order where order was promised.

    submit -> nothing before it, small, transport known:   moved at once, the future is complete
           -> else: waits for the submits before it on the same buffers, then its pieces go to the workers of its transport

Rules of this file:
    1. Submits of this process that share a buffer run in the order in which they were submitted, those of one action too. Within
       a submit there is no order.
    2. Every submit ends: with its last piece, with the first failure once no piece is under way, or at its deadline. A submit
       that still waits for others ends at its deadline, and moves nothing afterwards.
    3. Workers never wait for each other.

Read next: `transport.py` for what moves bytes, `action.py` for who submits.
"""

from __future__ import annotations

import contextvars
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

from monarch._base.errors import InternalError
from monarch._base.ids import ProcRef
from monarch._runtime.future import Future
from monarch.rdma import staging
from monarch.rdma.errors import BufferGoneError, DeadlineError, OwnerGoneError, TransferError, UnreachableError, submit_failed
from monarch.rdma.handles import Handle
from monarch.rdma.huge_pages import Heat
from monarch.rdma.transport import SPLIT_BYTES, Choice, Op, Piece, Transport, check_deadline
from monarch.rdma.workers import Workers

T = TypeVar("T")
INLINE_BYTES = 1 << 20
"""Up to here handing over to another thread costs more than it gains."""
_SMALL_OP_BYTES = 16 << 10
"""Moving many ops that are no larger than this holds the interpreter lock most of the time, on whatever thread."""
_MOST_INLINE_OPS = 2048
_CLOSE_S = 1.0
_ASK_S = 1.0
"""How long the agent of an owner that is gone may take to say why."""


class Submit:
    """One submit under way."""

    __slots__ = (
        "__weakref__",
        "deadline_s",
        "failed_op",
        "failure",
        "future",
        "keys",
        "lock",
        "num_running",
        "num_waiting",
        "ops",
        "started",
        "successors",
    )

    def __init__(self, ops: Sequence[Op], deadline_s: float, keys: set[Hashable]) -> None:
        self.ops = ops
        self.deadline_s = deadline_s
        self.keys = keys
        self.future: Future[None] = Future._new()
        self.lock = threading.Lock()
        self.num_running = 0
        """Tasks that move pieces."""
        self.failure: Exception | None = None
        self.failed_op = ops[0]
        self.started = False
        self.num_waiting = 0
        """Submits before it that are not over."""
        self.successors: list[Submit] = []


class Engine:
    """The submits of one process. Thread: any."""

    def __init__(
        self,
        choice: Choice,
        num_threads: int,
        call_later: Callable[[float, Callable[[], None]], object],
        why_gone: Callable[[ProcRef, float], str],
        on_hot: Callable[[Handle], None] = lambda handle: None,
    ) -> None:
        """Args:
        call_later: runs a callback after so many seconds.
        why_gone: what is known of the end of a process, "" for nothing; may ask for so many seconds.
        on_hot: called when a buffer has been moved so often that its owner should hear of it.
        """
        self._choice = choice
        self._num_threads = num_threads
        self._call_later = call_later
        self._why_gone = why_gone
        self._on_hot = on_hot
        self._heat = Heat()
        self._lock = threading.Lock()
        self._last: dict[Hashable, Submit] = {}
        """The last submit under way for each key."""
        self._workers: dict[str, Workers] = {}
        """By lane."""
        self._closed = False

    def submit(self, ops: Sequence[Op], timeout_s: float, key: Hashable = None) -> Future[None]:
        """Move the bytes of all `ops`.

        Args:
            timeout_s: for all of them together.
            key: what else keeps submits in order; None: nothing.

        Returns:
            A future that fails with `RDMAError`.
        """
        ops = [op for op in ops if op.nbytes]
        if not ops:
            return Future._completed(None)
        deadline_s = time.monotonic() + timeout_s
        keys: set[Hashable] = {(op.handle.nonce, op.handle.generation) for op in ops}
        if key is not None:
            keys.add(key)
        if _is_small(ops) and not (self._last and any(key in self._last for key in keys)):
            future = self._move_now(ops, deadline_s)
            if future is not None:
                return future
        return self._enqueue(Submit(ops, deadline_s, keys), timeout_s)

    def order(self, handle: Handle, then: Callable[[], None]) -> None:
        """Call `then()` once all submits so far on this buffer are over: now, or on a worker."""
        with self._lock:
            last = self._last.get((handle.nonce, handle.generation))
        if last is None:
            then()
        else:
            last.future._when_done(then)

    def run(self, work: Callable[[], T], lane: str) -> Future[T]:
        """Do what waits for several submits, one after the other, on a worker of its own lane, with the context of the caller."""
        result: Future[T] = Future._new()
        context = contextvars.copy_context()

        def task() -> None:
            try:
                result._complete(context.run(work))
            except BaseException as exc:
                result._fail(exc)

        try:
            self._pool(lane).start_task(task)
        except RuntimeError as exc:
            result._fail(submit_failed(_no_thread(exc), lane))
        return result

    # --- small ---------------------------------------------------------------------------------------------------

    def _move_now(self, ops: Sequence[Op], deadline_s: float) -> Future[None] | None:
        """The outcome; None when something of it is not a matter of microseconds."""
        try:
            if len(ops) == 1:
                transport = self._choice.instant(ops[0].handle)
                if transport is None:
                    return None
                staging.move(transport, Piece(ops[0].kind, ops), deadline_s)
                return Future._completed(None)
            groups = self._groups(ops, lambda op: self._choice.instant(op.handle))
            if groups is None:
                return None
            for chosen, group in groups:
                for piece in chosen.cut(group):
                    staging.move(chosen, piece, deadline_s)
        except UnreachableError:
            return None
        except OwnerGoneError as exc:
            future: Future[None] = Future._new()
            failure, op = exc, ops[0]
            self._pool("gone").start_task(lambda: future._fail(self._explained(failure, op)))
            return future
        except TransferError as exc:
            return Future._failed(self._explained(exc, ops[0]))
        return Future._completed(None)

    def _groups(self, ops: Sequence[Op], find: Callable[[Op], Transport | None]) -> list[tuple[Transport, list[Op]]] | None:
        """Ops by lane, in order; None when one has no transport."""
        groups: dict[str, tuple[Transport, list[Op]]] = {}
        by_route: dict[Hashable, list[Op]] = {}
        route_of = self._choice.route_of
        for op in ops:
            route = route_of(op.handle)
            mates = by_route.get(route)
            if mates is None:
                transport = find(op)
                if transport is None:
                    return None
                mates = by_route[route] = groups.setdefault(transport.lane(op.handle), (transport, []))[1]
            mates.append(op)
        return list(groups.values())

    # --- large ---------------------------------------------------------------------------------------------------

    def _enqueue(self, submit: Submit, timeout_s: float) -> Future[None]:
        with self._lock:
            if self._closed:
                return Future._failed(submit_failed(TransferError("this process is being shut down"), _place_of(submit.failed_op)))
            before = {id(last): last for key in submit.keys if (last := self._last.get(key)) is not None} if self._last else {}
            submit.num_waiting = len(before)
            for last in before.values():
                last.successors.append(submit)
            self._last.update(dict.fromkeys(submit.keys, submit))
        if not before:
            self._begin(submit)
        else:
            # The timer runs for long after a submit has ended, and must not keep its memory until then.
            self._call_later(min(timeout_s, threading.TIMEOUT_MAX), partial(self._give_up, weakref.ref(submit)))
        return submit.future

    def _give_up(self, waiting: weakref.ref[Submit]) -> None:
        submit = waiting()
        if submit is None:
            return
        with submit.lock:
            if submit.started:
                return
            submit.started = True
        self._fail(submit, DeadlineError())

    def _begin(self, submit: Submit) -> None:
        with submit.lock:
            if submit.started:
                started_before = True
            else:
                started_before, submit.started = False, True
        if started_before:
            self._end(submit)
            return
        # Never behind the pieces of another lane, which may have to wait for a network.
        handle = submit.ops[0].handle
        known = self._choice.known(handle)
        pool = f"choice {handle.ref.host or handle.ref.uid}" if known is None else known.lane(handle)
        try:
            self._pool(pool).start_task(lambda: self._plan(submit, pool))
        except RuntimeError as exc:
            self._fail(submit, _no_thread(exc))
            self._end(submit)

    def _plan(self, submit: Submit, own_pool: str) -> None:
        """Find transports and hand out the pieces; on a worker, because a connection may have to be made."""
        try:
            check_deadline(submit.deadline_s)
            groups = self._groups(submit.ops, lambda op: self._choice.choose(op.handle, submit.deadline_s))
            assert groups is not None
            pieces = [(transport, transport.lane(group[0].handle), transport.cut(group)) for transport, group in groups]
        except TransferError as exc:
            self._fail(submit, exc)
            self._end(submit)
            return
        except Exception as exc:
            self._break(submit, exc)
            self._end(submit)
            return
        tasks: list[tuple[str, Transport, deque[Piece]]] = []
        for transport, lane, parts in pieces:
            is_large = sum([op.nbytes for piece in parts for op in piece.ops]) >= SPLIT_BYTES
            tasks += [(lane, transport, deque(parts))] * (min(transport.num_threads, len(parts)) if is_large else 1)
        submit.num_running = len(tasks)
        stays = tasks[0][0] == own_pool
        for lane, transport, shared in tasks[stays:]:
            try:
                self._pool(lane).start_task(partial(self._move, submit, transport, shared))
            except RuntimeError:  # no thread can be started: better late than never
                self._move(submit, transport, shared)
        if stays:
            self._move(submit, tasks[0][1], tasks[0][2])

    def _move(self, submit: Submit, transport: Transport, pieces: deque[Piece]) -> None:
        """Take pieces until none is left, or something has failed."""
        while submit.failure is None:
            try:
                piece = pieces.popleft()
            except IndexError:
                break
            try:
                self._carry(transport, piece, submit.deadline_s)
            except Exception as exc:
                submit.failed_op = piece.ops[0]
                submit.failure = exc
        with submit.lock:
            submit.num_running -= 1
            if submit.num_running:
                return
        failure = submit.failure
        if failure is None:
            submit.future._complete(None)
            self._heat_up(submit)
        elif isinstance(failure, TransferError):
            self._fail(submit, failure)
        else:
            self._break(submit, failure)
        self._end(submit)

    def _carry(self, transport: Transport, piece: Piece, deadline_s: float) -> None:
        """Move a piece; what this transport does not lead to after all goes by the next one that does."""
        try:
            staging.move(transport, piece, deadline_s)
        except UnreachableError as exc:
            others: dict[Transport, list[Op]] = {}
            for op in piece.ops:
                is_refused = not exc.generations or op.handle.generation in exc.generations
                other = self._choice.divert(transport, op.handle, exc, deadline_s) if is_refused else transport
                others.setdefault(other, []).append(op)
            if others.keys() == {transport}:
                raise
            for other, ops in others.items():
                for part in other.cut(ops):
                    self._carry(other, part, deadline_s)

    def _heat_up(self, submit: Submit) -> None:
        with self._lock:
            hot = [op.handle for op in submit.ops if self._heat.add(op.handle, op.nbytes)]
        for handle in hot:
            self._on_hot(handle)

    def _end(self, submit: Submit) -> None:
        """Let those go on that wait for it. It is over, so its future has an outcome, or had one before it began."""
        with self._lock:
            for key in submit.keys:
                if self._last.get(key) is submit:
                    del self._last[key]
            ready = []
            for successor in submit.successors:
                successor.num_waiting -= 1
                if not successor.num_waiting:
                    ready.append(successor)
        for successor in ready:
            self._begin(successor)

    # --- failures ------------------------------------------------------------------------------------------------

    def _fail(self, submit: Submit, failure: TransferError) -> None:
        submit.future._fail(self._explained(failure, submit.failed_op))

    def _break(self, submit: Submit, failure: Exception) -> None:
        """A defect of ours, or no memory: whoever waits must hear of it all the same."""
        broken = InternalError(f"a transfer broke: {failure!r}")
        broken.__cause__ = failure
        submit.future._fail(broken)

    def _explained(self, failure: TransferError, op: Op) -> Exception:
        ref = op.handle.ref
        is_gone = isinstance(failure, OwnerGoneError)
        told = "" if isinstance(failure, (BufferGoneError, DeadlineError)) else self._why_gone(ref, _ASK_S if is_gone else 0.0)
        if is_gone or told:
            self._choice.forget(op.handle.nonce)
            fate = f"{ref.uid} {told or '(' + failure.what + ')'}"
            hint = "make a new RDMABuffer in a process that lives"
            failure = OwnerGoneError(f"the owner of the buffer is gone: {fate}", next=hint, fate=fate)
        error = submit_failed(failure, _place_of(op))
        error.__cause__ = failure
        return error

    # --- threads -------------------------------------------------------------------------------------------------

    def _pool(self, name: str) -> Workers:
        with self._lock:
            workers = self._workers.get(name)
            if workers is None:
                workers = self._workers[name] = Workers(f"monarch-rdma-{name.partition(' ')[0]}", self._num_threads)
            return workers

    def close(self) -> None:
        """Take no more submits, and wait a moment for those under way."""
        with self._lock:
            self._closed = True
            pools = list(self._workers.values())
        for pool in pools:
            pool.close(_CLOSE_S)


def _is_small(ops: Sequence[Op]) -> bool:
    """Whether the thread of the caller is to move them itself."""
    total = ops[0].nbytes if len(ops) == 1 else sum([op.nbytes for op in ops])
    return total <= INLINE_BYTES or (len(ops) <= _MOST_INLINE_OPS and total <= len(ops) * _SMALL_OP_BYTES)


def _no_thread(failure: RuntimeError) -> TransferError:
    hint = "raise the limit of threads (ulimit -u), or that of memory"
    return TransferError(f"no thread can be started for it: {failure}", next=hint)


def _place_of(op: Op) -> str:
    handle = op.handle
    what = f"{op.kind} of bytes {op.offset} to {op.offset + op.nbytes} of buffer {handle.number} ({handle.nbytes} bytes)"
    return f"{what} of {handle.ref.uid} at {handle.ref.address}"
