"""Corrects a forecast, which is a bound, to the range of seconds that published runs suggest.

FSDP2 trained Llama 3.1 8B on 8 H100 at 5,762 tokens/s a device, and with ``torch.compile`` at 6,667
(https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md). The forecast is 10,044
(docs/plan.md).
"""

from __future__ import annotations

LEAST, MOST = 0.57, 0.66
RUNS = "torchtitan's Llama 3.1 8B on 8 H100, December 2024"


def expected_seconds(bound: float) -> tuple[float, float]:
    """Return the range of seconds to expect for a step with this bound, as in the published runs.

    >>> expected_seconds(0.66)[0]
    1.0
    """
    return bound / MOST, bound / LEAST
