"""The runtime's own log: what monarch itself says of a process, for whoever looks for a fault in it.

    MONARCH_STDERR_LOG=debug    on the process's stderr
    MONARCH_FILE_LOG=debug      in <log folder>/runtime/<role>-<pid>.log (setting file_log_level; monarch_log_suffix ends the name)

Both are off by default, and errors then go where the program's logging sends them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings

from monarch import config
from monarch._runtime import log_files

STDERR_VARIABLE = "MONARCH_STDERR_LOG"
_LEVELS = {
    "trace": 5, "debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "warning": logging.WARNING,
    "error": logging.ERROR, "critical": logging.CRITICAL, "fatal": logging.CRITICAL,
}  # fmt: skip
_MOST_BYTES = 1 << 24
_OLD_S = 7 * 86400.0
_started_in = 0
_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"


def level_of(text: str, where: str) -> int | None:
    """The level that a setting names; None when it is empty, "off", or (with a warning) no level.

    Args:
        where: the setting, for the warning.
    """
    # The peer takes filters such as "info,some_module=debug"; only their general part means something here.
    name = next((part.strip().lower() for part in text.split(",") if "=" not in part), "")
    if name in ("", "off"):
        return None
    if name not in _LEVELS:
        warnings.warn(f"ignored {where}={text!r}; expected off, {', '.join(_LEVELS)}", RuntimeWarning, stacklevel=2)
    return _LEVELS.get(name)


def start_runtime_log(role: str) -> None:
    """Begin the log of this process, if settings ask for one.

    Args:
        role: "client", "agent" or "proc"; part of the file's name.
    """
    global _started_in
    if _started_in == os.getpid():  # a client that starts again
        return
    _started_in = os.getpid()
    logger = logging.getLogger("monarch")
    handlers: list[logging.Handler] = []
    to_stderr = level_of(os.environ.get(STDERR_VARIABLE, ""), STDERR_VARIABLE)
    if to_stderr is not None:
        handlers.append(logging.StreamHandler())
        handlers[-1].setLevel(to_stderr)
    to_file = level_of(config.value("file_log_level"), "file_log_level")
    if to_file is not None:
        try:
            handlers.append(_file_handler(role))
            handlers[-1].setLevel(to_file)
        except OSError as exc:
            warnings.warn(f"no runtime log is written: {exc}", RuntimeWarning, stacklevel=2)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    if handlers:
        logger.setLevel(min(handler.level for handler in handlers))
        logger.info("process started: role=%s pid=%d", role, os.getpid())


def _file_handler(role: str) -> logging.Handler:
    from logging.handlers import RotatingFileHandler

    base = log_files.base_folder(config.value("log_folder"))
    log_files.make_log_folder(base)
    folder = os.path.join(base, "runtime")
    log_files.make_log_folder(folder)
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - entry.stat().st_mtime > _OLD_S:
                os.unlink(entry.path)
    path = os.path.join(folder, f"{role}-{os.getpid()}{config.value('monarch_log_suffix')}.log")
    return RotatingFileHandler(path, maxBytes=_MOST_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")
