"""Events of inotify are read as the kernel writes them, whatever the names and wherever a read ends."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given
from hypothesis.strategies import binary, builds, integers, lists

from monarch._mounts.inotify import Event, Inotify, Mask, decode, magic_of

names = binary(max_size=60).map(lambda name: name.replace(b"\0", b"").replace(b"/", b""))
events = builds(Event, integers(-1, 2**31 - 1), integers(0, 2**32 - 1), integers(0, 2**32 - 1), names)


def as_the_kernel_writes(event):
    padded = event.name + b"\0" * (-len(event.name) % 16 or 16) if event.name else b""
    return struct.pack("=iIII", event.watch, event.mask, event.cookie, len(padded)) + padded


@given(lists(events, max_size=8))
def test_events_are_read_in_their_order(some):
    assert decode(b"".join(map(as_the_kernel_writes, some))) == some


@given(lists(events, min_size=1, max_size=3), integers(1, 15))
def test_an_event_that_is_cut_is_refused(some, missing):
    with pytest.raises(ValueError, match="inotify event"):
        decode(b"".join(map(as_the_kernel_writes, some))[:-missing])


def test_a_directory_tells_of_what_is_in_it(tmp_path):
    notifier = Inotify()
    watch = notifier.add(os.fsencode(tmp_path))
    assert notifier.add(os.fsencode(tmp_path / ".")) == watch and notifier.read() == []
    (tmp_path / "new").write_bytes(b"1")
    (tmp_path / "new").rename(tmp_path / "newer")
    told = [(Mask(event.mask), event.name) for event in notifier.read()]
    assert (Mask.CREATE, b"new") in told and (Mask.MODIFY, b"new") in told
    assert (Mask.MOVED_FROM, b"new") in told and (Mask.MOVED_TO, b"newer") in told
    with pytest.raises(NotADirectoryError):
        notifier.add(os.fsencode(tmp_path / "newer"))
    notifier.remove(watch)
    assert [event.mask for event in notifier.read()] == [Mask.IGNORED]
    notifier.close()


def test_file_systems_are_told_apart():
    assert magic_of(b"/proc") == 0x9FA0 and magic_of(b"/no/where") == 0
