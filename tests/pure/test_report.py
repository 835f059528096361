"""Printed traces and timelines show each line's kind, parameters and bytes; steps are shown on stderr.

The timelines are written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.harness.errors import fails
from tests.harness.timelines import make_param, split
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import Policy
from thunder_zero.schedule.ops import Compute, Free, Gather, Op, Reduce, Return, Wait
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.printing.progress import show_steps
from thunder_zero.tools.printing.words import fold
from thunder_zero.tools.table.rows import Row, explained, label
from thunder_zero.tools.views.print_rows import format_timeline, print_rows, print_total, select

POLICY = Policy(stage=3)
PARAMS = (
    make_param("embedding.weight", (8, 4), "", POLICY),  # 128 B
    make_param("h.0.w", (8, 8), "h.0", POLICY),  # 256 B
    make_param("h.0.b", (8,), "h.0", POLICY),  # 32 B
)
PLAN = Plan(POLICY, Mesh.of(4), PARAMS)
FORWARD = (  # lines of code, and their operations
    ("# x: input", ""),
    ("f = zero_all_gather_coalesced((t_w, t_b), ('h.0.w', 'h.0.b'))", "gather f <- t_w t_b: h.0.w h.0.b"),
    ("c = torch.cos(x)", "compute c <- x"),
    ("(w, b) = zero_wait_coalesced(f)", "wait w b <- f: h.0.w h.0.b"),
    ("del f", ""),
    ("wt = torch.permute(w, (1, 0))", "compute wt <- w"),
    ("del w", "free <- w"),
    ("y = torch.matmul(c, wt)", "compute y <- c wt"),
    ("del c, wt", "free <- c wt: h.0.w"),
    ("z = torch.add(y, b)", "compute z <- y b"),
    ("del b", "free <- b: h.0.b"),
    ("return z", "return <- z"),
)
BACKWARD = (
    ("f2 = zero_reduce_scatter(gw, 'h.0.w')", "reduce f2 <- gw0: h.0.w"),
    ("g = zero_wait(f2)", "wait g <- f2: h.0.w"),
    ("gw = torch.sin(g)", "compute gw <- g"),
    ("f3 = zero_reduce_scatter(gw, 'h.0.b')", "reduce f3 <- gw: h.0.b"),
    ("return g", "return <- g"),
)


def op(text: str, *, backward: bool = False) -> Op:
    kind, values, params = re.fullmatch(r"(\w+)([^:]*):?(.*)", text).groups()
    writes, reads = (tuple(names.split()) for names in values.split("<-"))
    paths = tuple(params.split())
    made: dict[str, Callable[[], Op]] = {
        "gather": lambda: Gather(reads, writes[0], paths, backward),
        "reduce": lambda: Reduce(reads, writes[0], paths),
        "wait": lambda: Wait(Gather((), reads[0], paths), writes),
        "free": lambda: Free(reads, paths, backward),
        "return": lambda: Return(reads, backward),
        "compute": lambda: Compute(reads, writes, backward=backward, repeatable=True),
    }
    return made[kind]()


PLACES = [(phase, index, text) for phase in (FORWARD, BACKWARD) for index, (_, text) in enumerate(phase) if text]
OPS = [op(text, backward=phase is BACKWARD) for phase, _, text in PLACES]
POSITIONS = [(index,) for _, index, _ in PLACES]
TIMELINE = Timeline((), {}, PLAN).with_ops(OPS)


@cache
def phase(*, backward: bool) -> tuple[Row, ...]:
    code = [code for code, _ in (BACKWARD if backward else FORWARD)]
    lines = [Row("", index, text) for index, text in enumerate(code) if not text.startswith("#")]
    return tuple(explained(lines, TIMELINE, POSITIONS, backward=backward))


def printed(shown: tuple[Row | int, ...]) -> list[str]:
    console = Console(file=(file := StringIO()))
    print_rows(shown, PLAN, "forward", console)
    print_total(shown, console)
    return file.getvalue().splitlines()


def test_each_line_has_kind_parameters_sent_bytes_and_gathered_bytes() -> None:
    # Rank 0 of 4 owns 64 + 8 B of the parameters, and sends them to 3 peers.
    assert printed(phase(backward=False)) == [
        "# forward, ZeRO-3, rank 0 of 4                   does    parameters                    sent gathered",
        "f = zero_all_gather_coalesced((t_w, t_b),        gather  h.0.w, b                     216 B    288 B",
        "    ('h.0.w', 'h.0.b'))",
        "c = torch.cos(x)                                 compute                                       288 B",
        "(w, b) = zero_wait_coalesced(f)                  wait    h.0.w, b                              288 B",
        "del f                                                                                          288 B",
        "wt = torch.permute(w, (1, 0))                    compute h.0.w                                 288 B",
        "del w                                                                                          288 B",
        "y = torch.matmul(c, wt)                          compute h.0.w                                 288 B",
        "del c, wt                                        free    h.0.w                                  32 B",
        "z = torch.add(y, b)                              compute h.0.b                                  32 B",
        "del b                                            free    h.0.b                                   0 B",
        "return z                                         return                                          0 B",
        "",
        "1 collective (1 gather, 0 reduce), 216 B sent by this rank, 288 B gathered at most",
    ]


def test_rows_mark_gradients() -> None:
    result = [(row.kind, row.params, row.gradients) for row in phase(backward=True)]
    assert result == [
        ("reduce", ("h.0.w",), True),
        ("wait", ("h.0.w",), True),
        ("compute", ("h.0.b",), True),  # makes the gradient that is reduced next
        ("reduce", ("h.0.b",), True),
        ("return", (), False),
    ]


def rows_of(*texts: str, backward: bool = False) -> tuple[Row, ...]:
    """Return the rows of a phase with a line for each text. A ";" separates operations of a line."""
    pairs = [((index,), op(text, backward=backward)) for index, line in enumerate(texts) for text in split(line)]
    positions, ops = zip(*[((0,), OPS[0])][:backward], *pairs, strict=True)
    lines = [Row("", index, f"line {index}") for index in range(len(texts))]
    return tuple(explained(lines, TIMELINE.with_ops(ops), positions, backward=backward))


def test_a_row_has_several_parameters() -> None:
    (begins,) = rows_of("compute gy <- gz", backward=True)
    assert begins.unsharded == 288, "backward begins with the bytes that forward left"
    freed = rows_of("gather f <- t_w t_b: h.0.w h.0.b", "free <- w b: h.0.w h.0.b")[1]
    assert (freed.kind, freed.params, freed.unsharded) == ("free", ("h.0.w", "h.0.b"), 0)


def positions_of(shown: tuple[Row | int, ...]) -> list[int | str]:
    return [item.position if isinstance(item, Row) else f"{item} lines" for item in shown]


def test_rows_of_other_units_are_left_out_and_lines_without_parameters_become_a_gap() -> None:
    assert positions_of(select(phase(backward=False), PLAN, "h.0", None)) == [*range(1, 11)]
    assert select(phase(backward=False), PLAN, "", None) == ()
    texts = [
        f"gather f{index} <- t_w: h.0.w" if index in (3, 12, 14) else f"compute t{index} <- x" for index in range(20)
    ]
    shown = select(rows_of(*texts), PLAN, None, "parameters")
    assert positions_of(shown) == [3, "8 lines", 12, 13, 14]
    texts[4], texts[13] = "wait w <- f3: h.0.w", "compute y <- w"
    shown = select(rows_of(*texts), PLAN, None, "communication")
    assert positions_of(shown) == [3, 4, "7 lines", 12, 13, 14]


def test_operations_without_a_line_and_unknown_units_are_refused() -> None:
    lines = [Row("", index, "x") for index in range(11)]
    missing = "the trace has no lines of the operations at [9] of the timeline"
    fails(lambda: list(explained(lines, TIMELINE, POSITIONS, backward=False)), "ValueError", missing)
    fails(lambda: select((), PLAN, "h.7", None), "ValueError", "unit is 'h.7'; the units of this module are '', 'h.0'")
    only = "only is 'waits'; choose 'parameters' or 'communication', or None"
    fails(lambda: select((), PLAN, None, "waits"), "ValueError", only)


def test_a_label_names_parameters_briefly() -> None:
    embedding, weight, bias = (param.path for param in PARAMS)
    assert label((weight,), PLAN, gradients=True) == "grad h.0.w"
    assert label((weight, bias, weight), PLAN, gradients=True) == "h.0: 3 gradients"
    assert label((embedding, weight, bias), PLAN, gradients=False) == "embedding.weight, 2 more"
    assert label((embedding,) * 3, PLAN, gradients=True) == "grad embedding.weight, 2 more"  # its unit has no name


def test_origins_stand_above_their_lines_once() -> None:
    origin = "m.py:3  y = f(x)"
    lines = Row("", 0, "a = f(x)", origin), Row("", 1, "del x"), Row("", 2, "b = f(a)", origin)
    text = printed(lines)
    assert [line.split("  ")[0] for line in text[1:5]] == ["# m.py:3", "a = f(x)", "del x", "b = f(a)"]


LONG = "t_transformer_h_0_attention_projection_of_the_output_with_a_very_long_name_weight"


def test_code_folds_to_its_width() -> None:
    folded = {
        'a = f(x)  # a: "cpu f32[2]"': ["a = f(x)"],
        "# only a comment\n(a, b) = f(x)": ["(a, b) = f(x)"],
        "a = reshape_impl(tokens, (2, 8, 16))": ["a = reshape_impl(tokens,", "    (2, 8, 16))"],  # a shape stays
        "(aa, bb, cc, dd, ee, ff, gg, hh, ii, jj, kk, ll) = wait(f)": ["(aa, ... 11 more) = wait(f)"],
        "del aaaaaaaa, bbbbbbbb, cccccccc, dddddddd, eeeeeeee, ffffffff": ["del aaaaaaaa, ... 5 more"],
        "a = f('x, y(z, w', 'it\\'s')": ["a = f('x, y(z, w', \"it's\")"],
        f"a = {LONG}": ["a =", f"    {LONG[:25]}…"],
    }
    assert {code: fold(code, [30]) for code in folded} == folded


def test_arguments_that_are_calls_are_not_broken_and_use_the_full_width_below_the_columns() -> None:
    code = "(y, y_1) = aten._attention(q.view([8, 4]).transpose(1, 2), k.view([8, 4]).transpose(1, 2), 0.0, True)"
    assert fold(code, [30, 60]) == [
        "(y, y_1) = aten._attention(",
        "    q.view([8, 4]).transpose(1, 2),",
        "    k.view([8, 4]).transpose(1, 2), 0.0, True)",
    ]
    assert fold(f"a = aten.mm(x, {LONG})", [30, 30, 90]) == ["a = aten.mm(x,", "", f"    {LONG})"]


NAMES = st.text("abc", min_size=1, max_size=40)
TUPLES = st.lists(NAMES, min_size=2, max_size=9).map(lambda names: f"({', '.join(names)})")


@given(NAMES, st.lists(NAMES | TUPLES, max_size=9), st.integers(20, 60))
def test_no_line_of_code_is_too_long(target: str, args: list[str], width: int) -> None:
    code = f"{target} = f({', '.join(args)})"
    lines = fold(code, [width])
    assert max(map(len, lines)) <= width
    assert "... 1 more" not in " ".join(lines)
    if len(code) <= width:
        assert lines == [code]


def test_a_timeline_is_formatted_as_text() -> None:
    regather = Gather(("t_w",), "f2", ("h.0.w",), backward=True, repeated=True)
    timeline = TIMELINE.with_ops(
        [OPS[0], op("free <- w: h.0.w"), op("free <- x"), regather, op("return <- y", backward=True)]
    )
    assert [" ".join(line.split()) for line in format_timeline(timeline).splitlines()] == [
        "gather f <- t_w, t_b h.0.w, h.0.b",
        "free w h.0.w",
        "-- backward --",
        "gather f2 <- t_w h.0.w again",
        "return <- y",
    ]
    assert "backward" not in format_timeline(TIMELINE.with_ops(OPS[:1]))
    numbered = format_timeline(timeline, numbered=True).splitlines()
    assert [line[:10] for line in numbered[1:4]] == ["op 1    fr", "-- backwar", "op 3    ga"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_steps_are_lines_or_a_bar_on_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with show_steps("plan", 2) as show:
        show("looks")
        show(ended=1)
        show("leaps")
    out, err = capsys.readouterr()
    assert out == ""
    if is_terminal:
        assert [part in err for part in ("1/2", "leaps", "\u2501")] == [True, True, True]  # the last is of a bar
    else:
        assert err == "plan 0/2 looks\nplan 1/2 leaps\n"
