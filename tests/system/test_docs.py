"""The documentation is true: its Python runs, prints what it says, and its commands and links exist.

Each page with Python snippets is one script: its snippets in order, in a fresh interpreter. What stands right behind a snippet
in a `text` block is what it prints, with `...` for what differs from run to run. `<!-- skip: reason -->` in front of
a block leaves it out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from monarch.cli import main
from system.script import run_script

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^(?P<fence>```+)(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
_SKIP = re.compile(r"<!-- skip: [^>]+ -->\n\Z")
_LIMIT_S = 25.0
_FLOOR_OF_PAGES = 6
"""Pages with snippets; fewer found means that the pattern above is wrong."""


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    skipped: bool
    follows_code: bool
    """Only blank lines separate it from the Python block before."""


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    code_ends = -1
    for match in _BLOCK.finditer(text):
        follows = code_ends >= 0 and not text[code_ends : match.start()].strip()
        skipped = _SKIP.search(text[: match.start()]) is not None
        yield Block(match["language"], match["text"], text[: match.start("text")].count("\n") + 1, skipped, follows)
        code_ends = match.end() if match["language"] == "python" and not skipped else -1


def snippets_of(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "python" and not block.skipped]


def program_of(page: Path) -> str:
    """The page's snippets at the lines where the page has them, so that a traceback tells the place."""
    lines: list[str] = []
    for block in snippets_of(page):
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.splitlines()
    return "\n".join(lines) + "\n"


def pattern_of(output: str) -> str:
    lines = [re.escape(line.rstrip()).replace(re.escape("..."), ".*") for line in output.strip("\n").splitlines()]
    return "^" + r" *\n".join("(?:.*\n)*?.*" if line.strip() == ".*" else line for line in lines) + r" *$"


def id_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_SNIPPETS = [page for page in PAGES if snippets_of(page)]


def test_the_pages_with_snippets_are_found() -> None:
    assert len(WITH_SNIPPETS) >= _FLOOR_OF_PAGES


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=id_of)
def test_the_snippets_of_a_page_run_and_print_what_it_says(page: Path) -> None:
    source = program_of(page)
    compile(source, id_of(page), "exec")
    done = run_script(source, timeout=_LIMIT_S).check()
    rest = done.stdout
    for block in blocks_of(page):
        if block.language == "text" and block.follows_code and not block.skipped:
            match = re.search(pattern_of(block.text), rest, re.MULTILINE)
            assert match, f"{id_of(page)}:{block.line}: not printed:\n{block.text}\nwhat was printed from here on:\n{rest}"
            rest = rest[match.end() :]


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    shell = "\n".join(block.text for block in blocks_of(page) if block.language in ("sh", "bash", "console"))
    for name in re.findall(r"\b(?:sh|bash|python3?) ((?:scripts|bench|\.ci)/[\w./-]+)", page.read_text()):
        assert (ROOT / name).is_file(), f"{id_of(page)} names {name}"
    for name in re.findall(r"^(?:\.venv/bin/)?monarch (\w+)", shell, re.MULTILINE):
        assert main.get_command(click.Context(main), name), f"{id_of(page)} names the command monarch {name}"


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_the_links_of_a_page_lead_to_files(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text())
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_a_page_stands_alone(page: Path) -> None:
    text = page.read_text()
    foreign = [word for word in (str(ROOT), "/root/", "/home/") if word in text]
    assert not foreign


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = set(re.findall(r"^([\w/]+)$", index, re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert pages - listed == {"index"}
