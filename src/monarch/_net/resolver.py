"""Names of hosts to addresses of sockets, without anybody waiting: `getaddrinfo` blocks for seconds when a name server is silent.

Rules of this file:
    1. A result is given exactly once, or never when it was cancelled; an address that is none to look up is answered at once,
       in the caller's thread, all others in a thread of this module.
    2. At most `_MOST_THREADS` look-ups run; the rest queue, and a queue that is empty has no threads.

Read next: `interfaces.py` for this machine's own addresses.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from monarch._base.addresses import Address, is_ip
from monarch._base.errors import explain

_MOST_THREADS = 8
_SEE = "see /etc/hosts and DNS, or give an IP address"

Target: TypeAlias = tuple[int, tuple[Any, ...]]
"""Family and socket address, for `socket.socket(family)` and `connect` or `bind`."""
Result: TypeAlias = list[Target] | OSError
"""Where to dial, best first (RFC 6724), never empty; or why that is not known."""


class Resolution:
    """A look-up that is under way. Thread: any."""

    def __init__(self, address: Address, on_result: Callable[[Result], None]) -> None:
        self.address = address
        self._on_result: Callable[[Result], None] | None = on_result

    @property
    def cancelled_or_done(self) -> bool:
        """Whether nobody waits for the result (any more)."""
        return self._on_result is None

    def cancel(self) -> None:
        """Nobody wants the result: `on_result` is not called from now on; one that has begun in another thread runs on."""
        self._on_result = None

    def _answer(self, result: Result) -> None:
        on_result, self._on_result = self._on_result, None
        if on_result is not None:
            on_result(result)


def resolve(address: Address, on_result: Callable[[Result], None]) -> Resolution:
    """Look up where to dial a tcp or tls address; returns at once.

    Args:
        on_result: called with the result: before this returns where nothing has to be looked up, else from another thread.
            It must not raise and not block; `NetLoop.call_soon` is what it is for.
    """
    resolution = Resolution(address, on_result)
    if is_ip(address.host) or address.is_wildcard:
        resolution._answer(_look_up(address))
    else:
        _submit(resolution)
    return resolution


def resolve_within(address: Address, budget_s: float) -> list[Target]:
    """Where a tcp or tls address is, for a caller that can wait.

    Raises:
        OSError: it is not known, or not within `budget_s` seconds; the text names the host.
    """
    results: list[Result] = []
    done = threading.Event()

    def on_result(result: Result) -> None:
        results.append(result)
        done.set()

    resolution = resolve(address, on_result)
    if not done.wait(budget_s):
        resolution.cancel()
        raise OSError(explain(f"host name {address.host!r} was not resolved within {budget_s:g} s", next=_SEE))
    if isinstance(results[0], OSError):
        raise results[0]
    return results[0]


def _look_up(address: Address) -> Result:
    if address.is_wildcard:
        return OSError(explain(f"{address} stands for every interface and cannot be dialled", next="give a host name or an IP address"))
    literal = is_ip(address.host)
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_NUMERICHOST if literal else 0
        )
    except OSError as exc:
        return _unknown(address, exc.strerror or str(exc))
    except UnicodeError as exc:  # the codec of international names refuses what DNS cannot carry
        return _unknown(address, str(exc))
    return list(dict.fromkeys((int(family), sockaddr) for family, _, _, _, sockaddr in found))


def _unknown(address: Address, reason: str) -> OSError:
    if is_ip(address.host):
        interface = address.host.partition("%")[2]
        what = f"{address.host} is of no use here: {reason}"
        return OSError(explain(what, next=f"is there an interface {interface!r}?" if interface else ""))
    return OSError(explain(f"host name {address.host!r} cannot be resolved: {reason}", next=_SEE))


# --- threads ---------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_waiting: deque[Resolution] = deque()
_threads = 0


def _submit(resolution: Resolution) -> None:
    global _threads
    with _lock:
        _waiting.append(resolution)
        if _threads == _MOST_THREADS:
            return
        _threads += 1
    try:
        threading.Thread(target=_serve, name="monarch-resolver", daemon=True).start()
    except RuntimeError:  # no thread can be started: look it up here rather than never
        _serve()


def _serve() -> None:
    """Answer what waits; the thread ends with the queue."""
    while (resolution := _next()) is not None:
        if not resolution.cancelled_or_done:
            resolution._answer(_look_up(resolution.address))


def _next() -> Resolution | None:
    global _threads
    with _lock:
        if _waiting:
            return _waiting.popleft()
        _threads -= 1
        return None
