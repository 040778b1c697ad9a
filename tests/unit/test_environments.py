"""Rollouts by name: what is refused before anything starts, what a transcript keeps, and turns with a tool, against a scripted policy."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import batch_of
from msgspec.structs import replace

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import ModelConfig, RunConfig
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.generator.completions import Completion, Sampling
from megarl.rewards.score import Score, ScoreRequest, score_of
from megarl.rollouts.environments.base import RolloutContext, ToolError, sample_problems
from megarl.rollouts.environments.loading import check_rollout, load_rollout
from megarl.rollouts.environments.single_turn import single_turn
from megarl.rollouts.environments.tool_calls import ToolCalls
from megarl.rollouts.environments.transcript import Transcript
from megarl.rollouts.rollout import CheckedRollout
from megarl.types import Group, Prompt, Sample

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs/models/tiny-llama")
TOKENIZER = load_tokenizer(ModelConfig(path=TINY))
EOS = TOKENIZER.eos_id
VOCABULARY = 500


class ScriptedPolicy:
    """A fake policy: the texts that it says, turn by turn; "$" at the end stands for end-of-text. Remembers what it was asked."""

    def __init__(self, *turns: str):
        self._turns = list(turns)
        self.asked: list[tuple[list[int], Sampling]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, n: int) -> list[Completion]:
        self.asked.append((prompt_ids, sampling))
        return [self._say(self._turns.pop(0), sampling, version=len(self.asked)) for _ in range(n)]

    def _say(self, text: str, sampling: Sampling, version: int) -> Completion:
        ids = TOKENIZER.encode_text(text.removesuffix("$")) + [EOS] * text.endswith("$")
        ended = ids[-1] in sampling.stop_token_ids
        assert len(ids) <= sampling.max_tokens and not set(ids[:-1]) & set(sampling.stop_token_ids)
        return Completion(ids, [-0.5 * version] * len(ids), [version] * len(ids), "stop" if ended else "length")

    def context(self) -> RolloutContext:
        async def score(request: ScoreRequest) -> Score:
            return Score(float(request.response == request.answer), {"index": request.sample_index})

        async def run_in_worker(function: Any, *arguments: Any) -> Any:
            try:
                return function(*arguments)
            except ValueError as error:
                raise ToolError(str(error)) from error

        return RolloutContext(TOKENIZER, self.generate, score, run_in_worker, tool_timeout_s=0.05)


def prompt(text: str = "12*12=", answer: str = "144") -> Prompt:
    return Prompt(ordinal=7, token_ids=TOKENIZER.encode_prompt(text), text=text, answer=answer)


SAMPLING = Sampling(max_tokens=64, stop_token_ids=(EOS,))
MARKS: dict[str, Any] = {"call_open": "<", "call_close": ">", "result": "{result};"}


def sample_of(policy: ScriptedPolicy, sampling: Sampling = SAMPLING, **arguments: Any) -> Sample:
    [sample] = asyncio.run(ToolCalls(TOKENIZER, **{**MARKS, **arguments})(policy.context(), prompt(), sampling, 1))
    assert sample_problems([sample], 1, sampling.max_tokens, VOCABULARY) == []
    return sample


# --- turns with a tool ---


def test_a_call_is_answered_and_the_answer_is_the_environments():
    policy = ScriptedPolicy("<12*12>", "144$")
    sample = sample_of(policy)
    assert sample.text == "<12*12>144;144" and sample.reward == 1.0 and sample.finish_reason == "stop"
    ids = TOKENIZER.encode_text("<12*12>144;144") + [EOS]
    assert sample.token_ids.tolist() == ids
    assert sample.policy_mask.tolist() == [True] * 7 + [False] * 4 + [True] * 4
    assert sample.logprobs.tolist() == [-0.5] * 7 + [0.0] * 4 + [-1.0] * 4
    summary = sample.summary()
    assert summary.policy_versions == [(1, 7), (2, 4)] and (summary.min_version, summary.max_version) == (1, 2)
    assert sample.environment_spans == [(7, 11)] and sample.text[7:11] == "144;"
    assert sample.metrics == {"tool_calls": 1, "tool_errors": 0} and (summary.turns, summary.policy_tokens) == (2, 11)
    [trained] = batch_of([Group(prompt(), [sample])]).numbers.values()
    assert trained.policy_mask is not None
    arrays = (trained.token_ids, trained.logprobs, trained.policy_mask)
    assert [each.tolist() for each in arrays] == [ids, [*sample.logprobs], [*sample.policy_mask]], "all of it reaches the trainer"
    (first, one), (second, two) = policy.asked
    assert first == prompt().token_ids and second == prompt().token_ids + ids[:11]
    assert (one.max_tokens, two.max_tokens) == (64, 64 - 11)
    assert set(one.stop_token_ids) == {EOS, TOKENIZER.token_id(">")}


def test_without_a_call_there_is_one_turn_and_no_mask():
    sample = sample_of(ScriptedPolicy("144$"))
    assert not sample.policy_mask and sample.summary().turns == 1 and sample.reward == 1.0 and sample.metrics["tool_calls"] == 0


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("<2**3>", "error: not arithmetic;"),
        ("12*12>", "error: the call was not opened;"),
        ("<>", "error: not arithmetic;"),
        ("<<6*7>", "42;"),  # the last opening counts
        ("<1/0>", "error: division by zero;"),
    ],
)
def test_calls_that_fail_are_answered_too(call: str, answer: str):
    sample = sample_of(ScriptedPolicy(call, "144$"))
    assert sample.text == f"{call}{answer}144" and sample.reward == 1.0
    assert sample.metrics == {"tool_calls": 1, "tool_errors": int(answer.startswith("error"))}


def test_the_result_of_the_tool_is_not_the_policys_answer():
    """The last turn alone is scored, and a sample that ends in a call has none."""
    assert sample_of(ScriptedPolicy("<12*12>", "$")).reward == 0.0
    ended = sample_of(ScriptedPolicy("<12*12>", "144>"), max_calls=1)
    assert ended.reward == 0.0 and ended.text == "<12*12>144;144>" and ended.metrics["tool_calls"] == 1


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


def test_a_tool_cannot_write_special_tokens_but_the_template_can():
    sample = sample_of(ScriptedPolicy("<1>", "2$"), tool=f"{__name__}:special", result="<bos>{result}")
    environment = [token for token, mine in zip(sample.token_ids, sample.policy_mask) if not mine]
    assert environment == [TOKENIZER.token_id("<bos>"), *map(TOKENIZER.token_id, "1<eos>")] and EOS not in environment


# --- single turn, and what a rollout returns ---


def test_single_turn_asks_once_for_all():
    policy = ScriptedPolicy("144$", "7$")
    samples = asyncio.run(single_turn(policy.context(), prompt(), SAMPLING, 2))
    assert [(s.text, s.reward, len(s.policy_mask), s.versions[0]) for s in samples] == [("144", 1.0, 0, 1), ("7", 0.0, 0, 1)]
    assert [s.reward_parts for s in samples] == [{"index": 0.0}, {"index": 1.0}]
    assert len(policy.asked) == 1


def test_samples_that_are_none_end_the_run_with_a_reason():
    good = asyncio.run(single_turn(ScriptedPolicy("144$").context(), prompt(), SAMPLING, 1))[0]

    def call(*samples: Any) -> Any:
        async def rollout(context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int) -> Any:
            return list(samples)

        checked = CheckedRollout("mine:rollout", rollout, ScriptedPolicy().context(), timeout_s=5, vocab_size=VOCABULARY)
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
        ([replace(good, reward=1e308)], "reward 1e+308: must be a finite number of absolute value at most 1e+06"),
        ([replace(good, reward=10**400)], "reward 1000"),
        ([replace(good, logprobs=[-0.5, float("nan"), -0.5, -0.5])], "log-prob nan: must be a finite number, at most 0"),
        ([replace(good, logprobs=[-0.5, 0.25, -0.5, -0.5])], "log-prob 0.25: must be a finite number, at most 0"),
        ([replace(good, logprobs=[-0.5, -0.5, -0.5, -1e300])], "log-prob -inf: must be a finite number, at most 0"),
        ([replace(good, token_ids=[4, 4, VOCABULARY, 4])], f"token id {VOCABULARY}: the vocabulary has 0 to {VOCABULARY - 1}"),
        ([replace(good, token_ids=[4, -1, 4, 4])], "token id -1: the vocabulary has"),
        ([replace(good, token_ids=[4] * 65, logprobs=[0.0] * 65, versions=[0] * 65)], "65 tokens, more than max_tokens=64"),
    ]:
        with pytest.raises(RuntimeError, match=f"rollout mine:rollout, prompt 7: .*{re.escape(reason)}"):
            call(*samples)


def test_a_rollout_that_hangs_is_named():
    async def rollout(context: RolloutContext, prompt: Prompt, sampling: Sampling, n: int) -> Any:
        await asyncio.sleep(60)

    checked = CheckedRollout("mine:rollout", rollout, ScriptedPolicy().context(), timeout_s=0.02, vocab_size=VOCABULARY)
    with pytest.raises(TimeoutError, match="rollout mine:rollout, prompt 7: not finished within timeouts.samples_s=0.02"):
        asyncio.run(checked(prompt(), SAMPLING, 1))


# --- by name ---


def config(name: str, **arguments: Any) -> RunConfig:
    config = RunConfig()
    config.model.path = TINY
    config.rollout.name, config.rollout.args = name, arguments
    return config


async def no_annotation(context, prompt, sampling, n, *, depth=1): ...


async def needs_depth(context, prompt, sampling, n, *, depth: int): ...


async def three(context, prompt, sampling): ...


def not_async(context, prompt, sampling, n): ...


class NotCallable:
    def __init__(self, tokenizer: Tokenizer): ...


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("no_such_module_here:f", {}, "rollout.name=no_such_module_here:f: cannot be imported: No module named 'no_such_module_here'"),
        (f"{__name__}:need_depth", {}, f"{__name__} has no function or class need_depth; did you mean needs_depth?"),
        (f"{__name__}:needs_depth", {}, "rollout.args.depth: must be set"),
        (f"{__name__}:needs_depth", {"depth": "3"}, "rollout.args.depth=3: expected `int`, got `str`"),
        (f"{__name__}:needs_depth", {"depth": 3, "dept": 1}, "rollout.args.dept=1: unknown argument; did you mean depth?"),
        (f"{__name__}:no_annotation", {}, "its argument depth has no type annotation"),
        (f"{__name__}:three", {}, "must take 4 positional arguments, and all others by keyword only"),
        (f"{__name__}:not_async", {}, "must be an async function or a class"),
        (f"{__name__}:NotCallable", {}, "must be callable by an async __call__"),
        ("single_turn", {"x": 1}, "rollout.args.x=1: unknown argument; there is none"),
        ("tool_calls", {**MARKS, "max_calls": 0}, "rollout.args.max_calls=0: expected `int` >= 1"),
        ("tool_calls", {**MARKS, "call_close": "</call>"}, f"rollout.args.call_close=</call>: must be one token of {TINY}"),
        ("tool_calls", {**MARKS, "call_open": "\u00e9"}, "rollout.args.call_open=\u00e9: must be one token"),
        ("tool_calls", {**MARKS, "result": "{}"}, "rollout.args.result={}: must contain {result} once"),
        ("tool_calls", {**MARKS, "tool": "abacus"}, "rollout.args.tool=abacus: must be calculator, package.module:function"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(name: str, arguments: dict[str, Any], problem: str):
    with pytest.raises(ConfigError) as error:
        check_rollout(config(name, **arguments))
    assert any(problem in line for line in error.value.problems), error.value.problems


def same_length(text: str, answer: str) -> float:
    return float(len(text) == len(answer))


def misspelt(text: str, anwser: str) -> float: ...


def nameless(text: str, *rest: str) -> float: ...


async def judge(prompt: str, response: str, *, row: dict[str, Any], **more: Any) -> float: ...


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_module_here:f", "cannot be imported: No module named 'no_such_module_here'"),
        (f"{__name__}:same_lenght", f"{__name__} has no function or class same_lenght; did you mean same_length?"),
        (f"{__name__}:NotCallable", "must be a function; see docs/own_run.md"),
        (
            f"{__name__}:misspelt",
            "its parameter anwser is none of text, response, answer, prompt, row, prompt_token_ids, token_ids, version, "
            "sample_index, truncated; did you mean answer?",
        ),
        (f"{__name__}:nameless", "its parameter *rest must be one that can be passed by name"),
        (f"{__name__}:same_length", ""),
        (f"{__name__}:judge", ""),
    ],
)
def test_a_reward_function_of_ones_own_is_looked_at_before_anything_starts(name: str, problem: str):
    found = config("single_turn")
    found.reward.name = name
    if not problem:
        return check_rollout(found)
    with pytest.raises(ConfigError) as error:
        check_rollout(found)
    assert error.value.problems == [f"reward.name={name}: {problem}"]


def test_arguments_reach_the_rollout():
    assert load_rollout(config(f"{__name__}:needs_depth", depth=3), TOKENIZER).keywords == {"depth": 3}
    assert isinstance(load_rollout(config("tool_calls", **MARKS), TOKENIZER), ToolCalls)


# --- the example of docs/environments.md ---


def test_the_documented_example_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL)
    (tmp_path / "games.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    rollout = load_rollout(config("games:higher_or_lower", max_guesses=3), TOKENIZER)
    [sample] = asyncio.run(rollout(ScriptedPolicy("5", "x", "144").context(), prompt("?"), SAMPLING, 1))
    assert sample.text == "5 higher\nx a number!\n144" and sample.reward == 1.0 and sample.metrics == {"guesses": 3}
    assert sample_problems([sample], 1, SAMPLING.max_tokens, VOCABULARY) == [] and sample.summary().turns == 3
    [lost] = asyncio.run(rollout(ScriptedPolicy("145", "1", "2").context(), prompt("?"), SAMPLING, 1))
    assert lost.text == "145 lower\n1 higher\n2 higher\n" and lost.reward == 0.0
    with pytest.raises(ConfigError, match="rollout.args.max_guess=3: unknown argument; did you mean max_guesses"):
        load_rollout(config("games:higher_or_lower", max_guess=3), TOKENIZER)


def test_the_documented_run_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "docs/own_run.md").read_text()
    codes, [settings] = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yaml"))
    (tmp_path / "graders.py").write_text("\n".join(codes))
    (tmp_path / "run.yaml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "graders", raising=False)
    check_rollout(load_config("run.yaml", [f"model.path={TINY}"]))
    assert sys.modules["graders"].share_right(" a,b,d\n", "a,b,c") == pytest.approx(2 / 3)
    check_rollout(load_config("run.yaml", [f"model.path={TINY}", "reward.name=graders:graded"]))
    found = score_of(sys.modules["graders"].graded("so 42\n", "42", {"weight": 2}, truncated=True))
    assert found == Score(pytest.approx(1.9), {"right": 1.0})


def test_environment_text_is_never_the_policys_even_at_the_ends():
    transcript = Transcript(prompt(), TOKENIZER, 10)
    transcript.add_policy(Completion([4, 5], [-1.0, -2.0], [3, 4], "stop"))
    assert not transcript.add_environment([6] * 8) and transcript.add_environment([6] * 7)
    sample = transcript.sample(1.0)
    summary = sample.summary()
    assert summary.policy_versions == [(3, 1), (4, 1)] and summary.turns == 1 and summary.policy_tokens == 2


def test_numbers_may_be_given_in_any_form_and_nothing_else_passes_for_them():
    lists = Sample([4, 5], [-0.5, -1], [3, 3], "", 1.0, "stop", [True, False])
    arrays = Sample(np.array([4, 5]), np.float64([-0.5, -1.0]), np.int16([3, 3]), "", 1.0, "stop", np.array([True, False]))
    assert arrays == lists and lists == replace(lists) and lists != replace(lists, versions=[3, 4])
    assert [each.typecode for each in (lists.token_ids, lists.logprobs, lists.versions, lists.policy_mask)] == ["i", "f", "i", "b"]
    for name, values in [
        ("token_ids", [4.0, 5]), ("token_ids", np.array([4.0, 5.0])), ("token_ids", [4, 1 << 31]), ("token_ids", np.array([4, 1 << 31])),
        ("token_ids", np.array([[4, 5]])), ("versions", ["3", "3"]), ("logprobs", [None, -1.0]), ("logprobs", "ab"),
        ("policy_mask", np.array([1, 0])),
    ]:  # fmt: skip
        with pytest.raises(TypeError, match=f"Sample.{name}: "):
            replace(lists, **{name: values})
    with pytest.raises(TypeError):
        _ = lists.token_ids + [6]  # to be told, not to be guessed at
