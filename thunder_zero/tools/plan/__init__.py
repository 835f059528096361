"""Searches for a policy, a stage and a mesh: ``tz.tools.fit`` and ``tz.tools.plan_training``."""
