"""The language of the debugger's prompt: every form, and what is no form."""

from __future__ import annotations

import sys
from unittest.mock import AsyncMock

import pytest

from monarch.actor.debug_command import (
    Attach,
    Cast,
    CommandError,
    Continue,
    DebugCommand,
    Help,
    ListCommand,
    Quit,
    read_command,
)

END = sys.maxsize


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("attach trainer 1", Attach("trainer", 1)),
        ("a my_actor-12_X 100", Attach("my_actor-12_X", 100)),
        ("  a \t trainer   1  ", Attach("trainer", 1)),
        ("attach trainer<4fA> 1", Attach("trainer<4fA>", 1)),
        ("list", ListCommand()),
        ("l", ListCommand()),
        ("help", Help()),
        ("h", Help()),
        ("quit", Quit()),
        ("q ", Quit()),
        ("continue", Continue()),
        ("c", Continue()),
    ],
)
def test_a_line_is_a_command(line, command):
    assert read_command(line) == command


@pytest.mark.parametrize(
    ("ranks", "meant"),
    [
        ("1", 1),
        (" 12 ", 12),
        ("1,4", [1, 4]),
        ("1 , 4,  9", [1, 4, 9]),
        (":", range(END)),
        ("::", range(END)),
        (":5", range(5)),
        ("5:", range(5, END)),
        ("2:5", range(2, 5)),
        ("::3", range(0, END, 3)),
        ("2::", range(2, END)),
        (":5:", range(5)),
        (":5:3", range(0, 5, 3)),
        ("2::3", range(2, END, 3)),
        ("2:5:", range(2, 5)),
        ("2 : 5 : 3", range(2, 5, 3)),
        ("0:0", range(0)),
        ("gpus=3", {"gpus": 3}),
        ("gpus=:", {"gpus": range(END)}),
        ("gpus=(1,3)", {"gpus": [1, 3]}),
        ("hosts=0:2, gpus=(1, 3), z=5", {"hosts": range(2), "gpus": [1, 3], "z": 5}),
        ("hosts = 15::2,_g2 = 1", {"hosts": range(15, END, 2), "_g2": 1}),
    ],
)
def test_ranks_are_numbers_lists_ranges_or_dimensions(ranks, meant):
    assert read_command(f"cast trainer ranks({ranks}) b 25") == Cast("trainer", meant, "b 25")
    assert read_command(f"cast trainer ranks({ranks})b 25") == Cast("trainer", meant, "b 25")


def test_the_command_of_a_cast_is_sent_as_it_is():
    assert read_command("cast a ranks(0) p f(1), (2)  ") == Cast("a", 0, "p f(1), (2)")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "   ",
        "a",
        "attach",
        "attach actor",
        "attach actor one",
        "attach actor -1",
        "attach actor 1abc",
        "attach actor 1 a",
        "attach act.or 1",
        "attachactor 1",
        "list all",
        "continue 1",
        "fly",
        "cast",
        "cast actor",
        "cast actor ranks",
        "cast ranks(1) b 25",
        "castactor ranks(1) b 25",
        "cast actor rnks(1) b 25",
        "cast actor ranks(1)",
        "cast actor ranks() b 25",
        "cast actor ranks(1ab) b 25",
        "cast actor ranks(-1) b 25",
        "cast actor ranks(1 2) b 25",
        "cast actor ranks(1,a,3) b 25",
        "cast actor ranks(a:2:4) b 25",
        "cast actor ranks(1,2,3",
        "cast actor ranks(1,2,3)) b 25",
        "cast actor ranks(1,) b 25",
        "cast actor ranks(,1,2) b 25",
        "cast actor ranks(1,,2) b 25",
        "cast actor ranks(:::) b 25",
        "cast actor ranks(:123::) b 25",
        "cast actor ranks(1:2:0) b 25",
        "cast actor ranks(1:2:3,4) b 25",
        "cast actor ranks(dim=) b 25",
        "cast actor ranks(=1) b 25",
        "cast actor ranks(dim=1,) b 25",
        "cast actor ranks(dim=1, 2) b 25",
        "cast actor ranks(dim=(1)) b 25",
        "cast actor ranks(dim=(1,2) b 25",
        "cast actor ranks(dim=(,1,2)) b 25",
        "cast actor ranks(dim=(1,,2)) b 25",
        "cast actor ranks(dim=1, other=) b 25",
        "cast actor ranks(dim=1, other=15::2 b 25",
    ],
)
async def test_what_is_no_command_is_said_and_nothing_happens(line):
    with pytest.raises(CommandError):
        read_command(line)
    io = AsyncMock()
    assert await DebugCommand.parse(io, line) is None
    (said,) = io.output.await_args.args
    assert said.startswith("Error parsing input: ") and said.endswith("\n")


def test_an_error_shows_where_it_is():
    with pytest.raises(CommandError, match=r"expected a number at ',4\) n' in 'ranks\(1,,4\) n'"):
        read_command("cast a ranks(1,,4) n")
    with pytest.raises(CommandError, match="unknown command 'lst'; did you mean 'list'"):
        read_command("lst")
