"""``tz.tools.plan_training``: which stage and mesh to train a model with, before anything runs."""
