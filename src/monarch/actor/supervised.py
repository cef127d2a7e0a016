"""Supervised procs: what `ProcMesh.supervised` gives, and the group that several meshes share.

Read next: `_runtime/policies.py` for the policies, `supervisor.py` for what they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from monarch._base.errors import explain
from monarch._base.ids import random_id
from monarch._runtime.policies import Policy, Restarting
from monarch.actor.base import Actor
from monarch.actor.process import this_process

if TYPE_CHECKING:
    from monarch.actor.proc_mesh import ProcMesh

T = TypeVar("T", bound=Actor)


class SupervisionGroup:
    """Meshes under one policy, in the order of their spawn; on any procs, of one owner.

        stages = SupervisionGroup(RestForOne(max_restarts=5, within_s=600))
        loader = cpus.supervised(stages).spawn("loader", Loader)
        trainer = gpus.supervised(stages).spawn("trainer", Trainer, loader)

    A restart starts the meshes in that order, each when every `__init__` of the one before has returned.
    """

    def __init__(self, policy: Policy) -> None:
        """Raises:
        TypeError: not a policy.
        """
        if not isinstance(policy, Policy):
            names = "OneForOne(), AllForOne(), RestForOne(), Escalate() or Ignore()"
            raise TypeError(explain(f"{policy!r} is no supervision policy", next=f"use {names}"))
        self.policy = policy
        self._uid = f"group-{random_id()}"
        self._owner: tuple[str, str] | None = None
        self._gave_up = False

    def _join(self) -> None:
        """Raises:
        ValueError: another actor has spawned the group's first mesh, or the policy has given up.
        """
        if self._gave_up:
            raise ValueError(
                explain(
                    "the supervision policy of this group has given up, and restarts nothing any more",
                    where=f"{self!r}",
                    next="stop its meshes, and spawn through a new group or a new supervised()",
                )
            )
        process = this_process()
        owner = (process.proc.ref.uid, process.activation().cell.uid)
        if self._owner is None:
            self._owner = owner
        elif self._owner != owner:
            raise ValueError(
                explain(
                    "all meshes of a supervision group must have the same owner",
                    where=f"the group belongs to actor {self._owner[1]!r}, and {owner[1]!r} spawns",
                    next="make a group in the actor that spawns",
                )
            )

    def __repr__(self) -> str:
        return f"SupervisionGroup({self.policy!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SupervisionGroup can't be pickled; it belongs to the actor that spawns its meshes, so make it there")


class SupervisedProcs:
    """Procs with a policy for what is spawned on them."""

    def __init__(self, procs: ProcMesh, group: SupervisionGroup) -> None:
        self._procs = procs
        self.group = group

    def spawn(self, name: str, Class: type[T], *args: Any, **kwargs: Any) -> T:
        """Like `ProcMesh.spawn`; the policy decides what happens when an actor of the mesh or its proc fails.

        After a restart the handle, its slices and the references that others hold lead to the new actors, which have
        the same ranks and were made with the same arguments (they are kept, pickled, as long as the mesh lives). Calls under
        way fail with a `SupervisionError` that says "restarting"; calls made meanwhile wait.
        """
        self.group._join()
        return self._procs._checked_spawn(name, Class, args, kwargs, self.group)

    def __repr__(self) -> str:
        return f"SupervisedProcs({self._procs!r}, {self.group.policy!r})"


def supervise(procs: ProcMesh, policy: Policy | SupervisionGroup) -> SupervisedProcs:
    """`ProcMesh.supervised`."""
    group = policy if isinstance(policy, SupervisionGroup) else SupervisionGroup(policy)
    own_policy = group.policy
    if isinstance(own_policy, Restarting) and own_policy.replace == "proc" and any(not ref.host for ref in procs._refs):
        raise ValueError(
            explain(
                'replace="proc" needs procs that were spawned; this one is the process of a client',
                where=f"{procs!r}",
                next='use replace="actor", or spawn_procs()',
            )
        )
    return SupervisedProcs(procs, group)
