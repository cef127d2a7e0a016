"""One host's end of a gathered folder, as an actor in a process of its own: looks, reads, and tells of changes.

Rules of this file:
    1. Answers to looks are given at once, bytes are read on threads of their own: a slow disk holds up nobody who only looks.
    2. Changes are asked for, and the answer waits until there are some. So they never pile up at who does not listen any more.

Read next: `folder.py` and `watches.py`, which do the work; `gather_actor.py`, who asks.
"""

from __future__ import annotations

import errno
import os
import pickle
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from monarch._base.errors import explain
from monarch._mounts import mounting
from monarch._mounts.folder import Folder, Found, Got, Listed, Want, kind_of_root
from monarch._mounts.watches import Change, Watches, What
from monarch.actor import Actor, Port, context, endpoint

SUBDIR = "$SUBDIR"
_NUM_READERS = 2
_MOST_PENDING = 10_000
"""Changes that nobody has asked for yet; more are told as one: anything may have changed."""


class Whereabouts(NamedTuple):
    """Where a folder is, for its client to see whether it would mount into it."""

    path: str
    """With all links resolved."""
    machine: str
    """The same in all processes that see the same files at the same paths."""
    problem: str
    """Why it can't be shown; "": it can."""


class GatherSourceActor(Actor):
    """The folder on one host."""

    def __init__(self, path: str) -> None:
        """`path`: `$SUBDIR` stands for the coordinates of this host."""
        self._path = os.fsencode(path.replace(SUBDIR, key_of(context().actor_instance.rank)))
        self._news = _News()
        self._watches = Watches(self._path, self._news.tell, lambda: self._folder.tick())
        self._folder = Folder(self._path, self._watches)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._readers = [threading.Thread(target=self._read_jobs, name="monarch-gather-read", daemon=True) for _ in range(_NUM_READERS)]
        for reader in self._readers:
            reader.start()

    @endpoint
    def whereabouts(self) -> Whereabouts:
        """Where the folder is, and whether it can be shown; one that does not exist yet can."""
        wrong = kind_of_root(self._path)
        problem = ""
        if wrong:
            what = f"{os.fsdecode(self._path)!r} can't be gathered: {os.strerror(wrong)}"
            next = "name the directory that it is in" if wrong == errno.ENOTDIR else "let the user of the workers read it"
            problem = explain(what, where=key_of(context().actor_instance.rank), next=next)
        return Whereabouts(os.fsdecode(os.path.realpath(self._path)), mounting.machine(), problem)

    @endpoint
    def stat(self, path: bytes, keep: bool) -> Found | int:
        """What a path stands for."""
        return self._folder.stat(path, keep=keep)

    @endpoint
    def listing(self, path: bytes) -> Listed | int:
        """What a directory holds."""
        return self._folder.listing(path)

    @endpoint(explicit_response_port=True)
    def read(self, port: Port[Got | int], path: bytes, ident: int, wants: list[Want]) -> None:
        """Ranges of a file."""
        if self._folder.is_small(path):
            self._read(port, path, ident, wants)  # sooner done than given to another thread
        else:
            self._jobs.put(partial(self._read, port, path, ident, wants))

    @endpoint(explicit_response_port=True)
    def changes(self, port: Port[list[Change]]) -> None:
        """What has changed since this was asked last, as soon as there is something."""
        self._news.ask(port.send)

    def _read(self, port: Port[Got | int], path: bytes, ident: int, wants: list[Want]) -> None:
        got = self._folder.read(path, ident, wants)
        if not isinstance(got, int):
            got = Got(got.found, [(known, pickle.PickleBuffer(data)) for known, data in got.parts])  # type: ignore[misc]
        port.send(got)

    def _read_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def __cleanup__(self, exc: Exception | None) -> None:
        for _ in self._readers:
            self._jobs.put(None)
        self._watches.close()
        for reader in self._readers:
            reader.join(1.0)
        self._folder.close()


class _News:
    """Changes on their way to who asks for them. Thread: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[Change, None] = {}
        self._answer: Callable[[list[Change]], None] | None = None

    def tell(self, changes: list[Change]) -> None:
        """These have happened."""
        with self._lock:
            self._pending.update(dict.fromkeys(changes))
            if len(self._pending) > _MOST_PENDING:
                self._pending = {(b"", What.ALL): None}
            self._give()

    def ask(self, answer: Callable[[list[Change]], None]) -> None:
        """`answer(changes)` is called once; who has asked before gets nothing."""
        with self._lock:
            before, self._answer = self._answer, answer
            if before is not None:
                before([])
            self._give()

    def _give(self) -> None:
        if self._answer is not None and self._pending:
            answer, self._answer = self._answer, None
            changes, self._pending = list(self._pending), {}
            answer(changes)


def key_of(rank: Mapping[str, int]) -> str:
    """The coordinates of a host, such as `hosts_0_gpus_1`; "" for a mesh without dimensions."""
    return "_".join(f"{dim}_{at}" for dim, at in rank.items())
