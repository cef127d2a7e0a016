"""`python -m monarch.actor.bootstrap`: a fresh interpreter becomes the proc that its environment describes."""

from __future__ import annotations

import base64
import importlib
import os
import sys

from monarch._wire import messages
from monarch.actor.host_mesh import PATH_VARIABLE

SPEC_VARIABLE = "MONARCH_PROC_SPEC"


def invoke_main() -> None:
    """Be a proc until stopped.

    Raises:
        SystemExit: nobody said which proc.
    """
    spec = os.environ.pop(SPEC_VARIABLE, None)
    if spec is None:
        sys.exit(f"{SPEC_VARIABLE} is not set: a host agent runs this module, not a person")
    path = [entry for entry in os.environ.pop(PATH_VARIABLE, "").split(os.pathsep) if entry and entry not in sys.path]
    sys.path[:0] = path
    boot = messages.decode_boot(base64.b64decode(spec))
    importlib.import_module(boot.entry).main(boot)


if __name__ == "__main__":
    invoke_main()
