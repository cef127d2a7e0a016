"""Chunked mounts of many processes, whose blocks come down a chain: the actors that programs for PyTorch Monarch spawn by themselves.

    client --- chain ---> FUSEActor 0 --> FUSEActor 1 --> ...        blocks
    client <--- enqueue --- RemoteMountLeader <--- FUSEActor         "somebody waits for block 7"
    client --- await_block --> RemoteMountLeader --> all FUSEActors  "block 7 is on its way; take it"

`remotemount` needs none of these: `mount_actor.py` is its end on a host.

Read next: `chunked.py` for the mount, `chain.py` for the blocks.
"""

from __future__ import annotations

from typing import Any

from monarch._base.errors import explain
from monarch._mounts import mounting, notes
from monarch._mounts.chain import STREAMS, ChainCtx, ChainServer, ctx_wait_into, forward, new_ctx, serve
from monarch._mounts.chunked import FuseMountHandle, mount_chunked_fuse
from monarch._mounts.index import BLOCK_SIZE, Index
from monarch.actor import Actor, context, endpoint

_BLOCK_S = 120.0


class RemoteMountLeader(Actor):
    """Stands between the client and the mounts of all processes."""

    def __init__(self, client: Any) -> None:
        """
        Args:
            client: an actor with an endpoint `enqueue(block)`; None: nobody is told what readers wait for.
        """
        self._client = client
        self._mounts: Any = None
        self._asked: set[int] = set()
        """Blocks that the client was told of, and that are not in the mounts."""

    @endpoint
    def set_fuse_actors(self, fuse_actors: Any) -> None:
        """These have the mounts."""
        self._mounts = fuse_actors

    @endpoint
    def await_block(self, block: int, stale: list[str], nbytes: int) -> None:
        """Return when a block that was sent down the chain is in every mount.

        Args:
            stale: paths of files whose bytes in it are not theirs.
        """
        if self._mounts is None:
            raise RuntimeError(explain("nobody has a mount yet", next="call set_fuse_actors first"))
        try:
            self._mounts.receive_via_cbcast.call(block, stale, nbytes).get(timeout=_BLOCK_S)
        finally:
            self._asked.discard(block)

    @endpoint
    def enqueue(self, block: int) -> None:
        """A reader waits for a block; the client hears of it once."""
        if self._client is not None and block not in self._asked:
            self._asked.add(block)
            self._client.enqueue.broadcast(block)


class FUSEActor(Actor):
    """The mount of one process."""

    def __init__(self, handler: Any) -> None:
        """
        Args:
            handler: an actor with an endpoint `enqueue(block)`, which hears what readers wait for; anything else: nobody does.
        """
        self._enqueue = getattr(handler, "enqueue", None)
        self._handle: FuseMountHandle | None = None
        self._path = ""
        self._server: ChainServer | None = None
        self._ctx: ChainCtx | None = None

    @endpoint
    def mkdir(self, path: str) -> None:
        """Make a directory to mount at, and take away what a dead server has left there."""
        mounting.prepare_mount_point(path)

    @endpoint
    def mount(self, mount_point: str, meta: Index) -> None:
        """Mount a tree whose blocks will come.

        Raises:
            RuntimeError: as of `mount_chunked_fuse`, or there is a mount already.
        """
        if self._handle is not None:
            raise RuntimeError(explain(f"this actor has a mount already, at {self._path!r}", next="unmount it first"))
        wanted = None if self._enqueue is None else self._enqueue.broadcast
        notes.remember(mount_point)
        try:
            self._handle = mount_chunked_fuse(meta, meta["/"].get("total_size", 0), mount_point, wanted)
        except BaseException:
            notes.forget(mount_point)
            raise
        self._path = mount_point

    @endpoint
    def refresh_mount(self, meta: Index) -> None:
        """Show another version."""
        self._mounted().refresh(meta, meta["/"].get("total_size", 0))

    @endpoint
    def cbc_listen(self, bind_addr: str | None = None, via_gateway: bool = False) -> tuple[int, Any]:
        """Be ready for blocks: the rank here, and the address for whoever comes before in the chain.

        Args:
            bind_addr: as of `chain.serve`.
            via_gateway: accepted; messages find the way through gateways.
        """
        self._end_chain()
        self._ctx = new_ctx(BLOCK_SIZE)
        self._server = serve(bind_addr)
        return context().actor_instance.rank.rank, self._server.addr

    @endpoint
    def cbc_start(self, addrs: list[Any], num_streams: int = STREAMS) -> None:
        """Take blocks from now on, and pass them to the next rank.

        Args:
            addrs: of all ranks, in their order.
        """
        server, ctx, rank = self._server, self._ctx, context().actor_instance.rank.rank
        if server is None or ctx is None:
            raise RuntimeError(explain("this actor does not listen yet", next="call cbc_listen first"))
        forward(server, addrs[rank + 1] if rank + 1 < len(addrs) else None, ctx, num_streams)

    @endpoint
    def receive_via_cbcast(self, block_id: int, stale: list[str], nbytes: int) -> None:
        """Take the next block of the chain into the mount."""
        if self._ctx is None:
            raise RuntimeError(explain("this actor does not listen yet", next="call cbc_listen first"))
        handle = self._mounted()
        ctx_wait_into(self._ctx, handle.block_ptr(block_id), BLOCK_SIZE, nbytes, int(_BLOCK_S * 1000))
        handle.receive_block(block_id, stale)

    @endpoint
    def unmount(self, path: str) -> tuple[str, str]:
        """End the mount at `path`, whoever has made it: one of "ok", "not_mounted", "busy", "error", and what the system said."""
        if self._handle is None or path != self._path:
            return mounting.unmount(path)
        status, detail = self._handle.try_unmount()
        if status in ("ok", "not_mounted"):
            self._forget()
        return status, detail

    def _mounted(self) -> FuseMountHandle:
        if self._handle is None:
            raise RuntimeError(explain("this actor has no mount", next="call mount first"))
        return self._handle

    def _forget(self) -> None:
        notes.forget(self._path)
        self._handle, self._path = None, ""

    def _end_chain(self) -> None:
        if self._ctx is not None:
            self._ctx.close()
            self._ctx = None

    def __cleanup__(self, exc: Exception | None) -> None:
        self._end_chain()
        if self._handle is not None:
            self._handle.close()
            self._forget()
