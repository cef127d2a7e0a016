"""Cast inboxes: what a process does with casts that are for it, so that each sender's messages keep their order.

Read next: `cast_order.py`, the rules; `caster.py` for the other end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monarch._runtime.cast_order import Inorder
from monarch._wire.cast_messages import CastHanded, CastVoid
from monarch._wire.messages import Hello

_GRACE_S = 10.0
"""How long a cast of a sender that is gone may still be in the tree."""
Step = Callable[[], None]


class CastInbox:
    """The order of what has come to one process, by sender. Thread: net loop."""

    def __init__(self, call_later: Callable[[float, Step], object]) -> None:
        self._call_later = call_later
        self._orders: dict[str, Inorder[Step]] = {}
        self._epochs: dict[str, int] = {}
        """Of whoever has opened a link."""

    def on_direct(self, sender: str, after: int, step: Step) -> None:
        """A message came straight that follows a cast (`after` is not 0)."""
        _run(self._order(sender).on_direct(after, step))

    def on_handed(self, sender: str, message: CastHanded, step: Step) -> None:
        """A cast came from the agent."""
        _run(self._order(sender).on_cast(message.epoch, message.number, message.after, message.fenced, step))

    def on_fence(self, sender: str, number: int) -> None:
        """All that was sent straight before that cast has come."""
        _run(self._order(sender).on_fence(number))

    def on_void(self, message: CastVoid) -> None:
        """Casts up to a number will not come."""
        _run(self._order(message.sender).void(message.epoch, message.number))

    def on_hello(self, hello: Hello) -> None:
        """A sender has opened a link: it may be another process than before."""
        uid = hello.proc.uid
        self._epochs[uid] = max(hello.epoch, self._epochs.get(uid, 0))
        order = self._orders.get(uid)
        if order is not None:
            order.begin(hello.epoch)

    def on_gone(self, sender: str) -> None:
        """A sender has ended; casts of it may still be on their way."""
        self._epochs.pop(sender, None)
        order = self._orders.get(sender)
        if order is None:
            return
        _run(order.close())

        def forget() -> None:
            if self._orders.get(sender) is order:
                order.lose()
                del self._orders[sender]

        self._call_later(_GRACE_S, forget)

    def _order(self, sender: str) -> Inorder[Step]:
        order = self._orders.get(sender)
        if order is None:
            order = self._orders[sender] = Inorder(self._epochs.get(sender, 0))
        return order

    def __len__(self) -> int:
        """How many messages are held back."""
        return sum(map(len, self._orders.values()))


def _run(steps: Sequence[Step]) -> None:
    for step in steps:
        step()
