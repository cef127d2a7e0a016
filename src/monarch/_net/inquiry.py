"""Inquiries: one question to a host agent from a process that is nobody yet.

A client behind a gateway has to know what the gateway calls itself before it can have an address of its own.

Read next: `net_router.py`; `actor/gateway.py` for who asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from monarch._base.ids import ProcRef, agent_at, random_id
from monarch._net.loop import NetLoop
from monarch._net.net_router import NetRouter
from monarch._net.router import socket_path
from monarch._net.stream import LinkClosedError
from monarch._wire import messages
from monarch._wire.frames import Frame, FrameError, Kind

if TYPE_CHECKING:
    from monarch._net.greeter import Greeting
    from monarch._net.handshake import Preface
    from monarch._net.stream import Link

_REDIAL_S = 0.05
_MOST_FRAME_BYTES = 1 << 20
_JOIN_S = 5.0


class Inquiry:
    """One question. Thread: `ask` any, the rest its own loop."""

    def __init__(self, address: str, question: messages.Control) -> None:
        self.story = ""
        """Why there is no answer yet; for people."""
        self._agent = agent_at(address)
        self._question = question
        self._answer: messages.Control | None = None
        self._over = threading.Event()
        self._loop = NetLoop("monarch-inquiry")
        own = ProcRef(f"client<{random_id()}>", "", "")
        self._router = NetRouter(self._loop, own, None, self, _MOST_FRAME_BYTES, _file_of)

    def ask(self, budget_s: float, on_wait: Callable[[], None], every_s: float) -> messages.Control | None:
        """The answer; None when there was none in time, or can't be one: see `story`.

        Args:
            on_wait: called every `every_s` seconds while there is none.
        """
        deadline_s = self._loop.now_s() + budget_s
        self._loop.start()
        try:
            self._router.link_to(self._agent).send_control(self._question, port=1)
            while not self._over.wait(min(every_s, max(0.0, deadline_s - self._loop.now_s()))):
                if self._loop.now_s() >= deadline_s:
                    break
                on_wait()
        finally:
            self._over.set()
            self._loop.call_soon(self._router.close, "the question was answered")
            self._loop.stop()
            self._loop.join(_JOIN_S)
        return self._answer

    def on_peer(self, ref: ProcRef) -> None:
        """The agent is there."""

    def on_hello(self, hello: messages.Hello) -> None:
        """A process has said Hello."""

    def on_frame(self, link: Link, frame: Frame, buffers: Sequence[memoryview]) -> None:
        """The answer, or something that is of no interest."""
        if frame.kind == Kind.REPLY:
            self._answer = messages.decode_control(bytes(frame.payload))
            self._over.set()

    def on_unreachable(self, ref: ProcRef, reason: str) -> None:
        """It may still come."""
        self.story = reason
        self._loop.call_later(_REDIAL_S, lambda: self._router.dial(ref))

    def on_denied(self, ref: ProcRef, reason: str) -> None:
        """It will not."""
        self.story = reason
        self._over.set()

    def on_reach(self, ref: ProcRef) -> None:
        """Nobody can be reached there."""
        self.on_denied(ref, "nobody can be dialled there")

    def on_visitor(self, preface: Preface, greeting: Greeting) -> None:
        """Nobody knows this process."""
        raise FrameError("an inquiry serves nobody")

    def on_forgotten(self, ref: ProcRef, reason: str) -> None:
        """It has given the connection up: it is asked anew."""
        self.on_lost(ref, reason, 0)

    def on_lost(self, ref: ProcRef, reason: str, pid: int) -> None:
        """It has ended instead of answering: the next one may."""
        if not self._over.is_set():
            self.story = reason
            self._loop.call_later(_REDIAL_S, self._ask_again)

    def _ask_again(self) -> None:
        self._router.lose(self._agent, self.story)
        self._router.readmit(self._agent)
        try:
            self._router.link_to(self._agent).send_control(self._question, port=1)
        except LinkClosedError:
            return  # the inquiry is over


def _file_of(address: str) -> str | None:
    return socket_path(address) if address.startswith("ipc://") else None
