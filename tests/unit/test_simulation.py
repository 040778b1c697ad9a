"""Runs in virtual time: against closed forms, in many small worlds, and with wrong schedulers,
which must be detected.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from json_files import json_lines, write_json_lines
from planner_published import FIT, TABLES
from published import simulated_s
from simulated import failures_of, of_run

from megarl import executors, simulation
from megarl.base.geometry import TrainerTopology
from megarl.bench.emulated import PROMPT_TOKENS, EmulatedEngine, EmulatedLengths
from megarl.cli import main
from megarl.config.schema import (
    AsyncConfig,
    CheckpointConfig,
    GeneratorConfig,
    PlanConfig,
    RolloutConfig,
    RunConfig,
    SimulationConfig,
    TimeoutConfig,
)
from megarl.generator.client import EngineUnreachable
from megarl.generator.completions import Sampling
from megarl.models.registry import load_spec
from megarl.plan.resolve import RunPlan
from megarl.plan.weights import WeightsSource
from megarl.report.reading import RunReader
from megarl.rollouts.buffer import RolloutBuffer
from megarl.rollouts.stream import Admission
from megarl.simulation import lengths as drawn
from megarl.simulation.command import summarize
from megarl.simulation.engines import SimulatedEngine, Speed, Work
from megarl.simulation.run import Models, simulate
from megarl.simulation.virtual import Deadlock, VirtualLoop

SPEC = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "vocab_size": 128, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
TOKEN_S = 0.01
PROMPT = 10


def in_virtual_time(coroutine):
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def test_time_jumps_to_what_comes_next():
    async def both():
        order = []

        async def after(delay_s):
            await asyncio.sleep(delay_s)
            order.append((delay_s, asyncio.get_running_loop().time()))

        await asyncio.gather(after(3e6), after(2.0), after(0.0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return order, asyncio.get_running_loop().time()

    order, ended = in_virtual_time(both())
    assert order == [(0.0, 0.0), (2.0, 2.0), (3e6, 3e6)]
    assert ended == 3e6 + 5


def test_wait_without_a_cause_is_a_deadlock():
    with pytest.raises(Deadlock):
        in_virtual_time(asyncio.Event().wait())


def speed(cache=1e9, most=64, prefill_s=0.0, per_request_s=0.0) -> Speed:
    return Speed(
        lambda running, context: TOKEN_S + per_request_s * running,
        lambda tokens, length: prefill_s * tokens,
        cache,
        most,
    )


async def ask(
    engine: SimulatedEngine, key: int, totals: list[int], most: int = 1000, version: int = 0
):
    """(completions, their times)"""
    engine._work.setdefault(key, Work(PROMPT, totals, PROMPT, most))
    completions = await engine.complete(
        [[key] * PROMPT for _ in totals], [Sampling(most)] * len(totals), version
    )
    return completions, asyncio.get_running_loop().time()


def test_an_engine_takes_the_time_of_its_tokens():
    async def scenario():
        engine = SimulatedEngine("e", speed(prefill_s=0.001, per_request_s=0.002), 1, {})
        engine.resume(0, False)
        return await ask(engine, 1, [100, 300])

    completions, ended = in_virtual_time(scenario())
    assert [len(completion.token_ids) for completion in completions] == [100, 300]
    assert {completion.finish_reason for completion in completions} == {"stop"}
    # The prefill of one prompt, a hundred tokens of two requests, two hundred of one.
    assert ended == pytest.approx(
        PROMPT * 0.001 + 100 * (TOKEN_S + 0.004) + 200 * (TOKEN_S + 0.002), rel=1e-6
    )


@pytest.mark.parametrize("most", [2, 4])
def test_requests_wait_for_a_place(most):
    async def scenario():
        engine = SimulatedEngine("e", speed(most=most), 1, {})
        engine.resume(0, False)
        return [
            ended
            for _, ended in await asyncio.gather(*(ask(engine, key, [100]) for key in range(4)))
        ]

    assert in_virtual_time(scenario()) == pytest.approx(
        [1.0, 1.0, 2.0, 2.0] if most == 2 else [1.0] * 4
    )


def test_a_full_cache_sends_requests_back():
    """Two sequences of 1010 tokens do not fit into 1500.

    One is prefilled again when the other has ended.
    """

    async def scenario():
        engine = SimulatedEngine("e", speed(cache=1500, prefill_s=0.001), 1, {})
        engine.resume(0, False)
        answers = await asyncio.gather(*(ask(engine, key, [1000], 1000) for key in range(2)))
        tokens = [len(completion.token_ids) for (completion,), _ in answers]
        return engine, [ended for _, ended in answers], tokens

    engine, ended, tokens = in_virtual_time(scenario())
    assert tokens == [1000, 1000]
    assert engine.retracted == 1
    prefill_s = 2 * PROMPT * 0.001
    full = (1500 - 2 * PROMPT) / 2
    assert sorted(ended) == pytest.approx(
        [prefill_s + 10.0, prefill_s + 10.0 + (PROMPT + full) * 0.001 + (1000 - full) * TOKEN_S],
        rel=1e-3,
    )


def test_tokens_are_of_the_version_that_sampled_them():
    async def scenario():
        engine = SimulatedEngine("e", speed(), 1, {})
        engine.resume(0, False)
        running = asyncio.ensure_future(ask(engine, 1, [100]))
        await asyncio.sleep(0.305)
        engine.pause()
        await asyncio.sleep(5)
        engine.resume(1, False)
        (completion,), ended = await running
        return Counter(completion.versions), ended

    versions, ended = in_virtual_time(scenario())
    assert versions == {0: 30, 1: 70}
    assert ended == pytest.approx(6.0)


def test_request_keeps_tokens_if_aborted_but_not_if_failed():
    async def scenario():
        engine = SimulatedEngine("e", speed(), 1, {})
        engine.resume(0, False)
        first = asyncio.ensure_future(ask(engine, 1, [100]))
        await asyncio.sleep(0.505)
        await engine.abort_all(1.0)
        (aborted,), _ = await first
        assert (aborted.finish_reason, len(aborted.token_ids)) == ("abort", 50)
        assert engine._work[1].totals == [100]
        second = asyncio.ensure_future(ask(engine, 2, [100, 100]))
        await asyncio.sleep(0.5)
        engine.fail(restart_s=30)
        with pytest.raises(EngineUnreachable):
            await second
        with pytest.raises(EngineUnreachable):
            await ask(engine, 3, [1])
        assert not await engine.fresh()
        await asyncio.sleep(30)
        assert await engine.fresh()

    in_virtual_time(scenario())


def test_a_waiting_request_has_sampled_nothing():
    async def scenario():
        engine = SimulatedEngine("e", speed(most=1), 1, {})
        engine.resume(0, False)
        running = asyncio.ensure_future(ask(engine, 1, [100]))
        waiting = asyncio.ensure_future(ask(engine, 2, [100]))
        await asyncio.sleep(0.505)
        await engine.abort_all(1.0)
        return (
            [len(completion.token_ids) for (completion,), _ in (await running, await waiting)],
            engine.sampled,
            engine.could_sample,
        )

    tokens, sampled, could_sample = in_virtual_time(scenario())
    assert tokens == [50, 0]
    assert sampled == 50
    assert could_sample == pytest.approx(50.5)


def plan_of(
    settings: SimulationConfig,
    async_: AsyncConfig,
    *,
    engines=2,
    prompts=4,
    n=2,
    longest=64,
    mean=20,
    seed=0,
    **plan_settings,
) -> RunPlan:
    config = RunConfig(
        async_=async_,
        rollout=RolloutConfig(
            prompts_per_step=prompts,
            n=n,
            max_tokens=longest,
            dynamic_sampling="dropped_share" in plan_settings,
        ),
        generator=GeneratorConfig(engines=engines, max_concurrency=4, kv_cache_tokens=1000),
        checkpoint=CheckpointConfig(every=2),
        plan=PlanConfig(
            prompt_tokens=PROMPT, response_tokens=mean, simulation=settings, **plan_settings
        ),
        timeouts=TimeoutConfig(rollouts_s=100),
        max_steps=settings.steps,
        seed=seed,
    )
    return RunPlan(
        config, load_spec(SPEC), TrainerTopology(), settings.steps, prompts * n, WeightsSource("")
    )


def models(train_s=1.0, write_s=0.1, control_s=0.05, **of_speed):
    return lambda plan, unit: Models(
        speed(most=plan.config.generator.max_concurrency, **of_speed),
        lambda batch: train_s,
        write_s,
        control_s,
        checkpoint_s=plan.config.plan.simulation.checkpoint_s or 0.0,
    )


@pytest.mark.parametrize("train_s", [0.2, 3.0])
@pytest.mark.parametrize("capacity", [0, 1])
def test_equal_lengths_give_the_closed_form(capacity, train_s):
    """All responses have 64 tokens, and a step's responses all run at once: equations 2 and 3 of
    LlamaRL.
    """
    settings = SimulationConfig(steps=12)
    plan = plan_of(settings, AsyncConfig(capacity, partial_rollout="in_flight"), mean=64)
    totals = simulate(plan, models(train_s))
    generate_s = 64 * TOKEN_S
    expected = (
        generate_s + train_s + 0.15 if capacity == 0 else max(train_s + 0.1, generate_s + 0.15)
    )
    assert summarize(plan, totals).step_p50_s == pytest.approx(expected, abs=0.02)


class Reference(EmulatedEngine):
    """Replaces a simulated engine by that of `megarl bench overlap`, which keeps time in another
    way.
    """

    up = True
    busy_s = 0.0
    running_s = 0.0
    retracted = 0
    sampled = 0
    could_sample = 0.0
    slots = 4
    token_s = TOKEN_S
    lengths = EmulatedLengths(20, 0.0, 64)

    def __init__(self, url, speed, unit, work):
        super().__init__(url, self.slots, self.token_s, 0.0, self.lengths)

    def resume(self, version, recompute):
        assert not recompute
        with pytest.raises(StopIteration):
            super().resume(version, recompute).send(None)


@pytest.mark.parametrize("sigma", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["block", "in_flight", "resume", "abort"])
def test_another_engine_gives_the_same_run(monkeypatch, mode, sigma):
    """Steps, waits and ages of tokens are the same.

    There are more prompts than places, so requests wait at the engines.
    """
    monkeypatch.setattr(Reference, "lengths", EmulatedLengths(20, sigma, 64))
    settings = SimulationConfig(steps=30)
    plan = plan_of(
        settings, AsyncConfig(1, partial_rollout=mode, chunk_tokens=8), engines=1, prompts=8
    )
    plan = replace(
        plan,
        config=replace(plan.config, plan=replace(plan.config.plan, prompt_tokens=PROMPT_TOKENS)),
    )
    simulated = simulate(plan, models(0.6), lengths=Reference.lengths)
    monkeypatch.setattr(simulation.run, "SimulatedEngine", Reference)
    reference = simulate(plan, models(0.6), lengths=Reference.lengths)
    for name in ("time/step_s", "time/trainer_wait_s", "time/generator_wait_s", "staleness/mean"):
        mean = np.mean([row[name] for row in simulated.rows[5:]])
        expected = np.mean([row[name] for row in reference.rows[5:]])
        scale = (
            1
            if name == "staleness/mean"
            else np.mean([row["time/step_s"] for row in reference.rows[5:]])
        )
        assert abs(mean - expected) <= 0.05 * scale, (name, mean, expected)


def test_without_asynchrony_no_length_is_favoured():
    # a unit has three tokens
    plan = plan_of(SimulationConfig(steps=10), AsyncConfig(0), longest=900, mean=300)
    assert summarize(plan, simulate(plan, models())).length_bias == pytest.approx(0, abs=1e-12)


def test_goodput_is_the_time_of_steps_that_were_kept():
    """Each restart loses the work since the last kept step, and its own duration."""
    settings = SimulationConfig(
        steps=40, gpu_mtbf_h=0.003, restart_s=3.0, engine_restart_s=1.0, checkpoint_s=0.0
    )
    plan = plan_of(settings, AsyncConfig(0), mean=64)
    totals = simulate(plan, models())
    assert totals.trainer_failures > 1
    kept_s = sum(row["time/step_s"] for row in totals.rows)
    assert summarize(plan, totals).goodput == pytest.approx(kept_s / totals.end_s, abs=0.02)


@pytest.mark.parametrize("beside", [True, False])
def test_one_checkpoint_is_written_at_a_time(beside):
    """A checkpoint takes ten training steps, and is due every second step. Steps wait for it, even
    if it is written in the background.
    """
    settings = SimulationConfig(steps=20, checkpoint_s=10.0)
    plan = plan_of(settings, AsyncConfig(1, partial_rollout="in_flight"), mean=64)
    plan = replace(
        plan, config=replace(plan.config, checkpoint=CheckpointConfig(every=2, beside=beside))
    )
    totals = simulate(plan, models(1.0))
    assert totals.end_s == pytest.approx(9 * 10.0 + 20 * 1.1 * (not beside), rel=0.15)
    assert sum(row["time/save_s"] for row in totals.rows) == pytest.approx(
        totals.end_s - 20 * 1.15, rel=0.2
    )


def test_short_responses_under_a_high_limit_keep_their_lengths():
    plan = plan_of(
        SimulationConfig(steps=6, turns=2, tool_s=0.0), AsyncConfig(), longest=16_000, mean=60
    )
    mean = np.concatenate(simulate(plan, models()).lengths).mean()
    assert mean == pytest.approx(60, rel=0.25)


def test_lengths_have_the_mean_that_is_asked_for():
    for settings in (SimulationConfig(lengths="lognormal", sigma=1.2), SimulationConfig()):
        plan = plan_of(settings, AsyncConfig(), longest=1024, mean=200)
        lengths = drawn.Lengths.of(drawn.Workload.of(plan.config), settings, 4, seed=1)
        sample = np.minimum(np.concatenate([lengths(ordinal, 4) for ordinal in range(8000)]), 1024)
        assert sample.mean() == pytest.approx(200, rel=0.03)


def test_lengths_of_one_prompt_have_something_in_common(tmp_path):
    samples = tmp_path / "samples.jsonl"
    write_json_lines(samples, ({"samples": [{"tokens": tokens}]} for tokens in (5, 50, 500)))
    for correlation in (0.0, 0.9):
        settings = SimulationConfig(lengths=str(samples), correlation=correlation)
        lengths = drawn.Lengths.of(
            drawn.Workload.of(plan_of(settings, AsyncConfig()).config), settings, 4, seed=1
        )
        pairs = np.array([lengths(ordinal, 2) for ordinal in range(2000)])
        assert set(np.unique(pairs)) == {5, 50, 500}
        assert (pairs[:, 0] == pairs[:, 1]).mean() == pytest.approx(
            1 / 3 if correlation == 0 else 0.75, abs=0.06
        )


def world(number: int) -> tuple[RunPlan, object]:
    """A random small world: sizes, lengths, asynchrony settings, times and failures."""
    rng = np.random.default_rng(number)
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    settings = SimulationConfig(
        steps=int(rng.integers(2, 6)),
        lengths=pick("exponential", "lognormal"),
        turns=int(pick(1, 1, 3)),
        tool_s=0.1,
        score_s=float(pick(0.0, 0.3)),
        gpu_mtbf_h=pick(None, None, 0.01),
        restart_s=3.0,
        engine_restart_s=float(pick(0.5, 5.0)),
        checkpoint_s=float(pick(0.0, 0.5)),
    )
    async_ = AsyncConfig(
        capacity=pick(0, 1, 2, 4, None),
        max_staleness=pick(None, 1, 2) if rng.random() < 0.6 else None,
        max_in_flight=pick(None, 2, 9),
        partial_rollout=pick("block", "in_flight", "retract", "abort", "resume"),
        chunk_tokens=pick(None, 7),
    )
    further = {"dropped_share": float(pick(0.3, 0.6))} if rng.random() < 0.3 else {}
    plan = plan_of(
        settings, async_, engines=int(rng.integers(1, 4)), n=int(pick(2, 4)), seed=number, **further
    )
    return plan, models(
        float(pick(0.05, 0.5, 2.0)),
        float(pick(0.0, 0.1)),
        prefill_s=1e-4,
        cache=float(pick(90, 200, 1e9)),
    )


def broken_worlds(numbers) -> Iterator[int]:
    for number in numbers:
        plan, time_models = world(number)
        try:
            totals = simulate(plan, time_models)
        except RuntimeError:  # Deadlock, BrokenGuarantee, or an error of the run's own code
            yield number
        else:
            assert len(totals.rows) == plan.config.plan.simulation.steps


def test_small_random_runs_keep_all_guarantees():
    assert list(broken_worlds(range(100))) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_random_runs_keep_all_guarantees():
    assert list(broken_worlds(range(100, 10_000))) == []


def test_worlds_do_not_depend_on_chance():
    plan, time_models = world(17)
    first = simulate(plan, time_models)
    second = simulate(plan, time_models)
    assert json.dumps(first.rows) == json.dumps(second.rows)


def begins_too_early(self, version):
    return version >= 0 and (
        self._run_ahead is None
        or self._place() < (version + self._run_ahead + 2) * self._prompts_per_step
    )


def makes_a_short_batch(self, step, quotas=RolloutBuffer._quotas):
    return [max(1, count - 1) for count in quotas(self, step)]


def trains_on_it_again(self, ordinal):
    group = self._remove(ordinal)
    self._take_in(group)
    return group


def frees_no_place(self, ordinal, outside=False, dropped=False):
    """Planted fault: a finished prompt keeps its place."""


def forgets_who_is_done(self, ledger=RolloutBuffer.ledger):
    state = ledger(self)
    return msgspec.structs.replace(state, consumed_below=max(0, state.consumed_below - 1))


def replaces_no_dropped_prompt(self, ordinal, outside, dropped, finish=Admission.finish):
    finish(self, ordinal, outside)


def rejects_too_late(self, step, reject=RolloutBuffer.reject):
    return reject(self, step - 1)


WRONG = {
    "begins too early": [(Admission, "_deep_enough", begins_too_early)],
    "makes a short batch": [(RolloutBuffer, "_quotas", makes_a_short_batch)],
    "trains on it again": [(RolloutBuffer, "_consume", trains_on_it_again)],
    "frees no place": [(Admission, "finish", frees_no_place)],
    "forgets who is done": [(RolloutBuffer, "ledger", forgets_who_is_done)],
    "replaces no dropped prompt": [(Admission, "finish", replaces_no_dropped_prompt)],
    # The generator begins no prompt that would be too old, and the buffer takes no group that is:
    # either rule alone suffices.
    "trains on what is too old": [
        (
            executors.generator,
            "run_ahead",
            lambda async_: None if async_.capacity is None else async_.capacity + 2,
        ),
        (simulation.run, "run_ahead", lambda async_: None),
        (RolloutBuffer, "reject", rejects_too_late),
        (RolloutBuffer, "_due", lambda self, by_version, step: [[] for _ in self._mixture.names]),
    ],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_scheduler_is_noticed(monkeypatch, wrong):
    for place in WRONG[wrong]:
        monkeypatch.setattr(*place)
    assert any(True for _ in broken_worlds(range(40)))


CONFIG = ["plan", "configs/8b_aipo.yaml", "plan.simulation.steps=4", "--simulate"]


def test_the_command_sweeps_and_advises(printed, printed_json):
    one = printed_json(*CONFIG, "--json")
    assert one["steps"] == 4
    assert sum(one["staleness"].values()) == pytest.approx(1)
    assert one["goodput"] == 1
    lines = printed(*CONFIG, "--sweep", "async.capacity=0,1").splitlines()
    assert [line.split()[0] for line in lines] == [
        "settings",
        "async.capacity=0",
        "async.capacity=1",
        "take",
    ]


def test_planned_step_counts_waits_as_the_simulated(printed_json):
    """Half of the simulated step, in which the trainer waits for the last responses."""
    config = ["plan", "configs/qwen3_30b_a3b_aipo.yaml", "plan.simulation.steps=8"]
    planned = printed_json(*config, "--json")
    simulated = printed_json(*config, "--simulate", "--json")
    assert planned["places_wait_s"] > 0.2 * planned["step_s"]
    assert planned["step_s"] == pytest.approx(simulated["step_p50_s"], rel=0.05)


def test_output_adds_up_to_the_step(printed, printed_json):
    """A checkpoint of 8 billion parameters and 12 bytes each takes 48 s. The first of the four
    steps waits for none.
    """
    each_step = ["checkpoint.every=1", "checkpoint.beside=false"]
    lines = dict(line.split(maxsplit=1) for line in printed(*CONFIG, *each_step).splitlines())
    assert "checkpoints +36 s" in lines["adds"]
    assert "for checkpoints 73%" in lines["waits"]
    assert lines["advice"].startswith("write checkpoints less often")
    summary = printed_json(*CONFIG, *each_step, "plan.simulation.checkpoint_s=0", "--json")
    assert summary["waits_for_checkpoints"] == 0
    assert sum(summary["step_parts_s"].values()) == pytest.approx(summary["step_p50_s"], rel=0.1)


@pytest.mark.parametrize("capacity", [0, 1])
@pytest.mark.parametrize(("response", "longer"), [(300, "generation"), (60, "training")])
def test_shared_gpus_advise_on_the_longer_side(printed, capacity, response, longer):
    lengths = [f"plan.response_tokens={response}", "plan.simulation.steps=3"]
    arguments = ["plan", "configs/one_gpu.yaml", f"async.capacity={capacity}", *lengths]
    assert f"\nadvice     shorten {longer}, or take more GPUs" in printed(*arguments, "--simulate")


def test_too_few_places_in_flight_are_reported(printed):
    assert "advice     raise async.max_in_flight and async.capacity: the trainer waits" in printed(
        *CONFIG, "async.max_in_flight=2"
    )


def test_a_simulated_run_is_a_run_for_the_page(tmp_path, capsys, refusal):
    folder = tmp_path / "simulated"
    assert main([*CONFIG, "--output", str(folder)]) == 0
    rows = json_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert main(["report", str(folder)]) == 0
    capsys.readouterr()
    assert "is there already" in refusal(*CONFIG, "--output", str(folder))


def test_simulation_from_a_run_takes_its_times(tmp_path, capsys, printed_json, refusal):
    """Here from a simulated run, whose times are known. A run of other sizes is refused."""
    folder = tmp_path / "simulated"
    steps = "plan.simulation.steps=20"
    command = [*CONFIG[:2], steps, "--simulate"]
    assert main([*command, "--output", str(folder)]) == 0
    capsys.readouterr()
    facts = printed_json(*command, "--from", str(folder), "--json")
    rows = json_lines(folder / "metrics.jsonl")
    assert facts["step_p50_s"] == pytest.approx(
        np.median([row["time/step_s"] for row in rows]), rel=0.1
    )
    assert "its sizes differ: generator.engines=" in refusal(
        *command, "--from", str(folder), "generator.engines=3"
    )


def test_a_run_is_compared_with_its_simulation(tmp_path):
    """Here with a simulated run, so that the two must agree."""
    samples = tmp_path / "samples.jsonl"
    folder = tmp_path / "run"
    group = {
        "samples": [{"tokens": tokens, "versions": [[0, tokens]]} for tokens in (64, 256, 1024)]
    }
    write_json_lines(samples, ({"step": step, **group} for step in range(16)))
    assert (
        main(
            [
                *CONFIG[:2],
                "plan.simulation.steps=16",
                f"plan.simulation.lengths={samples}",
                "--simulate",
                "--output",
                str(folder),
            ]
        )
        == 0
    )
    (folder / "rollouts").mkdir()
    samples.rename(folder / "rollouts" / "samples.jsonl")
    comparison = of_run(folder)
    assert abs(comparison.step_error) < 0.05
    assert comparison.wait_error < 0.1
    assert comparison.age_distance > 0.9  # in all steps the samples above are of version 0


def test_failures_of_a_run_are_simulated_again(tmp_path):
    """The failures are in a run's trace, here of a simulated run. The page shows the same ones."""
    folder = tmp_path / "run"
    samples = tmp_path / "samples.jsonl"
    group = {"samples": [{"tokens": 256, "versions": [[0, 256]]}]}
    write_json_lines(samples, ({"step": step, **group} for step in range(40)))
    times = {"gpu_mtbf_h": 0.15, "checkpoint_s": 5, "restart_s": 60, "engine_restart_s": 30}
    failures = [
        "checkpoint.every=4",
        *(f"plan.simulation.{key}={value}" for key, value in times.items()),
    ]
    steps = ["plan.simulation.steps=40", "max_steps=40", f"plan.simulation.lengths={samples}"]
    assert main([*CONFIG[:2], *steps, *failures, "--simulate", "--output", str(folder)]) == 0
    (folder / "rollouts").mkdir()
    samples.rename(folder / "rollouts" / "samples.jsonl")
    events = RunReader(folder, 1).read()
    failed = failures_of(events)
    assert len(failed.trainer) >= 2
    assert len(failed.engines) >= 2
    assert [mark["what"] for mark in events["marks"] if mark["what"] != "lost"] == [
        "end",
        "start",
    ] * len(failed.trainer)
    assert sum(mark["what"] == "lost" for mark in events["marks"]) == len(failed.engines)
    assert all(after_s == pytest.approx(60, abs=1) for _, after_s in failed.trainer)
    compared = of_run(folder)
    assert compared.end_error == pytest.approx(0, abs=0.05)
    assert abs(compared.step_error) < 0.05


def test_published_rows_are_simulated():
    """Without stragglers and waits, a step takes the planner's time."""
    [sides] = [row.sides(FIT) for row in TABLES[0] if row.name == "70B, 8 / 8"]
    assert simulated_s(sides) == pytest.approx(sides.step_s(), rel=0.2)


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({"time/step_s": None}, "has 0 steps with all times"),
        ({"time/step_s": float("nan")}, "has 0 steps with all times"),
        ({"time/step_s": "long"}, "has 0 steps with all times"),
        ({"time/trainer_wait_s": 1000.0}, "has 0 steps with all times"),
        ({"samples_per_s": 0.0}, "has 0 steps with all times"),
        ({"time/rollout_s": 1e-6}, "at no speed of engines do rollouts take 1e-06 s"),
    ],
)
def test_impossible_times_of_a_run_are_refused(tmp_path, refusal, spoilt, message):
    folder = tmp_path / "run"
    command = [*CONFIG[:2], "plan.simulation.steps=12", "--simulate"]
    assert main([*command, "--output", str(folder)]) == 0
    rows = [
        json.loads(line) | spoilt for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    write_json_lines(folder / "metrics.jsonl", rows)
    assert message in refusal(*command, "--from", str(folder))


def test_a_simulation_that_failed_leaves_no_folder(tmp_path):
    assert main([*CONFIG, "timeouts.rollouts_s=5", "--output", str(tmp_path / "run")]) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*CONFIG[:-1], "--sweep", "async.capacity=0,1"], "--sweep: needs --simulate"),
        ([*CONFIG, "--sweep", "async.capacity"], "must be KEY=VALUE,VALUE,…"),
        ([*CONFIG, "--sweep", "async.capacity=0,-1"], "async.capacity=-1"),
        ([*CONFIG, "--sweep", "async.capacity=0", "async.capacity=2"], "only once"),
        ([*CONFIG, "--search"], "--search: is not for --simulate"),
        ([*CONFIG, "--output", "/proc/nothing"], "--output /proc/nothing: "),
        (
            [*CONFIG, "plan.simulation.lengths=lognormal", "plan.simulation.sigma=40"],
            "plan.simulation.sigma=40",
        ),
        ([*CONFIG, "plan.simulation.sigma=0.5"], "sigma=0.5: has no effect with"),
        ([*CONFIG, "plan.simulation.tool_s=2"], "tool_s=2: has no effect with"),
        (
            [*CONFIG, "plan.simulation.correlation=0", "rollout.n=1"],
            "correlation=0: has no effect with rollout.n=1",
        ),
        (
            [*CONFIG, "plan.simulation.checkpoint_s=9", "checkpoint.every=0"],
            "checkpoint_s=9: has no effect with checkpoint.every=0",
        ),
        ([*CONFIG, "plan.simulation.restart_s=9"], "simulation.restart_s=9: has no effect with"),
        ([*CONFIG, "plan.simulation.engine_restart_s=9"], "engine_restart_s=9: has no effect with"),
        ([*CONFIG, "--from", "runs/none"], "runs/none/config.yaml"),
        ([*CONFIG, "plan.simulation.lengths=none.jsonl"], "none.jsonl"),
        ([*CONFIG, "trainer.tp=1", "cluster.gpu=L40S"], "too large"),
    ],
)
def test_wrong_arguments_are_refused_before_simulation(arguments, message, refusal):
    assert message in refusal(*arguments)


def test_a_simulated_plan_that_train_refuses_has_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    simulated = ["plan", "configs/quickstart.yaml", "--simulate", "plan.simulation.steps=2"]
    assert main(simulated) == 0
    assert main([*simulated, "cluster.gpu=H100"]) == 1, "float32 engines on GPUs"
    assert "refused by megarl train: model.dtype=float32" in " ".join(
        capsys.readouterr().out.split()
    )
