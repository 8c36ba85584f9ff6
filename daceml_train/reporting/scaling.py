"""Scaling: the time of a step on many ranks, from what its launches take here and from assumed or measured links.

It is arithmetic, not a measurement: gradients appear evenly over the backward pass, buckets queue on one channel, and
all ranks wait for the slowest of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from daceml_train.reporting.model import Launched
from daceml_train.reporting.numbers import counted
from daceml_train.runtime.links import Link
from daceml_train.runtime.roofline import Machine

BUCKETS = tuple(1 << power for power in range(16, 31))
"""Sizes of buckets that are compared, in bytes."""


@dataclass(frozen=True)
class Profile:
    """What one rank does in a step: seconds of computing by phase, bytes of dense gradients, and bytes of rows.

    `clipped`: all updates wait for the norm of all gradients. `sharded`: parameters are gathered after the update.
    `exchange` are seconds in which the rank copies and adds up what it sends and receives, and `host` those in which no
    launch runs: the checks of a call, and the data.
    """

    forward: float
    backward: float
    update: float
    gradients: int
    rows: int = 0
    clipped: bool = False
    sharded: bool = False
    exchange: float = 0.0
    host: float = 0.0

    @property
    def alone(self) -> float:
        """Seconds of a step on one rank."""
        return self.host + self.forward + self.backward + self.update

    def on_cores(self, share: float) -> Profile:
        """The same where a rank's thread has this share of a core, as where more threads than cores compute."""
        times = ("forward", "backward", "update", "exchange", "host")
        return replace(self, **{name: getattr(self, name) / share for name in times})

    def seconds(self, ranks: int, link: Link, bucket: int, overlap: bool = True) -> float:
        """Seconds of a step on `ranks` ranks with buckets of at most so many bytes.

        Without `overlap`, each collective waits for the end of the backward pass.
        """
        if ranks == 1:
            return self.alone
        slow, count = link.slowest(ranks), max(1, math.ceil(self.gradients / bucket))
        part = (
            link.half(self.gradients / count, ranks) if self.sharded else link.all_reduce(self.gradients / count, ranks)
        )
        part += self.exchange / count
        channel, before = 0.0, self.host + self.forward
        for number in range(count):
            ready = before + self.backward * ((number + 1) / count if overlap else 1.0)
            channel = max(channel, ready * slow) + part
        channel += link.gather(self.rows, ranks) if self.rows else 0.0
        computed = (before + self.backward) * slow  # updates come after it, each as soon as its bucket is there
        last = self.update if self.clipped or not overlap else self.update / count
        end = max(channel + last * slow, computed + self.update * slow)
        return end + (link.half(self.gradients, ranks) if self.sharded else 0.0)


@dataclass(frozen=True)
class Scaling:
    """The simulated step on `ranks` ranks.

    `bucket` is the size in bytes with which it takes the least time, `seconds` that time, `apart` the time without
    overlap of communication with the backward pass, `alone` that on one rank; each rank sends `sent` bytes.
    `measured` says whether the launches were measured rather than estimated by the machine's roofline.
    """

    ranks: int
    link: Link
    alone: float
    seconds: float
    apart: float
    bucket: int
    sent: int
    measured: bool
    profile: Profile

    @property
    def efficiency(self) -> float:
        """The time on one rank as a share of that on all of them, each with as many rows."""
        return self.alone / self.seconds if self.seconds else 1.0

    def lines(self) -> Iterator[str]:
        """What the report says of it."""
        source = "measured launches" if self.measured else "launches at the machine's roofline"
        link = f"{self.link.alpha * 1e6:.3g} us and {self.link.bandwidth / 1e9:.3g} GB/s, jitter {self.link.jitter:.1%}"
        yield f"simulated on {counted(self.ranks, 'rank')}, from {source}; links assumed: {link}"
        yield (
            f"  {self.seconds * 1e3:.3f} ms a step against {self.alone * 1e3:.3f} ms on one rank: efficiency "
            f"{self.efficiency:.3f} with buckets of {self.bucket / 2**20:.3g} MiB"
        )
        yield f"  {self.apart * 1e3:.3f} ms if no collective begins before the backward pass ends"
        yield f"  each rank sends {self.sent / 1e6:.3f} MB a step"


def profile(launches: Sequence[Launched], machine: Machine | None, template: Profile) -> tuple[Profile, bool]:
    """The template with the seconds of these launches by phase, and whether they were measured.

    Collectives do not count: their time is what is simulated.
    """
    own = [launch for launch in launches if not launch.network and launch.operators != "await"]
    measured = bool(own) and all(launch.seconds is not None for launch in own)
    phases = dict.fromkeys(("forward", "backward", "update"), 0.0)
    for launch in own:
        spent = launch.seconds if measured else machine.seconds(launch.bytes, launch.flops) if machine else 0.0
        phases[launch.phase if launch.phase in phases else "forward"] += spent or 0.0
    forward, backward, update = phases.values()
    return replace(template, forward=forward, backward=backward, update=update), measured


def simulated(found: Profile, measured: bool, ranks: int, link: Link) -> Scaling:
    """The step on so many ranks, with the best size of buckets."""
    best = min(BUCKETS, key=lambda bucket: found.seconds(ranks, link, bucket))
    sent = 2 * (ranks - 1) / ranks * found.gradients + (ranks - 1) * found.rows
    whole = max(found.gradients, 1)
    seconds, apart = found.seconds(ranks, link, best), found.seconds(ranks, link, whole, overlap=False)
    return Scaling(ranks, link, found.alone, seconds, apart, best, round(sent), measured, found)
