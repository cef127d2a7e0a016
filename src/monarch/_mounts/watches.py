"""Which paths of a folder have changed: watches on its directories, and the thread that reads what the kernel says of them.

One watch per directory tells of everything directly in it. There are no more of them than `MOST`; the one used longest ago goes first.

Rules of this file:
    1. A directory is watched before it is looked at, so whatever changes after the look is told.
    2. What can't be watched is said to be unwatched (`watch` gives False), and whoever looks asks again each time: file systems of a
       network, FUSE and the kernel's own, where changes come without events, and any when the limits of the system are reached.
    3. Changes are told at most every `BATCH_S`, each path once, and one whose bytes change all the time every `HOT_S`: after each time its
       readers have to ask anew.

Read next: `inotify.py` for the events, `folder.py` for who looks, `gathered.py` for who is told.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum

from monarch._mounts import inotify
from monarch._mounts.inotify import Event, Inotify, Mask

_logger = logging.getLogger("monarch.mounts")

MOST = 8192
"""Watched directories."""
BATCH_S = 0.02
HOT_S = 0.06
_ROOT_S = 1.0
"""How often the folder itself is looked at: what is above it is not watched."""
_LOCAL = {
    0xEF53: "ext", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x794C7630: "overlay",
    0xF2F52010: "f2fs", 0x2FC12FC1: "zfs", 0xCA451A4E: "bcachefs", 0x3153464A: "jfs", 0x52654973: "reiserfs", 0x73717368: "squashfs",
    0xE0F5E1E2: "erofs", 0x9660: "iso9660", 0x2011BAB0: "exfat", 0x4D44: "vfat",
}  # fmt: skip
"""File systems that only this machine changes, and that tell of it."""


class What(IntEnum):
    """What has changed about a path."""

    CONTENT = 0
    """Bytes or attributes."""
    NAME = 1
    """It stands for something else, or for nothing, and so does all below it."""
    UNWATCHED = 2
    """Nobody will tell of changes in this directory any more, unless it is asked for anew."""
    ALL = 3
    """Anything may have changed anywhere; the path is b""."""


Change = tuple[bytes, int]
"""A path relative to the folder, and what (of `What`)."""


class Watches:
    """The watched directories of one folder. Thread: any."""

    def __init__(self, root: bytes, tell: Callable[[list[Change]], None], on_tick: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            tell: called with changes. Thread: one of ours.
            on_tick: called about once a second on the same thread.
        """
        self._root = root
        self._tell = tell
        self._on_tick = on_tick
        self._lock = threading.Lock()
        self._by_path: OrderedDict[bytes, int] = OrderedDict()
        self._paths: dict[int, set[bytes]] = {}
        """Several paths lead to one directory where links do."""
        self._lost: dict[Change, None] = {}
        self._held: dict[Change, None] = {}
        """Changes that were told a moment ago."""
        self._told_s: dict[Change, float] = {}
        self._magics: dict[int, bool] = {}
        self._said: set[object] = set()
        self._identity = _identity(root)
        try:
            self._inotify: Inotify | None = Inotify()
        except OSError as exc:
            self._inotify = None
            self._say("none", "changes are not told but looked for: %s", exc)
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="monarch-watches", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End. Idempotent."""
        with self._lock:
            if self._alarm < 0:
                return
            os.eventfd_write(self._alarm, 1)
        self._thread.join(5.0)
        with self._lock:
            alarm, self._alarm = self._alarm, -1
            notifier, self._inotify = self._inotify, None
        os.close(alarm)
        if notifier is not None:
            notifier.close()

    def watch(self, path: bytes) -> bool:
        """Watch the directory `path` from now on; False: its changes will not be told."""
        full = self._root + b"/" + path if path else self._root
        with self._lock:
            if self._inotify is None or not self._tells(full):
                return False
            try:
                number = self._inotify.add(full)
            except OSError as exc:
                if exc.errno in (errno.ENOSPC, errno.ENOMEM):
                    self._say("limit", "no more directories can be watched, changes are looked for: raise fs.inotify.max_user_watches")
                return False
            before = self._by_path.get(path)
            if before is not None and before != number:
                self._forget(path)
            self._by_path[path] = number
            self._by_path.move_to_end(path)
            self._paths.setdefault(number, set()).add(path)
            while len(self._by_path) > MOST:
                oldest = next(iter(self._by_path))
                self._forget(oldest)
                self._lost[oldest, What.UNWATCHED] = None
            return True

    def is_watched(self, path: bytes) -> bool:
        """Whether the directory `path` is."""
        return path in self._by_path

    def __len__(self) -> int:
        return len(self._by_path)

    def _tells(self, full: bytes) -> bool:
        try:
            device = os.stat(full).st_dev
        except OSError:
            return False
        if device not in self._magics:
            magic = inotify.magic_of(full)
            self._magics[device] = magic in _LOCAL
            if magic not in _LOCAL:
                self._say(device, "the file system (type %#x) at %r does not tell of all its changes, they are looked for", magic, full)
        return self._magics[device]

    def _say(self, kind: object, text: str, *args: object) -> None:
        if kind not in self._said:
            self._said.add(kind)
            _logger.warning(text, *args)

    def _forget(self, path: bytes) -> None:
        number = self._by_path.pop(path)
        paths = self._paths.get(number, set())
        paths.discard(path)
        if not paths:
            self._paths.pop(number, None)
            if self._inotify is not None:
                self._inotify.remove(number)

    # --- on the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        waiting, stop = select.poll(), select.poll()
        for poll in (waiting, stop):
            poll.register(self._alarm, select.POLLIN)
        if self._inotify is not None:
            waiting.register(self._inotify.fd, select.POLLIN)
        while True:
            ready = waiting.poll((BATCH_S if self._held else _ROOT_S) * 1000)
            if stop.poll(BATCH_S * 1000 if ready else 0):
                return
            try:
                self._turn(is_tick=not ready and not self._held)
            except Exception:
                _logger.exception("changes of a folder were not told")

    def _turn(self, *, is_tick: bool) -> None:
        changes = self._without_hot(self._held | self._read())
        if is_tick:
            identity = _identity(self._root)
            if identity != self._identity:
                self._identity = identity
                self._forget_all()
                changes = {(b"", What.ALL): None}
            self._on_tick()
        if changes:
            self._tell(list(changes))

    def _without_hot(self, changes: dict[Change, None]) -> dict[Change, None]:
        now_s = time.monotonic()
        self._told_s = {change: at for change, at in self._told_s.items() if now_s - at < HOT_S}
        self._held = {change: None for change in changes if change[1] == What.CONTENT and change in self._told_s}
        due = {change: None for change in changes if change not in self._held}
        self._told_s.update(dict.fromkeys(due, now_s))
        return due

    def _read(self) -> dict[Change, None]:
        with self._lock:
            changes, self._lost = self._lost, {}
            while self._inotify is not None and (events := self._inotify.read()):
                for event in events:
                    self._take(event, changes)
        return changes

    def _take(self, event: Event, changes: dict[Change, None]) -> None:
        mask = event.mask
        if mask & Mask.Q_OVERFLOW:
            changes[b"", What.ALL] = None
            return
        for directory in list(self._paths.get(event.watch, ())):
            path = directory + b"/" + event.name if directory and event.name else directory or event.name
            if not event.name:
                self._take_own(directory, mask, changes)
            elif mask & inotify.NAMES:
                changes[path, What.NAME] = None
                if mask & Mask.ISDIR and mask & (Mask.MOVED_FROM | Mask.DELETE):
                    self._forget_below(path)
            else:
                changes[path, What.CONTENT] = None

    def _take_own(self, directory: bytes, mask: int, changes: dict[Change, None]) -> None:
        if mask & inotify.LOST:
            changes[directory, What.UNWATCHED] = None
            if directory in self._by_path:
                self._forget(directory)
        else:
            changes[directory, What.CONTENT] = None

    def _forget_below(self, path: bytes) -> None:
        for other in [each for each in self._by_path if each == path or each.startswith(path + b"/")]:
            self._forget(other)

    def _forget_all(self) -> None:
        with self._lock:
            for path in list(self._by_path):
                self._forget(path)


def _identity(path: bytes) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
