"""The rooms of the package, and which rooms and libraries each may import.

The tests read the source (``ast``). Imports inside functions count as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
    """How a room may use a library."""

    NOT = 0
    TYPES = 1  # under `if TYPE_CHECKING:` only
    IMPORT = 2


NOT, TYPES, IMPORT = May

NOTHING: frozenset[str] = frozenset()
ALL = frozenset({"every room"})  # except for the rooms of extras
EXTRAS = frozenset({"lightning"})  # libraries that the base install lacks: only the room of its name may import each


def rooms(names: str) -> frozenset[str]:
    return frozenset(names.split())


@dataclass(frozen=True)
class Room:
    name: str  # a file, or a folder with "/" at its end
    torch: May
    distributed: May
    thunder: May
    reads: frozenset[str]  # the other rooms that it may import


# fmt: off
ROOMS = (  # each room reads only rooms above its row; rooms below the line are tools, which the core never reads
    # file or folder          torch   torch.d. thunder  reads
    Room("lazy.py",           NOT,    NOT,     NOT,     NOTHING),
    Room("safetensors_files.py",IMPORT,NOT,    NOT,     NOTHING),
    Room("encodings/",        IMPORT, NOT,     NOT,     NOTHING),
    Room("plan/amounts.py",   IMPORT, NOT,     NOT,     NOTHING),
    Room("plan/layout.py",    NOT,    NOT,     NOT,     NOTHING),
    Room("plan/precision.py", IMPORT, NOT,     NOT,     NOTHING),
    Room("plan/stored.py",    IMPORT, NOT,     NOT,     rooms("encodings")),
    Room("plan/formats.py",   IMPORT, NOT,     NOT,     rooms("encodings plan/precision plan/stored")),
    Room("plan/policy.py",    TYPES,  NOT,     NOT,     rooms("plan/formats plan/precision")),
    Room("plan/mesh.py",      NOT,    NOT,     NOT,     rooms("plan/policy")),
    Room("plan/geometry.py",  NOT,    NOT,     NOT,     rooms("plan/layout plan/mesh")),
    Room("plan/sizes.py",     NOT,    NOT,     NOT,     rooms("plan/policy")),
    Room("plan/params.py",    TYPES,  NOT,     NOT,     rooms("encodings plan/amounts plan/geometry plan/layout "
                                                              "plan/mesh plan/policy plan/sizes")),
    Room("plan/make_plan.py", TYPES,  NOT,     NOT,     rooms("plan/amounts plan/formats plan/geometry plan/layout "
                                                              "plan/mesh plan/params plan/policy plan/precision "
                                                              "plan/stored")),
    Room("plan/rows.py",      IMPORT, NOT,     NOT,     rooms("plan/params")),
    Room("plan/outer.py",     IMPORT, NOT,     NOT,     rooms("encodings plan/mesh plan/params plan/policy")),
    Room("plan/",             NOT,    NOT,     NOT,     NOTHING),
    Room("schedule/",         TYPES,  NOT,     NOT,     rooms("encodings plan")),
    Room("compat/private.py", TYPES,  TYPES,   NOT,     NOTHING),
    Room("compat/torch/",     IMPORT, IMPORT,  NOT,     rooms("compat/private")),
    Room("compat/imports.py", IMPORT, NOT,     IMPORT,  NOTHING),
    Room("compat/jitted.py",  IMPORT, NOT,     IMPORT,  NOTHING),
    Room("compat/lines.py",   NOT,    NOT,     IMPORT,  NOTHING),
    Room("compat/accelerate.py",NOT,NOT,       NOT,     NOTHING),
    Room("compat/uncapturable.py",IMPORT,IMPORT,NOT,    NOTHING),
    Room("compat/plans_of_transformers.py",IMPORT,IMPORT,NOT, NOTHING),
    Room("compat/",           IMPORT, NOT,     IMPORT,  rooms("plan schedule")),
    Room("comm/",             IMPORT, IMPORT,  NOT,     rooms("plan compat/plans_of_transformers compat/private "
                                                              "compat/torch")),
    Room("shares.py",         IMPORT, IMPORT,  NOT,     rooms("plan comm")),
    Room("traces/",           IMPORT, NOT,     IMPORT,  rooms("plan schedule compat")),
    Room("sharded/",          IMPORT, IMPORT,  NOT,     rooms("safetensors_files encodings plan schedule comm traces "
                                                              "compat/private compat/torch compat/accelerate")),
    Room("optim/",            IMPORT, NOT,     NOT,     rooms("plan compat/torch comm sharded")),
    Room("outer/",            IMPORT, IMPORT,  NOT,     rooms("encodings plan comm compat/torch sharded")),
    Room("spmd/run_trace.py", IMPORT, NOT,     IMPORT,  rooms("plan schedule compat traces")),
    Room("spmd/of_trace.py",  IMPORT, NOT,     IMPORT,  rooms("plan schedule compat traces spmd/run_trace")),
    Room("spmd/",             IMPORT, IMPORT,  NOT,     rooms("plan/amounts compat/private compat/torch")),
    Room("capture/arguments.py",IMPORT,TYPES,NOT,     rooms("safetensors_files plan sharded")),
    Room("capture/compilations.py",IMPORT,NOT,NOT,    NOTHING),
    Room("capture/",        IMPORT, NOT,     IMPORT,  rooms("plan schedule comm compat traces sharded spmd")),
    Room("checkpoint/",       IMPORT, IMPORT,  NOT,     rooms("safetensors_files plan comm compat/private "
                                                              "compat/torch sharded optim")),
    Room("hugging_face.py",   IMPORT, IMPORT,  NOT,     rooms("plan comm compat sharded capture checkpoint")),
    Room("lightning/",        IMPORT, IMPORT,  IMPORT,  rooms("plan comm compat/jitted sharded optim capture")),
    # -------------------------------------------------------------------------------------------------------------
    Room("tools/printing/",   NOT,    NOT,     NOT,     rooms("plan schedule")),
    Room("tools/table/rows.py",NOT,   NOT,     NOT,     rooms("plan schedule tools/printing")),
    Room("tools/table/lines.py",NOT,  NOT,     IMPORT,  rooms("plan traces tools/table/rows")),
    Room("tools/devices/",    IMPORT, IMPORT,  NOT,     rooms("encodings plan schedule comm tools/printing")),
    Room("tools/dry_run.py",  IMPORT, IMPORT,  IMPORT,  rooms("plan schedule compat comm traces sharded spmd capture "
                                                              "tools/devices")),
    Room("tools/measure.py",  NOT,    NOT,     IMPORT,  rooms("plan schedule comm sharded traces capture")),
    Room("tools/format_errors.py",IMPORT,NOT,  IMPORT,  rooms("comm sharded traces capture tools/printing")),
    Room("tools/compiled_programs.py", IMPORT, NOT, IMPORT, rooms("plan traces capture tools/printing")),
    Room("tools/forecast/rehearsal.py",IMPORT,IMPORT,IMPORT,rooms("encodings plan comm compat sharded traces")),
    Room("tools/forecast/loading.py",NOT,NOT,  NOT,     rooms("encodings plan")),
    Room("tools/forecast/",   IMPORT, NOT,     IMPORT,  rooms("plan schedule traces compat sharded "
                                                              "capture tools/printing tools/table/rows "
                                                              "tools/table/lines tools/forecast/rehearsal "
                                                              "tools/forecast/loading")),
    Room("tools/time/",       NOT,    NOT,     NOT,     rooms("plan schedule traces capture tools/printing "
                                                              "tools/devices tools/forecast")),
    Room("tools/table/",      NOT,    NOT,     IMPORT,  rooms("plan schedule spmd traces capture tools/printing "
                                                              "tools/devices tools/time tools/forecast "
                                                              "tools/table/rows tools/table/lines")),
    Room("tools/from_file.py",IMPORT, NOT,     NOT,     rooms("compat")),
    Room("tools/models.py",     IMPORT, IMPORT,  NOT,     rooms("tools/printing")),
    Room("tools/plan/fit.py", IMPORT, TYPES,   IMPORT,  rooms("plan schedule comm traces capture tools/printing "
                                                              "tools/dry_run tools/forecast")),
    Room("tools/plan/",       IMPORT, IMPORT,  NOT,     rooms("plan comm schedule traces capture tools/printing "
                                                              "encodings tools/devices tools/time tools/dry_run "
                                                              "tools/forecast tools/from_file "
                                                              "tools/models tools/table/rows")),
    Room("tools/views/print_rows.py",NOT,NOT,  NOT,     rooms("plan schedule tools/printing tools/table/rows")),
    Room("tools/views/page/", IMPORT, NOT,     TYPES,   rooms("plan schedule spmd compat traces capture tools/printing "
                                                              "tools/devices tools/dry_run tools/forecast "
                                                              "tools/time tools/table tools/models "
                                                              "tools/plan")),
    Room("tools/views/why.py",IMPORT, IMPORT,  NOT,     rooms("plan sharded traces capture tools/printing "
                                                              "tools/devices tools/compiled_programs tools/forecast "
                                                              "tools/time tools/table")),
    Room("tools/views/",      IMPORT, IMPORT,  IMPORT,  rooms("plan schedule spmd traces capture tools/printing "
                                                              "tools/devices tools/time tools/forecast tools/table "
                                                              "tools/views/print_rows")),
    Room("tools/convert.py",  IMPORT, IMPORT,  NOT,     rooms("safetensors_files plan checkpoint tools/printing")),
    Room("tools/cli.py",      NOT,    NOT,     NOT,     rooms("checkpoint spmd outer tools/convert tools/devices "
                                                              "tools/dry_run tools/from_file tools/models "
                                                              "tools/plan tools/table/rows tools/views")),
    Room("tools/__init__.py", NOT,    NOT,     NOT,     ALL),
    Room("__main__.py",       NOT,    NOT,     NOT,     rooms("tools/cli")),
    Room("__init__.py",       NOT,    NOT,     IMPORT,  ALL),
)
# fmt: on


def room_of(path: str) -> Room | None:
    """The first row that names the file or a folder around it."""
    return next((room for room in ROOMS if path == room.name or path.startswith(f"{name_of(room)}/")), None)


def name_of(room: Room) -> str:
    """Return the name of a room as ``Room.reads`` has it."""
    return room.name.removesuffix("/").removesuffix(".py")


def sources(folder: Path, names_from: Path = ROOT) -> dict[str, str]:
    """Return the text of each module, by its path."""
    return {str(file.relative_to(names_from)): file.read_text() for file in sorted(folder.rglob("*.py"))}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(parsed(source)))


@cache
def unparsed(node: ast.AST) -> str:
    return ast.unparse(node)


@cache
def imports_of(source: str) -> frozenset[tuple[str, May]]:
    """Return the dotted names that a source imports, or reaches as ``torch.distributed``, and how it uses them."""
    result: set[tuple[str, May]] = set()

    def visit(node: ast.AST, use: May) -> None:
        if isinstance(node, ast.Import):
            result.update((alias.name, use) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: rooms are imported by their full names"
            result.update((f"{node.module}.{alias.name}", use) for alias in node.names)
        elif isinstance(node, ast.Attribute) and unparsed(node) == "torch.distributed":
            result.add(("torch.distributed", use))
        for_types = node.body if isinstance(node, ast.If) and unparsed(node.test).endswith("TYPE_CHECKING") else []
        for child in ast.iter_child_nodes(node):
            visit(child, TYPES if child in for_types else use)

    visit(parsed(source), IMPORT)
    return frozenset(result)


def faults(path: str, source: str) -> list[str]:
    """Describe the imports of a file that its room may not have."""
    room = room_of(path)
    if room is None:
        return [f"{path} has no row in ROOMS"]
    return [
        f"{path} imports {name}{' for types' if use is TYPES else ''}"
        for name, use in sorted(imports_of(source))
        if not is_allowed(path, room, name, use)
    ]


def is_allowed(path: str, room: Room, name: str, use: May) -> bool:
    top, inside, *_ = [*name.split("."), ""]
    if top == "torch":
        return use <= (room.distributed if inside == "distributed" else room.torch)
    if top == "thunder":
        return use <= room.thunder
    if top == "thunder_zero":
        named = "/".join(name.split(".")[1:])
        read = room_of(f"{named}/__init__.py" if (PACKAGE / named).is_dir() else f"{named}.py")
        home = name_of(read) if read is not None else inside
        is_around = f"{name_of(room)}/".startswith(f"{home}/")
        is_read = is_around or any(f"{home}/".startswith(f"{read}/") for read in (name_of(room), *room.reads))
        return is_read or (room.reads is ALL and home not in EXTRAS)
    return top not in EXTRAS or path.startswith(f"{top}/")


def test_a_room_imports_only_what_it_may() -> None:
    for path, source, fault in (
        ("plan/policy.py", "from torch import nn", "plan/policy.py imports torch.nn"),
        ("plan/layout.py", "if TYPE_CHECKING:\n    import torch", "plan/layout.py imports torch for types"),
        ("schedule/free.py", "def f():\n    import thunder.core.trace", "schedule/free.py imports thunder.core.trace"),
        (
            "tools/printing/a.py",
            "import thunder_zero.traces.lift",
            "tools/printing/a.py imports thunder_zero.traces.lift",
        ),
        ("optim/a.py", "from thunder_zero.tools.time import lanes", "optim/a.py imports thunder_zero.tools.time.lanes"),
        ("traces/lift.py", "from torch import distributed as dist", "traces/lift.py imports torch.distributed"),
        ("traces/lift.py", "import torch\ntorch.distributed.barrier()", "traces/lift.py imports torch.distributed"),
        ("compat/casts.py", "from lightning.fabric import Fabric", "compat/casts.py imports lightning.fabric.Fabric"),
        ("__init__.py", "import thunder_zero.lightning", "__init__.py imports thunder_zero.lightning"),
        ("attic/old.py", "", "attic/old.py has no row in ROOMS"),
    ):
        assert faults(path, source) == [fault]
    assert faults("plan/policy.py", "if TYPE_CHECKING:\n    from torch import nn") == []
    assert faults("traces/lift.py", "import torch, thunder\nfrom thunder_zero.traces.symbols import x") == []
    assert [fault for path, source in sources(PACKAGE, PACKAGE).items() for fault in faults(path, source)] == []


SHARD_ARITHMETIC = "thunder_zero.plan.layout"
COUNTING = {  # transports have a group and no plan; a TrainingPlan has its own world size
    *("comm/native.py", "comm/pairwise.py", "tools/plan/training_plan.py"),
}


def counted_ranks(source: str) -> list[str]:
    """Return where a source reads a plan's number of ranks, or imports the arithmetic of rows."""
    counts = {"world_size", "rank", "replicas"}
    nodes = (node for node in nodes_of(source) if isinstance(node, ast.Attribute) and node.attr in counts)
    result = [unparsed(node) for node in nodes if unparsed(node.value).rpartition(".")[2] in ("plan", "_plan")]
    return result + [name for name, _ in imports_of(source) if name.startswith(SHARD_ARITHMETIC)]


def test_the_plan_alone_counted_ranks() -> None:
    assert counted_ranks("a = self._plan.world_size + plan.mesh.shard.size") == ["self._plan.world_size"]
    assert counted_ranks("from thunder_zero.plan import layout") == [SHARD_ARITHMETIC]
    result = {path: counted_ranks(text) for path, text in sources(PACKAGE, PACKAGE).items()}
    assert {path for path, names in result.items() if names and not path.startswith("plan/")} == COUNTING


def test_a_room_reads_only_rooms_above_its_row_and_the_listing_has_their_order() -> None:
    names = [room.name.rstrip("/").removesuffix(".py") for room in ROOMS]
    assert len(names) == len(set(names))
    for index, room in enumerate(ROOMS):
        assert room.reads is ALL or room.reads <= set(names[:index]), room.name
    listing = run_path(str(ROOT / "docs/listing.py"))
    assert list(listing["ORDER"]) == list(dict.fromkeys(room.name.partition("/")[0] for room in ROOMS))


def import_order(files: dict[str, str]) -> list[str]:
    """Sort modules, so that each comes after its imports, including imports for types.

    Args:
        files: sources by dotted names.

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


# Only one room patches Thunder and torch

ROOM_OF_WORKAROUNDS = "compat/"
PATCHES = (  # prefixes of names that only this room may use
    *("torch._", "torch.library", "torch.autograd.Variable._", "torch.distributed.distributed_c10d."),
    *("thunder.core.jit_ext.register_general_jit_lookaside", "thunder.torch._torch_to_thunder_function_map"),
    *("thunder.core.interpreter._", "atexit"),
)


def patches(source: str) -> list[str]:
    """Return the private names that a source uses, and the attributes of Thunder or torch that it assigns."""
    named = {name for name, _ in imports_of(source)}
    named |= {unparsed(node) for node in nodes_of(source) if isinstance(node, ast.Attribute)}
    result = [name for name in named if name.startswith(PATCHES)]
    modules = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes_of(source)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0] in ("torch", "thunder")
    }
    return sorted(result + [unparsed(node) for node in written_to(source) if root_of(node) in modules])


def written_to(source: str) -> Iterator[ast.expr]:
    """Yield attributes and items that are assigned or deleted, and the objects that ``setattr`` changes."""
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield node
        elif isinstance(node, ast.Call) and unparsed(node.func) in ("setattr", "delattr"):
            yield node.args[0]


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return unparsed(node)


def test_thunder_and_torch_are_patched_in_one_room() -> None:
    for source, patch in (
        ("import torch\ntorch.compile = None", "torch.compile"),
        ("from thunder.core import interpreter\ninterpreter.found[bool] = f", "interpreter.found[bool]"),
        ("from torch import Tensor\nsetattr(Tensor, name, f)", "Tensor"),
        ("from torch._dynamo import config", "torch._dynamo.config"),
        ("import torch\nx = torch._foreach_norm(y)", "torch._foreach_norm"),
        ("import atexit", "atexit"),
    ):
        assert patches(source) == [patch]
    assert patches("import torch\nx.y = torch.zeros(3)\ntorch.zeros(3).z.sum()") == []
    result = {path: patches(text) for path, text in sources(PACKAGE, PACKAGE).items()}
    assert any(result[path] for path in result if path.startswith(ROOM_OF_WORKAROUNDS))
    assert {path: names for path, names in result.items() if names and not path.startswith(ROOM_OF_WORKAROUNDS)} == {}


def private_names(source: str) -> set[str]:
    """Return the private modules and names of torch that a source uses. Names of operators are not private."""
    named = {name for name, _ in imports_of(source)}
    named |= {unparsed(node) for node in nodes_of(source) if isinstance(node, ast.Attribute)}
    dispatch = "torch.utils._python_dispatch."
    allowed = ("torch.ops.", "torch.utils._pytree", f"{dispatch}TorchDispatchMode", f"{dispatch}is_traceable")
    private = re.compile(r"torch\.(\w+\.)*_(?!_)")
    return {name for name in named if private.match(name) and not name.startswith(allowed)}


LIBRARIES = ("torch", "thunder", "transformers", "trl", "lightning", "accelerate")
BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "attrgetter")


def foreign_names(source: str, own: frozenset[str] = NOTHING) -> set[str]:
    """Return the private attributes, arguments and names in a source that are neither in ``own`` nor allowed."""
    is_private = re.compile(r"_[a-zA-Z]").match
    named: set[str | None] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute) and not unparsed(node).startswith("torch.ops."):
            named.add(node.attr)
        elif isinstance(node, ast.keyword):
            named.add(node.arg)
        elif isinstance(node, ast.Call) and unparsed(node.func) in BY_NAME:
            named |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            named |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return {name for name in named if name is not None and is_private(name)} - own - {"_pytree", "_python_dispatch"}


def own_names(source: str) -> set[str]:
    """Return the functions, classes, arguments, variables and attributes of ``self`` that a source defines."""
    named: set[str] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            named.add(node.name)
        elif isinstance(node, ast.arg):
            named.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            named.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and unparsed(node.value) == "self":
            named.add(node.attr)
    return named


def test_private_names_of_libraries_stand_in_one_room() -> None:
    # A private name that the package defines as well escapes this test.
    for line, name in (
        ("proxy._shape = shape", "_shape"),
        ("thunder.core.proxies.TensorProxy(_shape=shape)", "_shape"),
        ("getattr(model, '_overrides_parameters')", "_overrides_parameters"),
        ("from thunder.core.interpreter import _run_frame", "_run_frame"),
        ("from lightning.fabric._utils import x", "_utils"),
    ):
        assert foreign_names(line) == {name}
    assert foreign_names("self._rows", frozenset(own_names("self._rows = 1"))) == set()
    private = run_path(str(PACKAGE / "compat/private.py"))
    others = [text for path, text in sources(PACKAGE, PACKAGE).items() if not path.startswith(ROOM_OF_WORKAROUNDS)]
    own = frozenset(name for text in others for name in own_names(text)) - private["ATTRIBUTES"].keys()
    assert {name for text in others for name in foreign_names(text, own)} == private["ATTRIBUTES"].keys()


def test_private_names_of_torch_are_in_one_file() -> None:
    assert private_names("from torch._dynamo import config\nimport torch\ntorch._foreach_norm(torch.ops.aten._x)")
    home = "compat/private.py"
    result = {path: private_names(text) for path, text in sources(PACKAGE, PACKAGE).items() if path != home}
    assert {path: names for path, names in result.items() if names} == {}
    private = run_path(str(PACKAGE / home))
    assert [name for name in private["NAMES"] if private["__getattr__"](name) is None] == []


def test_a_version_of_thunder_is_named_in_one_room() -> None:
    (version,) = re.findall(r'"lightning-thunder>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    room = ("thunder_zero/compat/", "tests/one/test_compat.py", "tests/one/test_needs.py")
    texts = {path: text for folder in (PACKAGE, TESTS, ROOT / "examples") for path, text in sources(folder).items()}
    assert any(version in text for path, text in texts.items() if path.startswith(room))
    assert [path for path, text in texts.items() if version in text and not path.startswith(room)] == []


def test_a_workaround_opens_with_its_need() -> None:
    # A section of a file counts as a workaround if the file has several.
    needs = run_path(str(ROOT / "docs/listing.py"))["needs_by_name"]()
    room = PACKAGE / ROOM_OF_WORKAROUNDS
    files = {str(path.relative_to(room)) for path in room.rglob("*.py") if path.name != "__init__.py"}
    assert files == {name.partition(":")[0] for name in needs}
    assert [name for name, line in needs.items() if "?" in name or not line.endswith(".") or len(line) > 82] == []


# The tests


@cache
def brings_thunder(name: str) -> bool:
    """Return whether an import brings Thunder, by the table of rooms."""
    top, *rest = name.split(".")
    if top == "thunder_zero":
        result = [room_of(f"{'/'.join(rest[:length])}.py") for length in range(len(rest), 0, -1)]
        room = next((room for room in result if room is not None), None)
        return room is None or room.thunder is not NOT
    if name.startswith("tests.harness."):
        source = (TESTS / "harness" / f"{rest[1]}.py").read_text()
        return any(brings_thunder(inner) for inner, _ in imports_of(source))
    return top == "thunder"


def faults_of_test(path: str, source: str) -> list[str]:
    """Return forbidden imports of a test module: other test modules, and Thunder if the tests are pure."""
    names = sorted(name for name, _ in imports_of(source))
    others = [name for name in names if name.startswith("tests.") and not name.startswith("tests.harness.")]
    return others + [name for name in names if path.startswith("tests/pure/") and brings_thunder(name)]


def test_a_test_imports_only_the_harness_and_a_pure_one_no_thunder() -> None:
    for path, source, imported in (
        ("tests/one/test_a.py", "from tests.one.test_b import x", "tests.one.test_b.x"),
        ("tests/pure/test_a.py", "import thunder", "thunder"),
        ("tests/pure/test_a.py", "from thunder_zero.capture import transform", "thunder_zero.capture.transform"),
        ("tests/pure/test_a.py", "from thunder_zero.traces import lift", "thunder_zero.traces.lift"),
        ("tests/pure/test_a.py", "from thunder_zero import ZERO3", "thunder_zero.ZERO3"),
        ("tests/pure/test_a.py", "from tests.harness.models import Mlp", "tests.harness.models.Mlp"),
    ):
        assert faults_of_test(path, source) == [imported]
    assert {path: result for path, source in sources(TESTS).items() if (result := faults_of_test(path, source))} == {}
