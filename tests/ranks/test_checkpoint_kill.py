"""SIGKILL of a rank in the middle of a save, at many moments: what was there stays, and nothing false is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.kill_in_saves import kill_at_moments
from tests.harness.ranks import CAN_FORK, call_alone
from tests.harness.tiers import of_tier


@pytest.mark.skipif(not CAN_FORK, reason="forks")
@pytest.mark.timeout(150)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The worker has looked at the disk after each: all that is visible is whole, ``latest`` leads to some of it, who
    says saved is right, and the next save works."""
    results = call_alone(kill_at_moments, tmp_path, timeout=140)
    assert [result for result in results if "wrong" in result] == []
    assert len(results) >= of_tier(15, 50)
    for result in results:
        assert result["victim"] not in result["lives"], result
    before_group = [at for at in results if not at["wait"] and at["victim"] == 1 and at["moment"].startswith("1 of ")]
    assert len(before_group) == of_tier(0, 1)
    for result in before_group:  # and not after half an hour, the group's time-out
        assert "rank 0 got no answer from rank 1" in result["said"][0]
    of_0 = [result for result in results if result["victim"] == 0 and result["name"] == "step-2"]
    assert {result["latest"] for result in of_0} == {1.0, 2.0}  # early kills leave the first, late ones the second
    assert of_0[0]["visible"] == {"step-1": 1.0}
    replaced = [result["found"] for result in results if result["name"] == "step-1"]
    assert set(replaced) == {1.0, 2.0}
    assert {} in [result["visible"] for result in results]  # between two renames: it was found all the same
