"""Writes the code that trains as a row of the table says."""

from __future__ import annotations

from thunder_zero.policy import Policy
from thunder_zero.tools.planner.figures import Row


def code_of(row: Row, policy: Policy, build: str) -> str:
    """Python to paste: imports, the policy, the module, the mesh, and the model's transform.

    Args:
        row: which stage on which mesh.
        policy: of the row.
        build: Python that makes ``module``: lines that import, and one that makes it.
    """
    *imports, made = build.splitlines()
    where, mesh = "", []
    if row.mesh.replicas > 1:
        shape = row.mesh.replicas, row.mesh.shards
        imports.append("from torch.distributed.device_mesh import init_device_mesh")
        mesh = [f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names=("replicate", "shard"))']
        where = ", mesh=mesh"
    precision = policy.mixed_precision
    lines = [
        "import torch",
        "import thunder_zero as tz  # before thunder",
        "import thunder",
        *imports,
        "",
        "policy = tz.Policy(",
        f"    stage={policy.stage},",
        f"    recompute={policy.recompute!r},",
        f"    mixed_precision=tz.MixedPrecision({precision.param_dtype}, reduce_dtype={precision.reduce_dtype}),",
        f"    bucket_bytes={policy.bucket_bytes:_},",
        f"    in_flight_bytes={policy.in_flight_bytes:_},",
        f"    prefetch={policy.prefetch},",
        ")",
        made,
        *mesh,
        f"model = thunder.jit(module, transforms=[tz.ZeroTransform(policy{where})])",
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)",
    ]
    return "\n".join(lines)
