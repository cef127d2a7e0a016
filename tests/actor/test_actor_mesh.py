"""What `spawn` refuses before anything starts: classes that are no actors, mixed kinds, reserved names."""

from __future__ import annotations

import pytest

from monarch.actor import Actor, concurrent_endpoint, endpoint
from monarch.actor.actor_mesh import ActorMesh, check_actor_class, class_name, endpoints_of, is_asynchronous


async def coroutine(self, *args):
    pass


def plain(self, *args):
    pass


def actor(*bases, **members):
    return type("Made", bases or (Actor,), {"__module__": __name__, **members})


@pytest.mark.parametrize("wrong", [int, object, 5, None, "Actor", print, endpoint(plain)], ids=repr)
def test_only_actor_classes_are_spawned(wrong):
    with pytest.raises(ValueError, match=r"must subclass monarch\.service\.Actor to spawn it\.\n  next:  derive it from monarch\.actor"):
        check_actor_class(wrong)


def test_an_object_of_an_actor_class_is_not_spawned():
    text = r"spawn\(\) makes the actors itself: it takes the class Made and not an object of it\n  next:  write spawn\("
    with pytest.raises(ValueError, match=text):
        check_actor_class(actor()())


KINDS = {
    "sync endpoint": endpoint(plain),
    "async endpoint": endpoint(coroutine),
    "concurrent endpoint": concurrent_endpoint(coroutine),
    "sync port": endpoint(plain, explicit_response_port=True),
    "async port": endpoint(coroutine, explicit_response_port=True),
    "plain method": plain,
    "async method": coroutine,
    "nothing": None,
}
IS_ASYNC = {"sync endpoint": False, "sync port": False, "async endpoint": True, "concurrent endpoint": True, "async port": True}


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("inherited", [False, True], ids=["own", "inherited"])
def test_sync_and_async_endpoints_do_not_mix(one, other, inherited):
    cls = actor(actor(one=KINDS[one]), other=KINDS[other]) if inherited else actor(one=KINDS[one], other=KINDS[other])
    kinds = {IS_ASYNC[kind] for kind in (one, other) if kind in IS_ASYNC}
    if len(kinds) == 2:
        with pytest.raises(ValueError, match=r"mixes both async and sync endpoints; sync: .*'o.*, async: .*'o"):
            check_actor_class(cls)
    else:
        check_actor_class(cls)
        assert is_asynchronous(cls) == (kinds != {False})


@pytest.mark.parametrize("kind", ["sync endpoint", "async endpoint", "concurrent endpoint", "nothing"])
@pytest.mark.parametrize("cleanup", [plain, coroutine], ids=["def", "async def"])
def test_cleanup_is_of_the_kind_of_the_endpoints(kind, cleanup):
    cls = actor(work=KINDS[kind], __cleanup__=cleanup)
    if kind == "nothing" or IS_ASYNC[kind] == (cleanup is coroutine):
        check_actor_class(cls)
    else:
        with pytest.raises(ValueError, match=r"mixes both async and sync: __cleanup__ is a?sync and its endpoints are a?sync\n  where: "):
            check_actor_class(cls)


@pytest.mark.parametrize("kind", ["sync endpoint", "async endpoint", "nothing"])
@pytest.mark.parametrize("supervise", [plain, coroutine], ids=["def", "async def"])
def test_an_async_supervise_needs_a_loop(kind, supervise):
    cls = actor(work=KINDS[kind], __supervise__=supervise)
    if kind == "sync endpoint" and supervise is coroutine:
        with pytest.raises(ValueError, match="__supervise__ is async and its endpoints are sync"):
            check_actor_class(cls)
    else:
        check_actor_class(cls)


RESERVED = ["slice", "split", "flatten", "rename", "size", "sizes", "extent", "stop", "initialized"]
RESERVED += ["_name", "_class", "_inner", "_shape", "_proc_mesh", "_mesh_name", "_endpoint", "_ndslice", "_labels", "_new_with_shape"]


@pytest.mark.parametrize("name", RESERVED)
def test_names_of_the_mesh_are_reserved_for_it(name):
    text = rf"ActorMesh has an attribute that collides with an endpoint name: attribute={name}\n  where: class .*Made\n  next:  rename"
    with pytest.raises(ValueError, match=text):
        check_actor_class(actor(**{name: endpoint(plain)}))
    check_actor_class(actor(other=endpoint(plain), **({} if name in ("_ndslice", "_labels") else {name: plain})))


@pytest.mark.parametrize("name", ["name", "get", "put", "send", "recv", "init", "call", "call_one", "rank", "update", "run"])
def test_other_names_are_free(name):
    cls = actor(**{name: endpoint(plain)})
    check_actor_class(cls)
    assert list(endpoints_of(cls)) == [name]


def test_endpoints_are_found_through_inheritance_and_can_be_replaced():
    base = actor(kept=endpoint(plain), gone=endpoint(plain))
    derived = actor(base, own=endpoint(plain), gone=None)
    assert sorted(endpoints_of(derived)) == ["kept", "own"]
    assert class_name(derived) == f"{__name__}.Made"


def test_every_public_attribute_of_a_mesh_is_reserved():
    public = [name for name in dir(ActorMesh) if not name.startswith("_")]
    assert set(RESERVED[:9]) <= set(public)
    for name in public:
        with pytest.raises(ValueError, match="collides with an endpoint name"):
            check_actor_class(actor(**{name: endpoint(plain)}))
