"""Which interpreter runs a host agent or a zygote: this one, with this very installation of monarch.

`-m` would put the working directory on the module path, where a user's `select.py` or `queue.py` would be loaded
instead of the standard library's; and it would not find a monarch that only `sys.path` of the script leads to.
"""

from __future__ import annotations

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def host_command(*arguments: str) -> list[str]:
    """The command line of a new process that runs `host_main.main(arguments)`."""
    code = f"import sys; sys.path.insert(0, {_ROOT!r}); from monarch._runtime.host_main import main; main(sys.argv[1:])"
    return [sys.executable, "-P", "-c", code, *arguments]
