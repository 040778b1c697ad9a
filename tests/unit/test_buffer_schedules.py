"""Every prompt is trained on or dropped exactly once, and none is too old, for any order of events
and any kills of the run.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_schedules import Simulation, ready

from megarl.data.order import Mixture
from megarl.rollouts.buffer import Ledger

some_or_none = st.one_of(st.none(), st.integers(0, 5))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    per_step=st.integers(1, 6),
    capacity=some_or_none,
    max_staleness=some_or_none,
    in_flight=st.integers(1, 20),
    mixed=st.booleans(),
    eager=st.booleans(),
    kills=st.lists(st.integers(0, 14), max_size=3),
    dropping=st.sampled_from((0.0, 0.0, 0.1, 0.5, 0.9)),
)
def test_prompts_are_trained_on_or_dropped_once_in_time(
    seed, per_step, capacity, max_staleness, in_flight, mixed, eager, kills, dropping
):
    steps = 15
    run = Simulation(
        seed=seed,
        per_step=per_step,
        capacity=capacity,
        max_staleness=max_staleness,
        in_flight=in_flight,
        steps=steps,
        mixed=mixed,
        eager=eager,
        dropping=dropping,
    )
    for kill_at in sorted(kills):
        run.run(kill_at)
        run.kill_and_resume()
    run.run()
    assert [len(batch) for batch in run.trained] == [per_step] * steps
    prompts = per_step * steps + sum(map(len, run.dropped))
    assert Counter(chain(*run.trained, *run.dropped)) == Counter(range(prompts)), (
        "each is trained on or reported as dropped"
    )
    assert run.dropping or prompts == per_step * steps
    assert run.admission.exhausted and not run.running and not run.buffer.ledger().untold, (
        "nothing is left over"
    )
    if max_staleness is not None:
        assert max(run.ages) <= max_staleness
    if not mixed and run.capacity is not None:
        assert max(run.ages) <= run.capacity, (
            "an update that waits for rollouts bounds their age by the capacity"
        )
    if run.capacity == 0:
        in_order = [
            ordinal for step in zip(run.trained, run.dropped) for ordinal in sorted(chain(*step))
        ]
        assert in_order == list(range(prompts)), "the synchronous loop"


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    per_step=st.integers(1, 6),
    capacity=some_or_none,
    max_staleness=st.sampled_from((None, 0, 1, 2)),
    in_flight=st.integers(1, 20),
    mixed=st.booleans(),
    eager=st.booleans(),
    kills=st.lists(st.integers(0, 14), max_size=3),
    dropping=st.sampled_from((0.0, 0.0, 0.5)),
    shares=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    rows=st.lists(st.integers(1, 12), min_size=3, max_size=3),
    rest_epochs=st.integers(1, 3),
    outside=st.sampled_from((0.0, 0.5, 0.9, 1.0)),
)
def test_mixtures_and_curricula_lose_and_repeat_nothing(
    seed,
    per_step,
    capacity,
    max_staleness,
    in_flight,
    mixed,
    eager,
    kills,
    dropping,
    shares,
    rows,
    rest_epochs,
    outside,
):
    """Each step always has its share of each source.

    Which prompts rest follows only from the scores in the final ledger, for any order of events and
    any kills of the run.
    """
    steps = 15
    mixture = Mixture(shares, list("abc"[: len(shares)]))
    rows = rows[: len(shares)]
    run = Simulation(
        seed=seed,
        per_step=per_step,
        capacity=capacity,
        max_staleness=max_staleness,
        in_flight=in_flight,
        steps=steps,
        mixed=mixed,
        eager=eager,
        dropping=dropping,
        mixture=mixture,
        rows=rows,
        rest_epochs=rest_epochs,
        outside=outside,
    )
    for kill_at in sorted(kills):
        run.run(kill_at)
        run.kill_and_resume()
    run.run()
    for step, batch in enumerate(run.trained):
        prompts_of_source = Counter(mixture.source(ordinal) for ordinal in batch)
        assert [prompts_of_source[source] for source in range(len(shares))] == mixture.counts(
            step * per_step, (step + 1) * per_step
        )
    ledger = run.buffer.ledger()
    assert sum(run.rested) + ledger.rested_untold == len(ledger.rested), "each is reported once"
    every = Counter(chain(*run.trained, *run.dropped, ledger.rested))
    assert set(every.values()) == {1}
    assert every.keys() == {
        *range(ledger.consumed_below),
        *ledger.consumed_beyond,
    }
    assert ledger.trained() == {*chain(*run.trained)} and not ledger.groups and not ledger.untold
    for source in range(len(shares)):
        draws = sorted(
            mixture.draw(ordinal) for ordinal in every if mixture.source(ordinal) == source
        )
        assert draws == list(range(len(draws))), "a source leaves nothing out"
    out = {run.sources.place(ordinal) for ordinal in ledger.outside}
    for ordinal in every:
        source, epoch, row = run.sources.place(ordinal)
        rests = any((source, before, row) in out for before in range(epoch - rest_epochs, epoch))
        assert (ordinal in ledger.rested) == rests


def test_rejection_of_all_groups_is_no_deadlock():
    """All groups of a resumed run are too old: they are generated again, and the run continues."""
    run = Simulation(seed=1, per_step=4, capacity=3, max_staleness=3, in_flight=8, steps=10)
    groups = [ready(ordinal, 0) for ordinal in range(20, 32)]
    run.start(Ledger(20, [], groups), 5)
    run.trained = [[] for _ in range(5)]
    run.run()
    assert run.rejected == 12
    assert sorted(chain(*run.trained)) == list(range(20, 40))


def test_eager_generator_finishes_despite_rejections():
    sizes = dict(per_step=4, capacity=6, max_staleness=1, in_flight=8, steps=40)
    run = Simulation(seed=2, **sizes, mixed=False, eager=True)
    run.run()
    assert run.rejected > 100
    assert sorted(chain(*run.trained)) == list(range(160))


def test_long_rollouts_are_trained_on_like_short_ones():
    """One prompt in five takes twenty times as long.

    None is dropped for that, and none exceeds the limit of staleness.
    """
    run = Simulation(seed=3, per_step=8, capacity=None, max_staleness=2, in_flight=16, steps=60)
    run.run()
    assert run.rejected == 0 and max(run.ages) == 2
    assert sorted(chain(*run.trained)) == list(range(480))
