"""The store: bytes arrive in any order, readers wait for theirs and always end, memory follows what can be read."""

from __future__ import annotations

import errno
import os
import random
import threading

import pytest

from monarch._mounts.index import BLOCK_SIZE
from monarch._mounts.ranges import Span
from monarch._mounts.snapshot import NOWHERE
from monarch._mounts.store import Store
from mounts.world import DIRECTORY, FILE, Answer, bytes_of, made, memfds, resident_kib

MIB = 1 << 20
SMALL, BIG = Span(100, 50), Span(BLOCK_SIZE, 3 * MIB + 5)
FILES = made((0, b"small", FILE, *reversed(SMALL)), (0, b"big", FILE, *reversed(BIG)), total=1 << 40)


@pytest.fixture
def wanted() -> list:
    return []


@pytest.fixture
def store(wanted):
    store = Store(lambda offset, length: wanted.append(Span(offset, length)))
    store.extend(FILES)
    yield store
    store.close()


def put(store: Store, offset: int, data: bytes) -> None:
    store.put(offset, memoryview(data))


def start_read(store: Store, file: Span, offset: int = 0, size: int = 1 << 40) -> Answer:
    answer = Answer()
    found = store.read(file, offset, size, answer)
    if found is not answer:
        answer.given.append(bytes_of(found))
    return answer


def test_what_is_here_is_read_at_once(store, wanted):
    put(store, SMALL.offset, bytes(range(50)))
    assert start_read(store, SMALL).value == bytes(range(50))
    assert start_read(store, SMALL, 10, 5).value == bytes(range(10, 15))
    assert start_read(store, SMALL, 48, 100).value == bytes([48, 49])
    assert start_read(store, SMALL, 50, 1).value == b""
    assert not wanted


def test_holes_are_read_offered_and_counted_and_take_no_memory(store, wanted):
    before = resident_kib()
    reader = start_read(store, BIG)
    store.put_zeros(BIG.offset, 2 * MIB)
    put(store, BIG.offset + 2 * MIB, b"x" * (MIB + 5))
    assert reader.value == bytes(2 * MIB) + b"x" * (MIB + 5)
    assert start_read(store, BIG, 2 * MIB - 3, 5).value == b"\0\0\0xx"
    offer = store.offer(BIG.offset + MIB, 2 * MIB)
    assert offer.holes == ((BIG.offset + MIB, MIB),) and [(at, len(data)) for at, data in offer.parts] == [(BIG.offset + 2 * MIB, MIB)]
    assert b"".join(store.peek(Span(BIG.offset + MIB, MIB + 1))) == bytes(MIB) + b"x"
    assert resident_kib() - before < 1500
    assert store.statistics().resident_bytes == MIB + 5 and store.statistics().missing_bytes == SMALL.length
    store.put_zeros(BIG.offset, BIG.length)  # a late one: what is here stays
    assert start_read(store, BIG, 3 * MIB, 5).value == b"xxxxx"
    with open(f"/proc/self/fd/{store.backing_fd(BIG)}", "rb") as file:
        assert file.read() == reader.value
    store.drop([BIG])
    assert store.statistics().resident_bytes == 0


def test_each_missing_piece_is_asked_for_once_in_order(store, wanted):
    readers = [start_read(store, BIG), start_read(store, BIG, 5, 1), start_read(store, BIG, 2 * MIB, 9)]
    assert wanted == [Span(BIG.offset, MIB), Span(BIG.offset + MIB, MIB), Span(BIG.offset + 2 * MIB, MIB), Span(BIG.offset + 3 * MIB, 5)]
    assert not any(reader.given for reader in readers)
    assert store.statistics().num_waiting == 3


def test_readers_are_woken_as_their_pieces_arrive_in_the_order_of_the_pieces(store):
    order = []
    readers = {place: start_read(store, BIG, place, 1) for place in (2 * MIB, 5, MIB, 3 * MIB)}
    for place, reader in readers.items():
        reader.answer = lambda value, place=place: order.append((place, bytes_of(value)))
    put(store, BIG.offset + 3 * MIB, b"54321")
    assert order == [(3 * MIB, b"5")]
    put(store, BIG.offset, b"a" * MIB + b"b" * MIB + b"c" * MIB)
    assert order[1:] == [(5, b"a"), (MIB, b"b"), (2 * MIB, b"c")]


def test_a_reader_of_several_pieces_waits_for_the_last(store):
    reader = start_read(store, BIG, MIB - 2, 4)
    put(store, BIG.offset + MIB, b"b" * MIB)
    assert not reader.given
    put(store, BIG.offset + MIB - 1, b"a")
    assert not reader.given
    put(store, BIG.offset + MIB - 2, b"a")
    assert reader.value == b"aabb"


def test_a_byte_that_is_here_is_never_written_again(store):
    put(store, BIG.offset + 10, b"right")
    put(store, BIG.offset, b"x" * 100)
    assert start_read(store, BIG, 0, 20).value == b"x" * 10 + b"right" + b"x" * 5


def test_bytes_of_no_file_go_nowhere(store):
    put(store, 0, b"z" * 1000)
    put(store, 1 << 50, b"z" * 1000)
    assert store.statistics().resident_bytes == SMALL.length


def test_missing_is_what_files_lack(store):
    assert store.missing(0, 1 << 50) == [SMALL, BIG]
    put(store, SMALL.offset + 10, b"x" * 10)
    assert store.missing(0, 1000) == [Span(100, 10), Span(120, 30)]
    statistics = store.statistics()
    assert (statistics.resident_bytes, statistics.missing_bytes) == (10, SMALL.length + BIG.length - 10)


def test_a_failed_file_is_an_error_until_the_next_version_and_its_neighbours_are_not(store):
    put(store, BIG.offset, b"b" * BIG.length)
    parked, neighbour = start_read(store, SMALL, 20), start_read(store, BIG, 0, 1)
    store.failed("/small", errno.EIO)
    assert parked.value == errno.EIO and neighbour.value == b"b"
    put(store, SMALL.offset, b"s" * 50)
    assert start_read(store, SMALL).value == errno.EIO
    store.extend(FILES)
    assert start_read(store, SMALL).value == b"s" * 50


def test_a_failure_of_an_unknown_path_touches_nobody(store):
    store.failed("/unknown", errno.EIO)
    store.failed_at(1 << 50, 10, errno.EIO)
    put(store, SMALL.offset, b"s" * 50)
    assert start_read(store, SMALL).value == b"s" * 50


def test_a_failed_range_fails_every_file_in_it(store):
    readers = [start_read(store, SMALL), start_read(store, BIG)]
    store.failed_at(SMALL.end - 1, BLOCK_SIZE, errno.ESTALE)
    assert [reader.value for reader in readers] == [errno.ESTALE, errno.ESTALE]


def test_old_news_of_a_failure_is_a_reason_to_ask_again(store, wanted):
    version = store.version
    reader = start_read(store, BIG, 0, 1)
    store.extend(FILES)
    wanted.clear()
    store.failed_at(*BIG, errno.EIO, version=version)
    assert not reader.given and wanted == [Span(BIG.offset, MIB)]
    store.failed_at(*BIG, errno.EIO, version=store.version)
    assert reader.value == errno.EIO


def test_a_delivery_that_came_to_nothing_is_asked_for_again_while_somebody_waits(store, wanted):
    first = start_read(store, BIG, 0, 1)
    second = start_read(store, BIG, MIB, 1)
    second.cancelled = True
    wanted.clear()
    store.retry(BIG.offset, BIG.length)
    assert wanted == [Span(BIG.offset, MIB)]
    start_read(store, BIG, MIB, 1)
    assert wanted == [Span(BIG.offset, MIB), Span(BIG.offset + MIB, MIB)]
    put(store, BIG.offset, b"x")
    assert first.value == b"x"


def test_a_dead_source_wedges_nobody_and_may_come_back(store, wanted):
    reader = start_read(store, BIG, 0, 1)
    store.disconnect(errno.EHOSTUNREACH)
    assert reader.value == start_read(store, BIG, 0, 1).value == errno.EHOSTUNREACH
    wanted.clear()
    again = []
    store.connect(lambda offset, length: again.append(Span(offset, length)))
    assert not start_read(store, BIG, 0, 1).given
    assert again == [Span(BIG.offset, MIB)] and not wanted


def test_without_a_source_a_read_fails_at_once():
    store = Store()
    store.extend(FILES)
    assert start_read(store, BIG).value == errno.ENOTCONN


def test_closing_ends_every_wait_and_gives_all_back(wanted):
    before = memfds(), len(os.listdir("/proc/self/fd"))
    store = Store(lambda offset, length: None)
    store.extend(FILES)
    reader = start_read(store, BIG)
    put(store, SMALL.offset, b"x" * 50)
    put(store, BIG.offset, b"x")
    assert memfds() == before[0] + 2 and len(os.listdir("/proc/self/fd")) == before[1] + 1
    store.close()
    assert reader.value == errno.EIO
    assert (memfds(), len(os.listdir("/proc/self/fd"))) == before
    assert start_read(store, BIG).value == errno.ESTALE


def test_a_reader_that_was_interrupted_is_forgotten(store):
    reader = start_read(store, BIG, 0, MIB + 1)
    reader.cancelled = True
    put(store, BIG.offset, b"b" * BIG.length)
    assert not reader.given and store.statistics().num_waiting == 0


def test_dropped_files_give_their_memory_back_and_their_readers_an_error(store):
    before = memfds()
    put(store, BIG.offset, b"b" * MIB)
    reader = start_read(store, BIG, 2 * MIB, 1)
    store.drop([BIG, Span(5, 5)])
    assert reader.value == start_read(store, BIG).value == errno.ESTALE
    assert memfds() == before and store.statistics().num_descriptors == 0
    put(store, BIG.offset, b"late" * 1000)
    assert store.statistics().resident_bytes == 0


def test_pages_of_dropped_small_files_go_even_while_neighbours_stay():
    files = [Span(at * 3000, 3000) for at in range(1000)]
    store = Store(lambda offset, length: None)
    store.extend(made(*((0, b"f%d" % at, FILE, span.length, span.offset) for at, span in enumerate(files)), total=BLOCK_SIZE))
    put(store, 0, os.urandom(3_000_000))
    kept = {files[0], files[500]}
    before = [start_read(store, file).value for file in kept]
    rest = [file for file in files if file not in kept]
    random.Random(1).shuffle(rest)
    store.drop(rest[:400])
    store.drop(rest[400:])
    assert resident_kib() <= 16
    assert [start_read(store, file).value for file in kept] == before
    store.drop(kept)
    assert store.statistics().num_segments == 0
    store.close()


def test_a_snapshot_of_another_source_is_refused(store):
    longer = made((0, b"other", FILE, SMALL.length + 1, SMALL.offset), total=1 << 40)
    across = made((0, b"other", FILE, 10 * MIB, BIG.offset - MIB), total=1 << 40)
    for snapshot in (longer, across):
        with pytest.raises(ValueError, match=r"lies where this store has another one\n  next:  the snapshot comes from another source"):
            store.extend(snapshot)
    assert start_read(store, Span(across.offsets[1], 10 * MIB)).value == errno.ESTALE


def test_a_descriptor_is_given_once_the_file_is_complete(store):
    assert store.backing_fd(BIG) is None
    put(store, BIG.offset, b"x" * (BIG.length - 1))
    assert store.backing_fd(BIG) is None
    put(store, BIG.end - 1, b"y")
    fd = store.backing_fd(BIG)
    assert os.pread(fd, 10, BIG.length - 3) == b"xxy" and os.fstat(fd).st_size == BIG.length
    put(store, SMALL.offset, b"x" * SMALL.length)
    assert store.backing_fd(SMALL) is None
    store.failed("/big", errno.EIO)
    assert store.backing_fd(BIG) is None


def test_descriptors_have_a_limit_and_files_beyond_it_are_served_all_the_same():
    spans = [Span(at * 2 * MIB, MIB) for at in range(3)]
    store = Store(lambda offset, length: None, most_descriptors=2)
    store.extend(made(*((0, b"f%d" % at, FILE, MIB, span.offset) for at, span in enumerate(spans)), total=1 << 30))
    for span in spans:
        put(store, span.offset, b"x" * MIB)
    assert [store.backing_fd(span) is not None for span in spans] == [True, True, False]
    assert start_read(store, spans[2]).value == b"x" * MIB
    store.drop(spans[:1])
    assert store.statistics().num_descriptors == 1
    store.close()


def test_a_file_of_many_gigabytes_takes_the_memory_of_what_came():
    size = 8 << 30
    store = Store(lambda offset, length: None)
    store.extend(made((0, b"d", DIRECTORY, 0, NOWHERE), (0, b"huge", FILE, size, BLOCK_SIZE), total=1 << 40))
    file = Span(BLOCK_SIZE, size)
    reader = start_read(store, file, size - 3, 100)
    put(store, file.end - MIB, b"e" * MIB)
    put(store, BLOCK_SIZE + (5 << 30), b"m" * 10)
    assert reader.value == b"eee" and start_read(store, file, (5 << 30) + 9, 1).value == b"m"
    assert 1024 <= resident_kib() <= 1032
    store.close()


def test_wanting_ahead_asks_once(store, wanted):
    put(store, BIG.offset, b"x" * MIB)
    store.want(0, 1 << 50)
    assert wanted == [SMALL, *(Span(BIG.offset + at * MIB, min(MIB, BIG.length - at * MIB)) for at in (1, 2, 3))]
    start_read(store, BIG)
    assert len(wanted) == 4


def test_readers_and_a_delivery_run_at_the_same_time(store):
    data = random.Random(5).randbytes(BIG.length)
    wrong, done = [], threading.Barrier(5)

    def read(seed: int) -> None:
        places = random.Random(seed)
        for _ in range(300):
            offset, size = places.randrange(BIG.length), places.randrange(1, 200_000)
            answer, came = Answer(), threading.Event()
            answer.answer = lambda value, came=came, answer=answer: (answer.given.append(bytes_of(value)), came.set())
            found = store.read(BIG, offset, size, answer)
            if found is answer:
                assert came.wait(10)
                found = answer.value
            if bytes_of(found) != data[offset : offset + size]:
                wrong.append((offset, size))
        done.wait(10)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    starts = list(range(0, BIG.length, 50_000))
    random.Random(9).shuffle(starts)
    for start in starts:
        put(store, BIG.offset + start, data[start : start + 50_000])
    done.wait(10)
    for thread in threads:
        thread.join()
    assert not wrong and store.statistics().num_waiting == 0
