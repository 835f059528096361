"""``tz.tools.plan_training``: which stage and mesh to train a model with, before anything runs.

In: a model and machines. Out: ``TrainingPlan``; ``repeat.py`` makes few blocks stand for all.
"""
