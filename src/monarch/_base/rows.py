"""Rows: members that pass on what they get, each to the one behind it. The heads of the rows form a row of their own.

So the first one sends once, whatever the number of members, and nobody is farther away than the length of two rows.

Read next: `monarch/_mounts/delivery.py` and `monarch/rdma/relays.py`, which stand in rows.
"""

from __future__ import annotations

ROW = 16
"""Members of a row."""


def before(position: int) -> int | None:
    """Whom a member asks; None: it is the first."""
    if position == 0:
        return None
    return position - 1 if position % ROW else position - ROW
