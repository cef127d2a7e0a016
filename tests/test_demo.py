"""What the demo counts, without processes; `system/test_demo.py` runs it."""

from __future__ import annotations

import ast
from operator import add

from monarch.demo import Function, Index, Package, functions_of

SOURCE = """\
import os

class Box:
    @property
    def size(self):
        def inner(): pass
        return self._size

async def fetch(): return os
"""


def index_of(**files: str) -> Index:
    index = Index()
    for name, text in files.items():
        index.add_file(name.replace("__", "/") + ".py", text)
    return index


def test_functions_are_found_at_any_depth_by_their_qualified_name() -> None:
    found = list(functions_of(ast.parse(SOURCE), "box.py"))
    assert found == [
        Function(3, "Box.size", "box.py", 5),
        Function(1, "Box.size.inner", "box.py", 6),
        Function(1, "fetch", "box.py", 9),
    ]


def test_a_file_counts_for_its_outermost_folder() -> None:
    index = index_of(box=SOURCE, pack__a="", pack__deep__b="x = 1\n")
    assert {name: package.files for name, package in index.packages.items()} == {"(modules)": 1, "pack": 2}
    assert index.packages["(modules)"].longest.name == "Box.size"
    assert index.packages["pack"] == Package(2, 1, 1 + 5, Function())  # the end of a file is a token, the end of a line another


def test_keywords_are_no_identifiers() -> None:
    index = index_of(box=SOURCE)
    assert index.identifiers["self"] == 2
    assert not {"import", "class", "def", "return", "async", "pass"} & set(index.identifiers)


def test_the_index_of_a_whole_is_the_sum_of_the_indexes_of_its_parts() -> None:
    files = {"box": SOURCE, "pack__a": "def f():\n    return 1\n", "pack__b": SOURCE}
    parts = [index_of(**{name: text}) for name, text in files.items()]
    whole = index_of(**files)
    for order in (parts, parts[::-1]):
        assert sum(order, Index()) == whole
    assert add(whole, Index()) == whole
    assert whole.total == sum(whole.packages.values(), Package())
