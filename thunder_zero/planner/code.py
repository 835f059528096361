"""Writes the code that trains as a row of the table says."""

from __future__ import annotations

from thunder_zero.planner.figures import Row
from thunder_zero.policy import Policy


def code_of(row: Row, policy: Policy) -> str:
    """Python to paste: the policy, the mesh, and the model's transform."""
    precision = policy.mixed_precision
    lines = [
        "policy = tz.Policy(",
        f"    stage={policy.stage},",
        f"    recompute={policy.recompute!r},",
        f"    mixed_precision=tz.MixedPrecision({precision.param_dtype}, reduce_dtype={precision.reduce_dtype}),",
        f"    bucket_bytes={policy.bucket_bytes:_},",
        f"    in_flight_bytes={policy.in_flight_bytes:_},",
        f"    prefetch={policy.prefetch},",
        ")",
    ]
    where = ""
    if row.mesh.replicas > 1:
        shape = row.mesh.replicas, row.mesh.shards
        lines.append(f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names=("replicate", "shard"))')
        where = ", mesh=mesh"
    lines.append(f"model = thunder.jit(module, transforms=[tz.ZeroTransform(policy{where})])")
    lines.append("optimizer = torch.optim.AdamW(model.parameters(), fused=True)")
    return "\n".join(lines)
