"""News of a folder reach who asks for them: at once, once, and in bounded number."""

from __future__ import annotations

from monarch._mounts import mounting
from monarch._mounts.gather_source import _MOST_PENDING, _News, key_of
from monarch._mounts.watches import What


def test_news_wait_for_who_asks_and_who_asks_waits_for_news():
    news, answers = _News(), []
    news.tell([(b"a", What.CONTENT), (b"a", What.CONTENT)])
    news.tell([(b"b", What.NAME)])
    news.ask(answers.append)
    assert answers == [[(b"a", What.CONTENT), (b"b", What.NAME)]]
    news.ask(answers.append)
    assert len(answers) == 1
    news.tell([(b"c", What.CONTENT)])
    news.tell([(b"d", What.CONTENT)])
    assert answers[1:] == [[(b"c", What.CONTENT)]]
    news.ask(answers.append)
    assert answers[2:] == [[(b"d", What.CONTENT)]]


def test_who_asks_again_leaves_nobody_waiting():
    news, first, second = _News(), [], []
    news.ask(first.append)
    news.ask(second.append)
    news.tell([(b"a", What.CONTENT)])
    assert first == [[]] and second == [[(b"a", What.CONTENT)]]


def test_too_many_changes_are_told_as_one():
    news, answers = _News(), []
    news.tell([(b"%d" % index, What.CONTENT) for index in range(_MOST_PENDING + 1)])
    news.ask(answers.append)
    assert answers == [[(b"", What.ALL)]]


def test_coordinates_are_a_name():
    assert key_of({}) == "" and key_of({"hosts": 0, "gpus": 1}) == "hosts_0_gpus_1"
    assert mounting.machine() == mounting.machine()
