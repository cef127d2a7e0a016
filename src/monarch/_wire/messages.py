"""The protocol: every message between processes, as one tagged union of structs.

Calls and replies have their own frame kinds; all else is a `Control`. Pickles travel in a frame's payload, never in a
header, so decoding a header can't run anybody's code.

Rules of this file:
    1. A field is never renamed or re-typed once another host can speak the protocol; new fields go last, with defaults.
    2. Requests carry the port for the answer in the frame's prefix; the answer is a REPLY frame with `Flag.RAW`.

Read next: `frames.py` for the bytes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from monarch._base.ids import ProcRef
from monarch._wire.cast_messages import Cast, CastAcked, CastBroken, CastControl, CastFence, CastHanded, CastReplies, CastsDone, CastVoid
from monarch._wire.contact_messages import Attach, DialMe, HandOver, HostInfo, Reach, Register, TookOver
from monarch._wire.memory_messages import (
    AskMemory,
    DropMemory,
    HotMemory,
    LendMemory,
    MemoryKeys,
    ReleaseMemory,
    ShareFile,
    ShareMemory,
    ShareStorage,
    Staged,
    StageMemory,
    UnstageMemory,
)
from monarch._wire.observation_messages import Activities, Activity, FlushLogs, LogCredit, LogLines, Stacks, StackTexts, Stalled, StreamLogs

M = TypeVar("M")


class CallHeader(msgspec.Struct, frozen=True, array_like=True):
    """Which endpoint of which actor, called by whom through which view of the mesh."""

    actor: str
    """Uid of the actor's mesh; one proc holds at most one actor of a mesh."""
    method: str
    sender: ProcRef
    sender_actor: str
    reply_to: ProcRef | None
    """The proc that holds the reply port; None: nobody waits for a reply."""
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    """Extent of the view; the frame's `rank` counts inside it."""
    explicit: bool = False
    """The endpoint takes the reply port as an argument."""
    once: bool = False
    """The reply port takes one reply from each rank."""


class Fault(msgspec.Struct, frozen=True):
    """Why an actor can't answer, for whoever waits for it."""

    kind: str
    """"failed", "stopped" or "lost" (its process is gone)."""
    actor: str
    """Human chain of the actor, `<root>.<mod.Class name{'gpus': 0/2}>`."""
    mesh: str
    """Uid of its mesh."""
    rank: int
    """Its rank in that mesh; -1 when a whole proc is meant."""
    report: str
    """What happened, for people."""
    proc: str = ""
    """Uid of its proc."""
    again: bool = False
    """Its supervision policy may bring it back; what is sent from now on waits for that."""


# --- between procs -----------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First frame on every connection, both ways."""

    proc: ProcRef
    pid: int
    version: str
    session: str = ""
    """Between hosts: which session this connection is for; "" in an answer: it is not known here."""
    received: int = 0
    """How many frames of the session have come in."""
    resumed: bool = False
    """The session has had a connection before."""
    epoch: int = 0
    """Of two processes that run under one id, one after the other, the later has the larger one."""
    patience_s: float = 0.0
    """For how long the sender lets the session be without a connection; 0: it does not say. Both ends take the smaller one."""


class CreateActor(msgspec.Struct, frozen=True, tag=True):
    """Create the actor of mesh `actor` on this proc; payload: pickled class and arguments."""

    actor: str
    name: str
    owner: ProcRef
    owner_actor: str
    rank: int
    """-1: that of its frame."""
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    system: bool = False
    """Part of the runtime: starts before the bootstrap has finished, and is hidden from people."""
    supervised: bool = False
    """A policy may create it anew when it fails."""
    attempt: int = 0
    """How many times it was created before; such a creation is answered with `Done` once `__init__` has returned."""


class StopActor(msgspec.Struct, frozen=True, tag=True):
    """Drain, clean up and release an actor; answered when it is done."""

    actor: str
    reason: str
    again: bool = False
    """It will be created anew: what is queued is refused, what comes later waits."""


class Obituary(msgspec.Struct, frozen=True, tag=True):
    """An actor that was on this proc, or on the one before it under this id, will not come back."""

    fault: Fault


class StopProc(msgspec.Struct, frozen=True, tag=True):
    """Stop all actors, then end the process."""

    reason: str


class ActorFault(msgspec.Struct, frozen=True, tag=True):
    """An actor failed; sent to its owner."""

    owner_actor: str
    fault: Fault


class Bounced(msgspec.Struct, frozen=True, tag=True):
    """A message without reply port found nobody; sent back to its sender."""

    sender_actor: str
    method: str
    fault: Fault


class Credit(msgspec.Struct, frozen=True, tag=True):
    """Actor `actor` has handled `nbytes` more of what this peer sent it."""

    actor: str
    nbytes: int


class ReleaseSegments(msgspec.Struct, frozen=True, tag=True):
    """The receiver no longer looks at these shared-memory segments."""

    segments: list[int]


class DropSegments(msgspec.Struct, frozen=True, tag=True):
    """The sender closed these segments; the receiver may unmap them."""

    segments: list[int]


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered at once by the net thread with `Done`."""


UNKNOWN_ATTEMPT = 1 << 30
"""`ProcExited.attempt` of an end that no agent reported; later than any other."""

# --- between procs and host agents -------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, tag=True):
    """A program to run instead of forking the zygote."""

    program: str
    arg0: str | None
    args: list[str]
    env: dict[str, str | None]


class ProcSpec(msgspec.Struct, frozen=True, tag=True):
    """One proc to start."""

    proc: ProcRef
    name: str
    bind: dict[str, str]
    command: Command | None


class SpawnProcs(msgspec.Struct, frozen=True, tag=True):
    """Start procs; each is answered by `ProcUp` or `ProcExited`, sent to the spawning proc."""

    mesh: str
    procs: list[ProcSpec]
    owner: ProcRef
    env: dict[str, str] | None
    """Full environment; None: the agent's own."""
    cwd: str
    sys_path: list[str]
    preload: list[str]
    config: dict[str, Any]
    max_idle_s: float
    credentials: bytes = b""
    """What the procs of its own host show to others; ignored by other hosts."""

    def __repr__(self) -> str:
        return f"SpawnProcs(mesh={self.mesh!r}, procs={self.procs!r})"  # not the environment and the credentials: secrets


class ProcBoot(msgspec.Struct, frozen=True):
    """What a new process is told before its first message; travels through the zygote."""

    proc: ProcRef
    host: ProcRef
    owner: ProcRef
    name: str
    config: dict[str, Any]
    entry: str
    """Module whose `main(boot)` is the process."""
    log_mark: str = ""
    """What marks the output of its actors (`_runtime/log_lines.py`)."""
    folder: str = ""
    """Where the socket files of its host's procs are."""
    credentials: bytes = b""
    """What it shows to other hosts (`_net/credentials.py`); empty: what its environment says."""

    def __repr__(self) -> str:
        return f"ProcBoot(proc={self.proc!r}, host={self.host!r})"  # not the credentials


class ProcUp(msgspec.Struct, frozen=True, tag=True):
    """A proc listens on its address."""

    proc: ProcRef
    pid: int


class ProcsUp(msgspec.Struct, frozen=True, tag=True):
    """Several `ProcUp`."""

    procs: list[ProcUp]


class ProcExited(msgspec.Struct, frozen=True, tag=True):
    """A proc is gone, or never came."""

    proc: ProcRef
    reason: str
    """For people: "exited with status 1", "was killed by signal 9 (SIGKILL)", "failed to start: ..."."""
    how: str
    """"stopped" (asked to), "exited", "killed", "launch", "timeout", "unknown", "denied" (it may live, and does not trust this process)."""
    code: int | None = None
    signal: int | None = None
    pid: int = 0
    attempt: int = 0
    """How many processes there were under this id before."""
    again: bool = False
    """A supervision policy may start it anew, under the same id; if not, this is sent once more with False."""
    last_words: list[str] = []
    """The last lines of its output, when nobody had asked it to end."""


class WatchProc(msgspec.Struct, frozen=True, tag=True):
    """Ask the agent for a proc: answered by `ProcUp` once it is up, or by `ProcExited`."""

    uid: str
    exit_only: bool = False
    """The link to it broke: answer only when its exit is known."""
    pid: int = 0
    """The process at the other end of that link; 0: unknown."""


class SuperviseProcs(msgspec.Struct, frozen=True, tag=True):
    """The sender's group `group` may want these procs started anew when they end unasked."""

    uids: list[str]
    group: str


class AbandonProcs(msgspec.Struct, frozen=True, tag=True):
    """Undoes `SuperviseProcs`."""

    uids: list[str]
    group: str


class KillProcs(msgspec.Struct, frozen=True, tag=True):
    """Kill these procs, as if they had died; not a stop."""

    uids: list[str]


class StartProcs(msgspec.Struct, frozen=True, tag=True):
    """Start these procs anew, once they and their descendants are gone; without effect for those that live."""

    uids: list[str]


class StopProcs(msgspec.Struct, frozen=True, tag=True):
    """End these procs: killed when still there after `budget_s`; answered by `Done` when all and their descendants are gone."""

    uids: list[str]
    budget_s: float


class ShutdownHost(msgspec.Struct, frozen=True, tag=True):
    """End all procs and the agent itself; answered by `Done` first."""

    budget_s: float


class Done(msgspec.Struct, frozen=True, tag=True):
    """A request is complete."""


Control = (
    Hello
    | CreateActor
    | StopActor
    | Obituary
    | StopProc
    | ActorFault
    | Bounced
    | Credit
    | ReleaseSegments
    | DropSegments
    | Ping
    | SpawnProcs
    | ProcUp
    | ProcsUp
    | ProcExited
    | WatchProc
    | SuperviseProcs
    | AbandonProcs
    | KillProcs
    | StartProcs
    | StopProcs
    | Activity
    | Activities
    | Stacks
    | StackTexts
    | Stalled
    | Attach
    | HostInfo
    | HandOver
    | TookOver
    | Register
    | Reach
    | DialMe
    | ShutdownHost
    | StreamLogs
    | FlushLogs
    | LogLines
    | LogCredit
    | Done
    | Cast
    | CastHanded
    | CastFence
    | CastVoid
    | CastAcked
    | CastBroken
    | CastReplies
    | CastsDone
    | ShareMemory
    | ShareFile
    | LendMemory
    | DropMemory
    | HotMemory
    | AskMemory
    | MemoryKeys
    | ReleaseMemory
    | StageMemory
    | Staged
    | UnstageMemory
    | ShareStorage
)

_encoder = msgspec.msgpack.Encoder()
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
_cast_control_decoder = msgspec.msgpack.Decoder(CastControl)
_call_decoder = msgspec.msgpack.Decoder(CallHeader)
_boot_decoder = msgspec.msgpack.Decoder(ProcBoot)
_fault_decoder = msgspec.msgpack.Decoder(Fault)

encode = _encoder.encode
DecodeError = msgspec.DecodeError
"""What the decoders raise for bytes that are no such message."""


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes | bytearray | memoryview) -> M:
    try:
        return decoder.decode(data)
    except RecursionError as exc:
        raise DecodeError("the message is nested too deeply") from exc


def decode_control(data: bytes) -> Control:
    """The message of a CONTROL frame's header; DecodeError when it is none."""
    return _decode(_control_decoder, data)


def decode_call(data: bytes) -> CallHeader:
    """The header of a CALL frame; DecodeError when it is none."""
    return _decode(_call_decoder, data)


def decode_cast_control(data: bytes) -> CastControl:
    """The header of a cast that is no call; DecodeError when it is none."""
    return _decode(_cast_control_decoder, data)


def decode_boot(data: bytes) -> ProcBoot:
    """What a new process is told."""
    return _decode(_boot_decoder, data)


def decode_fault(data: bytes | bytearray | memoryview) -> Fault:
    """The payload of a REPLY frame with `Flag.DEAD`."""
    return _decode(_fault_decoder, data)
