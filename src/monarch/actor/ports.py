"""Ports and channels: messages that belong to no endpoint.

A `Port` is the sending end and may be handed to anybody; its receiver stays in the process that opened it.

Read next: `_runtime/mailbox.py` for the receiving table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from monarch._base.ids import ProcRef
from monarch._runtime.cell import Delivery
from monarch._runtime.future import Future, gather
from monarch._runtime.mailbox import Reply, Stream
from monarch._wire.frames import Flag
from monarch._wire.pickling import dumps
from monarch.actor.endpoint import Endpoint
from monarch.actor.process import this_process

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")

_NO_RANK = 0xFFFFFFFF


class Port(Generic[R]):
    """The sending end of a channel, or of a call's reply. Picklable. Thread: any."""

    __slots__ = ("_once", "_port", "_proc", "_rank", "_used", "return_undeliverable")

    def __init__(self, proc: ProcRef, port: int, rank: int | None, *, once: bool) -> None:
        self._proc = proc
        self._port = port
        self._rank = rank
        self._once = once
        self._used = False
        self.return_undeliverable = True
        """Whether a failed send comes back to the sender as a fault."""

    def send(self, obj: R) -> None:
        """Post `obj` to the receiver; never waits for delivery.

        Raises:
            RuntimeError: a once-port was used before.
            TypeError: `obj` can't be pickled.
        """
        payload, buffers = dumps(obj)
        self._post(payload, buffers, 0)

    def exception(self, obj: Exception) -> None:
        """Make the receiver raise `obj`."""
        from monarch._wire.exceptions import dumps_exception

        payload, buffers = dumps_exception(obj)
        self._post(payload, buffers, Flag.ERROR)

    def _post(self, payload: bytes, buffers: list[memoryview], flags: int) -> None:
        if self._once:
            if self._used:
                raise RuntimeError("OncePortRef already used: this port takes one message; use a port of Channel.open() for more")
            self._used = True
        rank = _NO_RANK if self._rank is None else self._rank
        this_process().proc.sender.post(self._proc, self._port, rank, payload, buffers, flags)

    def __repr__(self) -> str:
        return f"Port({self._proc.uid}, {self._port})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_port, (tuple(self._proc), self._port, self._rank, self._once, self.return_undeliverable)


def _rebuild_port(proc: tuple[str, str, str], port: int, rank: int | None, once: bool, return_undeliverable: bool) -> Port[Any]:
    rebuilt: Port[Any] = Port(ProcRef(*proc), port, rank, once=once)
    rebuilt.return_undeliverable = return_undeliverable
    return rebuilt


class ReplyPort(Port[R]):
    """The port of one call of an explicit-port endpoint; while nothing was sent, the actor owes its caller an answer."""

    __slots__ = ("_delivery", "_owed")

    def __init__(self, delivery: Delivery, reply_to: ProcRef, owed: set[Delivery]) -> None:
        super().__init__(reply_to, delivery.port, delivery.rank, once=delivery.header.once)
        self._delivery = delivery
        self._owed = owed
        owed.add(delivery)

    def _post(self, payload: bytes, buffers: list[memoryview], flags: int) -> None:
        super()._post(payload, buffers, flags)
        self._owed.discard(self._delivery)

    def __reduce__(self) -> tuple[Any, ...]:
        self._owed.discard(self._delivery)  # from now on it is whoever receives the port that owes
        return super().__reduce__()


class DroppingPort:
    """The port of an explicit-port endpoint that was called without one waiting."""

    return_undeliverable = False

    def send(self, obj: Any) -> None:
        """Drop `obj`."""

    def exception(self, obj: Exception) -> NoReturn:
        """Raise `obj` here, since nobody else would hear of it."""
        raise obj


class PortReceiver(Generic[R]):
    """The receiving end of a channel. Thread: any of the process that opened it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def recv(self) -> Future[R]:
        """A future of the next message that no earlier `recv` has claimed."""
        return self._stream.receive()._then(_value)

    def ranked(self) -> RankedPortReceiver[R]:
        """The same messages, each with the rank that it is tagged with."""
        return RankedPortReceiver(self._stream)

    def __reduce__(self) -> Any:
        raise TypeError("a PortReceiver can't be pickled: messages arrive in the process that opened it; send the Port")


class RankedPortReceiver(Generic[R]):
    """The receiving end of a channel whose messages are tagged with ranks."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def recv(self) -> Future[tuple[int, R]]:
        """A future of the next (rank, message); fails with ValueError when the message has no rank."""
        return self._stream.receive()._then(_ranked_value)

    def __reduce__(self) -> Any:
        raise TypeError("a RankedPortReceiver can't be pickled: messages arrive in the process that opened it; send the Port")


def _value(item: tuple[int, Reply]) -> Any:
    return item[1].take()


def _ranked_value(item: tuple[int, Reply]) -> tuple[int, Any]:
    rank, reply = item
    if rank == _NO_RANK:
        raise ValueError("the message carries no rank; it was sent by a port that belongs to no call")
    return rank, reply.take()


class Channel(Generic[R]):
    """Makes ports. Never instantiated."""

    @staticmethod
    def open(once: bool = False) -> tuple[Port[Any], PortReceiver[Any]]:
        """A new port of the running actor and its receiver.

        Args:
            once: the port takes one message.
        """
        process = this_process()
        stream = Stream(process.proc.ports, None, _item)
        return Port(process.proc.ref, stream.port, None, once=once), PortReceiver(stream)

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[Any], RankedPortReceiver[Any]]:
        """A new reusable port and a receiver of (rank, message) pairs; `once` is ignored."""
        port, receiver = Channel.open()
        return port, receiver.ranked()


def _item(item: tuple[int, Reply]) -> tuple[int, Reply]:
    return item


class Accumulator(Generic[P, R, A]):
    """Folds the replies of a whole view into one value, on the caller's side.

    Args:
        endpoint: what to call.
        identity: where the fold starts.
        combine: `combine(accumulated, reply)`; called in order of arrival, so it must not depend on rank order.
    """

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Call every actor of the view now; the folded value once all have answered, or the first exception."""
        replies = list(self._endpoint.stream(*args, **kwargs))
        return gather(replies)._then(self._fold)

    def _fold(self, values: list[R]) -> A:
        result = self._identity
        for value in values:
            result = self._combine(result, value)
        return result
