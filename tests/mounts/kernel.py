"""A kernel for tests: the other end of a pair of sockets that takes the place of `/dev/fuse`."""

from __future__ import annotations

import socket
import struct

from monarch._mounts.fuse_protocol import HEADER_BYTES, Opcode

WAIT_S = 5.0


class Kernel:
    """Sends requests and reads replies, one at a time or many."""

    def __init__(self):
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.settimeout(WAIT_S)
        self.fd = theirs.detach()
        """For the server."""
        self.unique = 0
        self.early = {}

    def send(self, opcode, node=1, body=b"", *, length=None):
        """The number of the request."""
        self.unique += 2
        length = HEADER_BYTES + len(body) if length is None else length
        self.end.send(struct.pack("=IIQQIIIHH", length, opcode, self.unique, node, 0, 0, 1, 0, 0) + body)
        return self.unique

    def reply(self, unique):
        """(errno, body) of the reply to request `unique`."""
        while unique not in self.early:
            message = self.end.recv(2 << 20)
            assert message, "the server has closed its end"
            length, error, found = struct.unpack_from("=IiQ", message)
            assert length == len(message)
            self.early[found] = (-error, message[16:])
        return self.early.pop(unique)

    def notice(self):
        """(code, body) of the next notice."""
        return self.reply(0)

    def ask(self, opcode, node=1, body=b""):
        return self.reply(self.send(opcode, node, body))

    def init(self, flags=(1 << 64) - 1, minor=45):
        return self.ask(Opcode.INIT, 0, struct.pack("=IIIII11I", 7, minor, 1 << 17, flags & 0xFFFFFFFF, flags >> 32, *[0] * 11))

    def read(self, node, offset=0, size=4096, handle=0):
        return self.send(Opcode.READ, node, struct.pack("=QQIIQII", handle, offset, size, 0, 0, 0, 0))

    def close(self):
        self.end.close()
