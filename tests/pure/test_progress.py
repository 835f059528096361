"""Steps are shown on stderr: as a bar on a terminal, otherwise as lines."""

from __future__ import annotations

import pytest

from thunder_zero.tools.printing.progress import show_steps


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
        assert "1/2" in err
        assert "leaps" in err
        assert "\u2501" in err  # a bar
    else:
        assert err == "plan 0/2 looks\nplan 1/2 leaps\n"
