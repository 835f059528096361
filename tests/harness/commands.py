"""Runs ``thunder-zero`` in this process, as a user does in a shell."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

from thunder_zero.tools import cli


def run_command(*arguments: object) -> tuple[int, str, str]:
    """Run a command. Return its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def output_of(*arguments: object) -> str:
    """Run a command that succeeds. Return its stdout."""
    code, out, err = run_command(*arguments)
    assert code == 0, err
    return out


def refusal_of(*arguments: object) -> str:
    """Run a command that is refused in one line, and prints nothing else. Return the line."""
    code, out, err = run_command(*arguments)
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert err.startswith("thunder-zero: "), err
    return err
