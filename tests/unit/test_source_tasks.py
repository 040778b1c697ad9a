"""Sources with a reward, a rollout and an advantage of their own."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import batch_of
from msgspec.structs import replace
from resolving import problems_of
from scripted_policy import MARKS, SAMPLING, TINY, TOKENIZER, VOCABULARY, ScriptedPolicy, prompt

from megarl.algorithms.batches import advantages_by_source, batch_rewards, masked_places
from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import Batch, Failure, Group, Prompt, Sample
from megarl.config.dialect import read_yaml
from megarl.config.errors import ConfigError
from megarl.config.load import dump_config, load_config
from megarl.config.schema import RunConfig
from megarl.config.tasks import task_of, tasks_of, with_source_keys
from megarl.data.datasets import answers_of
from megarl.data.rows import held_out, held_out_sampling, stops_on_text
from megarl.plan.checkpoints import FIXED_KEYS
from megarl.rewards.credit import fraction_without_signal
from megarl.rewards.score import all_parts, failed_source, parts_in_evaluation, parts_of_source
from megarl.rollouts.channel import judged, pack
from megarl.rollouts.environments.loading import check_rollout
from megarl.rollouts.rollout import Rollouts, open_rollouts, train_sampling

SOURCES: dict[str, Any] = {
    "math": {"source": "synthetic:chain"},
    "code": {
        "source": "code.jsonl",
        "reward": {"name": "code", "unfinished_score": -1.0},
        "rollout": {"max_tokens": 8, "stop": ["end"]},
        "algorithm": {"mask_truncated": True},
    },
    "game": {
        "source": "synthetic:product",
        "rollout": {"name": "tool_calls", "args": {"tool": "calculator", **MARKS}},
        "algorithm": {"advantage": "leave_one_out"},
    },
}


def config_of(*overrides: str, **sources: Any) -> RunConfig:
    settings = {
        "model": {"path": TINY},
        "reward": {"parts": {"number": {"name": "last_number"}}},
        "rollout": {"max_tokens": 16, "n": 2},
        "data": {"train": {"sources": sources or SOURCES}},
    }
    return load_config(settings, overrides)


def test_source_inherits_what_it_leaves_out() -> None:
    config = config_of("rollout.temperature=0.5", "reward.timeout_s=3")
    assert task_of(config, "math") is config is task_of(config, "")
    code = task_of(config, "code")
    assert (code.reward.name, code.reward.parts, code.reward.timeout_s) == ("code", {}, 3.0)
    assert (code.rollout.name, code.rollout.max_tokens) == ("single_turn", 8)
    assert task_of(config, "game").rollout.temperature == 0.5
    assert [*task_of(config, "game").reward.parts] == ["number"]
    assert config.reward.parts and config.rollout.max_tokens == 16, "the run's own are as before"
    assert load_config(read_yaml(dump_config(config))) == config


def test_removed_parts_leave_the_reward_of_the_run() -> None:
    config = config_of(a={"source": "x", "reward": {"parts": {"mine": None}}})
    assert task_of(config, "a") is config


def test_arguments_of_another_rollout_are_not_inherited() -> None:
    run = ["rollout.name=tool_calls", "rollout.args={max_calls: 2, tool: a}"]
    config = config_of(
        *run,
        more={"source": "x", "rollout": {"args": {"max_calls": 5}}},
        other={"source": "x", "rollout": {"name": "single_turn"}},
    )
    assert task_of(config, "more").rollout.args == {"max_calls": 5, "tool": "a"}
    assert task_of(config, "other").rollout.args == {}


def test_reward_of_a_hub_replaces_that_of_the_run() -> None:
    config = config_of(hub={"source": "x", "rollout": {"name": "verifiers"}})
    assert (task_of(config, "hub").reward.name, task_of(config, "hub").reward.parts) == ("math", {})
    assert answers_of(config, name="hub") == "row"


def test_messages_name_the_key_of_the_source() -> None:
    config = config_of()
    text = "reward.name=code, reward.timeout_s, rollout.max_tokens and eval.reward.name"
    assert with_source_keys(text, config, "math") == text
    assert with_source_keys(text, config, "code") == (
        "data.train.sources.code.reward.name=code, reward.timeout_s, "
        "data.train.sources.code.rollout.max_tokens and eval.reward.name"
    )
    assert [part.key for part in all_parts(config)] == [
        "reward.parts.number.name",
        "data.train.sources.code.reward.name",
    ]


CODE = "data.train.sources.code"


@pytest.mark.parametrize(
    "override, problem",
    [
        (f"{CODE}.reward.nmae=math", f"{CODE}.reward.nmae=math: unknown key; did you mean "),
        (f"{CODE}.reward.name=maths", f"{CODE}.reward.name=maths: must be one of math, "),
        (f"{CODE}.rollout.temperature=1", f"{CODE}.rollout.temperature=1: unknown key; "),
        (f"{CODE}.reward.parts.a.weight=1", f"{CODE}.reward.parts.a.name: must be set"),
        (f"{CODE}.rollout.args=3", f"{CODE}.rollout.args=3: must be a mapping"),
        (f"{CODE}.algorithm.advantage=gae", f"{CODE}.algorithm.advantage=gae: must be "),
        (f"{CODE}.reward=code", f"{CODE}.reward=code: is a section; set its keys, such as "),
    ],
)
def test_wrong_setting_of_a_source_is_named_in_full(override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(override)
    assert error.value.problems[0].startswith(problem), error.value.problems


MIXED = (
    "data.train.source=sources",
    "data.train.sources.math.source=synthetic:chain",
    f"{CODE}.source=synthetic:chain",
)


@pytest.mark.parametrize(
    "settings, problem",
    [
        ([f"{CODE}.rollout.max_tokens=2000"],
         f"{CODE}.rollout.max_tokens=2000: must be at most rollout.max_tokens=1024"),
        ([f"{CODE}.reward.name=roles.grader"],
         f"{CODE}.reward.name=roles.grader: there is no such role; there is none"),
        ([f"{CODE}.reward.parts.penalty.name=math"],
         f"{CODE}.reward.parts.penalty: its name must be letters, digits, - and _, and none of "
         "penalty, turns"),
        ([f"{CODE}.reward.unfinished_penalty=1", "reward.unfinished_score=0"],
         f"reward.unfinished_score=0: must be null with {CODE}.reward.unfinished_penalty=1"),
        ([f"{CODE}.rollout.max_tokens=10", f"{CODE}.reward.overlong_tokens=20"],
         f"{CODE}.reward.overlong_tokens=20: must be at most {CODE}.rollout.max_tokens=10"),
        (["eval.suites.held.source=synthetic:chain", "eval.suites.held.task=cod"],
         "eval.suites.held.task=cod: must be a source in data.train.sources: math, code; did you "
         "mean code?"),
        (["algorithm.name=ppo", f"{CODE}.algorithm.advantage=mean"],
         f"{CODE}.algorithm.advantage=mean: must be null: ppo has its own"),
        (["algorithm.name=ppo", f"{CODE}.rollout.name=program"],
         f"algorithm.name=ppo: needs episodes of one sequence; those of {CODE}.rollout.name=program "
         "may have branches (docs/agents.md)"),
        (["eval.suites.held.source=synthetic:chain", "eval.suites.held.task=code",
          "eval.win_rate=last_number", f"{CODE}.rollout.name=verifiers"],
         f"eval.win_rate=last_number: must be null with {CODE}.rollout.name=verifiers, whose rows "
         "have no reference answers"),
        (["data.eval=null", "eval.suites.known.benchmark=gsm8k", "eval.win_rate=last_number"],
         "eval.win_rate=last_number: needs held-out prompts of no benchmark: set data.eval.source"),
        (["async.idle=samples", f"{CODE}.rollout.name=program"],
         f"async.idle=samples: must be off with {CODE}.rollout.name=program: its episodes may begin "
         "with different tokens"),
        ([f"{CODE}.rollout.name=verifiers", f"{CODE}.reward.name=last_number"],
         f"{CODE}.reward.name=last_number: must be left out with {CODE}.rollout.name=verifiers: "
         "the environment has a reward of its own"),
    ],
)  # fmt: skip
def test_impossible_task_is_refused(tmp_path: Path, settings: list[str], problem: str) -> None:
    assert problem in problems_of(tmp_path, *MIXED, *settings)


def test_arguments_of_a_source_are_checked() -> None:
    config = config_of("data.train.sources.game.rollout.args.max_calls=many")
    with pytest.raises(ConfigError) as error:
        check_rollout(config)
    key = "data.train.sources.game.rollout.args"
    problems = [problem for problem in error.value.problems if "bubblewrap" not in problem]
    assert problems == [f"{key}.max_calls=many: expected `int`, got `str`"]
    with pytest.raises(ConfigError, match=f"{key}.max_call=1: unknown argument; did you mean"):
        check_rollout(config_of("data.train.sources.game.rollout.args.max_call=1"))


def test_file_of_a_tool_is_found_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data: {train: {sources: {game: {source: x, rollout: {name: tool_calls, args: {tool: "
        "./ask.py:ask}}, reward: {parts: {own: {name: ./grade.py:grade}}}}}}}\n"
        f"model: {{path: {TINY}}}\n"
    )
    game = load_config(tmp_path / "run.yaml").data.train.sources["game"]
    assert game is not None and game.reward.parts["own"] is not None
    assert game.rollout.args["tool"] == f"{tmp_path}/ask.py:ask"
    assert game.reward.parts["own"].name == f"{tmp_path}/grade.py:grade"


def test_rows_and_limits_follow_the_source() -> None:
    config = config_of("eval.suites.held={source: synthetic:product, task: code}")
    assert [answers_of(config, name=name) for name in SOURCES] == ["final", "tests", "final"]
    assert answers_of(config, True, "held") == "tests"
    assert parts_in_evaluation(config, "held") == parts_of_source(config, "code")
    [(*_, suite)] = held_out(config)
    for sampling in (
        held_out_sampling(config, suite),
        train_sampling(task_of(config, "code"), TOKENIZER),
    ):
        assert (sampling.max_tokens, sampling.stop) == (8, ("end",))
    assert stops_on_text(config) and not stops_on_text(config_of(math=SOURCES["math"]))


async def opened(config: RunConfig, policy: Any, resources: AsyncExitStack) -> Rollouts:
    plan: Any = SimpleNamespace(config=config, spec=SimpleNamespace(vocab_size=VOCABULARY))
    return await open_rollouts(plan, policy, {}, TOKENIZER, resources)


def test_prompt_is_played_by_the_rollout_of_its_source(tmp_path: Path) -> None:
    """A real worker scores. What is equal is opened once."""
    sources = {name: SOURCES[name] for name in ("math", "game")}
    sources["also"] = {**SOURCES["math"], "reward": {"parts": {"number": {"name": "last_number"}}}}
    config = config_of(
        f"run_dir={tmp_path}",
        "reward.workers=1",
        "eval.suites.games={source: synthetic:product, task: game}",
        **sources,
    )

    async def play() -> list[Sample]:
        async with AsyncExitStack() as resources:
            policy = ScriptedPolicy("144$", "<12*12>", "144$", "<12*12>", "0$")
            rollouts = await opened(config, policy, resources)
            by_source: Any = rollouts.training
            also, math, game = (by_source.rollouts[name] for name in ("also", "math", "game"))
            assert also.rollout is math.rollout is not game.rollout
            held: Any = rollouts.held_out
            assert held.rollouts["games"].rollout is game.rollout
            samples = []
            for rollout, name in (
                (rollouts.training, "math"),
                (rollouts.training, "game"),
                (rollouts.held_out, "games"),
            ):
                group = await rollout(replace(prompt(), source=name), SAMPLING, 1)
                samples += group.samples
            return samples

    samples = asyncio.run(play())
    assert [sample.reward for sample in samples] == [1.0, 1.0, 0.0]
    assert [sample.summary().turns for sample in samples] == [1, 2, 2]
    assert len([*tmp_path.glob("logs/**/reward*.log")]) <= 1, "equal parts share their workers"


def group_of(source: str, ordinal: int, *samples: Sample) -> Group:
    return Group(Prompt(ordinal, [1], "", "", source=source), list(samples))


def sample(reward: float, finish: str = "stop", *failures: Failure) -> Sample:
    return Sample([3], [-0.5], [0], "x", reward, finish, failures=list(failures))


def batch() -> Batch:
    cut = [sample(1.0, "length"), sample(0.0)]
    groups = [group_of(name, ordinal, *cut) for ordinal, name in enumerate(SOURCES)]
    return batch_of(groups)


def test_penalties_and_masks_follow_the_source() -> None:
    config = config_of()
    assert batch_rewards(batch(), config).tolist() == [[1, 0], [-1, 0], [1, 0]]
    assert masked_places(batch(), config) == {2}
    assert masked_places(batch(), config_of(math=SOURCES["math"])) == set()


def test_signal_of_a_prompt_is_that_of_its_source() -> None:
    """Dynamic sampling sees the rewards after penalties."""
    config = config_of("rollout.dynamic_sampling=true")
    equal = [sample(-1.0), sample(1.0, "length")]
    dropped = [judged(pack(group_of(name, 0, *equal)), config).dropped for name in SOURCES]
    assert dropped == [False, True, False]


def test_signals_of_turns_are_those_of_their_source() -> None:
    """Equal rewards of which one response is cut, as in the metric zero_advantage_fraction."""
    equal = [sample(1.0, "length"), sample(1.0)]
    groups = batch_of([group_of(name, 0, *equal) for name in SOURCES]).groups
    config = config_of("algorithm.credit=returns")
    assert fraction_without_signal(groups, config) == pytest.approx(2 / 3), (
        "code alone has a penalty"
    )


@pytest.mark.parametrize("rule", ["mean", "batch_normalized"])
def test_advantages_follow_the_rule_of_the_source(rule: str) -> None:
    config = config_of(f"algorithm.advantage={rule}")
    algorithm = make_algorithm(config.algorithm)
    rewards = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 0.0]], dtype=torch.float64)
    advantages = advantages_by_source(batch(), rewards, algorithm, config)
    assert torch.equal(advantages[:2], algorithm.advantages(rewards[:2]))
    assert advantages[2].tolist() == [5.0, -5.0], "the reward minus that of the other sample"
    plain = config_of(math=SOURCES["math"])
    assert torch.equal(
        advantages_by_source(batch(), rewards, algorithm, plain), algorithm.advantages(rewards)
    )


def test_limit_of_failures_counts_by_source() -> None:
    """One source fails always; over all sources, that is less than half."""
    late = Failure("timeout", "it took longer than 5 s", "abc")
    config = config_of()

    def problem(*names: str) -> str | None:
        groups = []
        for ordinal, name in enumerate(SOURCES):
            failures = [late] if name in names else []
            groups.append(group_of(name, ordinal, *[sample(0.0, "stop", *failures)] * 2))
        return failed_source(config, batch_of(groups).groups)

    assert problem() is None
    key = "data.train.sources.code"
    assert problem("code") == (
        f"{key}: {key}.reward.name=code: of 2 samples 2 scores failed: 2 timeouts, more than "
        "reward.max_failed_fraction=0.5; for example 'abc': it took longer than 5 s"
    )
    config.data.train.sources["code"].reward.max_failed_fraction = 1.0  # type: ignore[union-attr]
    assert problem("code") is None


def test_limit_of_failures_counts_sources_of_one_task_together() -> None:
    """One of the three samples of a small source failed, of 12 in all."""
    late = Failure("timeout", "it took longer than 5 s", "abc", "number")
    config = config_of(
        "reward.max_failed_fraction=0.2",
        few={"source": "synthetic:chain"},
        many={"source": "synthetic:product"},
    )

    def problem(*failed: int) -> str | None:
        groups = []
        for ordinal in range(6):
            failures = [late] if ordinal in failed else []
            name = "many" if ordinal else "few"
            samples = [sample(0.0, "stop", *failures), sample(0.0, "stop")]
            groups.append(group_of(name, ordinal, *samples))
        return failed_source(config, batch_of(groups).groups)

    assert problem(0, 1) is None
    assert str(problem(0, 1, 2)).startswith(
        "data.train.sources.few, many: reward.parts.number.name=last_number: of 12"
    )


def test_resumed_run_keeps_the_tasks_that_samples_depend_on() -> None:
    sources = "data.train.sources.NAME"
    assert {f"{sources}.reward.name", f"{sources}.rollout.name", f"{sources}.quota"} <= {
        *FIXED_KEYS
    }
    assert f"{sources}.algorithm.advantage" not in FIXED_KEYS, "as algorithm.advantage"
    assert tasks_of(config_of()).keys() == SOURCES.keys()
