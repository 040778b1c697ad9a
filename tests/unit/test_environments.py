"""The contents of transcripts, refused samples, and turns with a tool, with a scripted policy."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
from batches import batch_of
from msgspec.structs import replace
from scripted_policy import EOS, SAMPLING, TOKENIZER, VOCABULARY, ScriptedPolicy, prompt, sample_of

from megarl.base.rollout_types import Group, Prompt, Sample
from megarl.generator.completions import Completion, Sampling
from megarl.rollouts.environments.base import RolloutContext, Transcript
from megarl.rollouts.environments.single_turn import single_turn
from megarl.rollouts.rollout import CheckedRollout


def test_answer_of_a_call_is_the_environments():
    policy = ScriptedPolicy("<12*12>", "144$")
    sample = sample_of(policy)
    assert sample.text == "<12*12>144;144"
    assert sample.reward == 1.0
    assert sample.finish_reason == "stop"
    ids = TOKENIZER.encode_text("<12*12>144;144") + [EOS]
    assert sample.token_ids.tolist() == ids
    assert sample.policy_mask.tolist() == [True] * 7 + [False] * 4 + [True] * 4
    assert sample.logprobs.tolist() == [-0.5] * 7 + [0.0] * 4 + [-1.0] * 4
    summary = sample.summary()
    assert summary.policy_versions == [(1, 7), (2, 4)]
    assert (summary.min_version, summary.max_version) == (1, 2)
    assert sample.environment_spans == [(7, 11)] and sample.text[7:11] == "144;"
    assert sample.metrics == {"tool_calls": 1, "tool_errors": 0}
    assert (summary.turns, summary.policy_tokens) == (2, 11)
    # all of it reaches the trainer
    [trained] = batch_of([Group(prompt(), [sample])]).numbers.values()
    assert trained.policy_mask is not None
    assert trained.token_ids.tolist() == ids
    assert trained.logprobs.tolist() == [*sample.logprobs]
    assert trained.policy_mask.tolist() == [*sample.policy_mask]
    (first_ids, first_sampling), (second_ids, second_sampling) = policy.asked
    assert first_ids == prompt().token_ids
    assert second_ids == prompt().token_ids + ids[:11]
    assert (first_sampling.max_tokens, second_sampling.max_tokens) == (64, 64 - 11)
    assert set(first_sampling.stop_token_ids) == {EOS, TOKENIZER.token_id(">")}


def test_sample_without_a_call_has_one_turn_and_no_mask():
    sample = sample_of(ScriptedPolicy("144$"))
    assert not sample.policy_mask
    assert sample.summary().turns == 1
    assert sample.reward == 1.0
    assert sample.metrics["tool_calls"] == 0


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("<2**3>", "error: not arithmetic;"),
        ("12*12>", "error: the call was not opened;"),
        ("<>", "error: not arithmetic;"),
        ("<<6*7>", "42;"),  # the last opening mark counts
        ("<1/0>", "error: division by zero;"),
    ],
)
def test_failed_calls_are_answered(call: str, answer: str):
    sample = sample_of(ScriptedPolicy(call, "144$"))
    assert sample.text == f"{call}{answer}144" and sample.reward == 1.0
    assert sample.metrics == {"tool_calls": 1, "tool_errors": int(answer.startswith("error"))}


def test_result_of_a_tool_is_not_the_answer():
    """Only the last turn is scored. A sample that ends in a call has no answer."""
    assert sample_of(ScriptedPolicy("<12*12>", "$")).reward == 0.0
    ended = sample_of(ScriptedPolicy("<12*12>", "144>"), max_calls=1)
    assert ended.reward == 0.0
    assert ended.text == "<12*12>144;144>"
    assert ended.metrics["tool_calls"] == 1


def test_budgets_hold():
    no_room = sample_of(ScriptedPolicy("<12*12>"), sampling=replace(SAMPLING, max_tokens=11))
    assert no_room.text == "<12*12>" and no_room.finish_reason == "length" and no_room.reward == 0.0
    one_left = sample_of(ScriptedPolicy("<12*12>", "1"), sampling=replace(SAMPLING, max_tokens=12))
    assert one_left.text == "<12*12>144;1" and one_left.finish_reason == "length"
    cut = sample_of(ScriptedPolicy("<12*12>", "144$"), max_result_tokens=2)
    assert cut.text == "<12*12>14;144"


async def slow(argument: str) -> str:
    await asyncio.sleep(60)
    return argument


async def broken(argument: str) -> str:
    raise KeyError(argument)


async def special(argument: str) -> str:
    return f"{argument}<eos>"


def test_async_tools():
    late = sample_of(ScriptedPolicy("<1>", "2$"), tool=f"{__name__}:slow")
    assert late.text == "<1>error: it took longer than 0.05 s;2"
    with pytest.raises(KeyError):
        sample_of(ScriptedPolicy("<1>"), tool=f"{__name__}:broken")


def test_only_the_template_writes_special_tokens():
    sample = sample_of(
        ScriptedPolicy("<1>", "2$"), tool=f"{__name__}:special", result="<bos>{result}"
    )
    environment = [
        token for token, by_policy in zip(sample.token_ids, sample.policy_mask) if not by_policy
    ]
    assert environment == [TOKENIZER.token_id("<bos>"), *map(TOKENIZER.token_id, "1<eos>")]
    assert EOS not in environment


def test_single_turn_asks_once_for_all():
    policy = ScriptedPolicy("144$", "7$")
    samples = asyncio.run(single_turn(policy.context(), prompt(), SAMPLING, 2))
    assert [(s.text, s.reward, len(s.policy_mask), s.versions[0]) for s in samples] == [
        ("144", 1.0, 0, 1),
        ("7", 0.0, 0, 1),
    ]
    assert [s.reward_parts for s in samples] == [{"index": 0.0}, {"index": 1.0}]
    assert len(policy.asked) == 1


def test_invalid_samples_end_the_run_with_a_reason():
    good = asyncio.run(single_turn(ScriptedPolicy("144$").context(), prompt(), SAMPLING, 1))[0]

    def call(*samples: Any) -> Any:
        async def rollout(
            context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int
        ) -> Any:
            return list(samples)

        checked = CheckedRollout(
            "mine:rollout", rollout, ScriptedPolicy().context(), timeout_s=5, vocab_size=VOCABULARY
        )
        return asyncio.run(checked(prompt(), SAMPLING, 1))

    assert call(good).samples == [good]
    for samples, reason in [
        ([good, good], "must return 1 samples, not 2"),
        (["144"], "must return a list of Sample"),
        ([replace(good, logprobs=[])], "4 token ids, but 0 logprobs"),
        ([replace(good, policy_mask=[True])], "4 token ids, but 1 policy_mask"),
        ([replace(good, policy_mask=[False] * 4)], "none of its tokens"),
        ([replace(good, reward=float("nan"))], "reward nan"),
        ([replace(good, reward=True)], "reward True: must be a finite number"),
        (
            [replace(good, reward=1e308)],
            "reward 1e+308: must be a finite number of absolute value at most 1e+06",
        ),
        ([replace(good, reward=10**400)], "reward 1000"),
        (
            [replace(good, logprobs=[-0.5, float("nan"), -0.5, -0.5])],
            "log-prob nan: must be a finite number, at most 0",
        ),
        (
            [replace(good, logprobs=[-0.5, 0.25, -0.5, -0.5])],
            "log-prob 0.25: must be a finite number, at most 0",
        ),
        (
            [replace(good, logprobs=[-0.5, -0.5, -0.5, -1e300])],
            "log-prob -inf: must be a finite number, at most 0",
        ),
        (
            [replace(good, token_ids=[4, 4, VOCABULARY, 4])],
            f"token id {VOCABULARY}: the vocabulary has 0 to {VOCABULARY - 1}",
        ),
        ([replace(good, token_ids=[4, -1, 4, 4])], "token id -1: the vocabulary has"),
        (
            [replace(good, token_ids=[4] * 65, logprobs=[0.0] * 65, versions=[0] * 65)],
            "65 tokens, more than max_tokens=64",
        ),
    ]:
        with pytest.raises(
            RuntimeError, match=f"rollout mine:rollout, prompt 7: .*{re.escape(reason)}"
        ):
            call(*samples)


def test_hanging_rollout_is_named():
    async def rollout(context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int) -> Any:
        await asyncio.sleep(60)

    checked = CheckedRollout(
        "mine:rollout", rollout, ScriptedPolicy().context(), timeout_s=0.02, vocab_size=VOCABULARY
    )
    with pytest.raises(
        TimeoutError,
        match="rollout mine:rollout, prompt 7: not finished within timeouts.samples_s=0.02",
    ):
        asyncio.run(checked(prompt(), SAMPLING, 1))


def test_environment_text_at_the_end_is_not_the_policys():
    transcript = Transcript(prompt(), TOKENIZER, 10)
    transcript.add_policy(Completion([4, 5], [-1.0, -2.0], [3, 4], "stop"))
    assert not transcript.add_environment([6] * 8) and transcript.add_environment([6] * 7)
    sample = transcript.sample(1.0)
    summary = sample.summary()
    assert summary.policy_versions == [(3, 1), (4, 1)]
    assert summary.turns == 1
    assert summary.policy_tokens == 2


def test_turn_with_a_limit():
    """A turn that is cut there continues.

    The response counts as cut only if it has no space left.
    """
    transcript = Transcript(prompt(), TOKENIZER, 10)
    for limit, max_tokens in ((None, 10), (3, 3), (11, 10)):
        assert transcript.turn(SAMPLING, max_tokens=limit).max_tokens == max_tokens
    transcript.add_policy(Completion([4, 5, 6], [-1.0] * 3, [3] * 3, "length"))
    assert transcript.finish_reason == "stop"
    assert not transcript.to_score.truncated
    assert transcript.add_environment([6])
    assert transcript.turn(SAMPLING, max_tokens=7).max_tokens == 6
    transcript.add_policy(Completion([4] * 6, [-1.0] * 6, [3] * 6, "length"))
    assert transcript.finish_reason == "length" and transcript.to_score.truncated


def test_sample_takes_numbers_in_any_form_and_only_numbers():
    lists = Sample([4, 5], [-0.5, -1], [3, 3], "", 1.0, "stop", [True, False])
    arrays = Sample(
        np.array([4, 5]),
        np.float64([-0.5, -1.0]),
        np.int16([3, 3]),
        "",
        1.0,
        "stop",
        np.array([True, False]),
    )
    assert arrays == lists and lists == replace(lists) and lists != replace(lists, versions=[3, 4])
    assert lists.token_ids.typecode == lists.versions.typecode == "i"
    assert (lists.logprobs.typecode, lists.policy_mask.typecode) == ("f", "b")
    for name, values in [
        ("token_ids", [4.0, 5]), ("token_ids", np.array([4.0, 5.0])), ("token_ids", [4, 1 << 31]),
        ("token_ids", np.array([4, 1 << 31])),
        ("token_ids", np.array([[4, 5]])), ("versions", ["3", "3"]), ("logprobs", [None, -1.0]),
        ("logprobs", "ab"),
        ("policy_mask", np.array([1, 0])),
    ]:  # fmt: skip
        with pytest.raises(TypeError, match=f"Sample.{name}: "):
            replace(lists, **{name: values})
    with pytest.raises(TypeError):
        _ = lists.token_ids + [6]  # to be reported, not guessed
