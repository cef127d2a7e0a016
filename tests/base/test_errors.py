"""Errors read alike, and a missing library names the extra that brings it."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._base.errors import InternalError, MissingExtraError, did_you_mean, explain, next_of, require, without_next

TEXT = """\
proc 'trainer' did not report within 30 s
  where: host tcp://node7:26600, rank 5
  next:  raise mesh_proc_spawn_max_idle
    | ImportError: libcuda.so.1
    | and more"""


def test_an_error_says_what_where_next_and_detail_in_this_order():
    shown = explain(
        "proc 'trainer' did not report within 30 s",
        detail="ImportError: libcuda.so.1\nand more\n",
        next="raise mesh_proc_spawn_max_idle",
        where="host tcp://node7:26600, rank 5",
    )
    assert shown == TEXT


@pytest.mark.parametrize("part", ["where", "next", "detail"])
def test_an_empty_part_leaves_no_line(part):
    assert explain("what") == explain("what", **{part: ""}) == "what"
    assert explain("what", **{part: "x"}).count("\n") == 1


@given(st.text(), st.text())
def test_every_line_of_a_detail_stands_behind_a_bar(what, detail):
    shown = explain(what, detail=detail)
    assert shown == "\n".join([what, *(f"    | {line}" for line in detail.splitlines())])


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("gpu", ["hosts", "gpus"], "; did you mean 'gpus'?"),
        ("gpu", iter(["hosts", "gpus"]), "; did you mean 'gpus'?"),
        ("gpu", [], ""),
        ("gpu", ["hosts"], ""),
        ("", ["hosts"], ""),
    ],
)
def test_only_a_near_name_is_suggested(name, known, said):
    assert did_you_mean(name, known) == said


def test_what_people_can_do_is_taken_out_of_a_text():
    text = explain("no", where="here", next="try yes", detail="next:  a line")
    assert (next_of(text), next_of("no")) == ("try yes", "")
    assert without_next(text) == explain("no", where="here", detail="next:  a line")


def test_an_installed_library_is_handed_over():
    assert require("json", extra="fast") is json


@pytest.mark.parametrize("library", ["no_such_library", "json.no_such_module"])
def test_a_missing_library_names_its_extra_and_its_cause(library):
    said = rf"{re.escape(repr(library))} is not installed\n  next:  .*pip install '\.\[rdma\]' in the checkout"
    with pytest.raises(MissingExtraError, match=said) as caught:
        require(library, extra="rdma")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_library_that_breaks_while_it_loads_counts_as_missing(tmp_path, monkeypatch):
    (tmp_path / "monarch_broken_library.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingExtraError) as caught:
        require("monarch_broken_library", extra="tensor")
    assert "libcuda.so.1" in str(caught.value.__cause__)


def test_an_impossible_state_is_no_error_of_the_user():
    assert issubclass(InternalError, RuntimeError)
