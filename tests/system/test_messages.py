"""Messages: what is sent is what arrives, at any size, and a sender that is too fast is slowed."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from typing import Any

import numpy
import pytest

from monarch.actor import Actor, ActorError, Channel, endpoint, this_host, this_proc
from system.actors import Echo, Inspector, Log, SyncEcho
from system.conftest import requires_torch

pytest_plugins = ["system.recorder"]
pytestmark = pytest.mark.usefixtures("faults")

WAIT_S = 20.0
MIB = 1 << 20

SIZES = [0, 1, 100, 4095, 4096, 4097, 65_536, 262_143, 262_144, 262_145, MIB, 5 * MIB + 3]


@pytest.fixture(scope="module")
def procs():
    return this_host().spawn_procs(per_host={"gpus": 4})


@pytest.fixture(scope="module")
def echo(procs):
    return procs.spawn("echo", Echo)


@pytest.fixture(scope="module")
def one(echo):
    return echo.slice(gpus=1)


def there_and_back(one, value):
    return one.echo.call_one(value).get(WAIT_S)


# --- kinds and sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [bytes, bytearray, str, memoryview, numpy.ndarray], ids=lambda kind: kind.__name__)
def test_memory_of_every_size_arrives_there_and_back(one, kind, size):
    data = os.urandom(size)
    match kind.__name__:
        case "str":
            value: Any = data.hex()[:size] + ("é" if size > 4096 else "")
        case "memoryview":
            value = data  # a memoryview itself is no value; what it looks at is
        case "ndarray":
            value = numpy.frombuffer(data, numpy.uint8)
        case _:
            value = kind(data)
    back = there_and_back(one, {"value": value, "size": size})
    assert back["size"] == size and type(back["value"]) is type(value)
    assert bytes(back["value"]) == bytes(value) if kind is not str else back["value"] == value


VALUES = [
    None,
    True,
    -(2**200),
    1.5,
    float("inf"),
    3 + 4j,
    "text ü 漢",
    (),
    [],
    {},
    set(),
    frozenset({1, 2}),
    [1, [2, [3, [4, [5]]]]],
    {"a": {"b": {"c": (1, b"x", None)}}},
    range(5),
    slice(1, 2, 3),
    ValueError("as a value"),
    int,
    os.path.join,
    b"\x00" * 10,
    {1: "one", (2, 3): [4]},
    list(range(1000)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_values_arrive_as_they_are(one, value):
    back = there_and_back(one, value)
    assert type(back) is type(value) and repr(back) == repr(value)


def test_one_object_at_two_places_stays_one_object(one):
    shared = [1]
    array = numpy.zeros(100_000)
    back = there_and_back(one, {"a": shared, "b": shared, "x": array, "y": array})
    assert back["a"] is back["b"] and back["x"] is back["y"]
    circle: list[Any] = []
    circle.append(circle)
    back = there_and_back(one, circle)
    assert back[0] is back


DTYPES = ["?", "i1", "u1", "i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16", "S5", "U3", "M8[s]", "m8[ms]", ">i4", "O", "i4,f8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_and_layout_arrive(one, dtype):
    flat = numpy.arange(24).astype("i8").astype(dtype) if dtype != "i4,f8" else numpy.array([(n, n / 2) for n in range(24)], dtype)
    cube = flat.reshape(2, 3, 4)
    layouts = {
        "flat": flat,
        "cube": cube,
        "fortran": numpy.asfortranarray(cube),
        "strided": cube[:, ::2, 1:],
        "reversed": flat[::-1],
        "scalar": flat[3:4].reshape(()),
        "empty": flat[:0],
        "large": numpy.resize(flat, 20_000),
        "large strided": numpy.resize(flat, (100, 300))[::3, ::2],
    }
    back = there_and_back(one, layouts)
    for name, array in layouts.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape, name
        assert (back[name] == array).all(), name
        assert back[name].flags.writeable, name


def test_three_hundred_megabytes_go_both_ways(one):
    array = numpy.arange(300 * MIB // 8, dtype=numpy.int64)
    back = there_and_back(one, array)
    assert back.nbytes == array.nbytes and back.flags.writeable
    assert (back == array).all()


def test_large_bytes_inside_of_other_things_arrive(one):
    data = os.urandom(8 * MIB)
    back = there_and_back(one, {"deep": [{"er": (data, bytearray(data), data.hex())}], "small": 1})
    plain, mutable, text = back["deep"][0]["er"]
    assert plain == data and mutable == data and text == data.hex() and type(mutable) is bytearray


def test_many_arrays_in_one_message_arrive(one):
    arrays = [numpy.full(2000, number) for number in range(300)]
    back = there_and_back(one, arrays)
    assert all((array == number).all() for number, array in enumerate(back))


def test_many_sizes_in_flight_keep_their_contents(echo):
    sent = [numpy.full(1 << (number % 18), number, numpy.int32) for number in range(200)]
    pending = [echo.echo.call(array) for array in sent]
    for array, future in zip(sent, pending, strict=True):
        for back in future.get(WAIT_S).values():
            assert back.shape == array.shape and (back == array).all()


# --- whose memory it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [10, 5_000, 2_000_000])
def test_every_receiver_has_a_private_writable_copy(procs, length):
    class Adder(Actor):
        @endpoint
        async def add(self, array):
            from monarch.actor import current_rank

            array += current_rank().rank
            return int(array.sum())

        @endpoint
        async def keep(self, array):
            self.array = array
            self.array[0] = 7

        @endpoint
        async def first(self):
            return int(self.array[0]), int(self.array[1])

    array = numpy.ones(length, numpy.int64)
    adder = procs.spawn("adder", Adder)
    for _ in range(3):
        assert adder.add.call(array).get(WAIT_S).values() == [length * (1 + rank) for rank in range(4)]
    assert (array == 1).all()
    adder.keep.call(array).get(WAIT_S)
    for number in range(10):  # memory that a receiver keeps is not reused for later messages
        adder.add.call(numpy.full(length, number, numpy.int64)).get(WAIT_S)
    assert adder.first.call().get(WAIT_S).values() == [(7, 1)] * 4
    adder.stop().get(WAIT_S)


@pytest.mark.parametrize("length", [10, 5_000, 1_000_000])
def test_a_caller_may_change_its_array_right_after_the_send(procs, length):
    log = procs.spawn("log", Log)
    array = numpy.zeros(length, numpy.int64)
    buffer = bytearray(8 * length)
    for number in range(5):
        array[:] = number
        buffer[:8] = number.to_bytes(8, "little")
        log.add.broadcast((array, buffer))
    array[:] = -1
    buffer[:8] = b"\xff" * 8

    for seen in log.items.call().get(WAIT_S).values():
        assert [(int(a[0]), int(a[-1]), b[0]) for a, b in seen] == [(number, number, number) for number in range(5)]
    log.stop().get(WAIT_S)


@pytest.mark.parametrize("where", ["worker", "own process"])
def test_an_actor_may_change_what_it_has_returned_or_posted(procs, where):
    class Keeper(Actor):
        def __init__(self, length):
            self.array = numpy.zeros(length)

        @endpoint
        def step(self, port):
            port.send(self.array)
            self.array += 1
            return self.array

    keepers = (procs.slice(gpus=0) if where == "worker" else this_proc()).spawn("keeper", Keeper, 100_000)
    port, receiver = Channel[Any].open()
    returned = [keepers.step.call_one(port).get(WAIT_S) for _ in range(4)]
    posted = [receiver.recv().get(WAIT_S) for _ in range(4)]
    assert [(array.min(), array.max()) for array in returned] == [(n, n) for n in (1, 2, 3, 4)]
    assert [(array.min(), array.max()) for array in posted] == [(n, n) for n in (0, 1, 2, 3)]
    returned[0][:] = -1
    assert keepers.step.call_one(port).get(WAIT_S)[0] == 5
    keepers.stop().get(WAIT_S)


def test_arrays_travel_through_ports_in_order(procs):
    class Source(Actor):
        @endpoint
        async def post(self, port, count):
            for number in range(count):
                port.send(numpy.full(1 << (number % 20), number, numpy.int32))

    port, receiver = Channel[Any].open()
    procs.slice(gpus=2).spawn("source", Source).post.broadcast(port, 60)
    for number in range(60):
        array = receiver.recv().get(WAIT_S)
        assert len(array) == 1 << (number % 20) and (array == number).all()


def test_messages_inside_one_process_are_copies_too():
    local = this_proc().spawn("log", Log)
    array = numpy.zeros(100_000)
    local.add.call_one(array).get(WAIT_S)
    array += 1
    [kept] = local.items.call_one().get(WAIT_S)
    assert (kept == 0).all()
    local.stop().get(WAIT_S)


def test_an_argument_that_is_too_deep_is_the_callers_error(one):
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises((RecursionError, pickle.PicklingError), match="recursion"):
        one.echo.call_one(deep)
    assert there_and_back(one, 1) == 1


@requires_torch
def test_tensors_arrive_on_the_cpu_with_dtype_layout_and_sharing(run_script):
    run_script(
        """
        import torch
        from monarch.actor import Actor, endpoint, this_host, current_rank, Channel

        class Echo(Actor):
            @endpoint
            async def echo(self, value):
                return value

            @endpoint
            async def add(self, tensor):
                tensor += current_rank().rank
                return tensor.sum().item()

            @endpoint
            async def kinds(self, value):
                return {name: (str(t.dtype), tuple(t.shape), t.device.type, t.requires_grad) for name, t in value.items()}

        class SyncEcho(Actor):
            @endpoint
            def echo(self, value):
                return value

        procs = this_host().spawn_procs({"gpus": 4})
        echo = procs.spawn("echo", Echo)
        one = echo.slice(gpus=3)

        def back(value):
            return one.echo.call_one(value).get(20)

        dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
                  torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn]
        for dtype in dtypes:
            for shape in ((), (0,), (3,), (2, 3, 4), (1000, 300)):
                tensor = torch.randint(0, 2, shape).to(dtype)
                got = back(tensor)
                assert got.dtype == dtype and got.shape == tensor.shape and got.device.type == "cpu", (dtype, shape)
                assert torch.equal(got.to(torch.complex128), tensor.to(torch.complex128)), (dtype, shape)

        base = torch.arange(1_000_000, dtype=torch.float32).reshape(1000, 1000)
        for view in (base[::2], base.T, base[5:7, 3:], base[:, 1], base.expand(2, 1000, 1000), base[-1:]):
            assert torch.equal(back(view), view)
        pair = back({"whole": base, "row": base[3]})
        pair["whole"][3, 0] = -1
        assert pair["row"][0] == -1, "views of one storage share it on arrival"

        grad = torch.ones(3, requires_grad=True)
        parameter = torch.nn.Parameter(torch.ones(5000))
        got = back([grad, parameter])
        assert got[0].requires_grad and isinstance(got[1], torch.nn.Parameter)
        model = torch.nn.Linear(100, 100)
        state = back(model.state_dict())
        assert list(state) == ["weight", "bias"] and torch.equal(state["weight"], model.weight)
        again = back(model)
        assert torch.equal(again(torch.ones(100)), model(torch.ones(100)))

        ones = torch.ones(2_000_000)
        for _ in range(3):
            assert echo.add.call(ones).get(20).values() == [2_000_000.0 * (1 + rank) for rank in range(4)]
        assert (ones == 1).all()
        for number in range(5):
            ones.fill_(number)
            pending = echo.echo.call(ones)
            ones.fill_(-1)
            assert all((tensor == number).all() for tensor in pending.get(20).values())

        big = torch.arange(10_000_000, dtype=torch.float32)
        assert torch.equal(back(big), big)
        assert torch.equal(procs.spawn("sync", SyncEcho).slice(gpus=0).echo.call_one(big).get(20), big)
        port, receiver = Channel.open()
        port.send(big)
        assert torch.equal(receiver.recv().get(20), big)
        assert not torch.cuda.is_initialized()
        """,
        timeout=60,
    ).check()


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_message_above_the_frame_limit_is_an_error_that_names_it_and_hurts_nobody(run_script):
    run_script(
        """
        import numpy
        import monarch.actor
        from monarch.actor import Actor, endpoint, this_host
        from monarch.config import configure

        monarch.actor.unhandled_fault_hook = lambda failure: None

        class Echo(Actor):
            @endpoint
            def length(self, value):
                return len(value)

            @endpoint
            def make(self, length):
                return list(range(length))

        configure(codec_max_frame_length=1 << 20)
        echo = this_host().spawn_procs({"gpus": 2}).spawn("echo", Echo)
        assert echo.length.call(b"x" * 900_000).get(10).values() == [900_000] * 2
        for value in (b"x" * (5 << 18), list(range(1 << 19)), [bytes([n]) * (1 << 18) for n in range(4)]):
            try:
                echo.length.call(value).get(10)
            except (ValueError, RuntimeError) as error:
                assert "codec_max_frame_length" in str(error) and "length" in str(error), error
            else:
                raise SystemExit("no error")
        assert echo.length.call(b"x").get(10).values() == [1, 1]
        print("arguments fine")
        """
    ).check()


def test_a_reply_above_the_frame_limit_is_an_error_that_names_it_and_hurts_nobody(run_script):
    run_script(
        """
        import monarch.actor
        from monarch.actor import Actor, endpoint, this_host
        from monarch.config import configure

        monarch.actor.unhandled_fault_hook = lambda failure: None

        class Maker(Actor):
            @endpoint
            def make(self, length):
                return list(range(length))

        configure(codec_max_frame_length=1 << 20)
        maker = this_host().spawn_procs({"gpus": 2}).spawn("maker", Maker)
        try:
            maker.make.call(1 << 19).get(5)
        except TimeoutError:
            raise
        except Exception as error:
            assert "codec_max_frame_length" in str(error), error
        else:
            raise SystemExit("no error")
        assert maker.make.call(3).get(5).values() == [[0, 1, 2]] * 2
        """
    ).check()


def test_a_sender_that_is_too_fast_is_slowed_and_memory_stays_bounded(run_script):
    done = run_script(
        """
        import resource, time
        from monarch.actor import Actor, endpoint, this_host

        COUNT, SIZE = 20_000, 20_000

        def peak_mib():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        class Slow(Actor):
            def __init__(self):
                self.count = 0

            @endpoint
            def take(self, number, data):
                assert number == self.count and len(data) == SIZE
                self.count += 1
                if number % 20 == 0:
                    time.sleep(0.002)

            @endpoint
            def result(self):
                return self.count, peak_mib()

        slow = this_host().spawn_procs({"gpus": 1}).spawn("slow", Slow).slice(gpus=0)
        before_here, before_there = peak_mib(), slow.result.call_one().get(10)[1]
        data = b"x" * SIZE
        started = time.monotonic()
        for number in range(COUNT):
            slow.take.broadcast(number, data)
        sent_s = time.monotonic() - started
        count, peak_there = slow.result.call_one().get(30)
        print(f"sent in {sent_s:.1f} s; grown here {peak_mib() - before_here:.0f} MiB, there {peak_there - before_there:.0f} MiB")
        assert count == COUNT
        assert peak_mib() - before_here < 100, "400 MB were sent: the sender must not keep them"
        assert peak_there - before_there < 150
        assert sent_s > 1, "a sender that was not slowed has its messages somewhere"
        """,
        timeout=60,
    )
    done.check()


@pytest.mark.parametrize("kind", ["Async", "Sync"])
def test_actors_that_flood_each_other_do_not_stand_still(run_script, kind):
    run_script(
        """
        from monarch.actor import Actor, endpoint, this_host

        COUNT, DATA = 3000, b"x" * 20_000  # 60 MB each way, several windows

        class Async(Actor):
            def __init__(self):
                self.count = 0

            @endpoint
            async def flood(self, other):
                for number in range(COUNT):
                    other.take.broadcast(number, DATA)

            @endpoint
            async def take(self, number, data):
                assert number == self.count
                self.count += 1

            @endpoint
            async def result(self):
                return self.count

        class Sync(Actor):
            def __init__(self):
                self.count = 0

            @endpoint
            def flood(self, other):
                for number in range(COUNT):
                    other.take.broadcast(number, DATA)

            @endpoint
            def take(self, number, data):
                assert number == self.count
                self.count += 1

            @endpoint
            def result(self):
                return self.count

        procs = this_host().spawn_procs({"gpus": 2})
        one, other = procs.slice(gpus=0).spawn("one", KIND), procs.slice(gpus=1).spawn("other", KIND)
        floods = one.flood.call_one(other), other.flood.call_one(one)
        for flood in floods:
            flood.get(30)
        while (one.result.call_one().get(30), other.result.call_one().get(30)) != (COUNT, COUNT):
            pass
        """.replace("KIND", kind),
        timeout=60,
    ).check()


def test_a_client_that_floods_an_actor_that_floods_it_back_gets_everything(procs):
    class Mirror(Actor):
        @endpoint
        async def reflect(self, port, data):
            port.send(data)

    port, receiver = Channel[Any].open()
    mirror = procs.slice(gpus=0).spawn("mirror", Mirror)
    data = b"y" * 20_000
    for number in range(2000):
        mirror.reflect.broadcast(port, (number, data))
    assert [receiver.recv().get(WAIT_S)[0] for _ in range(2000)] == list(range(2000))


def test_many_pipelined_calls_with_large_arguments_end(echo):
    data = numpy.arange(300_000)
    futures = [echo.echo.call(data) for _ in range(50)]
    for future in futures:
        assert all(int(array[-1]) == 299_999 for array in future.get(WAIT_S).values())


def test_checksums_agree_when_all_procs_send_at_once(procs):
    class Hasher(Actor):
        @endpoint
        def make(self, size):
            data = os.urandom(size)
            return data, hashlib.sha256(data).hexdigest()

    hasher = procs.spawn("hasher", Hasher)
    pending = [hasher.make.call(size) for size in (10, 50_000, 3 * MIB)]
    for future in pending:
        for data, digest in future.get(WAIT_S).values():
            assert hashlib.sha256(data).hexdigest() == digest


def test_recursion_limits_and_other_errors_of_a_result_are_actor_errors(procs):
    class Deep(Actor):
        @endpoint
        def make(self):
            deep = []
            for _ in range(100_000):
                deep = [deep]
            return deep

        @endpoint
        def fine(self):
            return sys.getrecursionlimit() > 0

    deep = procs.slice(gpus=0).spawn("deep", Deep)
    with pytest.raises(ActorError, match="RecursionError"):
        deep.make.call_one().get(WAIT_S)
    assert deep.fine.call_one().get(WAIT_S)


@pytest.mark.parametrize("cls", [Echo, SyncEcho], ids=lambda cls: cls.__name__)
def test_descriptors_and_memory_do_not_grow_with_large_messages(procs, cls):
    def held():
        return len(os.listdir("/proc/self/fd"))

    mesh, inspector = procs.spawn("echo", cls), procs.spawn("inspector", Inspector)
    data = numpy.zeros(MIB)

    def exchange():
        for _ in range(10):
            mesh.echo.call(data).get(WAIT_S)
        return held(), inspector.run.call(held).get(WAIT_S).values()

    exchange()
    before_here, before_there = exchange()
    for _ in range(3):
        here, there = exchange()
    assert here <= before_here + 4
    assert all(now <= before + 4 for now, before in zip(there, before_there, strict=True))
