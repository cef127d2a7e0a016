"""The job's secret: what every process of a job knows and nobody else does.

It comes from `MONARCH_SECRET`, from the file that `MONARCH_SECRET_FILE` names, or from whoever started this process
(`adopt_secret`). It never stands on a command line, in a log, in an error or in the configuration that a client
hands on, which is why it is no knob.

Rules of this file:
    1. No text that leaves it contains the secret, or a part of it.
    2. A file that others can read, change or replace by a link of theirs is refused, not used.
    3. Too short is an error, not a warning: whoever listens on a network can try all short ones at leisure.

Thread: any thread.
Read next: `handshake.py` for how it is proved.
"""

from __future__ import annotations

import contextlib
import os
import stat

from monarch._base.errors import explain

MIN_CHARACTERS = 16
_MAX_FILE_BYTES = 4096
_VARIABLE = "MONARCH_SECRET"
_FILE_VARIABLE = "MONARCH_SECRET_FILE"
_MAKE_ONE = f"`monarch secret FILE` makes a good one; name the file in {_FILE_VARIABLE}"

_adopted: bytes | None = None
"""What this process was told; None: nothing, so it looks for itself."""


def job_secret() -> bytes:
    """The secret of this process's job; b"": it has none.

    Raises:
        ValueError: it is shorter than 16 characters, or variable and file say different things.
        PermissionError: the file is not this user's alone.
        OSError: the file can't be read.
    """
    if _adopted is not None:
        return _adopted
    text, path = os.environ.get(_VARIABLE, ""), os.environ.get(_FILE_VARIABLE, "")
    told = _checked(os.fsencode(text), _VARIABLE) if text else b""
    if not path:
        return told
    kept = _checked(_read_private(path), path)
    if told and told != kept:
        raise ValueError(
            explain(f"{_VARIABLE} and the file that {_FILE_VARIABLE} names hold different secrets", where=path, next="unset one")
        )
    return kept


def adopt_secret(secret: bytes) -> None:
    """Use what the process that started this one said, whatever the environment says; b"": the job has none."""
    global _adopted
    _adopted = secret


def new_secret() -> str:
    """A fresh secret: 256 bits, as text that environment variables and files take as it is."""
    import secrets

    return secrets.token_urlsafe(32)


def write_secret_file(path: str | os.PathLike[str]) -> str:
    """Write a fresh secret to a new file that only this user can read.

    Returns:
        The secret. It belongs into no log and on no terminal.

    Raises:
        FileExistsError: the path is taken; nothing was changed.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as exc:
        next = f"set {_FILE_VARIABLE} to use what it holds, or name another file"
        raise FileExistsError(explain(f"{os.fspath(path)} is there already", next=next)) from exc
    secret = new_secret()
    try:
        with open(fd, "w") as file:
            os.fchmod(fd, 0o600)  # a umask may have taken the owner's own bits
            file.write(secret + "\n")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return secret


def _checked(data: bytes, where: str) -> bytes:
    secret = data.strip()
    count = len(os.fsdecode(secret))
    if count < MIN_CHARACTERS:
        raise ValueError(explain(f"the job's secret has {count} characters, fewer than {MIN_CHARACTERS}", where=where, next=_MAKE_ONE))
    return secret


def _read_private(path: str) -> bytes:
    """The content of a file of this user's alone. It is judged by its descriptor: a path may lead elsewhere a moment later."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer would block
    except OSError as exc:
        raise type(exc)(explain(f"the file of the job's secret can't be read ({exc.strerror})", where=path, next=_MAKE_ONE)) from exc
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(explain("the file of the job's secret is no regular file", where=path, next=_MAKE_ONE))
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(
                explain(
                    f"the file of the job's secret is not private: owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}",
                    where=path,
                    next="chmod 600 it, as the user that runs this process; if others could read it, make a new secret",
                )
            )
        if status.st_size > _MAX_FILE_BYTES:
            raise ValueError(
                explain(f"the file of the job's secret has {status.st_size} bytes: it is another one", where=path, next=_MAKE_ONE)
            )
        return os.read(fd, _MAX_FILE_BYTES)
    finally:
        os.close(fd)
