"""Keywords: a wrong form of a call is answered with the right one."""

from __future__ import annotations

import inspect

import pytest

from monarch._base.keywords import keywords_only, known_keywords


@keywords_only("place")
def serve(*, place: str, secret: str = "") -> str:
    """Serve there."""
    return place + secret


class Host:
    @known_keywords(lambda unknown: f"sizes={unknown}" if all(isinstance(value, int) for value in unknown.values()) else "")
    def spawn(self, sizes: dict[str, int] | None = None, name: str = "anon") -> tuple[dict[str, int] | None, str]:
        return sizes, name


def test_an_argument_by_position_is_told_its_keyword():
    assert serve(place="a", secret="b") == "ab"
    with pytest.raises(TypeError, match=r"serve\(\) takes its arguments by keyword\n  next:  write serve\(place='a'\)"):
        serve("a")


def test_an_unknown_keyword_is_told_what_was_meant():
    assert Host().spawn({"a": 1}, name="x") == Host().spawn(sizes={"a": 1}, name="x") == ({"a": 1}, "x")
    text = r"no argument 'gpus', 'cpus'; did you mean sizes=\{'gpus': 2, 'cpus': 3\}\?\n  next:  its arguments are: sizes, name"
    with pytest.raises(TypeError, match=text):
        Host().spawn(gpus=2, cpus=3)
    with pytest.raises(TypeError, match=r"has no argument 'nmae'; did you mean 'name'\?"):
        Host().spawn(nmae="x")
    with pytest.raises(TypeError, match=r"has no argument 'zzz'\n"):
        Host().spawn(zzz="x")


def test_signature_and_docstring_stay():
    assert serve.__doc__ == "Serve there." and list(inspect.signature(serve).parameters) == ["place", "secret"]
    assert list(inspect.signature(Host.spawn).parameters) == ["self", "sizes", "name"]
