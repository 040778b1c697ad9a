"""`megarl bench overlap` in small: real processes with emulated engines and an emulated trainer.

Tests check order and versions, never times.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from channel_samples import measure
from channel_samples import render as render_costs

from megarl.bench.emulated import PROMPT_TOKENS, EmulatedEngine, EmulatedLengths
from megarl.bench.overlap import (
    ENGINES,
    SETTINGS,
    WARM_UP,
    draw,
    grid,
    render,
    result,
    run_cells,
    sides_of,
)
from megarl.bench.overlap_cell import Cell
from megarl.generator.completions import ABORT, Completion, Sampling
from megarl.observe.status import merge_traces

STEPS = WARM_UP + 2
PROMPTS = 16
N = 4
DEADLINE_S = 60.0
TAILS = EmulatedLengths(mean=24, sigma=0.8, longest=96)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[str, tuple[Cell, list[dict]]]:
    """(cell, rows) of a short run of each setting, one after another in one pair of processes."""
    folder = tmp_path_factory.mktemp("overlap")
    cells = [
        Cell(
            name,
            0.05,
            0.05,
            0.002,
            TAILS,
            replace(async_, chunk_tokens=async_.chunk_tokens and 8),
            STEPS,
            str(folder / str(index)),
            ENGINES * sides_of(name),
        )
        for index, (name, async_) in enumerate(SETTINGS.items())
    ]
    rows = run_cells(cells, lanes=1, timeout_s=DEADLINE_S, report=lambda cell: None)
    return {cell.name: (cell, row) for cell, row in zip(cells, rows)}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_prompt_is_used_once_whole_and_within_the_depth(ran, setting):
    cell, rows = ran[setting]
    ordinals = [ordinal for row in rows for ordinal in row["ordinals"]]
    assert [row["step"] for row in rows] == list(range(STEPS)) and len(ordinals) == STEPS * PROMPTS
    assert sorted(ordinals) == list(range(STEPS * PROMPTS))
    lengths = [sorted(row["lengths"]) for row in rows]
    assert lengths == [
        sorted(length for ordinal in row["ordinals"] for length in TAILS(ordinal, N))
        for row in rows
    ], "cut and lost nothing"
    for row in rows:
        assert row["version/max"] <= row["step"]
        if cell.async_.capacity <= 1:  # with more, a long response may be used out of order
            assert row["step"] - cell.async_.capacity <= row["version/min"]


def test_only_the_modes_that_go_on_mix_versions_in_a_response(ran):
    mixing = {setting for setting, (_, rows) in ran.items() if sum(row["mixed"] for row in rows)}
    modes = {"streaming, in_flight", "streaming, retract", "streaming, resume"}
    assert modes <= mixing <= modes | {"streaming, idle updates", "streaming, idle samples"}


def test_the_bubble_is_the_idle_time_of_the_less_idle_side(ran):
    for _, rows in ran.values():
        for row in rows:
            trainer_idle_s = row["time/trainer_wait_s"] + row["time/sync_s"]
            generator_idle_s = row["time/generator_wait_s"]
            assert row["time/bubble_s"] == min(trainer_idle_s, generator_idle_s)
            assert min(trainer_idle_s, generator_idle_s, row["time/weights_wait_s"]) >= 0
            assert row["time/weights_wait_s"] <= row["time/trainer_wait_s"] <= row["time/step_s"]


def test_idle_side_makes_updates_or_samples(ran):
    for setting, (_, rows) in ran.items():
        updates = {row["updates"] for row in rows}
        samples = {row["samples"] for row in rows}
        assert updates == {1} or (setting == "streaming, idle updates" and max(updates) <= 4)
        assert samples == {N} or (setting == "streaming, idle samples" and max(samples) <= 16)


def test_synchronous_run_holds_its_generator_back(ran):
    _, rows = ran["synchronous"]
    assert all(row["version/min"] == row["version/max"] == row["step"] for row in rows)
    assert all(row["time/generator_wait_s"] >= 0.05 for row in rows[1:]), (
        "at least while the trainer trains"
    )


def test_the_table_and_the_picture_show_every_cell(ran, tmp_path):
    keys = [key for key, _ in grid(0.05, STEPS, "")]
    cells = [vars(result(*key, *ran[key[2]])) for key in keys]
    facts = {
        "longer_phase_s": 0.05,
        "update_s": 0.002,
        "steps": STEPS,
        "not_counted": WARM_UP,
        "hardware": "",
        "cells": cells,
    }
    table = render(facts)
    assert table.startswith("EMULATED") and all(setting in table for setting in SETTINGS)
    draw(facts, str(tmp_path / "overlap.svg"))
    assert (tmp_path / "overlap.svg").stat().st_size > 10_000


def test_a_trace_has_named_tracks_with_nested_spans(ran):
    """In the trace-event format, metadata ("M") names processes and threads, and complete events
    ("X") nest within a thread.
    """
    events = json.loads(merge_traces(Path(ran["streaming, in_flight"][0].run_dir)).read_text())[
        "traceEvents"
    ]
    assert {event["ph"] for event in events} == {"M", "X"}
    processes = {
        event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"
    }
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert processes.keys() == {"generator.0", "trainer.0"} and set(tracks.values()) == {
        "main",
        "weights",
    }
    spans = [event for event in events if event["ph"] == "X"]
    names = {
        (tracks[event["pid"], event["tid"]], event["name"].rsplit(" ", 1)[0]) for event in spans
    }
    assert names == {
        ("main", "generate batch"), ("main", "wait for batch"), ("main", "train step"),
        ("main", "write weights"),
        ("main", "wait for engines to take weights"), ("weights", "take weights"),
        ("weights", "pause for weights"),
    }  # fmt: skip
    for track in tracks:
        assert_nested([event for event in spans if (event["pid"], event["tid"]) == track])


def assert_nested(spans: list[dict]) -> None:
    """Two spans of one track are disjoint, or one contains the other.

    The tolerance is 2 us, since times are floats of about 1e15.
    """
    open_until: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while open_until and open_until[-1] <= span["ts"] + 2:
            open_until.pop()
        assert not open_until or span["ts"] + span["dur"] <= open_until[-1] + 2, (
            f"{span} overlaps what holds it"
        )
        open_until.append(span["ts"] + span["dur"])


def on_engine(body, length=20):
    async def run():
        engine = EmulatedEngine(
            "emulated",
            slots=2,
            token_s=0.001,
            prefill_s=0.0,
            lengths=EmulatedLengths(length, 0.0, length),
        )
        engine.pause()
        await engine.resume(0, recompute=False)
        async with asyncio.timeout(DEADLINE_S):
            await body(engine)

    asyncio.run(run())


def test_emulated_engine_fills_slots_in_turn_and_pauses():
    async def body(engine):
        order = []

        async def request(ordinal, samples):
            (first, *_) = await engine.complete(
                [[ordinal] * PROMPT_TOKENS] * samples, [Sampling(100)] * samples, 0
            )
            order.append(ordinal)
            return first

        requests = [asyncio.create_task(request(*arguments)) for arguments in ((0, 2), (1, 1))]
        await asyncio.sleep(0.01)
        engine.pause()
        await asyncio.sleep(0.1)
        assert order == []
        await engine.resume(1, recompute=True)
        first, second = await asyncio.gather(*requests)
        assert order == [0, 1] and len(first.token_ids) == len(second.token_ids) == 20
        assert (
            first.token_ids == first.versions
            and [*first.versions] == sorted(first.versions)
            and set(first.versions) == {0, 1}
        )
        assert set(second.versions) == {1}, "it had to wait for a slot"

    on_engine(body)


def test_an_emulated_engine_cuts_aborts_and_goes_on():
    async def body(engine):
        prompt = [7] * PROMPT_TOKENS
        (cut,) = await engine.complete([prompt], [Sampling(8)], 0)
        assert (len(cut.token_ids), cut.finish_reason) == (8, "length")
        continuation = asyncio.create_task(
            engine.complete([[*prompt, *cut.token_ids]], [Sampling(992)], 0)
        )
        await asyncio.sleep(0)
        await engine.abort_all(1)
        assert await continuation == [Completion([], [], [], ABORT)]
        continuation = asyncio.create_task(
            engine.complete([[*prompt, *cut.token_ids]], [Sampling(992)], 0)
        )
        await asyncio.sleep(0.003)
        await engine.abort_all(1)
        await engine.abort_all(1)
        (continued,) = await continuation
        assert continued.finish_reason == ABORT and 0 < len(continued.token_ids) < 492
        (end,) = await engine.complete(
            [[*prompt, *cut.token_ids, *continued.token_ids]], [Sampling(992)], 0
        )
        assert (8 + len(continued.token_ids) + len(end.token_ids), end.finish_reason) == (
            500,
            "stop",
        )
        assert not engine._unfinished and not engine._runs
        (uncut,) = await engine.complete([prompt], [Sampling(1000)], 0)
        assert (len(uncut.token_ids), uncut.finish_reason) == (500, "stop"), (
            "the same response, from the prompt"
        )

    on_engine(body, length=500)


def test_the_cost_of_the_channel_is_taken_with_the_buffer_full():
    cost = measure(buffered=256, steps=2)
    assert cost.buffered == 256 and cost.send_us > 0 and cost.receive_us > 0
    assert "256" in render_costs(
        {"step_s": 1.0, "samples_per_step": 128, "hardware": "", "costs": [asdict(cost)]}
    )
