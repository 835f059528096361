"""Timelines written by hand or drawn by Hypothesis, shown as lines of text; and an interpreter of timelines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf, prod
from types import MappingProxyType

import torch
from hypothesis import strategies as st

from thunder_zero.plan.layout import is_sharded
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.policy import RECOMPUTE, STAGES, MiB, Policy, Times
from thunder_zero.schedule.ops import Compute, Defer, Free, Gather, Launch, Op, Reduce, Return, Wait, Work, ends
from thunder_zero.schedule.timeline import Timeline, Value
from thunder_zero.tools.time.lanes import Span

CHEAP_BITS = 12
WORK = {"*": Work.MATMUL, "?": Work.OTHER, "~": Work.RANDOM, "/": Work.VIEW, "|": Work.VIEW}  # by mark, see ``program``
ALONE = Policy(
    stage=3, bucket_bytes=0, in_flight_bytes=0, reshard_after_forward=True
)  # no bucket merges, and no gather runs ahead


def make_param(path: str, shape: tuple[int, ...], unit: str, policy: Policy, **fields: object) -> Param:
    """Return a parameter as ``make_plan`` plans it, with ``fields`` replaced."""
    stage = STAGES[policy.stage]
    sharded = stage.sharded and is_sharded(shape)
    once = not sharded or stage.kept_unsharded
    dtype = fields.get("dtype", torch.float32)
    compute = fields.get("compute_dtype", dtype)
    reduce = fields.get("reduce_dtype", compute)
    gather_per_unit = sharded and not once and policy.gather_per_unit
    resident = sharded and stage.resident
    param = Param(path, (), shape, dtype, compute, reduce, True, unit, sharded, resident, once, gather_per_unit)  # type: ignore[arg-type]
    return replace(param, **fields)  # type: ignore[arg-type]


def lines(timeline: Timeline, *kinds: type[Op], backward: bool | None = None) -> list[str]:
    """Describe each operation in a line: its kind and parameters, or the values that it writes and reads. FREEs of
    other values than gathered parameters are left out."""

    def line(op: Op) -> str:
        assignment = f"{' '.join(op.writes) or 'return'} <- {' '.join(getattr(op, 'returned', op.reads))}"
        return f"{op.kind} {' '.join(op.params)}" if op.params else assignment

    ops = (op for op in timeline.ops if op.params or not isinstance(op, Free))
    return [line(op) for op in ops if isinstance(op, kinds or Op) and backward in (None, op.backward)]


def spans_in_words(spans: Iterable[Span]) -> list[str]:
    """Describe each span: its lane, or "wait" if compute waits; its start and end."""
    return [f"{'wait' if span.waits else span.lane} {span.start:.17g} {span.end:.17g}" for span in spans]


def gathered(timeline: Timeline, *, backward: bool) -> Counter[str]:
    gathers = (op for op in timeline.ops if isinstance(op, Gather) and op.backward == backward)
    return Counter(path for op in gathers for path in op.params)


def split(text: str) -> list[str]:
    """Return the lines of a text without comments. A ";" separates lines as well."""
    pieces = (piece for line in text.splitlines() for piece in line.partition("#")[0].split(";"))
    return [piece.strip() for piece in pieces if piece.strip()]


def in_flight_bytes(timeline: Timeline, kind: type[Launch]) -> tuple[int, ...]:
    """Return the full bytes that launches of a kind have in flight after each operation."""
    changes = (timeline.traffic(op).full * (isinstance(op, kind) - ends(op, kind)) for op in timeline.ops)
    return tuple(accumulate(changes))


@dataclass(frozen=True)
class Use:
    """A use of a parameter: ``y <- x, w`` in forward, and ``gx <- gy, w`` and ``gw <- gy, x`` in backward.

    Attributes:
        path: the parameter.
        steps: computations between the parameter and its use. "view" views the last value, "pair" writes two values,
            "constant" also reads a constant, "random" is not repeatable, and a path also reads another parameter.
        needed: backward reads the value of the last step.
        view_in_backward: it reads a view of the value.
        random: a random operation follows the use.
        returned: forward returns the value of the last step.
    """

    path: str
    steps: tuple[str, ...] = ()
    needed: bool = True
    view_in_backward: bool = False
    random: bool = False
    returned: bool = False


@dataclass
class Builder:
    """A timeline under construction: gathers at first use, reductions right after their gradients."""

    plan: Plan
    ops: list[Op] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    full: dict[str, str] = field(default_factory=dict)  # path -> value of the full parameter
    backward: bool = False

    def compute(self, reads: Iterable[str], *writes: str, repeatable: bool = True) -> None:
        for name in (*reads, *writes):
            self.values.setdefault(name, Value(8, "float32"))
        self.ops.append(
            Compute(tuple(reads), writes, len(self.ops), self.backward, repeatable=repeatable, number=len(self.ops))
        )

    def launch(self, launch: Launch, result: str) -> None:
        self.ops += launch, Wait(launch, (result,))

    def weigh(self, param: Param, *names: str) -> None:
        self.values.update(dict.fromkeys(names, Value(param.full_bytes, str(param.compute_dtype))))

    def use(self, path: str) -> str:
        """Return the full parameter; gather it at its first use."""
        param = self.plan.by_name[path]
        if path not in self.full and not param.sharded:
            self.full[path] = f"t_{path}"
            if param.is_cast:
                self.weigh(param, path)
                self.compute((f"t_{path}",), path)
                self.full[path] = path
        if path not in self.full:
            self.weigh(param, f"fut_{path}", path)
            nbytes = prod(self.plan.shard_shape(param)) * param.dtype.itemsize
            self.values[f"t_{path}"] = Value(nbytes, str(param.dtype))
            self.launch(Gather((f"t_{path}",), f"fut_{path}", (path,)), path)
            self.full[path] = path
        return self.full[path]

    def derived(self, number: int, use: Use) -> str:
        value = self.use(use.path)
        for depth, step in enumerate(use.steps):
            name = f"c{number}.{depth}"
            if step == "view":
                self.compute((value,), name)
            elif step == "pair":
                self.compute((value,), f"{name}'", name)
            elif step == "random":
                self.compute((value,), name, repeatable=False)
            elif step == "constant":
                self.compute((), f"k{number}.{depth}")
                self.compute((value, f"k{number}.{depth}"), name)
            else:
                self.compute(dict.fromkeys((value, self.use(step))), name)
            value = name
        return value

    def reduce(self, param: Param) -> str:
        read, axes = f"g_{param.path}", self.plan.reduced_over(param)
        for over in axes:
            name = param.path if over == axes[-1] else f"{over}_{param.path}"
            handle, mean = f"red_{name}", f"mean_{name}"
            self.weigh(param, handle, read, mean)
            if over != axes[0]:  # between two reductions a mean has the dtype in which both travel
                self.values[read] = replace(self.values[read], dtype=str(param.reduce_dtype))
            self.launch(Reduce((read,), handle, (param.path,), over), mean)
            read = mean
        return read


def lifted(plan: Plan, uses: Sequence[Use], *, training: bool = True) -> Timeline:
    """Return the timeline of a model that uses its parameters in the order of ``uses``."""
    builder = Builder(plan)
    x, last = "x", []
    outputs: dict[str, None] = {}
    for number, use in enumerate(uses):
        value = builder.derived(number, use)
        last.append((x, value))
        builder.compute((x, value), f"y{number}")
        x = f"y{number}"
        if use.random:
            builder.compute((x,), f"d{number}", repeatable=False)
            x = f"d{number}"
        if use.returned:
            outputs[value] = None
    outputs[x] = None
    builder.ops.append(Return(tuple(outputs)))
    gradients: list[tuple[str, str]] = []
    if training:
        gradients, last_gradient = _backward(builder, uses, last)
        builder.ops.append(Return((*(mean for _, mean in gradients), last_gradient), backward=True))
    inputs = {"x": None, **{f"t_{param.path}": param.path for param in plan.params}}
    tangents = frozenset({"g"} if training else ())
    return Timeline(tuple(builder.ops), builder.values, plan, inputs, tangents, tuple(gradients))


def _backward(
    builder: Builder, uses: Sequence[Use], last: Sequence[tuple[str, str]]
) -> tuple[list[tuple[str, str]], str]:
    """Append backward; return the parameters' gradients with their paths, and the gradient of ``x``."""
    builder.backward = True
    left = Counter(use.path for use in uses)
    made: dict[str, list[str]] = {}
    g = "g"
    reduced: list[tuple[str, str]] = []
    for number, (use, (x, value)) in reversed(list(enumerate(zip(uses, last, strict=True)))):
        param = builder.plan.by_name[use.path]
        if use.needed and use.view_in_backward:
            builder.compute((value,), f"b{number}")
            value = f"b{number}"
        if param.requires_grad:
            builder.compute(dict.fromkeys((g, x)), f"gw{number}")
            made.setdefault(use.path, []).append(f"gw{number}")
        builder.compute((g, value) if use.needed else (g,), f"gx{number}")
        g = f"gx{number}"
        left[use.path] -= 1
        if param.requires_grad and not left[use.path]:
            builder.compute(made[use.path], f"g_{use.path}")
            reduced.append((param.path, builder.reduce(param)))
    return reduced, g


def model(
    policy: Policy, *uses: Use | str, training: bool = True, replicas: int = 1, **fields: dict[str, object]
) -> Timeline:
    """Return a timeline of 4-byte parameters named ``unit.name``; ``fields`` has changed fields by ``unit_name``."""
    all_uses = [use if isinstance(use, Use) else Use(use) for use in uses]
    paths = dict.fromkeys(path for use in all_uses for path in (use.path, *use.steps) if "." in path)
    params = []
    for path in paths:
        special: dict[str, object] = {"shape": (1,), **fields.get(path.replace(".", "_"), {})}
        params.append(make_param(path, unit=path.split(".")[0], policy=policy, **special))  # type: ignore[arg-type]
    return lifted(Plan(policy, Mesh.of(2, replicas=replicas), tuple(params)), all_uses, training=training)


def program(text: str, policy: Policy, nbytes: Mapping[str, int] = MappingProxyType({})) -> Timeline:
    """Return a timeline from lines such as ``y <-* x w``. Lines after ``--`` are backward.

    The mark names the work: none is cheap pointwise work, ``*`` a matmul, ``?`` unknown, ``~`` random, ``/`` a view,
    ``|`` a view or a copy; ``!`` overwrites the second value that it reads. ``gather unit.w`` gathers a parameter and
    waits. A value has 8 bytes by default; ``nbytes`` has other sizes.
    """
    paths = dict.fromkeys(re.findall(r"gather ([\w.]+)", text))
    params = tuple(
        make_param(path, (9,) if "bias" in path else (3, 3), path.rpartition(".")[0], policy) for path in paths
    )
    ops: list[Op] = []
    values = {name: Value(size, "float32") for name, size in {"x": 8, **nbytes}.items()}
    backward = False
    for line in split(text):
        if line == "--":
            backward = True
            ops.append(Return(tuple(name for name in values if name.startswith("out"))))
        elif line.startswith("gather "):
            path = line.split()[1]
            launch = Gather((f"t_{path}",), f"fut_{path}", (path,))
            ops += launch, Wait(launch, (path,))
            values[f"t_{path}"] = Value(20, "float32")
            values |= dict.fromkeys((f"fut_{path}", path), Value(36, "float32"))
        else:
            writes, mark, reads = re.fullmatch(r"(.*) <-(\S*)(.*)", line).groups()
            inputs, outputs = tuple(reads.split()), tuple(writes.split())
            repeatable, cheap = mark not in ("~", "!"), mark in ("", "/")
            work, updates = WORK.get(mark, Work.POINTWISE), (inputs[1],) if mark == "!" else ()
            ops.append(
                Compute(inputs, outputs, line, backward, False, repeatable, work, cheap, updates, number=len(ops))
            )
            base = values[inputs[0]].base or inputs[0] if mark == "/" else ""
            values |= {name: Value(nbytes.get(name, 8), "float32", base) for name in outputs}
    ops.append(Return(ops[-1].writes[:1], backward))
    arguments = {"x": None, **{f"t_{path}": path for path in paths}}
    return Timeline(tuple(ops), values, Plan(policy, Mesh.of(2), params), arguments, frozenset({"g"}))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Draw a lifted timeline of a random model: units, ties, cones, frozen and unused parameters, all stages."""
    policy = Policy(
        stage=draw(st.integers(0, 3)),
        bucket_bytes=draw(st.sampled_from((0, 16, 64, 200, MiB))),
        prefetch=draw(st.integers(0, 4)),
        in_flight_bytes=draw(st.sampled_from((0, 16, 64, 200, MiB))),
        gather_per_unit=draw(st.booleans()),
        reshard_after_forward=draw(st.sampled_from((None, True))),
        recompute=draw(st.sampled_from(RECOMPUTE)),
    )
    params = []
    for unit in range(draw(st.integers(1, 4))):
        for number in range(draw(st.integers(1, 4))):
            shape = draw(st.lists(st.integers(0, 5), max_size=2).map(tuple))
            fields: dict[str, object] = {
                name: draw(st.sampled_from((torch.float32, torch.bfloat16)))
                for name in ("dtype", "compute_dtype", "reduce_dtype")
            }
            fields["requires_grad"] = draw(st.integers(0, 3)) > 0
            if policy.stage == 3 and draw(st.integers(0, 4)) == 0:
                fields |= {"kept_unsharded": True}
            params.append(make_param(f"u{unit}.p{number}", shape, f"u{unit}" if unit else "", policy, **fields))
    mesh = Mesh.of(draw(st.integers(1, 8)), replicas=draw(st.sampled_from((1, 1, 3))))
    plan = Plan(policy, mesh, tuple(params))
    paths = [param.path for param in params]
    order = [path for path in paths if draw(st.integers(0, 5)) > 0]  # so that some are unused
    for _ in range(draw(st.integers(0, 3))):  # ties
        order.insert(draw(st.integers(0, len(order))), draw(st.sampled_from(paths)))
    steps = st.lists(st.sampled_from(("view", "pair", "constant", "random", *paths)), max_size=3).map(tuple)
    often, seldom = st.integers(0, 2).map(bool), st.integers(0, 5).map(lambda number: number == 0)
    flags = st.tuples(often, st.booleans(), seldom, seldom)
    uses = [Use(path, draw(steps), *draw(flags)) for path in order]
    return with_cheap(lifted(plan, uses, training=draw(often)), draw(st.integers(0, (1 << CHEAP_BITS) - 1)))


@st.composite
def timed(draw: st.DrawFn) -> Timeline:
    """Draw a lifted timeline whose policy has times of most buckets: small integers, so that sums are exact.

    Units with parameters that are kept unsharded have no time in forward: prefetch would use it for their first read in
    backward, where a test's clock counts no time.
    """
    timeline = draw(timelines())
    plan = timeline.plan
    seconds = st.dictionaries(st.sampled_from([param.path for param in plan.params]), st.integers(0, 60).map(float))
    forward, backward = draw(seconds), draw(seconds)
    once = {param.unit for param in plan.params if param.kept_unsharded and param.sharded}
    forward = {path: time for path, time in forward.items() if plan.by_name[path].unit not in once}
    times = Times(forward, backward, draw(st.sampled_from((0.5, 1.0, 4.0, 16.0, inf))))
    return with_policy(timeline, times=times)


def with_cheap(timeline: Timeline, which: int) -> Timeline:
    """Make some repeatable computations cheap, by the bits of ``which``, and give values various sizes."""
    values = dict(timeline.values)
    ops: list[Op] = []
    for index, op in enumerate(timeline.ops):
        if isinstance(op, Compute) and op.repeatable:
            values |= dict.fromkeys(op.writes, Value(4 * (1 + index * (which | 1) % 5), "float32"))
            op = replace(op, cheap=True, work=Work.POINTWISE) if which >> index % CHEAP_BITS & 1 else op
        ops.append(op)
    return timeline.with_ops(ops, values)


def with_rank(timeline: Timeline, rank: int) -> Timeline:
    """Return the timeline of another rank, modulo the number of ranks."""
    ranks, copies = timeline.plan.mesh.shard.size, timeline.plan.mesh.replicate.size
    return replace(timeline, plan=replace(timeline.plan, mesh=Mesh.of(ranks, rank % ranks, copies)))


def with_policy(timeline: Timeline, **fields: object) -> Timeline:
    """Return the timeline under another policy."""
    policy = replace(timeline.plan.policy, **fields)  # type: ignore[arg-type]
    return replace(timeline, plan=replace(timeline.plan, policy=policy))


def same_results(after: Timeline, before: Timeline) -> bool:
    """Return whether two timelines return equal expressions. Raises what :func:`interpret` raises."""
    terms: dict[object, int] = {}
    return interpret(after, terms) == interpret(before, terms)


def interpret(timeline: Timeline, terms: dict[object, int]) -> tuple[int, ...]:
    """Return the expressions that a timeline returns, each as its number in ``terms``. Equal ones have equal numbers.

    Raises:
        AssertionError: a value is read before it is written, or after its free; or a launch has no wait.
    """
    value: dict[str, int] = {}
    pending: dict[str, list[int]] = {}
    freed: set[str] = set()
    runs: Counter[object] = Counter()
    written = {name for op in timeline.ops for name in op.writes}
    results: list[int] = []

    def term(*parts: object) -> int:
        return terms.setdefault(parts, len(terms))

    def read(name: str) -> int:
        assert name not in freed, f"{name} is read after its free"
        assert name in value or name not in written, f"{name} is read before it is written"
        return value.get(name, term("input", name))

    for op in timeline.ops:
        match op:
            case Gather() | Reduce():
                work = [term(op.kind, path, read(name)) for name, path in zip(op.reads, op.params, strict=True)]
                pending[op.handle] = work
            case Wait():
                value.update(zip(op.writes, pending.pop(op.launch.handle), strict=True))
            case Free():
                assert freed.isdisjoint(op.reads), f"{op.reads} is freed twice"
                freed.update(op.reads)
            case Defer():
                for name, path, grad in zip(op.writes, op.params, op.reads, strict=True):
                    value[name] = term(op.kind, path, read(grad))
            case Compute():
                runs[op.line] += not op.repeatable
                parts = ("op", op.line, runs[op.line], *map(read, op.reads))
                value |= {name: term(*parts, number) for number, name in enumerate(op.writes)}
            case Return():
                results += [read(name) for name in op.returned]
    assert not pending, f"{sorted(pending)} is never waited for"
    return tuple(results)
