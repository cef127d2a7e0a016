"""Weights: what is published is what is pulled, whole and of one version, whatever the layout."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time

import numpy as np
import pytest

from monarch._runtime.future import Future
from monarch.actor import shutdown_context
from monarch.actor.process import known_process
from monarch.rdma import RDMAError, RDMATimeout, WeightPublisher
from monarch.rdma import copies as copies_module
from monarch.rdma import weights as weights_module
from monarch.rdma.errors import UnavailableError


@pytest.fixture(autouse=True)
def client_ends():
    yield
    shutdown_context().get(timeout=10)


def state(value: float) -> dict[str, np.ndarray]:
    return {
        "a": np.full((3, 5), value, np.float32),
        "b": np.full(7, value, np.int64),
        "scalar": np.array(value, np.float64),
        "empty": np.zeros((0, 4), np.float32),
        "turned": np.asfortranarray(np.full((4, 6), value, np.float16)),
    }


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_what_is_published_last_is_pulled_whole(copies):
    publisher = WeightPublisher(state(1), version=10, copies=copies)
    into = state(0)
    assert publisher.weights.pull(into) == 10 and same(into, state(1))
    for value in range(2, 7):
        assert publisher.publish(state(value)) == 9 + value == publisher.weights.version()
    assert publisher.weights.pull(into) == 15 and same(into, state(6))
    assert publisher.publish(state(9), version=100) == publisher.weights.pull(into) == 100
    publisher.close()
    told = r"^these weights are closed: .*close\(\); version 100 was the last(?s:.*)where: client<(?s:.*)publisher\.weights"
    for use in (lambda: publisher.weights.pull(into), publisher.weights.version, publisher.weights.mapped):
        with pytest.raises(RDMAError, match=told):
            use()


def test_some_of_them_may_be_pulled():
    publisher = WeightPublisher(state(4))
    into = state(0)
    assert publisher.weights.pull(into, names=["b", "turned"]) == 0
    assert same(into, {**state(0), "b": state(4)["b"], "turned": state(4)["turned"]})
    publisher.close()


@pytest.mark.parametrize(
    ("into", "text"),
    [
        ({"c": np.zeros(3)}, "'c' is not among the published weights"),
        ({"turmed": np.zeros(3)}, r"'turmed' is not among the published weights; did you mean 'turned'\?"),
        ({f"c{number}": np.zeros(3) for number in range(7)}, "'c0', 'c1', 'c2', 'c3', 'c4' and 2 more are not among"),
        ({"b": np.zeros(8, np.int64)}, r"'b' that is pulled is int64 \[8\], and was published as int64 \[7\]"),
        ({"b": np.zeros(7, np.int32)}, "int32"),
    ],
)
def test_what_does_not_fit_is_refused(into, text):
    publisher = WeightPublisher(state(1))
    with pytest.raises(ValueError, match=text):
        publisher.weights.pull(into)
    publisher.close()


def test_a_module_instead_of_its_state_dict_is_refused_with_the_way_on():
    publisher = WeightPublisher(state(1))
    with pytest.raises(TypeError, match=r"not a range\n  next:  pass a dict, such as module.state_dict\(\)"):
        publisher.weights.pull(range(3))
    publisher.close()


def test_a_publication_that_does_not_fit_changes_nothing():
    publisher = WeightPublisher(state(1))
    for wrong in ({"a": state(2)["a"]}, {**state(2), "b": np.zeros(8, np.int64)}):
        with pytest.raises(ValueError, match="published"):
            publisher.publish(wrong)
    into = state(0)
    assert publisher.weights.pull(into) == 0 and same(into, state(1))
    publisher.close()
    with pytest.raises(ValueError, match="the state dict is empty"):
        WeightPublisher({})
    with pytest.raises(ValueError, match="copies must be"):
        WeightPublisher(state(1), copies=0)
    with pytest.raises(TypeError, match="neither a tensor nor an array"):
        WeightPublisher({"a": [1, 2]})


def test_versions_never_mix_while_the_owner_publishes_all_the_time():
    publisher = WeightPublisher({name: np.full(50_000, 0) for name in "abcd"})
    done = threading.Event()

    def publish() -> None:
        number = 0
        while not done.is_set():
            number += 1
            publisher.publish({name: np.full(50_000, number) for name in "abcd"}, version=number)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        last = 0
        for _ in range(100):
            into = {name: np.zeros(50_000, np.int64) for name in "abcd"}
            version = publisher.weights.pull(into)
            assert version >= last and all((value == version).all() for value in into.values())
            last = version
    finally:
        done.set()
        thread.join()
    publisher.close()


def test_a_reader_that_is_overtaken_again_and_again_says_so(monkeypatch):
    publisher = WeightPublisher(state(1))
    submit = weights_module.RDMAAction.submit

    def overtaken(self, **options):
        for value in (2, 3):
            publisher.publish(state(value))
        return submit(self, **options)

    monkeypatch.setattr(weights_module.RDMAAction, "submit", overtaken)
    with pytest.raises(RDMATimeout, match="the next ones came too soon"):
        publisher.weights.pull(state(0), timeout=1)
    publisher.close()


def test_tensors_of_any_layout():
    torch = pytest.importorskip("torch")
    model = {"weight": torch.arange(12.0).view(3, 4), "turned": torch.arange(6).view(2, 3).t(), "half": torch.ones(5, dtype=torch.bfloat16)}
    model["parameter"] = torch.nn.Parameter(torch.full((2, 2), 3.0))
    publisher = WeightPublisher(model)
    into = {name: torch.zeros_like(value) for name, value in model.items()}
    into["weight"] = torch.zeros(4, 3).t()
    assert publisher.weights.pull(into) == 0
    assert all(torch.equal(into[name], model[name]) for name in model)
    publisher.close()


def test_mapped_weights_are_the_published_ones_and_stay_of_their_version():
    publisher = WeightPublisher(state(1), version=10)
    with publisher.weights.mapped() as first, publisher.weights.mapped(names=["b"]) as some:
        assert first.version == some.version == 10 and same(first, state(1)) and list(some) == ["b"]
        for value in range(2, 7):
            publisher.publish(state(value))
        assert same(first, state(1)) and same(publisher.weights.mapped(), state(6))
        with pytest.raises(ValueError, match="read-only"):
            first["a"][0, 0] = 5
    for use in (lambda: first["a"], lambda: "a" in first, lambda: dict(first)):
        with pytest.raises(RDMAError, match=r"version 10, were closed here, with close\(\)(?s:.*)weights\.mapped\(\)"):
            use()
    assert repr(first) == "<MappedWeights: version 10, closed>"
    with pytest.raises(ValueError, match="'c' is not among the published weights"):
        publisher.weights.mapped(names=["c"])
    publisher.close()
    with pytest.raises(RDMAError):
        publisher.weights.mapped()


def test_a_tensor_of_mapped_weights_keeps_them_until_it_is_gone():
    publisher = WeightPublisher(state(1), copies=1, spares=1)
    mapped = publisher.weights.mapped()
    left = mapped["a"]
    mapped.close()
    publisher.publish(state(2))
    with publisher.weights.mapped() as second, pytest.raises(RDMAError, match="of 2 copies of the weights readers map all but the newest"):
        publisher.publish(state(3))
    assert np.array_equal(left, state(1)["a"]) and second.version == 1
    del left
    assert publisher.publish(state(3)) == publisher.weights.version() == 2
    publisher.close()


def test_mapped_tensors_may_be_written_to_and_nobody_else_sees_it():
    torch = pytest.importorskip("torch")
    model = {"weight": torch.arange(12.0).view(3, 4), "half": torch.ones(5, dtype=torch.bfloat16), "none": torch.zeros(0, 3)}
    publisher = WeightPublisher(model)
    with publisher.weights.mapped() as mine, publisher.weights.mapped() as yours:
        assert all(torch.equal(mine[name], value) and mine[name].dtype == value.dtype for name, value in model.items())
        layer = torch.nn.Linear(4, 3, bias=False)
        with publisher.weights.mapped(names=["weight"]) as only:
            layer.load_state_dict(only)
        assert torch.equal(layer.weight, model["weight"])
        mine["weight"].add_(1)
        assert torch.equal(yours["weight"], model["weight"]) and not torch.equal(mine["weight"], model["weight"])
    publisher.close()


def test_weights_of_another_machine_are_not_mapped(monkeypatch):
    publisher = WeightPublisher(state(1))
    monkeypatch.setattr(copies_module, "machine", lambda: (b"another boot of it", 1))
    with pytest.raises(RDMAError, match=r"only on a machine that has them(?s:.*)hosts=\.\.\."):
        publisher.weights.mapped()
    publisher.close()


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_publication_that_breaks_off_changes_nothing(monkeypatch):
    torch = pytest.importorskip("torch")
    publisher = WeightPublisher({"a": torch.zeros(3)}, version=5, copies=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(weights_module, "copy_out", interrupted)
        publisher.publish({"a": torch.ones(3)})
    with pytest.raises(RDMATimeout, match="the only copy is being filled, or its publication broke off"):
        publisher.weights.pull({"a": torch.zeros(3)}, timeout=0)
    assert publisher.publish({"a": torch.ones(3)}) == 6
    into = {"a": torch.zeros(3)}
    assert publisher.weights.pull(into) == 6 and torch.equal(into["a"], torch.ones(3))
    publisher.close()
    with pytest.raises(
        RDMAError, match=r"were closed, with close\(\), when version 6 was the last(?s:.*)where: .*(?s:.*)make a new WeightPublisher"
    ):
        publisher.publish({"a": torch.ones(3)})


def test_what_is_no_state_dict_is_refused_before_anything_changes():
    publisher = WeightPublisher(state(1))
    fixed = np.zeros(7, np.int64)
    fixed.flags.writeable = False
    into = {**state(0), "b": fixed}
    for call, kind, text in (
        (lambda: publisher.weights.pull(into), ValueError, r"read-only(?s:.*)array\.copy\(\)"),
        (lambda: publisher.weights.pull(state(0), names=["c"]), ValueError, "'c' is to be pulled, and there is nothing to pull into"),
        (lambda: publisher.weights.pull(state(0), names="ab"), TypeError, r"one string, not several(?s:.*)write names=\['ab'\]"),
        (lambda: publisher.weights.mapped(names="a"), TypeError, r"write names=\['a'\]"),
        (lambda: WeightPublisher(state(1), hosts=[]), TypeError, r"not list(?s:.*)this_host\(\)"),
        (lambda: publisher.weights.pull([1]), TypeError, r"not a list(?s:.*)module\.state_dict\(\)"),
        (
            lambda: publisher.weights.pull(state(0), timeout=1.5),
            TypeError,
            r"timeout=1\.5 is no whole number of seconds(?s:.*)write timeout=1",
        ),
        (lambda: publisher.weights.version(timeout=-1), OverflowError, "give whole seconds"),
        (lambda: publisher.publish(state(2), version=2**63), ValueError, "more than 64 bits"),
        (lambda: publisher.publish(state(2), version="2"), TypeError, "integer"),
        (lambda: publisher.publish(None), TypeError, "not a NoneType"),
        (lambda: WeightPublisher({"a": np.array([object()])}), TypeError, "without plain elements: object"),
        (lambda: WeightPublisher({"a": np.zeros(2, [("x", "i4")])}), TypeError, "one for each field"),
        (lambda: pickle.dumps(publisher), TypeError, r"stays in the process(?s:.*)publisher\.weights"),
    ):
        with pytest.raises(kind, match=text):
            call()
    assert same({**into, "b": state(0)["b"]}, state(0)) and not fixed.any()
    assert publisher.weights.version() == 0
    publisher.close()


@pytest.mark.parametrize("kind", ["quantized", "sparse", "meta", "expanded"])
def test_tensors_without_elements_of_their_own_are_refused(kind):
    torch = pytest.importorskip("torch")
    publisher = WeightPublisher({"a": torch.ones(2, 3)})
    if kind == "expanded":
        with pytest.raises(ValueError, match=r"several of its elements are the same memory(?s:.*)clone\(\)"):
            publisher.weights.pull({"a": torch.zeros(3).expand(2, 3)})
    else:
        make = {"sparse": torch.Tensor.to_sparse, "meta": lambda tensor: tensor.to("meta")}
        tensor = make.get(kind, lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8))(torch.ones(2, 3))
        for call in (lambda: publisher.weights.pull({"a": tensor}), lambda: WeightPublisher({"a": tensor})):
            with pytest.raises(TypeError, match="'a' is a tensor without plain elements"):
                call()
    publisher.close()


def test_conjugated_tensors_and_matrices_get_what_was_published():
    torch = pytest.importorskip("torch")
    publisher = WeightPublisher({"a": torch.full((2,), 1 + 2j), "b": np.ones((2, 2))})
    into = {"a": torch.zeros(2, dtype=torch.complex64).conj(), "b": np.zeros((2, 2)).view(np.matrix)}
    publisher.weights.pull(into)
    assert into["a"].tolist() == [1 + 2j] * 2 and into["b"].min() == 1
    publisher.close()


def test_a_publisher_that_can_not_be_made_leaves_nothing():
    before = sorted(os.listdir("/proc/self/fd"))

    class NoHosts:
        def spawn_procs(self, name):
            raise RuntimeError("there are none")

    for wrong in ({"version": 2**63}, {"hosts": NoHosts()}):
        with pytest.raises((ValueError, RuntimeError)):
            WeightPublisher(state(1), **wrong)
    left = set(os.listdir("/proc/self/fd")) - set(before)
    assert not [fd for fd in left if "monarch-weights" in os.path.realpath(f"/proc/self/fd/{fd}")]


def test_a_fork_neither_publishes_in_the_place_of_its_parent_nor_closes_for_it():
    publisher = WeightPublisher(state(1))
    with publisher._lock:
        pid = os.fork()
        if not pid:
            try:
                publisher.close()
                publisher.publish(state(2))
            except RDMAError as exc:
                os._exit("this is a fork of it" in str(exc))
            finally:
                os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    into = state(0)
    assert publisher.publish(state(3)) == publisher.weights.pull(into) == 1 and same(into, state(3))
    publisher.close()


def test_a_publisher_that_outlives_the_runtime_is_closed_without_another_one():
    publisher = WeightPublisher(state(1))
    shutdown_context().get(timeout=10)
    publisher.close()
    assert known_process() is None


def test_relays_that_do_not_end_are_told_and_the_memory_is_free_all_the_same(caplog):
    class Stopped:
        def stop(self):
            return Future._failed(TimeoutError("no outcome within 20 s"))

    publisher = WeightPublisher(state(1))
    publisher._procs = Stopped()
    publisher.close()
    assert "relays of weights have not ended" in caplog.text
    with pytest.raises(RDMAError, match="no version was seen from here"):
        publisher.weights.version()


def test_a_timeout_is_not_shortened_to_the_second_below():
    assert weights_module._left(time.monotonic() + 3) == 3 and weights_module._left(time.monotonic() - 1) == 1


def test_a_relay_that_can_not_get_weights_is_told_once_and_asked_again(caplog):
    class Unavailable:
        asked = 0

        def newest(self, nbytes, timeout):
            self.asked += 1
            raise UnavailableError("there is no room for the next version")

    publisher = WeightPublisher(state(1))
    weights, relay = publisher.weights, Unavailable()
    weights._sources = [relay, weights._owner]
    for _ in range(3):
        weights.pull(state(0))
    assert relay.asked == 3 and caplog.text.count("no room for the next version") == 1
    publisher.close()


def test_a_relay_that_ended_with_its_publisher_is_not_told_of(caplog):
    class Ended:
        def newest(self, nbytes, timeout):
            raise RDMAError("the relay has ended")

    publisher = WeightPublisher(state(1))
    weights = publisher.weights
    weights._sources = [Ended(), weights._owner]
    assert weights.pull(state(0)) == 0 and caplog.text.count("the relay has ended") == 1
    caplog.clear()
    weights._sources, weights._told = [Ended(), weights._owner], ""
    publisher.close()
    with pytest.raises(RDMAError, match="these weights are closed"):
        weights.pull(state(0))
    assert not caplog.text


class Slow:
    """A source that has nothing before the test lets it."""

    def __init__(self, owner):
        self.owner, self.copies, self.gate, self.thread = owner, owner.copies, threading.Event(), None

    def newest(self, nbytes, timeout):
        self.thread = threading.current_thread()
        assert self.gate.wait(10)
        return self.owner.newest(nbytes, timeout)


async def test_a_pull_that_was_started_does_not_block_the_event_loop():
    publisher = WeightPublisher(state(1), version=3)
    weights, into = publisher.weights, state(0)
    slow = Slow(weights._owner)
    weights._sources = [slow, weights._owner]
    pulling = weights.start_pull(into)
    asyncio.get_running_loop().call_soon(slow.gate.set)  # runs only if this loop does
    assert await pulling == 3 and same(into, state(1))
    assert slow.thread is not threading.current_thread()
    publisher.close()


async def test_a_pull_that_blocks_the_event_loop_says_what_to_write():
    publisher = WeightPublisher(state(1), version=3)
    into = state(0)
    with pytest.warns(UserWarning) as warned:
        assert publisher.weights.pull(into) == 3 and same(into, state(1))
    [said] = warned
    assert 'write "await weights.start_pull(...)"' in str(said.message) and said.filename == __file__
    publisher.close()


def test_a_pull_that_can_not_be_started_is_refused_at_the_call_and_a_failure_is_its_outcome():
    publisher = WeightPublisher(state(1))
    with pytest.raises(ValueError, match="'c' is not among the published weights"):
        publisher.weights.start_pull({"c": np.zeros(3)})
    publisher.close()
    pulling = publisher.weights.start_pull(state(0))
    with pytest.raises(RDMAError):
        pulling.get(10)


def test_pulling_that_is_interrupted_changes_nothing_afterwards(monkeypatch):
    publisher = WeightPublisher(state(1))
    submit, ended = weights_module.RDMAAction.submit, []

    class Interrupted:
        def __init__(self, future):
            self.future = future

        def get(self):
            raise KeyboardInterrupt

        def exception(self):
            ended.append(self.future.exception(10))

    monkeypatch.setattr(weights_module.RDMAAction, "submit", lambda self, **options: Interrupted(submit(self, **options)))
    with pytest.raises(KeyboardInterrupt):
        publisher.weights.pull(state(0))
    assert ended == [None]
    publisher.close()


def test_without_memory_files_weights_are_pulled_and_not_mapped(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    publisher = WeightPublisher(state(1))
    monkeypatch.undo()
    into = state(0)
    for value in range(2, 5):
        publisher.publish(state(value))
        assert publisher.weights.pull(into) == value - 1 and same(into, state(value))
    with pytest.raises(RDMAError, match="only on a machine that has them in shared memory"):
        publisher.weights.mapped()
    publisher.close()
