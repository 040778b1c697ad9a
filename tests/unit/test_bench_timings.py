"""The results that `megarl bench sync` computes from its measurements, without an engine."""

from __future__ import annotations

import pytest

from megarl.base.files import PICTURES
from megarl.bench import sync
from megarl.bench.sync import AUDITED, RECALLED, Way
from megarl.bench.sync_ranks import BLOCK_BYTES, block_parts


async def nothing() -> None: ...


WAYS = {
    "ceiling memcpy": Way(nothing, 100, 2),
    "direct shared_memory": Way(nothing, 100, 7, "ceiling memcpy"),
    "direct shared_memory" + AUDITED: Way(nothing, 100, 7, "ceiling memcpy"),
    "direct shared_memory" + RECALLED: Way(nothing, 100, 7, "ceiling memcpy"),
    "direct shared_memory, 1.0 % changed": Way(nothing, 5, 2, compare_s=0.125),
    "gather + broadcast": Way(nothing, 150, 9),
    "gather + bucket": Way(nothing, 160, 5),
}
TIMES = {  # in the last round the machine is ten times slower
    "ceiling memcpy": [1.0, 1.0, 10.0],
    "direct shared_memory": [2.0, 2.0, 20.0],
    "direct shared_memory" + AUDITED: [2.5, 2.5, 25.0],
    "direct shared_memory" + RECALLED: [2.75, 2.75, 27.5],
    "direct shared_memory, 1.0 % changed": [0.5, 0.5, 5.0],
    "gather + broadcast": [6.0, 6.0, 60.0],
    "gather + bucket": [8.0, 8.0, 80.0],
}


def test_ratios_compare_runs_of_the_same_round():
    by_name = {timing.name: timing for timing in sync.timings(WAYS, TIMES, 100)}
    assert by_name.keys() == {name for name in WAYS if not name.endswith((AUDITED, RECALLED))}
    direct = by_name["direct shared_memory"]
    assert (direct.median_s, direct.quartiles_s, direct.best_s) == (2.0, (2.0, 11.0), 2.0)
    assert (direct.of_ceiling, direct.times_faster, direct.times_fewer_bytes) == (0.5, 3.0, 1.5)
    assert (direct.audit_s, direct.recall_s) == (0.5, 0.25)
    delta = by_name["direct shared_memory, 1.0 % changed"]
    assert (delta.times_faster, delta.times_fewer_bytes, delta.compare_s) == (12.0, 30.0, 0.125)
    assert delta.of_ceiling is None
    assert by_name["ceiling memcpy"].of_ceiling is None
    assert by_name["gather + bucket"].times_faster is None


def test_table_and_picture(tmp_path):
    ways = [sync.asdict(timing) for timing in sync.timings(WAYS, TIMES, 100)]
    facts = {
        "model": "tiny",
        "bytes": 100,
        "trainer_tp": 2,
        "engine_tp": 1,
        "hardware": "2 CPU cores",
        "repeats": 3,
        "ways": ways,
    }
    row = next(line for line in sync.render(facts).splitlines() if line.startswith("direct"))
    assert row.split()[-5:] == ["50%", "3.0x", "1.5x", "500.0", "250.0"]
    for suffix in PICTURES:
        sync.draw(facts, str(tmp_path / f"times{suffix}"))
        assert (tmp_path / f"times{suffix}").stat().st_size > 1000


@pytest.mark.parametrize("size", [1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5])
def test_parts_of_a_block_add_up_and_stay_inside(size):
    parts = list(block_parts(size, BLOCK_BYTES // 4))
    assert sum(part.stop - part.start for part in parts) == size
    assert all(0 <= part.start < part.stop <= BLOCK_BYTES for part in parts)
