"""Whether a series of measurements grows. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Slope per step of the least-squares line through ``values``, and its standard error.

    Fewer than three values have no error: it is 0.
    """
    count = len(values)
    if count < 2:
        return 0.0, 0.0
    centre, mean = (count - 1) / 2, sum(values) / count
    spread = sum((i - centre) ** 2 for i in range(count))
    slope = sum((i - centre) * (value - mean) for i, value in enumerate(values)) / spread
    left = sum((value - mean - slope * (i - centre)) ** 2 for i, value in enumerate(values))
    return slope, math.sqrt(left / (count - 2) / spread) if count > 2 else 0.0
