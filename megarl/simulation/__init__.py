"""Simulated runs: the scheduler's own code in virtual time (`megarl plan --simulate`,
docs/simulation.md).

Admission, rollout stream, fleet, messages, buffer and ledger are the code of real runs. The engines
(`engines`), the trainer's step and the weight update are models. Their durations come from the
planner (`megarl.estimate`) or from a measured run.
"""
