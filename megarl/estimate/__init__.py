"""Estimates, before a run needs any GPU, whether it fits, how long a step takes, what limits it,
and which settings are faster.

`estimate` combines `memory` and `times` for one config. `theory` is section 7 of the LlamaRL paper.
`search` finds the fastest split of a number of GPUs, and settings with which a run fits.
docs/planner.md lists the errors: tests/tools/planner_validation.py compares estimates with
published rows.
"""
