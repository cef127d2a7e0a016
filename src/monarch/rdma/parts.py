"""Parts: the tensors or arrays of a state dict as places in one flat piece of memory, and the copies between both.

Rules of this file:
    1. Neither torch nor numpy is imported before somebody needs it: who has a tensor has imported torch.

Read next: `weights.py`, which publishes them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from monarch._base.errors import did_you_mean, explain

_ALIGNMENT = 64
_MOST_SHOWN = 5
Library = Literal["torch", "numpy"]


class Part(NamedTuple):
    """One tensor of a state dict."""

    offset: int
    """In a copy."""
    nbytes: int
    dtype: str
    """As `str(tensor.dtype)` says, without the module."""
    shape: tuple[int, ...]
    library: Library
    """Whose tensor or array was published."""


def parts_of(state: Mapping[str, Any]) -> tuple[dict[str, Part], int]:
    """The parts of a state dict one after the other, and the bytes of all.

    Raises:
        TypeError: it is no mapping, or a value is no tensor or array with plain elements.
    """
    _check_mapping(state)
    parts, size = {}, 0
    for name, value in state.items():
        part = parts[name] = _part_of(name, value, size)
        size += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    return parts, size


def check_same(parts: Mapping[str, Part], state: Mapping[str, Any], *, what: str, partly: bool = False) -> None:
    """ValueError unless `state` has the names, types and shapes of `parts`; of some of them, if `partly`. TypeError as of `parts_of`."""
    _check_mapping(state)
    check_known(parts, state)
    missing = set() if partly else parts.keys() - state.keys()
    if missing:
        raise ValueError(explain(f"{_some(missing)} missing in what is {what}", next="use the names of the first publication"))
    for name, value in state.items():
        found = _part_of(name, value, 0)
        if (found.dtype, found.shape) != (parts[name].dtype, parts[name].shape):
            have, want = f"{found.dtype} {list(found.shape)}", f"{parts[name].dtype} {list(parts[name].shape)}"
            raise ValueError(explain(f"{name!r} that is {what} is {have}, and was published as {want}", next="give it that type and shape"))


def check_known(parts: Mapping[str, Part], names: Mapping[str, Any]) -> None:
    """ValueError for a name that was not published."""
    unknown = names.keys() - parts.keys()
    if unknown:
        what = f"{_some(unknown)} not among the published weights{_meant(unknown, parts)}"
        raise ValueError(explain(what, next="use the names of the first publication"))


def chosen_of(into: Mapping[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    """Those of `into` that have these names; None: all. ValueError for a name that is not in it, TypeError when it is no mapping,
    or `names` is a string."""
    _check_mapping(into)
    if names is None:
        return dict(into)
    names = listed(names)
    missing = set(names) - into.keys()
    if missing:
        what = f"{_some(missing)} to be pulled, and there is nothing to pull into{_meant(missing, into)}"
        raise ValueError(explain(what, next="give a tensor or an array for each of the names"))
    return {name: into[name] for name in names}


def listed(names: Iterable[str]) -> list[str]:
    """The names. TypeError: it is one string, whose letters would be taken for names."""
    if isinstance(names, str):
        raise TypeError(explain(f"names={names!r} is one string, not several names", next=f"write names=[{names!r}]"))
    return list(names)


def _check_mapping(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        what = f"weights are a mapping of names to tensors or arrays, not a {type(state).__name__}"
        raise TypeError(explain(what, next="pass a dict, such as module.state_dict()"))


def _some(names: set[str]) -> str:
    """The first of the names, and the verb of a sentence about them."""
    shown = ", ".join(map(repr, sorted(map(str, names))[:_MOST_SHOWN]))
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"


def _meant(names: set[str], known: Iterable[str]) -> str:
    return did_you_mean(next(iter(names)), known) if len(names) == 1 else ""


def target_of(value: Any, part: Part) -> Any:
    """What to read into: the bytes of the value itself, or a bytearray, from which `copy_in` copies afterwards.

    Raises:
        ValueError: nothing can be written to it, or several of its elements are the same memory.
    """
    torch = _torch_of(value)
    if torch is not None:
        if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
            what = f"a tensor to pull into has strides {value.stride()}, so that several of its elements are the same memory"
            raise ValueError(explain(what, next="pull into tensor.clone()"))
        if value.device.type == "cpu" and value.is_contiguous() and not (value.is_conj() or value.is_neg()):
            return value.detach().view(-1).view(torch.uint8)
    elif not value.flags.writeable:
        raise ValueError(explain("an array to pull into is read-only", next="pull into array.copy()"))
    elif value.flags.c_contiguous:
        return _numpy().asarray(value).reshape(-1).view("uint8")
    return memoryview(bytearray(part.nbytes))


def within(targets: Mapping[str, Any], parts: Mapping[str, Part], start: int, end: int) -> Iterator[tuple[Any, int, int]]:
    """For each target that has a part of bytes `start` to `end` of a copy: what of it, and where that begins and ends in the copy."""
    for name, target in targets.items():
        part = parts[name]
        low, high = max(start, part.offset), min(end, part.offset + part.nbytes)
        if low < high:
            yield target[low - part.offset : high - part.offset], low, high


def copy_in(data: Any, value: Any, part: Part) -> None:
    """Copy what `target_of` gave into the value, unless it was read in place."""
    if not isinstance(data, memoryview) or not part.nbytes:
        return
    torch = _torch_of(value)
    if torch is not None:
        with torch.no_grad():
            value.copy_(torch.frombuffer(data, dtype=value.dtype).view(part.shape))
    else:
        value[...] = _numpy().frombuffer(data, dtype=value.dtype).reshape(part.shape)


def copy_out(value: Any, memory: memoryview, part: Part) -> None:
    """Copy a tensor or array to its place in a copy."""
    if not part.nbytes:
        return
    here = memory[part.offset : part.offset + part.nbytes]
    torch = _torch_of(value)
    if torch is not None:
        torch.frombuffer(here, dtype=value.dtype).view(part.shape).copy_(value.detach())
    else:
        _numpy().frombuffer(here, dtype=value.dtype).reshape(part.shape)[...] = value


def view_of(memory: Any, part: Part) -> Any:
    """The part itself, in a copy that has writable memory: a tensor if one was published, or else an array, which is read-only."""
    if part.library == "torch":
        torch: Any = importlib.import_module("torch")
        dtype = getattr(torch, part.dtype)
        flat = torch.frombuffer(memory, dtype=dtype, count=_count(part), offset=part.offset) if part.nbytes else torch.empty(0, dtype=dtype)
        return flat.view(part.shape)
    numpy = _numpy()
    array = numpy.frombuffer(memory, dtype=part.dtype, count=_count(part), offset=part.offset).reshape(part.shape)
    array.flags.writeable = False
    return array


def _count(part: Part) -> int:
    count = 1
    for size in part.shape:
        count *= size
    return count


def _torch_of(value: Any) -> Any:
    """The torch module when `value` is a tensor; None: it is none."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None


def _numpy() -> Any:
    return importlib.import_module("numpy")


def _part_of(name: str, value: Any, offset: int) -> Part:
    dtype = str(getattr(value, "dtype", "")).rpartition(".")[2]
    torch = _torch_of(value)
    if torch is not None:
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            what = f"{name!r} is a tensor without plain elements: {value.dtype}, {value.layout}, on {value.device}"
            raise TypeError(explain(what, next="use the tensors that it is made of, such as its values() or int_repr()"))
        return Part(offset, int(value.numel() * value.element_size()), dtype, tuple(value.shape), "torch")
    if hasattr(value, "__array_interface__") and dtype:
        if value.dtype.hasobject or value.dtype.names is not None:
            what = f"{name!r} is an array without plain elements: {value.dtype}"
            raise TypeError(explain(what, next="use arrays of numbers, such as one for each field"))
        return Part(offset, int(value.nbytes), dtype, tuple(value.shape), "numpy")
    what = f"{name!r} is a {type(value).__name__}, neither a tensor nor an array"
    raise TypeError(explain(what, next="publish tensors or numpy arrays"))
