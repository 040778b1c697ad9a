"""Where rewards at turns come from: rollouts, tools, programs, and reward models of steps."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
from array import array
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tokenizers
from batches import batch_of
from msgspec.structs import replace
from resolving import MODEL, config, problems_of
from scripted_policy import (
    ROOT,
    SAMPLING,
    TOKENIZER,
    VOCABULARY,
    ScriptedPolicy,
    prompt,
    sample_of,
)
from tokenizers import decoders, models, pre_tokenizers

from megarl.agents.episode import Tree
from megarl.agents.player import NoReward
from megarl.agents.program import score_of_output
from megarl.algorithms.registry import make_algorithm
from megarl.base.rollout_types import Failure, Group, Prompt, Sample, TrainSequence, TurnReward
from megarl.config.load import dump_config
from megarl.config.schema import AlgorithmConfig, MixedConfig, RunConfig, SourceRewardConfig
from megarl.critic.executor import ActorCriticSteps
from megarl.data.tokenizer import Tokenizer
from megarl.executors.batch_steps import FrozenScores
from megarl.generator.completions import Completion, Sampling
from megarl.observe.samples import format_sample
from megarl.rewards.score import RewardPart, Score, ScoreRequest
from megarl.roles.reward_model import RewardModel, step_ends, up_to
from megarl.rollouts.environments.base import RolloutContext, Transcript
from megarl.rollouts.rollout import CheckedRollout

pytestmark = pytest.mark.usefixtures("hub_offline")


async def scored(argument: str) -> dict[str, Any]:
    return {"result": "144", "reward": 0.25}


def test_tool_may_reward_the_turn_that_calls_it() -> None:
    sample = sample_of(ScriptedPolicy("<12*12>", "144$"), tool=f"{__name__}:scored")
    assert sample.text == "<12*12>144;144" and sample.reward == 1.0
    assert sample.turn_rewards == [(7, 0.25), (15, 1.0)]
    shown = format_sample(0, sample.summary(), sample.text)
    assert "2 turns" in shown and "rewards of turns 0.25 1" in shown


async def misscored(argument: str) -> dict[str, Any]:
    return {"result": "144", "reward": "much"}


def test_wrong_reward_of_a_tool_names_the_tool() -> None:
    tool = f"{__name__}:misscored"
    with pytest.raises(TypeError, match=f"rollout.args.tool={tool}: the reward of a turn: .*much"):
        sample_of(ScriptedPolicy("<12*12>", "144$"), tool=tool)


def completion(text: str) -> Completion:
    ids = TOKENIZER.encode_text(text)
    return Completion(ids, [-1.0] * len(ids), [1] * len(ids), "stop")


def played(*rewards: float) -> Transcript:
    transcript = Transcript(prompt(), TOKENIZER, 64)
    for reward in rewards:
        if transcript.turn_ends:
            transcript.add_environment(TOKENIZER.encode_text(";"))
        transcript.add_policy(completion("12"))
        transcript.add_reward(reward)
    return transcript


def test_transcript_adds_the_final_reward_to_the_last_turn() -> None:
    assert played(0.5, 0.0).sample(1.0).turn_rewards == [(2, 0.5), (5, 1.0)]
    assert played(0.0, 0.0).sample(1.0).turn_rewards == [(2, 0.0), (5, 1.0)]
    assert played(0.0).sample(1.0).turn_rewards == []
    with pytest.raises(ValueError, match="no turn"):
        played().add_reward(1.0)
    silent = played(0.0)
    silent.add_policy(completion("34"))
    assert silent.sample(1.0).turn_rewards == [(2, 0.0), (4, 1.0)], "the environment wrote nothing"
    silent.add_policy(completion(""))
    silent.add_reward(0.25)
    assert silent.sample(1.0).turn_rewards == [(2, 0.0), (4, 1.25)]
    twice = played(0.5)
    twice.add_reward(0.25)
    assert twice.sample(1.0).turn_rewards == [(2, 1.75)]


def test_scores_of_steps_join_the_rewards_of_turns() -> None:
    steps = [TurnReward(1, 0.125), TurnReward(5, 2.0)]
    sample = played(0.5, 0.25).sample(Score(2.0, turn_rewards=steps))
    assert sample.reward == 2.0
    assert sample.turn_rewards == [(1, 0.125), (2, 0.5), (5, 2.25)]
    cut = played(0.5)
    cut.add_environment(TOKENIZER.encode_text(";"))
    scored_later = Score(2.0, turn_rewards=[TurnReward(3, 2.0)])
    assert cut.sample(scored_later).turn_rewards == [(2, 2.5)]


def test_ignored_rewards_of_turns_are_warned_of_once() -> None:
    async def rollout(
        context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
    ) -> list[Sample]:
        return [played(0.5, 0.5).sample(1.0)]

    warnings: list[Failure] = []
    checked = CheckedRollout(
        "mine",
        rollout,
        ScriptedPolicy().context(),
        timeout_s=5,
        vocab_size=VOCABULARY,
        tell=lambda failure, ordinal: warnings.append(failure),
    )
    for ignores_turns in (False, True):
        watched = dataclasses.replace(checked, ignores_turns=ignores_turns)
        for _ in range(2):
            asyncio.run(watched(prompt(), SAMPLING, 1))
        assert len(warnings) == int(ignores_turns)
    assert "rewards at turns are ignored: algorithm.credit=outcome" in warnings[0].reason


def two_turns() -> Tree:
    tree = Tree()
    first = tree.add(None, [7, 8], completion("12"))
    tree.add(first, TOKENIZER.encode_text(";"), completion("3"))
    return tree


def test_program_rewards_turns_in_its_last_line() -> None:
    tree = two_turns()
    report = {"reward": 1.0, "turn_rewards": [0.5, 0], "guesses": 2}
    score, metrics = score_of_output(f"log\n{json.dumps(report)}\n", tree)
    assert (score.reward, metrics) == (1.0, {"guesses": 2.0})
    [sample] = tree.samples(2, TOKENIZER.decode_all, score, metrics)
    assert sample.turn_rewards == [(2, 0.5), (4, 1.0)]
    for wrong in ([0.5], [0.5, "1"], [0.5, True], [0.5, float("nan")], [0.5, 1e6], 3):
        line = json.dumps({"reward": 1.0, "turn_rewards": wrong})
        with pytest.raises(NoReward, match="turn_rewards"):
            score_of_output(line, two_turns())


def test_branches_of_an_agent_keep_their_own_rewards() -> None:
    tree = two_turns()
    first, second = tree.turns
    retried = tree.add(first, TOKENIZER.encode_text("+"), completion("456"))
    tree.rewards = {first: 1.0, second: 2.0, retried: 3.0}
    samples = tree.samples(2, TOKENIZER.decode_all, Score(10.0), {})
    assert [sample.turn_rewards for sample in samples] == [
        [(2, 1.0), (4, 12.0)],
        [(2, 1.0), (6, 13.0)],
    ]
    assert [sample.summary().shared_turns for sample in samples] == [0, 1]


def test_openenv_gives_its_steps_to_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of a turn's steps is its reward, and the reset's goes to the first."""
    monkeypatch.syspath_prepend(ROOT / "megarl/agents/hubs")
    episodes = importlib.import_module("inside_openenv_episodes")

    class Step:
        done = False

        def __init__(self, reward: float | None):
            self.reward = reward

    course = episodes._Course("", ended=False, rewards=[0.5], reset_reward=0.5)
    for rewards in ([1.0, 2.0], [None], [4.0]):
        course.turn_rewards.append(0.0)
        for reward in rewards:
            course.take(Step(reward))
    outcome = course.outcome("sum")
    assert outcome["reward"] == 7.5
    assert (outcome["turn_rewards"], outcome["final_reward"]) == ([3.5, 0.0, 4.0], 0.0)
    assert "turn_rewards" not in course.outcome("last")


def test_verifiers_steps_have_the_rewards_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "megarl/agents/hubs")
    verifiers = importlib.import_module("inside_verifiers")
    steps = [{"reward": None}, {"reward": 2}, {}]
    assert verifiers.turn_rewards_of({"trajectory": steps}) == [0.0, 2.0, 0.0]
    assert verifiers.turn_rewards_of({"trajectory": steps[:1]}) == []
    assert verifiers.turn_rewards_of({}) == []


def request_of(text: str, turn_ends: list[int] | None = None) -> ScoreRequest:
    ids = TOKENIZER.encode_text(text)
    return ScoreRequest(text, "", token_ids=array("i", ids), turn_ends=turn_ends or [len(ids)])


def test_steps_end_after_separators_and_turns() -> None:
    def responses(request: ScoreRequest, separator: str) -> list[str]:
        ends = step_ends(request, TOKENIZER, separator)
        return [up_to(request, end, TOKENIZER).response for end in ends]

    assert responses(request_of("1+2;;3;;4"), ";;") == ["1+2;;", "1+2;;3;;", "1+2;;3;;4"]
    assert responses(request_of("12"), ";;") == ["12"]
    assert responses(request_of("1;2;3", turn_ends=[1, 5]), ";") == ["1", "1;2;3"]
    assert step_ends(request_of("1;2"), TOKENIZER, ";") == [2, 3]
    assert len(up_to(request_of("1;2"), 2, TOKENIZER).token_ids) == 2


@pytest.mark.parametrize("by_bytes", [True, False])
def test_separator_may_be_of_any_characters(by_bytes: bool) -> None:
    """Math-Shepherd's has a leading space and letters of two bytes."""
    text = "x ки y ки z"
    if by_bytes:
        vocabulary = {letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        vocabulary = {word: n for n, word in enumerate(["▁x", "▁ки", "▁y", "▁z"])}
        backend = tokenizers.Tokenizer(models.WordLevel(vocabulary))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    policy = Tokenizer("", backend, bos_token=None, unknown_id=None, eos_ids=())
    request = ScoreRequest(text, "", token_ids=array("i", policy.encode_text(text)))
    steps = [up_to(request, end, policy) for end in step_ends(request, policy, " ки")]
    assert [step.response for step in steps] == ["x ки", "x ки y ки", text]


def test_steps_of_a_response_are_limited() -> None:
    ends = step_ends(request_of("1;" * 3000), TOKENIZER, ";")
    assert (len(ends), ends[:2], ends[-2:]) == (1024, [2, 4], [2046, 6000])


def test_reward_model_scores_every_step() -> None:
    """Its reward is the last step's. If a step fails, so does the whole score."""
    model = RewardModel.__new__(RewardModel)
    model._separator = ";"
    model._policy = TOKENIZER
    model._step_places = asyncio.Semaphore(2)
    model_scores = {"1;": 0.25, "1;2": 0.75}

    async def score(part: RewardPart, request: ScoreRequest) -> Score:
        if request.response not in model_scores:
            return part.failed("error", "too long", request)
        return Score(model_scores[request.response])

    model._score = score
    part = RewardPart("roles.prm", failed_score=-1.0)
    result = asyncio.run(model.score(part, request_of("1;2")))
    assert result == Score(0.75, turn_rewards=[TurnReward(2, 0.25), TurnReward(3, 0.75)])
    failed = asyncio.run(model.score(part, request_of("1;3")))
    assert failed.reward == -1.0 and failed.failures and not failed.turn_rewards


def test_reward_models_of_steps_need_credit_by_turn(tmp_path: Path) -> None:
    path = tmp_path / "prm"
    path.mkdir()
    scores = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    written = json.loads((MODEL / "config.json").read_text()) | scores
    (path / "config.json").write_text(json.dumps(written))
    role = ["roles.prm.role=reward_model", f"roles.prm.path={path}", "reward.name=roles.prm"]
    separator = 'roles.prm.step_separator="##"'
    assert problems_of(tmp_path, *role, separator) == [
        "roles.prm.step_separator=##: needs roles.prm.scores=steps"
    ]
    assert problems_of(tmp_path, *role, "roles.prm.scores=steps") == [
        "roles.prm.scores=steps: needs algorithm.credit=returns or process; outcome would ignore "
        "all steps but the last"
    ]
    code = "data.train.sources.code"
    sources = ["data.train.source=sources", f"{code}.source=synthetic:chain"]
    by_calls = [f"{code}.rollout.name=program", "algorithm.credit=process"]
    assert (
        "roles.prm.scores=steps: needs episodes of one sequence; those of "
        f"{code}.rollout.name=program may have branches (docs/agents.md)"
    ) in problems_of(tmp_path, *role, "roles.prm.scores=steps", *sources, *by_calls)
    by_turn = config(tmp_path, *role, "roles.prm.scores=steps", "algorithm.credit=process")
    assert by_turn.roles["prm"].step_separator == "\n\n"
    (tmp_path / "run/checkpoints/step_000010").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text(dump_config(by_turn))
    changed = [*role, "roles.prm.scores=steps", "algorithm.credit=process", separator]
    [problem] = problems_of(tmp_path, *changed, command="dry-run")
    assert problem.startswith("roles.prm.step_separator=##: the run in run_dir=")


@pytest.mark.parametrize(("credit", "expected"), [
    ("outcome", [0.0, 0.0, 0.0, 0.0, 3.0]),
    ("returns", [0.0, 0.5, 0.0, 0.0, 1.0]),
])  # fmt: skip
def test_critic_gets_rewards_at_the_last_tokens_of_turns(
    credit: str, expected: list[float]
) -> None:
    """Values 0 and lambda 0: a token's advantage is its own reward."""
    sample = Sample(
        token_ids=array("i", range(6)),
        logprobs=array("f", [-1.0] * 6),
        versions=array("i", [0] * 6),
        policy_mask=array("b", [True, True, False, True, True, True]),
        text="",
        reward=3.0,
        finish_reason="stop",
        turn_rewards=[TurnReward(2, 0.5), TurnReward(6, 1.0)],
    )
    run = RunConfig()
    run.algorithm = AlgorithmConfig(advantage="critic", credit=credit, gae_lambda=0.0)
    steps = ActorCriticSteps(
        cast(Any, None), make_algorithm(run.algorithm), run, critic=cast(Any, None)
    )
    batch = batch_of([Group(prompt(), [sample])])
    start = len(prompt().token_ids)
    mask = np.array([False] * start + [bool(value) for value in sample.policy_mask])
    zeros = np.zeros(len(mask), np.float32)
    sequences = {0: TrainSequence(zeros.astype(np.int32), mask, zeros, zeros)}
    advantages, returns = steps._estimates(
        sequences, {0: zeros}, steps._earned(batch, [3.0]), FrozenScores(None, None, None), {}
    )
    assert advantages[0][mask].tolist() == expected == returns[0][mask].tolist()


def test_critic_subtracts_the_penalties_of_the_source() -> None:
    cut = replace(played(0.5, 0.0).sample(1.0), finish_reason="length")
    run = RunConfig()
    run.algorithm = AlgorithmConfig(advantage="critic", credit="returns")
    penalty = SourceRewardConfig(unfinished_penalty=10.0)
    run.data.train.sources["strict"] = MixedConfig(source="strict.jsonl", reward=penalty)
    steps = ActorCriticSteps(
        cast(Any, None), make_algorithm(run.algorithm), run, critic=cast(Any, None)
    )
    batch = batch_of([Group(replace(prompt(), source=source), [cut]) for source in ("", "strict")])
    earned = steps._earned(batch, steps.rewards(batch).flatten().tolist())
    assert earned == [[(2, 0.5), (5, 1.0)], [(2, 0.5), (5, 1.0 - 10.0)]]
