"""Who uses a path is found by what is open, and by where programs are."""

from __future__ import annotations

import os

from monarch._mounts.mount_users import users_of


def test_whoever_has_something_open_there_is_named(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    assert users_of(str(place)) == []
    with open(place / "file", "w"):
        (line,) = users_of(str(place))
        assert line.startswith(f"pid {os.getpid()}: ") and line.endswith(f"{place}/file")
        (tmp_path / "link").symlink_to(tmp_path)
        assert users_of(str(tmp_path / "link" / "place")) == [line]
        assert users_of(str(tmp_path / "pla")) == []
    assert users_of(str(place)) == []
