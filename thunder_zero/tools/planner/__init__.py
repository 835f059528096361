"""``tz.tools.plan_training``: recommends a stage and a mesh for a model, before a run.

In: a model and machines. Out: ``TrainingPlan``. ``repeat.py`` extends the figures of a few blocks to all blocks.
"""
