"""Values to bytes and back: a small pickle, and the large memory beside it, not copied.

Pure: no I/O. The frames lay out what `dumps` returns; sockets and `_net/local.py` carry it.

Rules of this file:
    1. Plain `pickle` sees exact builtin types only. All else goes through cloudpickle, because classes and functions of
       `__main__` travel by value, and plain pickle would send a name that the other side cannot resolve.
    2. The buffers that `dumps` returns are the user's own memory: write them out before the user's code runs on.
    3. What `loads` builds over a writable buffer is writable and keeps the buffer alive; a read-only one is copied.
    4. numpy and torch are never imported to send, only looked up: who holds a value of theirs has imported them.

A payload is an ordinary protocol 5 pickle, except when it holds `bytes`, `bytearray` or `str` of 256 KiB or more. CPython's
pickler gives those to its file uncopied, as pieces of their own; they become the first buffers, the payload then starts
with `_CUT` and the places of the cuts, and `_Stitched` puts them back while unpickling. So they travel out of band from any
depth, and what arrives is exactly what was sent.

Read next: `tensors.py` for arrays and tensors, `exceptions.py` for exceptions, `culprit.py` for what can't be pickled,
`_net/local.py` for how buffers cross to another process of this host.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from copyreg import dispatch_table as _copyreg_table
from functools import lru_cache
from types import CodeType, FunctionType, NoneType
from typing import Any

OUT_OF_BAND_BYTES = 4096
"""Buffers below this are copied into the payload: measured, a buffer of its own costs what copying 4 KiB costs."""

_PIECE_BYTES = 256 * 1024  # CPython cuts from 64 KiB on; up to here copying takes less than putting back (10 us)
_PLAIN_ITEMS = 32  # longer containers gain nothing: one pickler object costs as much as looking at this many items
_modules = sys.modules
_CUT = b"\x00"
_FRAME = 0x95
_NONE = pickle.dumps(None, 5)
_NO_ARGUMENTS = pickle.dumps(((), {}), 5)
_SCALARS = frozenset({NoneType, bool, int, float, complex, str})
_only_scalars = _SCALARS.issuperset
_only_builtins = (_SCALARS | {tuple, list, dict, set, bytes, bytearray}).issuperset


def dumps(value: Any, *, parts: Sequence[str] = (), result_of: str = "") -> tuple[bytes, list[memoryview]]:
    """`value` as small bytes plus out-of-band buffers.

    Args:
        parts: what errors call the items of `value`, a tuple; without them a pair of a tuple and a dict is a call's arguments.
        result_of: the endpoint whose result `value` is, for errors.

    Returns:
        The payload, and C-contiguous byte views over memory of `value` itself (each keeps its owner alive).

    Raises:
        Exception: whatever pickling raised, in its own type; the text or a note names the offending part of `value`.

    Cost: 1 us for `((1,), {})`, 6 us for a small object; only strided arrays and small views of large tensors are copied.
    """
    if value is None:
        return _NONE, []
    if type(value) is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict:
        args, kwargs = value  # a call
        if _only_scalars(map(type, args)) and len(args) + len(kwargs) <= _PLAIN_ITEMS:
            if not kwargs:
                return (pickle.dumps(value, 5) if args else _NO_ARGUMENTS), []
            if _only_scalars(map(type, kwargs)) and _only_scalars(map(type, kwargs.values())):
                return pickle.dumps(value, 5), []
        elif not _only_builtins(map(type, args)):
            return _dumps_named(value, parts, result_of)
    return (pickle.dumps(value, 5), []) if _is_plain(value, 4) else _dumps_named(value, parts, result_of)


def loads(payload: bytes | bytearray | memoryview, buffers: Sequence[memoryview] = ()) -> Any:
    """The value that `dumps` was given.

    Args:
        payload: as `dumps` returned it.
        buffers: as `dumps` returned them, or copies. Arrays and tensors lie over them from then on.

    Raises:
        Exception: whatever the value's own code raised while it was rebuilt.
    """
    torch = _modules.get("torch")
    if torch is not None and has_dispatch_mode(torch):
        with torch.utils._python_dispatch._disable_current_modes():
            return _unpickle(payload, buffers)
    return pickle.loads(payload, buffers=buffers) if payload[0] else _unpickle(payload, buffers)


def has_dispatch_mode(torch: Any) -> bool:
    """Whether a mode of torch would see what is done with tensors now."""
    try:
        return bool(torch._C._len_torch_dispatch_stack())
    except AttributeError:  # being imported by another thread
        return False


def _unpickle(payload: bytes | bytearray | memoryview, buffers: Sequence[memoryview]) -> Any:
    if payload[0]:
        return pickle.loads(payload, buffers=buffers)
    stitched = _Stitched(payload, buffers)
    return pickle.Unpickler(stitched, buffers=buffers[stitched.num_pieces :]).load()


def _is_plain(value: Any, depth: int) -> bool:
    """True when `value` is made of exact builtin types, is small to look at and holds no large bytes."""
    kind = type(value)
    if kind is dict:
        if len(value) > _PLAIN_ITEMS or not _only_scalars(map(type, value)):
            return False
        items: Any = value.values()
    elif kind is tuple or kind is list or kind is set:
        items = value
    elif kind is bytes or kind is bytearray:
        return len(value) < _PIECE_BYTES
    else:
        return kind in _SCALARS
    if len(items) > _PLAIN_ITEMS:
        return False
    if _only_scalars(map(type, items)):
        return True
    if depth == 1 or len(items) > 8 or not _only_builtins(map(type, items)):
        return False
    for item in items:  # noqa: SIM110  # `all()` of a generator takes twice the time
        if type(item) not in _SCALARS and not _is_plain(item, depth - 1):
            return False
    return True


class _Sink:
    """The pickler's file: gathers pieces of the stream and the buffers that go beside it."""

    __slots__ = ("buffers", "pieces", "write")

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.buffers: list[memoryview] = []
        self.write = self.pieces.append

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Pickle's `buffer_callback`; True leaves the buffer in the stream."""
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND_BYTES:
            return True
        self.buffers.append(view)
        return False

    def result(self) -> tuple[bytes, list[memoryview]]:
        """Payload and buffers; large pieces that are the user's own become buffers, frames of the pickler stay."""
        pieces = self.pieces
        if len(pieces) == 1:
            return pieces[0], self.buffers
        small, cuts, large, at = [], [], [], 0
        for piece in pieces:
            if len(piece) >= _PIECE_BYTES and not _is_frame(piece):
                cuts.append(at)
                large.append(memoryview(piece))
            else:
                small.append(piece)
                at += len(piece)
        if not cuts:
            return b"".join(small), self.buffers
        head = _CUT + struct.pack(f"<I{len(cuts)}Q", len(cuts), *cuts)
        return b"".join((head, *small)), large + self.buffers


def _is_frame(piece: Any) -> bool:
    # A wrong answer costs a copy and nothing else: a piece stands at the same place of the stream either way.
    at = 2 if piece[0] == 0x80 else 0
    return piece[at] == _FRAME and int.from_bytes(piece[at + 1 : at + 9], "little") == len(piece) - at - 9


class _Stitched:
    """File over a payload with its large pieces put back; the unpickler's `readinto` copies each of them once."""

    def __init__(self, payload: bytes | bytearray | memoryview, buffers: Sequence[memoryview]) -> None:
        view = memoryview(payload)
        self.num_pieces = struct.unpack_from("<I", view, 1)[0]
        cuts = struct.unpack_from(f"<{self.num_pieces}Q", view, 5)
        view, start = view[5 + 8 * self.num_pieces :], 0
        spans = []
        for cut, large in zip(cuts, buffers, strict=False):
            spans += [view[start:cut], large]
            start = cut
        self._rest = iter([*spans, view[start:]])
        self._span: memoryview = next(self._rest)

    def readinto(self, out: Any) -> int:
        done = 0
        with memoryview(out) as target:
            while done < len(target):
                if not self._span:
                    self._span = next(self._rest)
                    continue
                part = self._span[: len(target) - done]
                target[done : done + len(part)] = part
                done += len(part)
                self._span = self._span[len(part) :]
        return done

    def read(self, size: int) -> bytes:
        out = bytearray(size)
        self.readinto(out)
        return bytes(out)

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("a line in a binary pickle")


class _Table(dict[type, Any]):
    """cloudpickle's and copyreg's reducers, live, three times as fast to miss as cloudpickle's `ChainMap`."""

    __slots__ = ("_own",)

    def __init__(self, own: Any) -> None:
        self._own = own.maps[0]

    def __missing__(self, kind: type) -> Any:
        reduce = self._own.get(kind)
        return _copyreg_table[kind] if reduce is None else reduce


_reducers: dict[type, Callable[[Any, Any], Any]] = {}
"""Reducers by exact type, `(value, pickler) -> reduced or NotImplemented`; filled when a library appears."""
_awaited = ["numpy", "torch"]


@lru_cache(maxsize=1)
def _pickler_class() -> Any:
    import cloudpickle

    base: Any = cloudpickle.Pickler
    _reducers[CodeType] = _reduce_code
    override = base.reducer_override
    reducers = _reducers
    modules = _modules
    # Without this set (an internal of cloudpickle) every class is looked at by cloudpickle itself.
    by_value = getattr(cloudpickle.cloudpickle, "_PICKLE_BY_VALUE_MODULES", {"unknown"})

    class _Pickler(base):  # type: ignore[misc]
        dispatch_table = _Table(base.dispatch_table)
        storages: dict[int, tuple[list[Any], Any]] | None = None

        def reducer_override(self, value: Any) -> Any:
            kind = type(value)
            reduce = reducers.get(kind)
            if reduce is not None:
                return reduce(value, self)
            if kind is FunctionType or issubclass(kind, type):
                # What cloudpickle decides about a name of an imported module, in a fifth of its time.
                module = value.__module__
                is_name = type(module) is str and module != "__main__" and not by_value
                if is_name and getattr(modules.get(module), value.__qualname__, None) is value:
                    return NotImplemented
                return override(self, value)
            return NotImplemented

    return _Pickler


def _reduce_code(code: Any, pickler: Any) -> Any:
    # cloudpickle replaces the file's name, and with it the line that a remote traceback leads to.
    make, parts = pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


def _dumps_named(value: Any, parts: Sequence[str], result_of: str) -> tuple[bytes, list[memoryview]]:
    try:
        return _dumps_rich(value)
    except Exception as exc:
        from monarch._wire.culprit import blame

        blame(exc, value, _travels, parts=parts, result_of=result_of)
        raise


def _dumps_rich(value: Any) -> tuple[bytes, list[memoryview]]:
    if _awaited:
        _look_for_libraries()
    sink = _Sink()
    _pickler_class()(sink, 5, sink.take).dump(value)
    return sink.result()


def dumps_in_band(value: Any) -> bytes:
    """`value` as bytes alone, for what is small and is stored; `loads` takes it back."""
    if _awaited:
        _look_for_libraries()
    sink = _Sink()
    _pickler_class()(sink, 5).dump(value)
    return b"".join(sink.pieces)


def _look_for_libraries() -> None:
    for name in list(_awaited):
        library: Any = sys.modules.get(name)
        # Another thread may be half way through importing it; then this value cannot be one of its own.
        if library is None or getattr(library.__spec__, "_initializing", False):
            continue
        from monarch._wire.tensors import reducers_of

        _reducers.update(reducers_of(name, library))
        if name in _awaited:
            _awaited.remove(name)


def _travels(value: Any) -> bool:
    try:
        _dumps_rich(value)
    except Exception:
        return False
    return True
