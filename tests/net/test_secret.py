"""The job's secret: where it comes from, what is refused, and that no text ever shows it."""

from __future__ import annotations

import os
import resource
import stat

import pytest

from monarch._net import secret
from monarch._net.secret import adopt_secret, job_secret, new_secret, write_secret_file

GOOD, OTHER, SHORT = "correct-horse-battery", "staple-of-another-job", "hunter2"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch):
    monkeypatch.delenv("MONARCH_SECRET", raising=False)
    monkeypatch.delenv("MONARCH_SECRET_FILE", raising=False)
    monkeypatch.setattr(secret, "_adopted", None)


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """Put text into a file of a given mode, and name it in the environment."""

    def keep(text, mode=0o600):
        path = tmp_path / "secret"
        path.write_text(text)
        path.chmod(mode)
        monkeypatch.setenv("MONARCH_SECRET_FILE", str(path))
        return path

    return keep


def test_without_variable_and_file_there_is_none():
    assert job_secret() == b""


def test_an_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("MONARCH_SECRET", "")
    monkeypatch.setenv("MONARCH_SECRET_FILE", "")
    assert job_secret() == b""


@pytest.mark.parametrize("around", ["{}", "{}\n", "  {}\r\n"])
def test_it_comes_from_the_variable_or_the_file_without_space_around_it(monkeypatch, keep, around):
    monkeypatch.setenv("MONARCH_SECRET", around.format(GOOD))
    assert job_secret() == GOOD.encode()
    monkeypatch.delenv("MONARCH_SECRET")
    keep(around.format(GOOD))
    assert job_secret() == GOOD.encode()


def test_variable_and_file_may_say_the_same_and_nothing_else(monkeypatch, keep):
    path = keep(GOOD + "\n")
    monkeypatch.setenv("MONARCH_SECRET", GOOD)
    assert job_secret() == GOOD.encode()
    monkeypatch.setenv("MONARCH_SECRET", OTHER)
    with pytest.raises(ValueError, match=rf"different secrets\n  where: {path}\n  next:  unset one") as caught:
        job_secret()
    assert no_part_of(caught, GOOD, OTHER)


@pytest.mark.parametrize("text", [SHORT, " ", GOOD[:15], GOOD[:15] + " \n"])
def test_a_short_one_is_refused(monkeypatch, keep, text):
    monkeypatch.setenv("MONARCH_SECRET", text)
    with pytest.raises(
        ValueError, match=r"has \d+ characters, fewer than 16\n  where: MONARCH_SECRET\n  next: .*monarch secret FILE"
    ) as caught:
        job_secret()
    assert no_part_of(caught, text)
    monkeypatch.delenv("MONARCH_SECRET")
    path = keep(text)
    with pytest.raises(ValueError, match=rf"fewer than 16\n  where: {path}") as caught:
        job_secret()
    assert no_part_of(caught, text)


def test_sixteen_characters_are_enough(monkeypatch):
    monkeypatch.setenv("MONARCH_SECRET", "ä" * 16)
    assert job_secret() == ("ä" * 16).encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o666])
def test_a_file_that_others_may_touch_is_refused(keep, mode):
    path = keep(GOOD, mode)
    with pytest.raises(PermissionError, match=rf"not private: owner \d+, mode {mode:o}\n  where: {path}\n  next:  chmod 600") as caught:
        job_secret()
    assert no_part_of(caught, GOOD)


def test_a_file_of_somebody_else_is_refused(keep, monkeypatch):
    keep(GOOD)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="not private: owner"):
        job_secret()


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_a_private_file_is_read(keep, mode):
    keep(GOOD, mode)
    assert job_secret() == GOOD.encode()


def test_a_missing_file_is_an_error_and_not_no_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match=r"can't be read \(No such file.*\n  where: .*missing\n  next: .*monarch secret FILE"):
        job_secret()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(monkeypatch, tmp_path, make):
    path = tmp_path / "odd"
    make(path, 0o700)
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(path))
    with pytest.raises(ValueError, match="no regular file"):
        job_secret()


def test_a_large_file_is_another_one(keep):
    keep("x" * 5000)
    with pytest.raises(ValueError, match="has 5000 bytes: it is another one"):
        job_secret()


@pytest.mark.parametrize("told", [OTHER.encode(), b""], ids=["a secret", "none"])
def test_what_the_agent_says_beats_the_environment(monkeypatch, keep, told):
    monkeypatch.setenv("MONARCH_SECRET", GOOD)
    keep(SHORT, 0o644)
    adopt_secret(told)
    assert job_secret() == told


def test_a_new_secret_is_long_fresh_and_plain_text(monkeypatch):
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert all(len(text) >= 43 and text.isascii() and text.strip() == text for text in made)
    monkeypatch.setenv("MONARCH_SECRET", made.pop())
    assert len(job_secret()) >= 43


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_a_written_file_is_private_whatever_the_umask_and_can_be_used(monkeypatch, tmp_path, umask):
    path = tmp_path / "job.secret"
    before = os.umask(umask)
    try:
        written = write_secret_file(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(path))
    assert job_secret() == written.encode()


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_a_file_that_is_there_is_never_written(tmp_path, kind):
    path, elsewhere = tmp_path / "job.secret", tmp_path / "elsewhere"
    if kind == "file":
        path.write_text(GOOD)
    else:
        path.symlink_to(elsewhere)
        if kind == "link":
            elsewhere.write_text(GOOD)
    with pytest.raises(FileExistsError, match=r"is there already\n  next: .*MONARCH_SECRET_FILE") as caught:
        write_secret_file(path)
    assert no_part_of(caught, GOOD)
    assert kind == "dangling link" or path.read_text() == GOOD
    assert elsewhere.exists() == (kind == "link")


def test_a_file_that_could_not_be_written_is_removed(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # a full disk, as far as this process can tell
    try:
        with pytest.raises(OSError, match="File too large"):
            write_secret_file(tmp_path / "job.secret")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def no_part_of(caught, *secrets):
    """Whether an error, and those behind it, show no six characters of a secret."""
    text, error = "", caught.value
    while error is not None:
        text, error = text + str(error) + repr(error), error.__cause__ or error.__context__
    return not [s for s in secrets for at in range(len(s.strip()) - 5) if s.strip()[at : at + 6] in text]
