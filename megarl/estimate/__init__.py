"""Says, before a run needs any GPU, whether it fits, how long a step takes, what limits it, and which settings are faster.

`estimate` combines `memory` and `times` for one config; `theory` is section 7 of the LlamaRL paper. `search` finds the fastest split of a
budget, and settings that make a run fit.
docs/planner.md shows its errors: tests/tools/planner_validation.py compares it with published rows.
"""
