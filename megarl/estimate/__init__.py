"""Says before a run needs any GPU whether it fits, how long a step takes, what binds, and which settings would do better.

`estimate` combines memory (`trainer_memory`, `generator_memory`) and time (`train_time`, `generate_time`, `sync_time`) for one config;
`theory` is section 7 of the LlamaRL paper. `remedies` changes settings until a run fits; `search` finds the fastest split of a budget.
docs/planner.md says how wrong it is: tests/tools/planner_validation.py compares it with published rows.
"""
