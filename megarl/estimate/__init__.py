"""Before any GPU is asked for: does a run fit, how long is a step, what binds, and which settings would do better.

`estimate` puts it together for one config. Memory: `trainer_memory`, `generator_memory`. Time: `train_time`, `generate_time`, `sync_time`,
and section 7 of the LlamaRL paper in `theory`. `remedies` turns knobs until a run fits; `search` looks for the fastest split of a budget.
docs/planner.md says where it is wrong: tests/tools/planner_validation.py holds it against published rows.
"""
