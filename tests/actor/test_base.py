"""The actor object itself: it is no mesh, and what it inherits says so."""

from __future__ import annotations

import logging

import pytest

from monarch.actor import Actor


class Worker(Actor):
    pass


USES = [lambda a: a._ndslice, lambda a: a._labels, lambda a: a.initialized, lambda a: a.stop(), lambda a: a.slice(x=0)]


@pytest.mark.parametrize("use", USES, ids=["_ndslice", "_labels", "initialized", "stop", "slice"])
def test_members_of_a_mesh_are_refused_with_advice(use):
    with pytest.raises(NotImplementedError, match=r"actor implementations are not meshes(.|\n)*use the mesh that spawn\(\) returned"):
        use(Worker())


def test_the_logger_has_the_name_of_the_class_and_shows_everything():
    worker = Worker()
    assert worker.logger is worker.logger is logging.getLogger("Worker")
    assert worker.logger.level == logging.DEBUG


def test_undeliverable_messages_fail_an_actor_unless_it_says_otherwise():
    assert Worker()._handle_undeliverable_message(object()) is False
    assert Worker._is_system_actor is False
