"""Folders of other hosts for tests: what they hold is a dict, and what was asked of them is answered when the test says so."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import partial

from monarch._mounts.folder import Found, Got, Listed, digest
from monarch._mounts.gathered import GatheredFileSystem, Remote
from monarch._mounts.watches import What
from monarch._runtime.future import Future

S = 1_000_000_000


class Asked:
    """A question that was not answered yet."""

    def __init__(self, kind: str, path: bytes, answer: Callable[[], object]) -> None:
        self.kind = kind
        self.path = path
        self.future: Future = Future._new()
        self._answer = answer
        self.value: object = None

    def look(self) -> Asked:
        """Have the host look now; what it sees is told later."""
        self.value = self._answer()
        return self

    def tell(self) -> None:
        """Tell what was seen when it looked, or is there now."""
        self.future._complete(self.value if self.value is not None else self._answer())

    def die(self) -> None:
        """The host ends instead."""
        self.future._fail(RuntimeError("the host has ended"))


class Host:
    """One host's folder. Directories are dicts by name, files bytes. Changes are told unless `is_quiet`."""

    def __init__(self, content: dict, *, guarded: bool = True) -> None:
        self.content: dict | None = content
        self.guarded = guarded
        self.is_quiet = False
        self.holds_back = False
        """Questions stay in `asked` until the test answers them."""
        self.asked: list[Asked] = []
        self.log: list[tuple[str, bytes]] = []
        self.wants: list[list] = []
        self.told: Callable[[list], None] = lambda changes: None
        self._idents: dict[int, int] = {}
        self._keep: list = []
        self._times: dict[bytes, int] = {}
        self._clock = 1

    def remote(self) -> Remote:
        return Remote(lambda path, keep: self._ask("stat", path), partial(self._ask, "listing"), self._read)

    def _ask(self, kind: str, path: bytes, answer: Callable[[], object] | None = None) -> Future:
        asked = Asked(kind, path, answer or partial(getattr(self, kind), path))
        self.log.append((kind, path))
        if self.holds_back:
            self.asked.append(asked)
        else:
            asked.tell()
        return asked.future

    def _read(self, path: bytes, ident: int, wants: list) -> Future:
        self.wants.append(wants)
        return self._ask("read", path, lambda: self.read(path, ident, wants))

    # --- what it sees --------------------------------------------------------------------------------------------

    def _at(self, path: bytes):
        found = self.content
        for name in path.split(b"/") if path else ():
            found = found.get(os.fsdecode(name)) if isinstance(found, dict) else None
        return found

    def stat(self, path: bytes):
        content = self._at(path)
        if content is None:
            return errno.ENOENT
        if isinstance(content, int):
            return content
        kind = stat.S_IFDIR | 0o755 if isinstance(content, dict) else stat.S_IFREG | 0o644
        size = 0 if isinstance(content, dict) else len(content)
        time_ns = self._times.get(path, 1) * S
        return Found(kind, size, time_ns, time_ns, self._ident(path, content), self.guarded)

    def _ident(self, path: bytes, content) -> int:
        if isinstance(content, dict):
            self._keep.append(content)
            return id(content)
        return self._idents.setdefault(hash(path), hash(path) & 0xFFFFFF)

    def listing(self, path: bytes):
        content = self._at(path)
        if not isinstance(content, dict):
            return errno.ENOENT if content is None else errno.ENOTDIR
        inner = [os.fsencode(name) for name in content]
        seen = [(name, self.stat(path + b"/" + name if path else name)) for name in inner]
        return Listed(self.guarded, [(name, found if isinstance(found, int) else tuple(found)) for name, found in seen])

    def read(self, path: bytes, ident: int, wants: list):
        found = self.stat(path)
        if isinstance(found, int):
            return found
        if found.ident != ident:
            return errno.ESTALE
        content, parts = self._at(path), []
        for offset, length, num_known, known in wants:
            data = content[offset : offset + length]
            is_known = 0 < num_known <= len(data) and digest(data[:num_known]) == known
            parts.append((num_known if is_known else 0, memoryview(data[num_known if is_known else 0 :])))
        return Got(tuple(found), parts)

    # --- what happens there --------------------------------------------------------------------------------------

    def write(self, path: str, content: bytes) -> None:
        """The same file has other bytes."""
        self._put(path, content)
        self.tell((os.fsencode(path), What.CONTENT))

    def replace(self, path: str, content) -> None:
        """Another file, or a new one."""
        self._put(path, content)
        self._idents[hash(os.fsencode(path))] = self._clock + 1_000_000
        self.tell((os.fsencode(path), What.NAME))

    def remove(self, path: str) -> None:
        parent, name = os.path.split(path)
        del self._at(os.fsencode(parent))[name]
        self.tell((os.fsencode(path), What.NAME))

    def _put(self, path: str, content) -> None:
        self._clock += 1
        parent, name = os.path.split(path)
        self._at(os.fsencode(parent))[name] = content
        self._times[os.fsencode(path)] = self._clock

    def tell(self, *changes: tuple[bytes, int]) -> None:
        if not self.is_quiet and self.guarded:
            self.told(list(changes))


class Waiter:
    """A `Later` that remembers its answer."""

    def __init__(self) -> None:
        self.cancelled = False
        self.value: object = None

    def answer(self, value: object) -> None:
        if self.value is None:
            self.value = value

    def fail(self, number: int) -> None:
        self.answer(number)


class Mounted:
    """A file system over some hosts, and a reader."""

    def __init__(self, *hosts: Host, names: list[bytes] | None = None, **options) -> None:
        self.hosts = hosts
        self.time_s = 100.0
        self.notices: list[int] = []
        self.renamed: list[tuple[int, bytes]] = []
        names = names if names is not None or len(hosts) == 1 else [b"hosts_%d" % index for index in range(len(hosts))]
        self.fs = GatheredFileSystem([host.remote() for host in hosts], names, now=lambda: self.time_s, uid=7, gid=8, **options)
        self.fs.on_changed = self.notices.append
        self.fs.on_renamed = lambda parent, name: self.renamed.append((parent, name))
        for shard, host in enumerate(hosts):
            host.told = partial(self.fs.changed, shard)

    def ask(self, method: str, *args):
        """The answer, or a `Waiter` for it."""
        later = Waiter()
        value = getattr(self.fs, method)(*args, later)
        if value is not later:
            return value
        return later if later.value is None else later.value

    def lookup(self, path: str):
        """The entry at a path."""
        entry = None
        node = 1
        for name in path.split("/"):
            entry = self.ask("lookup", node, os.fsencode(name))
            if isinstance(entry, (int, Waiter)):
                return entry
            node = entry.node
        return entry

    def names(self, path: str = ""):
        node = self.lookup(path).node if path else 1
        found = self.ask("children", node)
        return found if isinstance(found, (int, Waiter)) else sorted(os.fsdecode(name) for name, _ in found)

    def read(self, path: str, offset: int = 0, size: int = 1 << 20):
        """Bytes, as the kernel gets them: who opens a file that is another one by now looks for it once more."""
        for _ in range(2):
            entry = self.lookup(path)
            if isinstance(entry, (int, Waiter)):
                return entry
            opened = self.ask("open", entry.node)
            if opened != errno.ESTALE:
                break
        if isinstance(opened, (int, Waiter)):
            return opened
        value = joined(self.ask("read", entry.node, opened.handle, offset, size))
        self.fs.release(opened.handle)
        return value


def joined(parts):
    return parts if isinstance(parts, (int, Waiter)) else b"".join(bytes(part) for part in parts)
