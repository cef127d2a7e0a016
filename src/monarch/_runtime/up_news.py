"""News that procs are up: the first goes to its owner at once, the others together, when no more are on their way or after 10 ms.

The owner of the procs of many hosts would otherwise hear of each by a message of its own. An owner on the same host does: it
is waiting to dial them.

Read next: `host.py`, which has the news.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from monarch._base.ids import ProcRef
from monarch._wire import messages
from monarch._wire.messages import ProcsUp, ProcUp

_TOGETHER_S = 0.01


class UpNews:
    """What the owners of one agent's procs are about to be told. Thread: the agent's."""

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], object],
        tell: Callable[[ProcRef, messages.Control], None],
        is_near: Callable[[ProcRef], bool],
    ) -> None:
        self._call_later = call_later
        self._tell = tell
        self._is_near = is_near
        self._waiting: dict[str, list[ProcUp]] = {}
        self._starting: Counter[str] = Counter()
        """How many procs of each owner are on their way."""

    def expect(self, owner: ProcRef) -> None:
        """A proc is being started."""
        self._starting[owner.uid] += 1

    def fail(self, owner: ProcRef) -> None:
        """A proc that was being started has ended."""
        self._arrive(owner)
        self.flush(owner)

    def add(self, owner: ProcRef, up: ProcUp) -> None:
        """A proc is up."""
        self._arrive(owner)
        waiting = self._waiting.get(owner.uid)
        if self._is_near(owner):
            self._tell(owner, up)
        elif waiting is None:
            self._tell(owner, up)
            self._waiting[owner.uid] = []
            self._call_later(_TOGETHER_S, lambda: self._look(owner))
        else:
            waiting.append(up)
            if owner.uid not in self._starting:
                self.flush(owner)

    def _arrive(self, owner: ProcRef) -> None:
        self._starting[owner.uid] -= 1
        if self._starting[owner.uid] <= 0:
            del self._starting[owner.uid]

    def _look(self, owner: ProcRef) -> None:
        if self._waiting.get(owner.uid):
            self.flush(owner)
            self._call_later(_TOGETHER_S, lambda: self._look(owner))
        else:
            self._waiting.pop(owner.uid, None)

    def flush(self, owner: ProcRef) -> None:
        """Something else is about to be told that came after them."""
        waiting = self._waiting.get(owner.uid)
        if waiting:
            self._tell(owner, ProcsUp(waiting))
            self._waiting[owner.uid] = []
