"""The rooms of the package and what each may import: the architecture, as a table that is checked.

Read from the source (``ast``), because importing any room runs ``thunder_zero/__init__.py`` and with it all
others. Imports inside functions count like those at the top.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "thunder_zero", ROOT / "tests"


class May(IntEnum):
    """How far a room may go with a library."""

    NOT = 0
    TYPES = 1  # under `if TYPE_CHECKING:` only
    IMPORT = 2


NOT, TYPES, IMPORT = May

NOTHING: frozenset[str] = frozenset()
ALL = frozenset({"every room"})  # but for extras
EXTRAS = frozenset({"lightning"})  # libraries that the base install lacks: each for the room of its name alone


def rooms(names: str) -> frozenset[str]:
    return frozenset(names.split())


DATA = rooms("layout times precision policy sizes plan")


@dataclass(frozen=True)
class Room:
    name: str  # a file, or a folder with "/" at its end
    torch: May
    distributed: May
    thunder: May
    reads: frozenset[str]  # the other rooms that it may import


# fmt: off
ROOMS = (  # bottom up: each reads rooms above its row only
    # file or folder      torch   torch.d. thunder  reads
    Room("_compat.py",    IMPORT, NOT,     IMPORT,  NOTHING),
    Room("_shortcuts.py", NOT,    NOT,     IMPORT,  NOTHING),
    Room("layout.py",     NOT,    NOT,     NOT,     NOTHING),
    Room("times.py",      NOT,    NOT,     NOT,     NOTHING),
    Room("precision.py",  IMPORT, NOT,     NOT,     NOTHING),
    Room("policy.py",     TYPES,  NOT,     NOT,     rooms("times precision")),
    Room("sizes.py",      NOT,    NOT,     NOT,     rooms("policy")),
    Room("plan.py",       TYPES,  NOT,     NOT,     rooms("layout precision policy sizes")),
    Room("rows.py",       IMPORT, NOT,     NOT,     rooms("layout plan")),
    Room("marks.py",      IMPORT, NOT,     NOT,     NOTHING),
    Room("schedule/",     TYPES,  NOT,     NOT,     DATA),
    Room("report/",       NOT,    NOT,     NOT,     DATA | {"schedule"}),
    Room("cost/",         NOT,    NOT,     NOT,     DATA | {"schedule"}),
    Room("trace/",        IMPORT, NOT,     IMPORT,  DATA | {"schedule"}),
    Room("comm/",         IMPORT, IMPORT,  NOT,     DATA | {"rows"}),
    Room("runtime/",      IMPORT, TYPES,   NOT,     DATA | {"rows", "marks", "schedule", "comm"}),
    Room("whole_step/",   IMPORT, NOT,     NOT,     DATA | {"rows", "marks", "comm", "runtime"}),
    Room("calibration/",  IMPORT, IMPORT,  NOT,     DATA | {"schedule", "report", "cost", "comm"}),
    Room("state_dict/",   IMPORT, IMPORT,  NOT,     DATA | {"rows", "comm", "runtime"}),
    Room("checkpoint/",   IMPORT, IMPORT,  NOT,     DATA | {"rows", "comm", "runtime", "state_dict"}),
    Room("convert/",      IMPORT, IMPORT,  NOT,     DATA | {"report", "state_dict", "checkpoint"}),
    Room("arguments.py",  IMPORT, TYPES,   NOT,     DATA | {"runtime"}),
    Room("refusals.py",   IMPORT, NOT,     IMPORT,  rooms("runtime")),
    Room("placement.py",  IMPORT, NOT,     IMPORT,  rooms("marks runtime")),
    Room("compiled.py",   NOT,    NOT,     IMPORT,  rooms("plan schedule trace")),
    Room("zero_module.py",IMPORT, NOT,     IMPORT,  rooms("runtime refusals compiled")),
    Room("program_transform.py",IMPORT,NOT,IMPORT,  rooms("plan schedule trace runtime refusals compiled")),
    Room("transform.py",  IMPORT, NOT,     IMPORT,  DATA | rooms("comm runtime state_dict trace arguments refusals "
                                                                 "placement zero_module program_transform")),
    Room("dynamo/",       IMPORT, NOT,     IMPORT,  rooms("policy runtime arguments refusals compiled zero_module "
                                                          "program_transform transform")),
    Room("plugin.py",     IMPORT, NOT,     IMPORT,  rooms("policy trace arguments refusals transform dynamo")),
    Room("full_parameters.py",IMPORT,NOT,  NOT,     rooms("plan rows marks comm runtime trace")),
    Room("dry_run.py",    IMPORT, NOT,     IMPORT,  DATA | rooms("cost trace runtime compiled transform")),
    Room("measure.py",    NOT,    NOT,     IMPORT,  DATA | rooms("schedule comm runtime zero_module")),
    Room("forecast/",     IMPORT, NOT,     IMPORT,  DATA | rooms("schedule report trace comm runtime "
                                                                 "compiled zero_module")),
    Room("fit.py",        IMPORT, NOT,     IMPORT,  DATA | rooms("schedule report comm compiled dry_run forecast")),
    Room("estimate.py",   NOT,    NOT,     NOT,     rooms("compiled cost forecast")),
    Room("print_trace.py",NOT,    NOT,     IMPORT,  rooms("report zero_module compiled forecast")),
    Room("ask/",          NOT,    NOT,     IMPORT,  rooms("layout plan policy schedule report cost compiled "
                                                          "zero_module forecast estimate print_trace")),
    Room("from_file.py",  IMPORT, NOT,     NOT,     NOTHING),
    Room("planner/",      IMPORT, NOT,     NOT,     DATA | rooms("schedule report cost compiled dry_run forecast "
                                                                 "from_file")),
    Room("hugging_face/", IMPORT, NOT,     NOT,     rooms("marks comm runtime state_dict checkpoint convert")),
    Room("doctor.py",     IMPORT, IMPORT,  IMPORT,  rooms("_compat policy transform")),
    Room("lightning.py",  IMPORT, NOT,     IMPORT,  DATA | rooms("comm runtime state_dict arguments zero_module "
                                                                 "transform plugin")),
    Room("cli.py",        NOT,    NOT,     NOT,     rooms("cost checkpoint convert dry_run print_trace ask planner "
                                                          "from_file doctor calibration")),
    Room("__init__.py",   NOT,    NOT,     NOT,     ALL),
)
# fmt: on


def room_of(path: str) -> Room | None:
    """The first row that names the file or a folder around it."""
    return next((room for room in ROOMS if path == room.name or path.startswith(f"{room.name.rstrip('/')}/")), None)


def sources(folder: Path, names_from: Path = ROOT) -> dict[str, str]:
    """The text of each module, by its path."""
    return {str(file.relative_to(names_from)): file.read_text() for file in sorted(folder.rglob("*.py"))}


@cache
def imports_of(source: str) -> frozenset[tuple[str, May]]:
    """Dotted names that the source imports (or reaches as ``torch.distributed``), and for what."""
    found: set[tuple[str, May]] = set()

    def visit(node: ast.AST, use: May) -> None:
        if isinstance(node, ast.Import):
            found.update((alias.name, use) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: rooms are imported by their full names"
            found.update((f"{node.module}.{alias.name}", use) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.add(("torch.distributed", use))
        for_types = node.body if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") else []
        for child in ast.iter_child_nodes(node):
            visit(child, TYPES if child in for_types else use)

    visit(ast.parse(source), IMPORT)
    return frozenset(found)


def faults(path: str, source: str) -> list[str]:
    """What the file imports and its room may not."""
    room = room_of(path)
    if room is None:
        return [f"{path} has no row in ROOMS"]
    return [
        f"{path} imports {name}{' for types' if use is TYPES else ''}"
        for name, use in sorted(imports_of(source))
        if not allowed(path, room, name, use)
    ]


def allowed(path: str, room: Room, name: str, use: May) -> bool:
    top, inside, *_ = [*name.split("."), ""]
    if top == "torch":
        return use <= (room.distributed if inside == "distributed" else room.torch)
    if top == "thunder":
        return use <= room.thunder
    if top == "thunder_zero":
        home = path.partition("/")[0].removesuffix(".py")
        return inside in room.reads or inside == home or (room.reads is ALL and inside not in EXTRAS)
    return top not in EXTRAS or path == f"{top}.py"


def test_a_room_imports_only_what_it_may() -> None:
    for path, source, fault in (
        ("policy.py", "from torch import nn", "policy.py imports torch.nn"),
        ("layout.py", "if TYPE_CHECKING:\n    import torch", "layout.py imports torch for types"),
        ("schedule/free.py", "def f():\n    import thunder.core.trace", "schedule/free.py imports thunder.core.trace"),
        ("report/html.py", "from thunder_zero.trace import lift", "report/html.py imports thunder_zero.trace.lift"),
        ("trace/lift.py", "from torch import distributed as dist", "trace/lift.py imports torch.distributed"),
        ("trace/lift.py", "import torch\ntorch.distributed.barrier()", "trace/lift.py imports torch.distributed"),
        ("trace/casts.py", "from lightning.fabric import Fabric", "trace/casts.py imports lightning.fabric.Fabric"),
        ("__init__.py", "import thunder_zero.lightning", "__init__.py imports thunder_zero.lightning"),
        ("attic/old.py", "", "attic/old.py has no row in ROOMS"),
    ):
        assert faults(path, source) == [fault]
    assert faults("policy.py", "if TYPE_CHECKING:\n    from torch import nn") == []
    assert faults("trace/lift.py", "import torch, thunder\nfrom thunder_zero.trace.symbols import x") == []
    assert [fault for path, source in sources(PACKAGE, PACKAGE).items() for fault in faults(path, source)] == []


def test_a_room_reads_only_rooms_above_its_row_and_the_listing_has_their_order() -> None:
    names = [room.name.rstrip("/").removesuffix(".py") for room in ROOMS]
    assert len(names) == len(set(names))
    for at, room in enumerate(ROOMS):
        assert room.reads is ALL or room.reads <= set(names[:at]), room.name
    listing = run_path(str(ROOT / "docs/listing.py"))
    assert list(listing["ORDER"]) == [room.name.rstrip("/") for room in ROOMS]


def import_order(files: dict[str, str]) -> list[str]:
    """Modules, given their sources by dotted names, each after those that it imports, for types too.

    Raises:
        CycleError: modules import each other in a circle.
    """

    def read(name: str) -> str:
        return name if name in files or not name else read(name.rpartition(".")[0])

    graph = {module: {read(name) for name, _ in imports_of(source)} - {module} for module, source in files.items()}
    return list(TopologicalSorter(graph).static_order())


def test_no_modules_import_each_other() -> None:
    circle = {"p.b": "if TYPE_CHECKING:\n    from p.c import y", "p.c": "def f():\n    from p.a import x"}
    with pytest.raises(CycleError):
        import_order({"p": "", "p.a": "from p import b", **circle})
    paths = sources(PACKAGE)
    dotted = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): paths[path] for path in paths}
    assert len(import_order(dotted)) > 50


def too_long(source: str) -> list[str]:
    """Functions above 50 lines and classes above 200, docstrings included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > (200 if isinstance(node, ast.ClassDef) else 50):
                found.append(f"{node.name}: {lines} lines")
    return found


def test_a_function_fits_a_screen() -> None:
    assert too_long("def f():\n" + "    x = 1\n" * 50) == ["f: 51 lines"]
    assert too_long("class A:\n" + "    x = 1\n" * 199) == []
    for folder in (PACKAGE, TESTS, ROOT / "examples", ROOT / "docs"):
        assert {path: long for path, source in sources(folder).items() if (long := too_long(source))} == {}


# The tests


@cache
def brings_thunder(name: str) -> bool:
    """By the table: ``thunder_zero`` itself does in any case, and is not meant."""
    top, *rest = name.split(".")
    if top == "thunder_zero":
        room = room_of("/".join([*rest[:1], "*"])) or room_of(f"{rest[0]}.py") if rest else None
        return room is None or room.thunder is not NOT
    if name.startswith("tests.harness."):
        source = (TESTS / "harness" / f"{rest[1]}.py").read_text()
        return any(brings_thunder(inner) for inner, _ in imports_of(source))
    return top == "thunder"


def faults_of_test(path: str, source: str) -> list[str]:
    """What a module of the tests imports and may not: another room's tests; Thunder, if the tests are pure."""
    names = sorted(name for name, _ in imports_of(source))
    others = [name for name in names if name.startswith("tests.") and not name.startswith("tests.harness.")]
    return others + [name for name in names if path.startswith("tests/pure/") and brings_thunder(name)]


def test_a_test_imports_only_the_harness_and_a_pure_one_no_thunder() -> None:
    for path, source, imported in (
        ("tests/one/test_a.py", "from tests.one.test_b import x", "tests.one.test_b.x"),
        ("tests/pure/test_a.py", "import thunder", "thunder"),
        ("tests/pure/test_a.py", "from thunder_zero import transform", "thunder_zero.transform"),
        ("tests/pure/test_a.py", "from thunder_zero.trace import lift", "thunder_zero.trace.lift"),
        ("tests/pure/test_a.py", "from thunder_zero import ZERO3", "thunder_zero.ZERO3"),
        ("tests/pure/test_a.py", "from tests.harness.models import Mlp", "tests.harness.models.Mlp"),
    ):
        assert faults_of_test(path, source) == [imported]
    assert {path: found for path, source in sources(TESTS).items() if (found := faults_of_test(path, source))} == {}
