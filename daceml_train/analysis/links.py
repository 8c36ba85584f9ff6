"""Links: what a message between ranks costs, and the times of collectives that follow from it.

The model is alpha-beta (Hockney, 1994): a message of b bytes takes `alpha + b / bandwidth` seconds. Collectives are
those of a ring, or of a tree where that needs fewer messages one after the other (Thakur et al., 2005).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid


@dataclass(frozen=True)
class Link:
    """A link between ranks: `alpha` seconds per message, `bandwidth` bytes per second.

    `jitter` is the standard deviation of a rank's computing time, as a share of it: all wait for the slowest one.
    """

    alpha: float
    bandwidth: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.alpha, self.bandwidth, self.jitter)
        if any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
            raise Invalid(f"a link has numbers of seconds and of bytes per second, given {self}")
        if not (self.alpha >= 0 and self.bandwidth > 0 and self.jitter >= 0):
            raise Invalid(f"a link has a latency and jitter of at least 0 and a positive bandwidth, given {self}")

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of a sum of arrays of `size` bytes."""
        return 2 * self.half(size, ranks)

    def half(self, size: float, ranks: int) -> float:
        """Seconds of a reduce-scatter or an all-gather, of which each rank has the whole array before or after."""
        messages = min(ranks - 1, math.ceil(math.log2(max(ranks, 1))))
        return messages * self.alpha + (ranks - 1) / ranks * size / self.bandwidth

    def gather(self, size: float, ranks: int) -> float:
        """Seconds until each rank has the `size` bytes of every other."""
        messages = min(ranks - 1, math.ceil(math.log2(max(ranks, 1))))
        return messages * self.alpha + (ranks - 1) * size / self.bandwidth

    def bucket(self, ranks: int) -> int:
        """Bytes of the smallest array in whose sum the messages' latency is at most a tenth of the bytes' time.

        Larger buckets gain little, and start later. Without latency, each gradient is sent by itself.
        """
        if ranks == 1:
            return 1
        messages = min(ranks - 1, math.ceil(math.log2(ranks)))
        return max(1, math.ceil(10 * messages * self.alpha * self.bandwidth * ranks / (ranks - 1)))

    def messages(self, size: float, ranks: int) -> int:
        """The number of messages in which an array of `size` bytes is summed in the least time while it is computed:
        only the last one is waited for, and each costs its latency.
        """
        whole, latency = self.all_reduce(size, ranks), self.all_reduce(0, ranks)
        return max(1, round(math.sqrt((whole - latency) / latency))) if latency else max(1, math.ceil(size))

    def slowest(self, ranks: int) -> float:
        """How many times as long as the mean the slowest rank computes: the expected largest of normal deviates."""
        return 1.0 + self.jitter * math.sqrt(2 * math.log(ranks))


def best_partitions(seconds: Mapping[int, float]) -> int:
    """The number of partitions with the least time, from seconds measured with some numbers of them.

    The model is t(P) = b / P + a (P - 1) + c (Kim et al., Parallax, 2019), fitted by least squares; the result is
    within the range that was measured. Raises `Invalid` for fewer than three numbers.
    """
    if len(seconds) < 3:
        raise Invalid(f"the number of partitions is fitted to three measurements or more, given {len(seconds)}")
    rows = [(1 / count, count - 1.0, 1.0) for count in seconds]
    b, a, _ = map(float, np.linalg.lstsq(np.asarray(rows), np.asarray([*seconds.values()]), rcond=None)[0])
    least, most = min(seconds), max(seconds)
    if b <= 0:
        return least
    return most if a <= 0 else max(least, min(most, round(math.sqrt(b / a))))
