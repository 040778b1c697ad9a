"""Says before a run needs any GPU whether it fits, how long a step takes, what binds, and which settings would do better.

`estimate` combines `memory` and `times` for one config; `theory` is section 7 of the LlamaRL paper. `search` finds the fastest split of a
budget, and settings that make a run fit.
docs/planner.md says how wrong it is: tests/tools/planner_validation.py compares it with published rows.
"""
