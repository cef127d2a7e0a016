"""Fuzzing: all decoders of what a stranger can send, with inputs that a coverage-guided fuzzer (atheris, libFuzzer) invents.

    .venv/bin/python -m pip install atheris             # not a dependency of the project; wheels for Linux only
    .venv/bin/python bench/fuzz.py TARGET [--seconds S] [--corpus FOLDER] [--seed N]

Targets: preface, status, dialer, acceptor (the handshake), frames (its decoder), control (control messages), session (two
connections of somebody who has proved himself, into a router and its session links). Each allows the one
exception that its module promises; any other, or a promise about lengths that does not hold, ends the run with exit status
1 or more, a traceback, and the input in the corpus folder (a temporary one by default). The property tests of the same modules run with
every test run; this is for hours.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, get_args

MAX_FRAME_BYTES = 300_000
"""More than the decoder's read buffer, so that frames with memory of their own occur."""
MAX_INPUT_BYTES = 4096


class Machine(Protocol):
    """What the four machines of the handshake have in common."""

    @property
    def done(self) -> bool: ...
    def needed(self) -> int: ...
    def feed(self, data: bytes) -> object: ...


class Target(NamedTuple):
    """What is fed to a decoder, and inputs to begin with."""

    run: Callable[[bytes], None]
    seeds: list[bytes]


def pieces(data: bytes) -> Iterator[bytes]:
    """The input cut as its own first byte says, so that the fuzzer chooses the cuts."""
    size = (data[0] if data else 0) + 1
    for at in range(1, len(data), size):
        yield data[at : at + size]


def handshake_target(make: Callable[[], Machine], bound: int, *, can_finish: bool) -> Callable[[bytes], None]:
    """Feed a machine of the handshake until it needs nothing more.

    Args:
        bound: the most that it may ever take.
        can_finish: whether these bytes may be right; a proof is not to be guessed.
    """
    from monarch._net.handshake import HandshakeError

    def run(data: bytes) -> None:
        machine, taken = make(), 0
        try:
            for piece in pieces(data):
                while piece and (needed := machine.needed()):
                    if taken + needed > bound:
                        raise RuntimeError(f"it asks for {needed} bytes behind {taken}, more than {bound}")
                    machine.feed(piece[:needed])
                    taken += min(needed, len(piece))
                    piece = piece[needed:]
        except HandshakeError:
            if machine.done:
                raise RuntimeError("done in spite of an error") from None
            return
        if machine.done and not can_finish:
            raise RuntimeError("a guessed proof was accepted")

    return run


def run_frames(data: bytes) -> None:
    """Feed the decoder of frames."""
    from monarch._wire.frames import Decoder, FrameError

    decoder = Decoder(MAX_FRAME_BYTES)
    try:
        for piece in pieces(data):
            while piece:
                space = decoder.space()
                if not len(space) or len(space) > MAX_FRAME_BYTES:
                    raise RuntimeError(f"a space of {len(space)} bytes")
                count = min(len(space), len(piece))
                space[:count] = piece[:count]
                for frame in decoder.received(count):
                    size = len(frame.header) + len(frame.payload) + sum(buffer.nbytes for buffer in frame.buffers)
                    if size > len(data):
                        raise RuntimeError(f"a frame of {size} bytes out of {len(data)}")
                piece = piece[count:]
    except FrameError:
        pass


def run_control(data: bytes) -> None:
    """Decode a control message; one that is right must survive being encoded again."""
    from monarch._wire.messages import DecodeError, decode_control, encode

    try:
        message = decode_control(data)
    except DecodeError:
        return
    again = encode(message)
    if encode(decode_control(again)) != again:
        raise RuntimeError(f"{message} is another one when it is encoded and decoded again")


class Turns:
    """A net loop without sockets and clock, whose turns are taken by hand."""

    def __init__(self) -> None:
        self.soon: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()

    def now_s(self) -> float:
        return 0.0

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        self.soon.append((callback, args))

    def call_later(self, _delay_s: float, callback: Callable[[], Any]) -> Any:
        from monarch._net.loop import Timer

        return Timer(callback)

    def watch(self, _fd: int, _events: int, _handler: Any) -> None: ...

    def unwatch(self, _fd: int) -> None: ...

    def report(self) -> None:
        raise RuntimeError("an exception that only a defect can raise") from sys.exc_info()[1]

    def take(self) -> None:
        """Run all that is due."""
        while self.soon:
            callback, args = self.soon.popleft()
            callback(*args)


class Wire:
    """A connected socket that brings given bytes, piece by piece, then ends, and takes whatever is sent."""

    family = 0

    def __init__(self, parts: Iterator[bytes]) -> None:
        self.parts = parts
        self.rest = b""
        self.closed = False

    def fileno(self) -> int:
        return 0

    def setblocking(self, _flag: bool) -> None: ...

    def close(self) -> None:
        self.closed = True

    def sendmsg(self, buffers: Sequence[bytes], _ancillary: Any = ()) -> int:
        return sum(map(len, buffers))

    def recvmsg_into(self, buffers: Sequence[memoryview], _nbytes: int = 0, _flags: int = 0) -> tuple[int, list[Any], int, None]:
        self.rest = self.rest or next(self.parts, b"")
        count = min(len(buffers[0]), len(self.rest))
        buffers[0][:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count, [], 0, None


class Receiver:
    """Does with frames what a process does before it lets anybody's code see them, and answers each call."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None

    def on_frame(self, link: Any, frame: Any, _buffers: Any) -> None:
        from monarch._wire import frames, messages

        if frame.kind == frames.Kind.CALL:
            messages.decode_call(frame.header)
            link.send(frames.encode(frames.Kind.REPLY, b"", b"answer", port=frame.port))
        elif frame.kind == frames.Kind.CONTROL:
            messages.decode_control(frame.header)
        elif frame.kind != frames.Kind.REPLY:
            raise frames.FrameError("unknown")


def run_session(data: bytes) -> None:
    """Let a member make two connections, one after the other; the second byte says how much goes into the first."""
    import logging

    from monarch._base.ids import agent_at
    from monarch._net.net_router import NetRouter

    logging.disable()
    loop: Any = Turns()
    events: Any = Receiver()
    router = NetRouter(loop, agent_at("tcp://127.0.0.1:1"), None, events, MAX_FRAME_BYTES, lambda _address: None)
    cut = 2 + len(data) * (data[1] if len(data) > 1 else 0) // 255
    wires = [Wire(pieces(data[:1] + part)) for part in (data[2:cut], data[cut:])]
    for wire in wires:
        router._on_stranger(wire)
        loop.take()
    left = [link for link in router._all if link.peer is None]
    if left or len(router._sessions) > len(wires):
        raise RuntimeError(f"{len(left)} links and {len(router._sessions)} sessions are left of {len(wires)} connections")
    router.close("over")
    if not all(wire.closed for wire in wires) or router._all or router._sessions:
        raise RuntimeError("something is left when all is closed")


def targets() -> dict[str, Target]:
    """All targets by name."""
    from monarch._base.ids import ProcRef
    from monarch._net import handshake as h
    from monarch._net.router import PROTOCOL_VERSION
    from monarch._wire import frames, messages

    def nonce(count: int) -> bytes:
        return bytes(range(count))

    def dialer() -> h.DialerProof:
        return h.DialerProof(b"a secret of the job", "abc.3", entropy=nonce)

    def acceptor() -> h.AcceptorProof:
        return h.AcceptorProof(b"a secret of the job", "abc.3", entropy=nonce)

    prefaces = [h.encode_preface(h.Preface(target, tls)) for target in ("", "abc.3", "é" * 100) for tls in (False, True)]
    statuses = [h.encode_status(h.Status(code, True, text)) for code in h.StatusCode for text in ("", "no\n  next:  wait")]
    proofs = [bytes(64), bytes(range(1, 65)), acceptor().feed(bytes(32))]
    calls = [
        frames.encode(frames.Kind.CALL, b"header", b"payload", buffers=[memoryview(b"x" * 20), memoryview(b"")]),
        frames.encode(frames.Kind.REPLY, b"", b"payload", spans=[(0, 5), (64, 7)], segment=3),
        frames.encode(frames.Kind.CONTROL, b"\x81", b"", port=9),
    ]
    joined = [b"".join(bytes(piece) for piece in call) for call in calls]
    # Most hold what their fields do not allow, but each has the names of its message and fields.
    controls = [messages.encode(kind(*[None] * len(kind.__struct_fields__))) for kind in get_args(messages.Control)]
    controls += [messages.encode(messages.StopProc("done")), messages.encode(messages.ReleaseSegments([1, 2]))]
    ref = ProcRef("member<1>", "tcp://127.0.0.1:2/m", "tcp://127.0.0.1:2")
    call = frames.encode(frames.Kind.CALL, messages.encode(messages.CallHeader("a<1>", "m", ref, "b<1>", ref, (), ())), b"payload", port=1)

    def hello(session: str, received: int, *, resumed: bool) -> bytes:
        header = messages.encode(messages.Hello(ref, 1, PROTOCOL_VERSION, session, received, resumed))
        return join(frames.encode(frames.Kind.CONTROL, header, b""))

    def join(pieces: Sequence[frames.Buffer]) -> bytes:
        return b"".join(bytes(piece) for piece in pieces)

    ack, bye = join(frames.encode(frames.Kind.ACK, b"", b"", port=1)), join(frames.encode(frames.Kind.BYE, b"", b"reason"))
    first = hello("s", 0, resumed=False) + join(call)
    sessions = [
        b"\xff" + first + ack + bye,
        bytes([255 * len(first) // (len(first) * 2)]) + first + hello("s", 1, resumed=True) + join(call),
        b"\x80" + first + hello("t", 0, resumed=False) + join(frames.encode(frames.Kind.SEGMENT, b"", b"", port=4096, segment=1)),
    ]
    return {
        "session": Target(run_session, sessions),
        "preface": Target(handshake_target(h.PrefaceReader, h.MAX_PREFACE_BYTES, can_finish=True), prefaces),
        "status": Target(handshake_target(h.StatusReader, h.MAX_STATUS_BYTES, can_finish=True), statuses),
        "dialer": Target(handshake_target(dialer, h.MAX_PROOF_BYTES, can_finish=False), proofs),
        "acceptor": Target(handshake_target(acceptor, h.MAX_PROOF_BYTES, can_finish=False), proofs),
        "frames": Target(run_frames, [*joined, b"".join(joined)]),
        "control": Target(run_control, controls),
    }


def fuzz(name: str, seconds: int, corpus: str, seed: int) -> None:
    """Run one target; ends the process."""
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        sys.exit("bench/fuzz.py needs atheris: .venv/bin/python -m pip install atheris")
    with atheris.instrument_imports(include=["monarch"]):
        target = targets()[name]
    for number, data in enumerate(target.seeds):
        # The first byte says how the others are cut; control messages come whole.
        with open(os.path.join(corpus, f"seed-{number}"), "wb") as file:
            file.write(data if name == "control" else b"\x3f" + data)
    options = [f"-max_total_time={seconds}", f"-max_len={MAX_INPUT_BYTES}", f"-artifact_prefix={corpus}/failed-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, f"-seed={seed}", "-verbosity=1", corpus], target.run)
    atheris.Fuzz()


def main() -> None:
    """Read the command line and fuzz."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", choices=["preface", "status", "dialer", "acceptor", "frames", "control", "session"])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", default=None, help="where inputs are kept, and taken from at the next run")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    given = parser.parse_args()
    corpus = given.corpus or tempfile.mkdtemp(prefix="monarch-fuzz-")
    os.makedirs(corpus, exist_ok=True)
    print(f"corpus {corpus}", flush=True)
    fuzz(given.target, given.seconds, corpus, given.seed)


if __name__ == "__main__":
    main()
