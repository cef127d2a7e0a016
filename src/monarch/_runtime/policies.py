"""Supervision policies: what to do when an actor, or its proc, has failed. Pure data.

    workers = procs.supervised(OneForOne(max_restarts=3, within_s=60)).spawn("w", Worker, ...)

Read next: `supervision.py` for how they are carried out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from monarch._base.errors import explain

if TYPE_CHECKING:
    from monarch._runtime.supervision import Place

Replace = Literal["actor", "proc"]


class Policy:
    """What happens to the actors of a group, and who hears of it, when one of them fails."""


@dataclass(frozen=True)
class Escalate(Policy):
    """Tell the owner (its `__supervise__`); the rank stays dead. What happens without a policy."""


@dataclass(frozen=True)
class Ignore(Policy):
    """Tell nobody but the log; the rank stays dead, and calls to it fail."""


@dataclass(frozen=True)
class Restarting(Policy, ABC):
    """What the restarting policies share.

    Args:
        max_restarts: of the whole group; one event (a death, however many ranks it makes restart) is one restart.
            One more within `within_s` and the policy gives up: the owner is told, with the story of all of them.
        within_s: for how long a restart counts, seconds.
        backoff_s: pause before the first restart, seconds; it doubles with every further restart that still counts.
        max_backoff_s: longest pause, seconds.
        replace: "actor": an actor that failed is created anew in its proc, and a new proc comes only where the old one has died
            (or does not end its actor in time); "proc": every restarted rank gets a new proc, which frees what a
            library keeps per process, such as a process group of torch.distributed.

    Raises:
        ValueError: a number is out of range.
    """

    max_restarts: int = 3
    within_s: float = 60.0
    backoff_s: float = 0.1
    max_backoff_s: float = 30.0
    replace: Replace = "actor"

    def __post_init__(self) -> None:
        most: object = self.max_restarts
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(
                explain(f"max_restarts is {self.max_restarts!r}; expected an integer of at least 1", next="use Escalate() for no restart")
            )
        for name, may_be_zero in (("within_s", False), ("backoff_s", True), ("max_backoff_s", True)):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < float("inf") or (value == 0 and not may_be_zero):
                least = "at least" if may_be_zero else "more than"
                text = f"{name} is {value!r}; expected a number of seconds, {least} 0"
                raise ValueError(explain(text, next=f"give it seconds, such as {name}=1.5"))
        if self.replace not in ("actor", "proc"):
            text = f"replace is {self.replace!r}; expected 'actor' or 'proc'"
            raise ValueError(explain(text, next="use 'proc' to free what a library keeps per process, else 'actor'"))

    def delay_s(self, restarts: int) -> float:
        """The pause before the `restarts`-th restart that counts, which is 1 or more."""
        return float(min(self.max_backoff_s, self.backoff_s * 2.0 ** min(restarts - 1, 64)))

    @abstractmethod
    def also_restarted(self, members: Sequence[Place], failed: set[Place]) -> list[Place]:
        """Which others are restarted with those that failed; `members` is everybody in start order."""


@dataclass(frozen=True)
class OneForOne(Restarting):
    """Restart what failed, and nothing else."""

    def also_restarted(self, members: Sequence[Place], failed: set[Place]) -> list[Place]:
        """Nobody."""
        return []


@dataclass(frozen=True)
class AllForOne(Restarting):
    """Restart the whole group when one of it fails: for ranks that compute together."""

    def also_restarted(self, members: Sequence[Place], failed: set[Place]) -> list[Place]:
        """Everybody."""
        return list(members)


@dataclass(frozen=True)
class RestForOne(Restarting):
    """Restart what failed and what was started after it: later ranks of its mesh, and the meshes spawned later.

    For stages that depend on those before them.
    """

    def also_restarted(self, members: Sequence[Place], failed: set[Place]) -> list[Place]:
        """Everybody from the first that failed."""
        first = min((index for index, place in enumerate(members) if place in failed), default=len(members))
        return list(members)[first:]
