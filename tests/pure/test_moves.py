"""The moves of a parameter between its states: each is in the table of ``sharded/param.py``, or raises."""

from __future__ import annotations

from functools import reduce
from itertools import product
from typing import get_args

from tests.harness.errors import refused
from thunder_zero.sharded.param import MOVES, Move, Status, moved


def test_a_move_that_the_table_lacks_raises() -> None:
    for status, move in product(get_args(Status), get_args(Move)):
        if (status, move) not in MOVES:
            with refused(RuntimeError, f"parameter 'w' is {status}", f"no move {move!r} from there"):
                moved(status, move, "w")


def test_a_full_value_moves_as_the_table_has_it() -> None:
    def after(status: Status, *moves: Move) -> Status:
        return reduce(lambda status, move: moved(status, move, "w"), moves, status)

    assert after("sharded", "gather", "arrive", "arrive") == "full"  # the second time beside a parameter that was due
    assert after("full", "expire", "gather", "gather", "arrive") == "full"  # the forward between the gathers failed
    assert after("sharded", "gather", "expire", "arrive") == "sharded"  # written to while it is in flight
