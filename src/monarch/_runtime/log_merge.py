"""Merging: similar lines of many actors become one line with a count.

Pure: no clock and no I/O; whoever holds a `Merger` decides when to `take`.

Rules of this file:
    1. The counts add up to the lines that were added: nothing is dropped, and nothing is counted twice.
    2. Two lines are similar when their edit distance is below 0.15 of the longer one's length.
    3. A merged line covers at most one line of each actor ("actors"), so that an actor's own progress stays visible; or any
       number of them ("all").
    4. Work and memory are bounded: only the youngest merged lines are compared, and those only so often; long lines merge only
       when equal; and a full merger says so.

Read next: `monarch/actor/log_printer.py`, which prints what comes out.
"""

from __future__ import annotations

from typing import NamedTuple

SIMILAR_BELOW = 0.15
_MOST_COMPARED = 24
_LONGEST_COMPARED = 1024
_MOST_COMPARISONS = 30_000
"""From one `take` to the next: beyond that only equal lines merge, so a flood costs no more than a look-up for each line."""
_MOST_CLUSTERS = 2000
_MOST_BYTES = 4 << 20


class Merged(NamedTuple):
    """A line that stands for so many similar ones; its text is that of the first."""

    num_lines: int
    text: str


class _Cluster:
    __slots__ = ("count", "sources", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.count = 0
        self.sources: set[object] = set()


class Merger:
    """Collects lines until they are taken."""

    def __init__(self, merge: str = "actors") -> None:
        """Args:
        merge: "actors": across actors only (rule 3); "all": an actor's own lines as well.
        """
        self._across = merge != "all"
        self._clusters: list[_Cluster] = []
        self._equal: dict[str, list[_Cluster]] = {}
        self._bytes = 0
        self._comparisons = 0

    def __bool__(self) -> bool:
        return bool(self._clusters)

    @property
    def full(self) -> bool:
        """It is time to `spill`."""
        return len(self._clusters) >= _MOST_CLUSTERS or self._bytes >= _MOST_BYTES

    def add(self, source: object, text: str) -> None:
        """Add one line.

        Args:
            source: who wrote it; hashable.
        """
        cluster = self._fitting(source, text)
        if cluster is None:
            cluster = _Cluster(text)
            self._clusters.append(cluster)
            self._equal.setdefault(text, []).append(cluster)
            self._bytes += len(text)
        cluster.count += 1
        if self._across:
            cluster.sources.add(source)

    def take(self) -> list[Merged]:
        """All merged lines in order of their first one; the merger is empty then, and a new window begins."""
        self._comparisons = 0
        return self.spill()

    def spill(self) -> list[Merged]:
        """The same in the middle of a window, because the merger is full."""
        taken = [Merged(cluster.count, cluster.text) for cluster in self._clusters]
        self._clusters, self._equal = [], {}
        self._bytes = 0
        return taken

    def _fitting(self, source: object, text: str) -> _Cluster | None:
        equal = self._equal.get(text, ())
        for cluster in equal:
            if source not in cluster.sources:
                return cluster
        if len(text) > _LONGEST_COMPARED or self._comparisons >= _MOST_COMPARISONS:
            return None
        for cluster in self._clusters[: -_MOST_COMPARED - 1 : -1]:
            if source in cluster.sources or cluster in equal:
                continue
            self._comparisons += 1
            if is_similar(cluster.text, text):
                return cluster
        return None


def is_similar(a: str, b: str) -> bool:
    """Whether the normalised edit distance of two lines is below `SIMILAR_BELOW`."""
    longest = max(len(a), len(b))
    if longest > _LONGEST_COMPARED:
        return a == b
    most = _most_edits(longest)
    return abs(len(a) - len(b)) <= most and distance(a, b, most) <= most


def _most_edits(length: int) -> int:
    """The largest number of edits that is still below the limit for lines of this length."""
    edits = int(length * SIMILAR_BELOW)
    return edits - 1 if edits and edits >= length * SIMILAR_BELOW else edits


def distance(a: str, b: str, most: int) -> int:
    """The edit distance (insert, delete, replace) of two texts; some number above `most` when it is larger than that.

    Cost: one pass over `b` with integers of `len(a)` bits, given up as soon as `most` is out of reach.
    Source: Myers 1999, "A fast bit-vector algorithm for approximate string matching", in Hyyrö's form of 2003.
    """
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    if not a or not b:
        return len(a) + len(b)
    positions: dict[str, int] = {}
    for index, char in enumerate(a):
        positions[char] = positions.get(char, 0) | 1 << index
    mask, top = (1 << len(a)) - 1, 1 << len(a) - 1
    plus, minus, score, left = mask, 0, len(a), len(b)
    for char in b:
        left -= 1
        equal = positions.get(char, 0)
        diagonal = (((equal & plus) + plus) ^ plus) | equal | minus
        up = minus | ~(diagonal | plus) & mask
        down = plus & diagonal
        if up & top:
            score += 1
        elif down & top:
            score -= 1
            if score - left > most:
                return most + 1
        up = up << 1 | 1
        plus = (down << 1 | ~(diagonal | up)) & mask
        minus = up & diagonal & mask
        if score - left > most:
            return most + 1
    return score
