"""The heap of a process that will be forked.

Read next: `zygote.py`, the only caller.
"""

from __future__ import annotations

import gc
import sys

_kept_modules: list[object] = []
"""Our own modules and the main one, and the list itself."""


def freeze() -> None:
    """Move all that lives out of the collector's sight: a collection in a child would write to, and so copy, all of it.

    Listings of directories go before that. A child must list them afresh, as modules may have come since, and freeing the
    zygote's there would copy 4 MB of its heap.
    """
    sys.path_importer_cache.clear()
    # At exit the interpreter drops its modules, collects, and then clears the globals of those that are left. A frozen module
    # would be dropped but its globals never collected, so the finaliser of what a proc put there never run. This cycle is
    # frozen too, so its modules are left. (Unfreezing at exit instead doubles the 0.2 s that a proc with torch takes to exit.)
    _kept_modules[:] = [_kept_modules, *(sys.modules[name] for name in sys.modules if _is_finalised(name))]
    gc.collect()
    gc.freeze()


def _is_finalised(module: str) -> bool:
    return module == "__main__" or module.partition(".")[0] == "monarch"
