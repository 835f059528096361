"""Corrects a lower bound on a step's time to the range of times that published runs suggest.

FSDP2 trained Llama 3.1 8B on 8 H100 at 5,762 tokens/s per device, and with ``torch.compile`` at 6,667 tokens/s
(https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md). The forecast is 10,044
tokens/s (docs/plan.md).
"""

from __future__ import annotations

LEAST, MOST = 0.57, 0.66
RUNS = "torchtitan's Llama 3.1 8B on 8 H100, December 2024"


def expected_seconds(bound: float) -> tuple[float, float]:
    """Return the expected range of a step's seconds, from a lower bound and published runs.

    >>> expected_seconds(0.66)[0]
    1.0
    """
    return bound / MOST, bound / LEAST
