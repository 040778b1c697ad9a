"""A run before the run: the scheduler's own code in virtual time (`megarl plan --simulate`, docs/simulation.md).

Admission, rollout stream, fleet, messages, buffer and ledger are the run's own. The engines (`engines`), the trainer's step and the weight
update are models: they take as long as the planner (`megarl.estimate`) or a measured run says.
"""
