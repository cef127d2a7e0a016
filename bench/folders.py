"""A directory to copy, mount and read: 20 large files and 2,000 small ones in 111 directories, and how fast it is read.

Nothing here knows an implementation: programs of each import it.
"""

from __future__ import annotations

import io
import os
import random
import socket
from pathlib import Path

from measure import now

NUM_BIG, NUM_FOLDERS, PER_FOLDER = 20, 100, 20
NUM_SMALL = NUM_FOLDERS * PER_FOLDER
MIB = 1 << 20
A_SMALL_FILE = "pkg0/sub000/mod00.py"
A_BIG_FILE = "big00.bin"


def make(root: str, mib: int) -> None:
    """`mib` MiB of random bytes in the large files, some 6 KiB of text in each small one."""
    dice = random.Random(1)
    for index in range(NUM_BIG):
        with open(f"{root}/big{index:02d}.bin", "wb") as file:
            file.write(os.urandom((mib << 20) // NUM_BIG))
    for folder in range(NUM_FOLDERS):
        path = f"{root}/pkg{folder // 10}/sub{folder:03d}"
        os.makedirs(path)
        for index in range(PER_FOLDER):
            with open(f"{path}/mod{index:02d}.py", "wb") as file:
                file.write(b"x = 1  # filler\n" * dice.randint(100, 700))


def read_big(root: str) -> float:
    """GiB/s."""
    buffer = bytearray(MIB)
    total = 0
    began = now()
    for index in range(NUM_BIG):
        with open(f"{root}/big{index:02d}.bin", "rb", buffering=0) as file:
            while size := file.readinto(buffer):
                total += size
    return total / (now() - began) / 2**30


def read_small(root: str) -> float:
    """Files per second: walk, stat, open, read."""
    count = 0
    began = now()
    for folder, _, files in os.walk(root):
        for name in files:
            if name.endswith(".py"):
                os.stat(f"{folder}/{name}")
                with open(f"{folder}/{name}", "rb") as file:
                    file.read()
                count += 1
    return count / (now() - began)


def read_all(root: str) -> float:
    """GiB/s of the large files, after the small ones."""
    read_small(root)
    return read_big(root)


def stat_all(root: str) -> float:
    """Milliseconds of a `stat` of every file, by names that are listed anew."""
    began = now()
    for _, _, files, fd in os.fwalk(root):
        for name in files:
            os.lstat(name, dir_fd=fd)
    return (now() - began) * 1000


def send_all(root: str, sock: socket.socket) -> None:
    """All files of a directory into a socket, each with its name and size before it; returns when the other side has written them."""
    buffer = memoryview(bytearray(MIB))
    for folder, _, files in os.walk(root):
        for name in files:
            path = f"{folder}/{name}"
            with open(path, "rb", buffering=0) as file:
                sock.sendall(f"{os.path.relpath(path, root)}\0{os.fstat(file.fileno()).st_size}\n".encode())
                while size := file.readinto(buffer):
                    sock.sendall(buffer[:size])
    sock.sendall(b"\n")
    sock.recv(1)


def receive_all(root: str, sock: socket.socket) -> None:
    """The other side of `send_all`: writes the files below `root`."""
    buffer = memoryview(bytearray(MIB))
    with io.BufferedReader(socket.SocketIO(sock, "rb"), MIB) as stream:
        while line := stream.readline().rstrip(b"\n").decode():
            name, size = line.split("\0")
            path = Path(root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            left = int(size)
            with open(path, "wb", buffering=0) as file:
                while left and (count := stream.readinto1(buffer[: min(left, MIB)])):
                    file.write(buffer[:count])
                    left -= count
        sock.sendall(b"x")
