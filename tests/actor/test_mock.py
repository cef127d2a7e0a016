from __future__ import annotations

import asyncio
import contextlib

import cloudpickle
import pytest

from monarch.actor import mock
from monarch.actor.mock import get_actor_class, get_actor_mock_registry_state, patch_actor, set_actor_mock_registry_state


class Worker: ...


class Other: ...


class FakeWorker: ...


class FakerWorker: ...


@pytest.fixture(autouse=True)
def _empty_registry():
    yield
    left = get_actor_mock_registry_state()
    set_actor_mock_registry_state({})
    assert left == {}


def by_with(patch, body):
    with patch as yielded:
        assert yielded is FakeWorker
        body()


def by_async_with(patch, body):
    async def run():
        async with patch as yielded:
            assert yielded is FakeWorker
            await asyncio.sleep(0)
            body()

    asyncio.run(run())


def by_decorator(patch, body):
    patch(body)()


def by_async_decorator(patch, body):
    @patch
    async def run():
        await asyncio.sleep(0)
        body()

    asyncio.run(run())


WAYS = pytest.mark.parametrize("way", [by_with, by_async_with, by_decorator, by_async_decorator], ids=lambda f: f.__name__)


@WAYS
def test_the_mock_is_constructed_while_the_patch_is_open(way):
    seen = []
    way(patch_actor(Worker, FakeWorker), lambda: seen.append((get_actor_class(Worker), get_actor_class(Other))))
    assert seen == [(FakeWorker, Other)]
    assert get_actor_class(Worker) is Worker


@WAYS
def test_an_exception_ends_the_patch_and_passes(way):
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        way(patch_actor(Worker, FakeWorker), fail)
    assert get_actor_class(Worker) is Worker


@WAYS
def test_a_nested_patch_restores_the_one_around_it(way):
    with patch_actor(Worker, FakerWorker):
        way(patch_actor(Worker, FakeWorker), lambda: None)
        assert get_actor_class(Worker) is FakerWorker


@WAYS
def test_one_patch_serves_many_times(way):
    patch = patch_actor(Worker, FakeWorker)
    for _ in range(2):
        way(patch, lambda: way(patch, lambda: None) if way in (by_with, by_decorator) else None)
        assert get_actor_class(Worker) is Worker


def test_several_classes_are_patched_apart():
    with patch_actor(Worker, FakeWorker), patch_actor(Other, FakerWorker):
        assert (get_actor_class(Worker), get_actor_class(Other)) == (FakeWorker, FakerWorker)


def test_a_mock_of_a_mock_is_not_followed():
    with patch_actor(Worker, FakeWorker), patch_actor(FakeWorker, FakerWorker):
        assert get_actor_class(Worker) is FakeWorker


def test_a_decorated_function_keeps_its_name_arguments_and_value():
    @patch_actor(Worker, FakeWorker)
    def named(a, *, b):
        """What it does."""
        return a, b, get_actor_class(Worker)

    assert named(1, b=2) == (1, 2, FakeWorker)
    assert (named.__name__, named.__doc__) == ("named", "What it does.")


def test_the_registry_travels_to_another_process():
    with patch_actor(Worker, FakeWorker):
        sent = cloudpickle.dumps(get_actor_mock_registry_state())
    set_actor_mock_registry_state(cloudpickle.loads(sent))
    assert get_actor_class(Worker) is FakeWorker
    set_actor_mock_registry_state({})


def test_the_state_is_a_copy_and_the_registry_stays_one_dict():
    registry = mock._actor_registry
    get_actor_mock_registry_state()[Worker] = FakeWorker
    assert get_actor_class(Worker) is Worker
    given = {Worker: FakeWorker}
    set_actor_mock_registry_state(given)
    given.clear()
    assert mock._actor_registry is registry
    assert registry == {Worker: FakeWorker}
    set_actor_mock_registry_state(registry)
    assert registry == {Worker: FakeWorker}
    set_actor_mock_registry_state({})


@pytest.mark.parametrize(("original", "replacement", "role"), [(Worker(), FakeWorker, "original"), (Worker, "FakeWorker", "mock")])
def test_only_classes_can_be_patched(original, replacement, role):
    with pytest.raises(TypeError, match=f"needs a class as {role}, got"):
        patch_actor(original, replacement)


@pytest.mark.parametrize("wrong", [Other, 5], ids=repr)
def test_only_functions_can_be_decorated(wrong):
    with pytest.raises(TypeError, match="open a with block instead"):
        patch_actor(Worker, FakeWorker)(wrong)


def test_patches_combine_in_an_exit_stack():
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch_actor(Worker, FakeWorker))
        stack.enter_context(patch_actor(Worker, FakerWorker))
        assert get_actor_class(Worker) is FakerWorker
    assert get_actor_class(Worker) is Worker
