"""Weights: a state dict that its owner publishes again and again, and that any number of readers get whole, in one version.

    publisher = WeightPublisher(model.state_dict(), hosts=rollout_hosts)    # on the learner, once
    weights = publisher.weights                         # a handle; send it in any message
    publisher.publish(model.state_dict(), version=7)    # after each step; nobody is told, nobody is waited for
    version = weights.pull(rollout.state_dict())        # anywhere, at any time; in a coroutine: await weights.start_pull(...)
    with weights.mapped() as tensors: ...               # on a host that has them: without a copy

The owner keeps versions side by side in memory of its own (`copies.py`), so training goes on in the tensors themselves.

Rules of this file:
    1. The reader needs nobody: it is one-sided, as all of this package. Where its host has a relay, that fetches each publication that
       somebody wants once; without it, or when it has died, the reader reads from the owner.
    2. What a reader gets is at least as new as what was published when it began.

Read next: `copies.py`, `relay_actor.py`, `mapped.py`.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from monarch._base.errors import explain
from monarch._runtime.future import Future, runs_in_loop
from monarch.actor.host_mesh import check_hosts
from monarch.rdma.action import RDMAAction, checked_timeout
from monarch.rdma.copies import NOTHING, Copies, Copy, PublishedCopies
from monarch.rdma.errors import RDMAError, RDMATimeout, UnavailableError
from monarch.rdma.manager import own_manager
from monarch.rdma.mapped import MappedWeights
from monarch.rdma.parts import Part, check_known, check_same, chosen_of, copy_in, copy_out, listed, parts_of, target_of, within
from monarch.rdma.relay_actor import start_relays
from monarch.rdma.relays import Question
from monarch.rdma.sources import Relays, Source, own_host

if TYPE_CHECKING:
    from monarch.actor import HostMesh, ProcMesh

T = TypeVar("T")
Use: TypeAlias = Callable[[Source, Copy, float], T | None]
_logger = logging.getLogger("monarch.rdma")
_MOST_COPIES = 16
_STOP_S = 20.0


class WeightPublisher:
    """The owner's end. Thread: any, one publication at a time."""

    def __init__(
        self, state: Mapping[str, Any], *, version: int = 0, copies: int = 2, spares: int = 4, hosts: HostMesh | None = None
    ) -> None:
        """Publish `state` for the first time.

        Args:
            state: name to tensor (on any device, of any layout) or numpy array.
            version: what `Weights.pull` returns to whoever reads this; any number of yours.
            copies: how many versions are kept; a reader that takes longer than `copies - 1` publications has to begin anew.
            spares: how many more may be kept while readers map them (`Weights.mapped`).
            hosts: get a process each, a relay, from which the readers of that host read: a version passes this host's link once,
                goes on from host to host, and only when somebody wants it. Needs the memory of two to `copies + spares` versions there.

        Raises:
            ValueError: there is no tensor in it, or `copies` or `spares` is none of 1 to 16, or `version` has more than 64 bits.
            TypeError: it is no mapping, or a value is no tensor or array with plain elements; or `hosts` is no mesh of hosts.

        Cost: `copies` times the memory of `state`, and one copy of it now and at each publication.
        """
        if not (1 <= copies <= _MOST_COPIES and 0 <= spares <= _MOST_COPIES):
            raise ValueError(explain(f"copies must be 1 to {_MOST_COPIES}, and spares 0 to {_MOST_COPIES}, not {copies} and {spares}"))
        if hosts is not None:
            check_hosts(hosts)
        parts, size = parts_of(state)
        if not size:
            raise ValueError(explain("there are no weights to publish: the state dict is empty", next="publish it once it is filled"))
        self._parts = parts
        self._lock = threading.Lock()
        self._copies = Copies(size, copies=copies, spares=spares)
        self._last = NOTHING
        self._procs: ProcMesh | None = None
        relays = None
        try:
            self.publish(state, version=version)
            if hosts is not None:
                self._procs = hosts.spawn_procs(name="weights-relay")
                relays = start_relays(self._procs, self._copies.published, size, copies=copies, spares=spares)
        except BaseException:
            self.close()
            raise
        self.weights = Weights(self._copies.published, parts, relays)
        """The handle; the same for all versions."""

    def publish(self, state: Mapping[str, Any], *, version: int | None = None) -> int:
        """Make `state` the version that readers get from now on.

        Args:
            state: the names, shapes and types of the constructor.
            version: None: one more than the last.

        Returns:
            The version.

        Raises:
            ValueError: another name, shape or type, or a version of more than 64 bits; nothing was published.
            RDMAError: readers map every copy but the newest, and there are no more spares; the text says who. Or it was closed, or
                this is a fork of the process that made it.

        Cost: one copy of the weights; what is on a GPU is copied from there.
        """
        check_same(self._parts, state, what="published")
        self._copies.check()  # also here: a fork may find the lock taken
        with self._lock:
            version = _checked_version(self._last.version + 1 if version is None else version)
            memory = self._copies.begin(self._last.number + 1, version)
            try:
                for name, part in self._parts.items():
                    copy_out(state[name], memory, part)
                self._last = self._copies.finish()
            finally:
                self._copies.abandon()
        return version

    def close(self) -> None:
        """Take the memory back and end the relays; who pulls from then on gets `RDMAError`. What is mapped stays with who has mapped it."""
        if self._copies.pid != os.getpid():
            return  # a fork has no share in them
        procs, self._procs = self._procs, None
        try:
            if procs is not None:
                procs.stop().get(timeout=_STOP_S)
        except TimeoutError as exc:  # of a host that is stopped, or can't be reached; what counts is the memory
            _logger.warning("relays of weights have not ended, and will with this process: reason=%s", exc)
        finally:
            with self._lock:
                self._copies.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(explain("a WeightPublisher stays in the process that made it", next="send its handle: publisher.weights"))


class Weights:
    """A handle to published weights, for any process. Thread: any."""

    def __init__(self, owner: PublishedCopies, parts: dict[str, Part], relays: Relays | None) -> None:
        self.parts = parts
        """Name to place, type and shape of each tensor."""
        self._owner = Source(owner, None)
        self._relays = relays
        self._sources: list[Source] = []
        """Of this process, the best first; the last is the owner. Empty before the first read."""
        self._last = NOTHING
        """What was read from here before."""
        self._told = ""
        """Why the log has it that the relay is not used."""

    def version(self, *, timeout: int = 60) -> int:
        """The version that is published now. Cost: one small one-sided read, of the owner's memory."""
        deadline_s = time.monotonic() + checked_timeout(timeout)
        return self._use_owner(lambda *_: True, 1, deadline_s)[0].version

    def pull(self, into: Mapping[str, Any], *, names: Iterable[str] | None = None, timeout: int = 60) -> int:
        """Copy published weights into tensors or arrays of this process; all of one version, at least as new as `version()` is now.

        Args:
            into: name to tensor or array, of the published shape and type. Those on the CPU and contiguous are filled directly,
                others through a copy.
            names: which; None: all that are in `into`.
            timeout: seconds.

        Returns:
            The version.

        Raises:
            ValueError: a name, shape or type that is not the published one, or what can't be written to; nothing was changed.
            TypeError: `into` is no mapping, or has what is no tensor or array; `names` is a string; or the timeout is no whole number.
            RDMATimeout: not done in time, or the owner publishes faster than this process reads. What was pulled so far is of
                several versions.
            RDMAError: the owner has ended, or closed the publisher.
        """
        pull = self._prepared_pull(into, names, timeout)
        if not runs_in_loop():
            return pull()
        text = 'Weights.pull() blocks the active event loop of this thread; write "await weights.start_pull(...)"'
        warnings.warn(text, UserWarning, stacklevel=2)
        pulling = self._on_worker(pull)
        ended = threading.Event()
        pulling._when_done(ended.set)
        try:
            ended.wait()  # `pull` ends at its deadline
        finally:  # see `_read`
            ended.wait()
        return pulling.get()

    def start_pull(self, into: Mapping[str, Any], *, names: Iterable[str] | None = None, timeout: int = 60) -> Future[int]:
        """The same as `pull`, beginning now, on another thread: `await` it in a coroutine, or `get` it once something else is done.

        Use what is in `into` when it is over, whoever waits: giving up waiting does not end it.

        Raises:
            ValueError, TypeError: as `pull`, at the call; what else can go wrong is the outcome of the future.
        """
        return self._on_worker(self._prepared_pull(into, names, timeout))

    def _on_worker(self, pull: Callable[[], int]) -> Future[int]:
        return own_manager().engine.run(pull, f"weights {self._owner.copies.owner}")

    def _prepared_pull(self, into: Mapping[str, Any], names: Iterable[str] | None, timeout: int) -> Callable[[], int]:
        """Check everything that can be checked now."""
        deadline_s = time.monotonic() + checked_timeout(timeout)
        wanted = chosen_of(into, names)
        check_same(self.parts, wanted, what="pulled", partly=True)
        targets = {name: target_of(value, self.parts[name]) for name, value in wanted.items()}

        def pull() -> int:
            copy, _ = self._use(partial(self._read, targets), 1, deadline_s)
            for name, value in wanted.items():
                copy_in(targets[name], value, self.parts[name])
            return copy.version

        return pull

    def _read(self, targets: Mapping[str, Any], source: Source, copy: Copy, deadline_s: float) -> bool | None:
        """Fill the targets from a copy, as it comes; None: it has been overwritten meanwhile."""
        memory, done = source.copies.bytes_of(copy.slot, _left(deadline_s)), 0
        while True:
            action = RDMAAction()
            for target, start, end in within(targets, self.parts, done, copy.arrived):
                action.read_remote(target, memory[start:end])
            reading = action.submit(timeout=_left(deadline_s))
            try:
                reading.get()
            finally:  # after Ctrl-C it still writes to the tensors, into which somebody may pull again
                reading.exception()
            now, done = source.copies.look(copy.slot, _left(deadline_s)), copy.arrived
            if now.is_same(copy) and done == now.arrived < source.copies.size:
                now = source.wait_copy(Question(copy.number, copy, done + 1), _left(deadline_s))
            if not now.is_same(copy):
                return None
            if done == source.copies.size:
                return True
            copy = now

    def mapped(self, *, names: Iterable[str] | None = None, timeout: int = 60) -> MappedWeights:
        """The published weights themselves, in the memory of the owner or of the relay of this host, as read-only tensors or arrays.

        They are of one version, at least as new as `version()` is now, and stay so: the owner goes on in other copies, so close this soon.
        Publishing fails once readers map `copies + spares - 1` of them.

        Args:
            names: which; None: all.
            timeout: seconds, for a relay to fetch them.

        Raises:
            ValueError: a name that was not published.
            TypeError: `names` is a string, or the timeout is no whole number.
            RDMATimeout: a relay did not get them in time.
            RDMAError: the owner has ended, or closed the publisher; or it is on another machine, and this host has no relay.

        Cost: 0.5 ms, whatever the size, and the page faults of what is looked at. To a GPU it is one copy: `load_state_dict(mapped)`.
        """
        deadline_s = time.monotonic() + checked_timeout(timeout)
        parts = self.parts if names is None else dict.fromkeys(listed(names))
        check_known(self.parts, parts)

        def lease(source: Source, copy: Copy, deadline_s: float) -> Any:
            if not source.copies.is_near:
                what = "weights can be mapped only on a machine that has them in shared memory"
                hint = "give this host a relay: WeightPublisher(..., hosts=...); or pull() them"
                raise UnavailableError(explain(what, where=source.copies.owner, next=hint))
            return source.copies.map(copy, _left(deadline_s))

        copy, memory = self._use(lease, self._owner.copies.size, deadline_s)
        return MappedWeights(copy.version, memory, {name: self.parts[name] for name in parts})

    def _use(self, use: Use[T], nbytes: int, deadline_s: float) -> tuple[Copy, T]:
        """Do something with a copy that is new enough and of which `nbytes` are there, until it has been there all the time.

        Args:
            use: gives None when it has not.
        """
        sources = self._own_sources()
        if len(sources) > 1:
            try:
                return self._use_source(sources[0], use, nbytes, deadline_s)
            except RDMATimeout:
                raise
            except RDMAError as exc:
                if not isinstance(exc, UnavailableError):
                    self._sources = sources[1:]
                if str(exc) != self._told:
                    # When the owner has ended or closed them as well, as relays end with it, its error is all that there is to say.
                    self._use_owner(lambda *_: True, 1, deadline_s)
                    self._told = str(exc)
                    _logger.warning("weights come from their owner instead of the relay of this host: reason=%s", exc)
        return self._use_owner(use, nbytes, deadline_s)

    def _use_owner(self, use: Use[T], nbytes: int, deadline_s: float) -> tuple[Copy, T]:
        try:
            return self._use_source(self._owner, use, nbytes, deadline_s)
        except RDMAError as exc:
            raise self._owner.copies.explained(exc, self._last) from exc.__cause__

    def _use_source(self, source: Source, use: Use[T], nbytes: int, deadline_s: float) -> tuple[Copy, T]:
        while True:
            copy = source.newest(nbytes, _left(deadline_s))
            used = use(source, copy, deadline_s) if copy != NOTHING else None
            if used is not None:
                self._last = copy
                return copy, used
            if time.monotonic() >= deadline_s:
                hint = "publish less often, or with more copies: WeightPublisher(..., copies=3)"
                what = "no version could be read whole in time: the next ones came too soon"
                if copy == NOTHING:
                    what = "no version was whole in time: the only copy is being filled, or its publication broke off"
                    hint = "publish again, and with more copies: WeightPublisher(..., copies=2)"
                raise RDMATimeout(explain(what, where=source.copies.owner, next=hint))

    def _own_sources(self) -> list[Source]:
        if not self._sources:
            relay = None if self._relays is None else self._relays.at(own_host())
            self._sources = [self._owner] if relay is None else [relay, self._owner]
        return self._sources

    def __reduce__(self) -> tuple[object, ...]:
        return Weights, (self._owner.copies, self.parts, self._relays)

    def __repr__(self) -> str:
        return f"<Weights: {len(self.parts)} tensors, {sum(part.nbytes for part in self.parts.values())} bytes>"


def _checked_version(version: int) -> int:
    number = operator.index(version)
    if not -(2**63) <= number < 2**63:
        raise ValueError(explain(f"version {number} has more than 64 bits", next="count versions from 0"))
    return number


def _left(deadline_s: float) -> int:
    return max(1, math.ceil(deadline_s - time.monotonic()))
