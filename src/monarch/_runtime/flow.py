"""Flow control: a sender that is faster than its receiver is slowed, and memory stays bounded.

Every (receiving proc, actor) has a window of bytes that this process may have sent and the actor not yet handled. A
sender beyond it waits on its own thread for the receiver's credit.

Three exceptions keep it free of deadlocks: an actor that others wait for does not wait itself (a circle of actors that
send to each other would otherwise stand still), an actor never waits for its own process, and a finaliser does not wait
that runs in the middle of a send, or on the net loop: its thread is the one by which the credit would come. In these cases
memory may grow.

What is cast to many at once is accounted for once: the windows of its receivers have a `Share`, whose bytes count as theirs.

Read next: `cell.py`, which hands out the credit.
"""

from __future__ import annotations

import _thread
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from monarch._net.loop import this_turn

MESSAGE_OVERHEAD_BYTES = 256
"""What an empty message counts as."""

_MAX_SHARES = 64
Key: TypeAlias = tuple[str, str]


class Window:
    """What is under way to one actor. Thread: any."""

    __slots__ = ("bytes", "lock", "lost", "share", "since", "waiters")

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finaliser may send while its own thread sends
        self.bytes = 0
        """Without what was cast since it has its share; below 0 when that was handled already."""
        self.lost = False
        self.waiters: list[Any] = []
        self.share: Share | None = None
        self.since = 0
        """`Share.total` when it joined."""

    def load(self) -> int:
        """Bytes under way."""
        share = self.share
        return self.bytes if share is None else self.bytes + share.total - self.since

    def leave(self) -> None:
        """Have no share any more."""
        share = self.share
        if share is not None:
            with share.lock:
                share.intact = False
            with self.lock:  # nothing is added to the share from now on
                self.bytes, self.share = self.bytes + share.total - self.since, None


class Share:
    """What was cast to one actor on each of some procs. Thread: any."""

    __slots__ = ("intact", "lock", "room", "total", "uids", "windows")

    def __init__(self, uids: Sequence[str], windows: list[Window]) -> None:
        self.lock = threading.RLock()
        self.uids = uids
        self.windows = windows
        self.intact = True
        """All of `windows` have this share."""
        self.total = 0
        self.room = 0
        """So many bytes at least are free in each window; what has been handled since the last look is not counted."""

    def add(self, nbytes: int) -> None:
        """A message was cast. With the lock."""
        self.total += nbytes
        self.room -= nbytes


class Flow:
    """The windows of one process as a sender. Thread: any; `spend` may block, so never the net loop."""

    def __init__(self, window_bytes: int, wait_at: Callable[[Any], Any] | None = None) -> None:
        """Args:
        wait_at: blocks until its argument, a lock, is released; None: acquires it.
        """
        self._window_bytes = window_bytes
        self._windows: dict[Key, Window] = {}
        self._keys: dict[str, list[Key]] = {}
        """Of the windows of each proc."""
        self._shares: OrderedDict[tuple[int, str], Share] = OrderedDict()
        self._shares_lock = threading.RLock()
        self._wait_at = wait_at

    def spend(self, key: Key, nbytes: int, may_wait: Callable[[], bool], on_wait: Callable[[Any], None]) -> None:
        """Account for a message of `nbytes`, waiting first while the window is full.

        Args:
            may_wait: False: go on at once, whatever the window says.
            on_wait: told the gate that this thread is about to wait at; releasing it makes the thread ask `may_wait` again.
        """
        window = self._windows.get(key) or self._open(key)
        with window.lock:
            if window.share is None:
                if window.bytes < self._window_bytes or window.lost:
                    window.bytes += nbytes
                    return
            elif window.load() < self._window_bytes or window.lost:
                self._add(window, nbytes)
                return
        self._wait(window, may_wait, on_wait)
        with window.lock:
            self._add(window, nbytes)

    def _add(self, window: Window, nbytes: int) -> None:
        window.bytes += nbytes
        share = window.share
        if share is not None:
            with share.lock:
                share.room = min(share.room, self._window_bytes - window.load())

    def _open(self, key: Key) -> Window:
        window = Window()
        found = self._windows.setdefault(key, window)
        if found is window:
            self._keys.setdefault(key[0], []).append(key)
        return found

    def spend_all(self, uids: Sequence[str], actor: str, nbytes: int, may_wait: Callable[[], bool], on_wait: Callable[[Any], None]) -> None:
        """`spend` for an actor on each of these procs.

        Args:
            uids: the same object for the same procs, which makes it cheap.

        Cost: O(1), but O(procs) for the first time, after casts to others of them, and once per window of bytes.
        """
        share = self._shares.get((id(uids), actor))
        if share is None or share.uids is not uids or not share.intact:
            share = self._join(uids, actor)
        with share.lock:
            if share.room > 0 and share.intact:
                share.add(nbytes)
                return
        least = self._window_bytes
        for window in share.windows:
            if window.load() >= self._window_bytes:
                self._wait(window, may_wait, on_wait)
            if not window.lost:
                least = min(least, self._window_bytes - window.load())
        with share.lock:
            if share.intact:
                share.room = least
                share.add(nbytes)
                return
        self.spend_all(uids, actor, nbytes, may_wait, on_wait)  # another thread has sent to some of them meanwhile

    def _join(self, uids: Sequence[str], actor: str) -> Share:
        with self._shares_lock:
            windows = [self._windows.get((uid, actor)) or self._open((uid, actor)) for uid in uids]
            share = Share(uids, windows)
            for window in windows:
                window.leave()
                with window.lock:
                    window.share, window.since = share, 0
            self._shares[id(uids), actor] = share
            if len(self._shares) > _MAX_SHARES:
                _, oldest = self._shares.popitem(last=False)
                for window in oldest.windows:
                    if window.share is oldest:
                        window.leave()
            return share

    def _wait(self, window: Window, may_wait: Callable[[], bool], on_wait: Callable[[Any], None]) -> None:
        while this_turn.may_wait and may_wait():
            gate = _thread.allocate_lock()
            gate.acquire()
            with window.lock:
                if window.load() < self._window_bytes or window.lost:
                    return
                window.waiters.append(gate)
            on_wait(gate)
            if self._wait_at is None:
                gate.acquire()  # unbounded on purpose: ends by credit, by the loss of the proc, or by Ctrl-C
            else:
                self._wait_at(gate)

    def credit(self, key: Key, nbytes: int) -> None:
        """The receiver has handled `nbytes` more."""
        window = self._windows.get(key)
        if window is None:
            return
        with window.lock:
            window.bytes -= nbytes
            if window.load() >= self._window_bytes:
                return
            waiters, window.waiters = window.waiters, []
        for gate in waiters:
            open_gate(gate)

    def lose(self, proc_uid: str) -> None:
        """A proc is gone: nobody waits for it any more."""
        for key in self._keys.pop(proc_uid, ()):
            window = self._windows.pop(key, None)
            if window is None:
                continue
            window.leave()  # whoever comes after it under its id has a window of its own
            with window.lock:
                window.lost = True
                waiters, window.waiters = window.waiters, []
            for gate in waiters:
                open_gate(gate)


def open_gate(gate: Any) -> None:
    """Release a gate that may be released already."""
    if gate.locked():
        try:
            gate.release()
        except RuntimeError:  # another thread was faster
            return
