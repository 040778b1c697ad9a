"""A run before the run: the scheduler's own code in virtual time (`megarl plan --simulate`, docs/simulation.md).

Real are admission, rollout stream, fleet, messages, buffer and ledger. Models are the engines (`engines`), the trainer's step and the
weight update, which take as long as the planner (`megarl.estimate`) or a measured run says.
"""
