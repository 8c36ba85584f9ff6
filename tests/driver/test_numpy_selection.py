"""NumPy selects by order itself: a step follows paths around it, with eager's values."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tests.driver.imperative import Imperative, Pair, batches


class Clamping(Imperative):
    """Clamps to quantiles and a median."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        seen = h.detach().numpy()
        self.notes.append(float(np.median(seen)))
        return self.r(h.clamp(float(np.quantile(seen, 0.1)), float(np.percentile(seen, 90))))


def test_a_quantile_is_numpys() -> None:
    pair = Pair(Clamping())
    pair.train(batches(6))
    assert any("selection" in why for why in pair.step.breaks)
    assert not pair.paths.refused and pair.paths.misses < 6
