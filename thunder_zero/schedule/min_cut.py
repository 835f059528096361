"""Finds the fewest bytes to keep, from which all that is wanted can be computed: a minimum cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence


def cheapest_to_keep(
    nbytes: Sequence[int], made_from: Sequence[Collection[int] | None], wanted: Collection[int]
) -> tuple[set[int], set[int]]:
    """Chooses which values to keep, and which to compute again, so that the fewest bytes are kept.

    Among the choices of fewest bytes it takes the one that computes least again. That choice is unique, so that all
    ranks make the same.

    Args:
        nbytes: of each value.
        made_from: the values from which each is computed; None if it cannot be computed again.
        wanted: the values that must be kept or computed again.

    Returns:
        The values to keep, and the values to compute again.

    >>> cheapest_to_keep([4, 8, 8], [None, {0}, {1}], wanted={1, 2})
    ({0}, {1, 2})
    """
    network = _Network(nbytes, made_from, wanted)
    while network.level():
        network.push()
    reaches = network.reaching_the_end()
    needed = [number for number in range(len(nbytes)) if 2 * number + 1 in reaches]
    recomputed = {number for number in needed if 2 * number in reaches and made_from[number] is not None}
    return set(needed) - recomputed, recomputed


class _Network:
    """A flow network. Value ``n`` is an edge of its bytes from node ``2n`` to ``2n + 1``; edges for what it is made
    from, and for being wanted, are too large for any cut. Dinic's algorithm: all shortest paths at once, then longer.
    """

    def __init__(
        self, nbytes: Sequence[int], made_from: Sequence[Collection[int] | None], wanted: Collection[int]
    ) -> None:
        self.start, self.end = 2 * len(nbytes), 2 * len(nbytes) + 1
        self.edges: list[list[int]] = [[] for _ in range(self.end + 1)]  # of each node: numbers of its edges
        self.to: list[int] = []  # edge 2k and its reverse, 2k + 1
        self.left: list[int] = []  # of each edge: bytes that it can still carry
        self.levels: list[int] = []
        endless = sum(nbytes) + 1
        for number, size in enumerate(nbytes):
            sources = made_from[number]
            self._connect(self.start if sources is None else 2 * number, 2 * number + 1, size)
            for source in sources or ():
                self._connect(2 * source + 1, 2 * number, endless)
        for number in wanted:
            self._connect(2 * number + 1, self.end, endless)

    def _connect(self, here: int, there: int, size: int) -> None:
        for node, other, left in ((here, there, size), (there, here, 0)):
            self.edges[node].append(len(self.to))
            self.to.append(other)
            self.left.append(left)

    def level(self) -> bool:
        """Find the distance of each node from the start; whether the end can still be reached."""
        self.levels = [-1] * len(self.edges)
        self.levels[self.start] = 0
        queue = deque([self.start])
        while queue:
            node = queue.popleft()
            for edge in self.edges[node]:
                other = self.to[edge]
                if self.left[edge] and self.levels[other] < 0:
                    self.levels[other] = self.levels[node] + 1
                    queue.append(other)
        return self.levels[self.end] >= 0

    def push(self) -> None:
        """Send as much as possible along shortest paths."""
        untried = [0] * len(self.edges)  # of each node: index of the first edge that may still lead on
        path: list[int] = []  # edges
        node = self.start
        while True:
            if node == self.end:
                node = self._send(path)
            edges = self.edges[node]
            while untried[node] < len(edges) and not self._leads_on(node, edges[untried[node]]):
                untried[node] += 1
            if untried[node] < len(edges):
                path.append(edges[untried[node]])
                node = self.to[path[-1]]
            elif path:
                node = self.to[path.pop() ^ 1]
                untried[node] += 1
            else:
                return

    def _send(self, path: list[int]) -> int:
        """Send along a path; shorten it to the node before its first edge that is full now, and return that node."""
        sent = min(self.left[edge] for edge in path)
        for edge in path:
            self.left[edge] -= sent
            self.left[edge ^ 1] += sent
        full = next(number for number, edge in enumerate(path) if not self.left[edge])
        node = self.to[path[full] ^ 1]
        del path[full:]
        return node

    def _leads_on(self, node: int, edge: int) -> bool:
        return self.left[edge] > 0 and self.levels[self.to[edge]] == self.levels[node] + 1

    def reaching_the_end(self) -> set[int]:
        """The nodes from which the end can still be reached."""
        found, queue = {self.end}, [self.end]
        while queue:
            for edge in self.edges[queue.pop()]:
                other = self.to[edge]  # the reverse edge leads from there to here
                if other not in found and self.left[edge ^ 1]:
                    found.add(other)
                    queue.append(other)
        return found
