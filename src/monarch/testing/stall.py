"""Stalls: a wait that nothing will end, and the story of who waits for what.

Read next: `scheduler.py`, which finds out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from monarch._base.errors import explain
from monarch._runtime.mailbox import Answer, Gather, OneReply, Ports, Stream
from monarch.testing.node import Node
from monarch.testing.scheduler import Wait

_MAX_LINES = 20


class DeadlockError(RuntimeError):
    """The test waits for something that can't happen any more. Its text says who waits for what."""


def deadlock(wait: Wait, why: str, nodes: dict[str, Node], parked: Iterable[Wait]) -> DeadlockError:
    """The error of a test whose wait will not end.

    Args:
        wait: the test's.
        why: a clause, such as "nothing is left to happen".
        parked: everybody who waits with a stack.
    """
    lines = list(_stories(nodes))
    more = len(lines) - _MAX_LINES
    return DeadlockError(
        explain(
            f"this wait will not end: {why}",
            where=f"virtual time {wait.node.scheduler.now_s:g} s",
            next="thaw or heal what is held back, or look below for who waits for whom" if lines else "nobody has been asked for this",
            detail="\n".join([*lines[:_MAX_LINES], *([f"and {more} more"] if more > 0 else [])]),
        )
    )


def _stories(nodes: dict[str, Node]) -> Iterator[str]:
    for node in nodes.values():
        process = node.process
        if process is None or node.dead:
            continue
        for cell in list(process.proc.cells.values()):
            if cell.running is not None:
                waiting = f", {len(cell.inbox)} more messages wait" if cell.inbox else ""
                yield f"{node.label}: {cell.display} is in its endpoint {cell.running.header.method}{waiting}{_state(node)}"
        for what in _awaited(process.proc.ports, nodes):
            yield f"{node.label} waits for {what}"


def _awaited(ports: Ports, nodes: dict[str, Node]) -> Iterator[str]:
    for receiver in list(ports._receivers.values()):
        if isinstance(receiver, OneReply):
            yield f"{receiver._target.endpoint}{_who([receiver._target.procs[receiver._rank]], nodes)}"
        elif isinstance(receiver, Gather):
            missing = [uid for uid, slot in zip(receiver._target.procs, receiver._slots, strict=True) if slot is None]
            yield f"{receiver._target.endpoint}{_who(missing, nodes)}"
        elif isinstance(receiver, Stream) and receiver._pending:
            yield "a message on a port" if receiver._target is None else receiver._target.endpoint
        elif isinstance(receiver, Answer) and not receiver.future._done:
            yield f"an answer of {_name(receiver._proc_uid, nodes)}"


def _who(uids: list[str], nodes: dict[str, Node]) -> str:
    shown = ", ".join(_name(uid, nodes) for uid in uids[:4])
    return f" of {shown}{f' and {len(uids) - 4} more' if len(uids) > 4 else ''}"


def _name(uid: str, nodes: dict[str, Node]) -> str:
    node = nodes.get(uid)
    return uid if node is None else f"{node.label}{_state(node)}"


def _state(node: Node) -> str:
    return " (dead)" if node.dead else " (frozen)" if node.frozen else ""
