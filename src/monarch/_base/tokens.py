"""Tokens: what an object over memory holds, so that the end of the one tells of the end of the other.

A weak reference to the object itself, or a `__del__`, fires for an object in a reference cycle before the finalisers of the cycle have
run, and these may still read the memory, or keep it. A token goes when its holder is really torn down.

Read next: `reused.py` and `_net/local.py`, whose memory is used again.
"""

from __future__ import annotations

from types import CodeType

_TOKEN = compile("", "<token>", "exec")


def new_token() -> CodeType:
    """A token, for one attribute of one object. Cost: 1 us.

    It is a code object: the one builtin type that has weak references and that the collector does not track.
    """
    return _TOKEN.replace()
