"""What a child is told and tells; its life as a process is in `tests/system/test_zygote.py`."""

from __future__ import annotations

import pytest

from monarch._runtime import launcher


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("0-7:2", {0, 2, 4, 6}), (" 1, 2\n", {1, 2})],
)
def test_a_cpu_list_reads_as_taskset_reads_it(text: str, numbers: set[int]) -> None:
    assert launcher.parse_cpus(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "0-3:0", "!0"])
def test_a_wrong_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        launcher.parse_cpus(text)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_DEBUG", "LD_PRELOAD", "PYTHONHASHSEED", "TORCH_LOGS", "MALLOC_ARENA_MAX"])
def test_what_libraries_read_while_they_load_parts_zygotes(name: str) -> None:
    assert launcher.startup_environment({name: "1"}) != launcher.startup_environment({name: "2"})


@pytest.mark.parametrize("name", ["RANK", "MARK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "TZ"])
def test_what_is_read_later_shares_a_zygote(name: str) -> None:
    assert launcher.startup_environment({name: "1"}) == launcher.startup_environment({name: "2"}) == launcher.startup_environment({})


def test_the_order_of_the_environment_does_not_part_zygotes() -> None:
    assert launcher.startup_environment({"LD_A": "1", "OMP_B": "2"}) == launcher.startup_environment({"OMP_B": "2", "LD_A": "1"})


@pytest.mark.parametrize(
    ("raw", "notes", "failure"),
    [
        (b"", [], None),
        (b"note:no membind\0", ["no membind"], None),
        (b"note:a\0failed:b\0", ["a"], "b"),
        (b"failed:two\nlines\0", [], "two\nlines"),
    ],
)
def test_a_report_holds_notes_and_at_most_one_failure(raw: bytes, notes: list[str], failure: str | None) -> None:
    assert launcher.parse_report(raw) == (notes, failure)
