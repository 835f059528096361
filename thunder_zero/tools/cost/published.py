"""What published runs reached of forecasts, which are bounds: a range to expect.

FSDP2 trained Llama 3.1 8B on 8 H100 with 5,762 tokens a second and device, and with ``torch.compile`` 6,667
(https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md), where the forecast is
10,044 (docs/plan.md).
"""

from __future__ import annotations

LEAST, MOST = 0.57, 0.66
RUNS = "torchtitan's Llama 3.1 8B on 8 H100, December 2024"


def expected_seconds(bound: float) -> tuple[float, float]:
    """Return the seconds that a step takes if it reaches what those runs did of their bound, fewest first.

    >>> expected_seconds(0.66)[0]
    1.0
    """
    return bound / MOST, bound / LEAST
