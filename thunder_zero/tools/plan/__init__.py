"""Searches for the policy, the stage and the mesh of a run: ``tz.tools.fit`` and ``tz.tools.plan_training``."""
