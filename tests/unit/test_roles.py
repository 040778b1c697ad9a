"""The models besides the policy: allowed settings, the prompts for a judge, and how its verdicts
count.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resolving import MODEL, config, problems_of

from megarl.base.rollout_types import Failure, Sample
from megarl.config.errors import ConfigError, RunError
from megarl.config.schema import PartConfig, RewardConfig, RunConfig
from megarl.data.datasets import answers_of
from megarl.data.tokenizer import Tokenizer, tokenizer_of
from megarl.estimate.estimate import estimate
from megarl.generator.completions import Completion, EngineError, score_in
from megarl.launch.launcher import placement, training_job
from megarl.models import load_spec
from megarl.plan.checkpoints import changes
from megarl.plan.resolve import resolve
from megarl.rewards.score import (
    RewardPart,
    Score,
    ScoreRequest,
    failure_metrics,
    parts_of,
    too_many_failures,
    weighted_sum,
)
from megarl.roles.judge import UNDECIDED, Judge, Template, chat_text, verdict_score
from megarl.roles.plan import ServedRole, check_roles, pairs
from megarl.roles.settings import RoleConfig

pytestmark = pytest.mark.usefixtures("hub_offline")
TINY = Path(__file__).parents[2] / "configs/models/tiny-llama"
JUDGE = [
    "roles.judge.path=" + str(MODEL),
    "roles.judge.template={response}",
    "roles.judge.verdict=([01])",
]
SCORED = ["reward.name=roles.judge"]


def scores(folder: Path, **changes: object) -> str:
    folder.mkdir()
    scoring = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(
        json.dumps(json.loads((MODEL / "config.json").read_text()) | scoring | changes)
    )
    return f"roles.rm.path={folder}"


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    assert problems_of(
        tmp_path,
        *JUDGE[:1], "roles.judge.template=Is it right? {prompt}", "roles.judge.verdict=(a)(b)",
        "roles.judge.verdict_range=[1,0]",
        "roles.judge.opponents=2", "roles.judge.verdict_scores={A: x}", "roles.judge.on=trainer",
    ) == ["roles.judge.on=trainer: a judge must be on engines"]  # fmt: skip
    assert problems_of(
        tmp_path,
        *JUDGE[:1], "roles.judge.template=Is it right? {prompt}", "roles.judge.verdict=(a)(b)",
        "roles.judge.verdict_range=[1,0]",
        "roles.judge.opponents=2", "roles.judge.verdict_scores={A: x}", "roles.engine.role=judge",
        f"roles.engine.path={MODEL}",
        f"roles.helper.path={MODEL}", "roles.rm.role=reward_model", f"roles.rm.path={MODEL}",
        "roles.rm.verdict=(a)",
        f"roles.critic.path={MODEL}", "reward.parts.a.name=roles.rm",
        "reward.parts.b.name=roles.rn", "reward.parts.penalty.name=math",
        "reward.parts.c.name=roles.critic", "roles.judge.server_args.api_key=x",
        "roles.judge.server_args.tp_size=2",
        "roles.rm.server_args.is_embedding=true",
    ) == [
        "roles.judge.server_args.api_key=x: must be left out; the launcher decides it",
        "roles.judge.server_args.tp_size=2: must be set by roles.judge.tp",
        "roles.rm.server_args.is_embedding=true: must be left out; the launcher decides what "
        "engines answer",
        "roles.judge.template='Is it right? {prompt}': must contain {response}",
        "roles.judge.verdict=(a)(b): must have one group, not 2; (?:…) groups without counting",
        'roles.judge.verdict_scores.A=x: must be a number of at most 1e+06 in size',
        "roles.judge.verdict_range=[1.0, 0.0]: the first number must be below the second",
        "roles.judge.opponents=2: needs roles.judge.mode=pairwise",
        "roles.judge: nothing uses it; name it in reward.name, reward.parts, eval.reward, "
        "eval.win_rate, label.reward or data.train.sources.NAME.reward, or set roles.judge=null",
        "roles.engine: its name must be letters, digits, - and _, and none of trainer, reward, "
        "tool, sft, evaluate, export, hub, evaluation, label, generator, evaluator, engine, "
        "eval_engine",
        "roles.helper.role=null: must be one of critic, reward_model, judge, teacher, reference, "
        "initial; only a role that is called so needs none",
        "roles.rm.verdict=(a): a reward_model has no such setting",
        "roles.critic: aipo has no critic; set algorithm.advantage=critic",
        "reward.parts.penalty: its name must be letters, digits, - and _, and none of "
            "penalty, turns",
        "reward.parts.b.name=roles.rn: there is no such role; there is judge, engine, helper, rm, critic",
        "reward.parts.c.name=roles.critic: must be a reward_model or a judge; it is a critic",
        f"roles.rm.path={MODEL}: is a LlamaForCausalLM; SGLang's reward models are "
        "LlamaForSequenceClassification, "
        "Qwen2ForSequenceClassification, Qwen3ForSequenceClassification, Qwen2ForRewardModel",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ["rollout.max_tokens=64"],
            "rollout.max_tokens=64: must be less than the context of roles.rm, 64, prompt and "
            "response together",
        ),
        (
            ["roles.rm.tp=3"],
            "roles.rm.tp=3: must divide the model's 32 attention heads and 8 key-value heads",
        ),
        (
            ["roles.rm.ep=2", "roles.rm.tp=2"],
            "roles.rm.ep=2: must be 1: a llama model has no experts",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    settings: list[str], problem: str, tmp_path: Path
) -> None:
    path = scores(tmp_path / "scores", max_position_embeddings=64)
    common = ["roles.rm.role=reward_model", "reward.name=roles.rm", "rollout.max_tokens=8"]
    assert problems_of(tmp_path, path, *common, *settings) == [problem]


def test_a_missing_model_is_missed_by_a_run_alone(tmp_path: Path, monkeypatch) -> None:
    """A model that megarl sft or reward-model will make has the shape of model.path."""
    monkeypatch.chdir(tmp_path)  # ./ on the command line is relative to this
    missing = ["roles.rm.role=reward_model", "roles.rm.path=./nowhere", "reward.name=roles.rm"]
    assert resolve(config(tmp_path, *missing)).served == ()
    assert [
        problem.partition(" in ")[0] for problem in problems_of(tmp_path, *missing, command="plan")
    ] == [f"roles.rm.path={tmp_path}/nowhere: no such folder"]
    to_be_made = [*missing, "roles.rm.path=${reward_model.output}"]
    [role] = resolve(config(tmp_path, *to_be_made), "plan").served
    assert (role.spec.head, role.spec.hidden_size, role.dtype) == ("scalar", 4096, "bfloat16")
    problems = problems_of(tmp_path, *to_be_made, command="eval")
    assert (
        f"roles.rm.path={tmp_path}/run/reward_model/hf: no such folder; megarl reward-model "
        "writes it" in problems
    )


def test_a_model_of_another_kind_is_refused_before_it_is_made(tmp_path: Path) -> None:
    """Otherwise megarl train would refuse it only after a reward model was trained in vain."""
    model = [
        "roles.rm.role=reward_model",
        "reward.name=roles.rm",
        "roles.rm.path=${reward_model.output}",
    ]
    mixtral = [*model, f"model.path={MODEL.parent / 'mixtral-8x7b'}"]
    served = (
        "SGLang's reward models are LlamaForSequenceClassification, "
        "Qwen2ForSequenceClassification, Qwen3ForSequenceClassification, "
    )
    message = (
        "megarl reward-model writes a MixtralForSequenceClassification there; "
        f"{served}Qwen2ForRewardModel"
    )
    assert f"roles.rm.path={tmp_path}/run/reward_model/hf: {message}" in problems_of(
        tmp_path, *mixtral, command="plan"
    )
    message = f"megarl sft writes a LlamaForCausalLM there; {served}Qwen2ForRewardModel"
    assert problems_of(tmp_path, *model, "roles.rm.path=${sft.output}", command="plan") == [
        f"roles.rm.path={tmp_path}/run/sft/hf: {message}"
    ]
    message = (
        "megarl reward-model writes a LlamaForSequenceClassification there, which generates no "
        "text; a judge must"
    )
    assert problems_of(
        tmp_path, *JUDGE, *SCORED, "roles.judge.path=${reward_model.output}", command="plan"
    ) == [f"roles.judge.path={tmp_path}/run/reward_model/hf: {message}"]
    folder = scores(tmp_path / "two", architectures=["Qwen2ForRewardModel"]).partition("=")[2]
    assert problems_of(tmp_path, *JUDGE, *SCORED, f"roles.judge.path={folder}", command="plan") == [
        f"roles.judge.path={folder}: is a Qwen2ForRewardModel, which generates no text; a judge must"
    ]


def test_engines_of_roles_have_ranks_of_their_own(tmp_path: Path) -> None:
    """They come after the policy's ranks, where the driver stays. The plan counts their memory."""
    path = scores(tmp_path / "scores")
    sizes = [
        "trainer.tp=4",
        "generator.engines=2",
        "generator.tp=2",
        "roles.rm.role=reward_model",
        "roles.rm.engines=3",
        "roles.rm.tp=2",
    ]
    run_config = config(
        tmp_path,
        path,
        *sizes,
        *JUDGE,
        "reward.parts.a.name=roles.rm",
        "reward.parts.b.name=roles.judge",
    )
    plan = resolve(run_config, "plan")
    first, second = placement(plan, training_job(plan), 2, 8)
    assert [part.name for part in first.engines] == ["engine.0", "engine.1"]
    assert first.serves == (
        0,
        1,
    )
    assert [(part.name, part.first_slot) for part in second.engines] == [
        ("rm.0", 0),
        ("rm.1", 2),
        ("rm.2", 4),
        ("judge.0", 6),
    ]
    assert second.serves == ()
    assert second.answering == second.engines
    planned = estimate(run_config, load_spec(MODEL))
    assert {name: served.gpus for name, served in planned.served.items()} == {"rm": 6, "judge": 1}
    assert planned.served["rm"].memory.weights < planned.served["judge"].memory.weights
    assert planned.overfull.keys().isdisjoint({"rm", "judge"})  # their caches take what is free
    assert planned.scored_s == max(
        planned.generate.total, *(served.score_s for served in planned.served.values())
    )


def test_a_resumed_run_keeps_its_reward(tmp_path: Path) -> None:
    from megarl.config.load import dump_config

    first_config = config(
        tmp_path,
        "reward.parts.a.name=math",
        "reward.parts.b.name=last_number",
        "eval.suites.x.source=x.jsonl",
    )
    (tmp_path / "run/checkpoints/step_000010").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text(dump_config(first_config))
    second_config = config(
        tmp_path, "reward.parts.a.name=math", "reward.parts.a.weight=2", "reward.parts.c.name=math"
    )
    fixed = [
        "reward.parts.a.weight=2.0: the run in run_dir={} began with 1.0; keep that, or use "
        "another run_dir",
        "reward.parts.b.name=null: the run in run_dir={} began with last_number; keep that, or "
        "use another run_dir",
        "reward.parts.b.weight=null: the run in run_dir={} began with 1.0; keep that, or use "
        "another run_dir",
        "reward.parts.c.name=math: the run in run_dir={} began with null; keep that, or use "
        "another run_dir",
        "reward.parts.c.weight=1.0: the run in run_dir={} began with null; keep that, or use "
        "another run_dir",
    ]
    problems = problems_of(
        tmp_path,
        "reward.parts.a.name=math",
        "reward.parts.a.weight=2",
        "reward.parts.c.name=math",
        command="dry-run",
    )
    assert sorted(problem for problem in problems if problem.startswith("reward.")) == [
        message.format(f"{tmp_path}/run") for message in fixed
    ]
    assert "eval.suites.x.source=null, was x.jsonl" in changes(second_config)


def test_the_answer_column_is_read_as_scores_need_it() -> None:
    def needed(
        *names: str, template: str = "{response}", evaluated: bool = False, **of_eval: str
    ) -> str:
        config = RunConfig(
            reward=RewardConfig(parts={str(i): PartConfig(name) for i, name in enumerate(names)})
        )
        config.roles = {
            "judge": RoleConfig(template=template),
            "rm": RoleConfig(role="reward_model"),
        }
        config.eval.reward = of_eval.get("reward")
        return answers_of(config, evaluated)

    assert needed("math", "roles.judge") == "final"
    assert needed("math", "g:f", "roles.judge") == "final, row"
    assert (
        needed("g:f", "roles.rm")
        == needed("roles.judge", template="{response} {answer}")
        == "whole"
    )
    assert needed("roles.judge", "roles.rm") == "unused"
    assert needed("roles.rm", evaluated=True, reward="math") == "final"


def test_a_weighted_sum_that_is_too_large_names_the_parts() -> None:
    parts = parts_of(
        RewardConfig(parts={"a": PartConfig("math", 1e6), "b": PartConfig("g:f", -1.0)})
    )
    with pytest.raises(
        RunError,
        match=r"^reward.parts: the weighted sum of a 2, b 1 is 2e\+06, more than 1e\+06 in size: "
        r"lower the weights$",
    ):
        weighted_sum(list(zip(parts, [Score(2.0), Score(1.0)])))


def test_reward_is_the_weighted_sum_of_its_parts() -> None:
    """Failures are counted by part."""
    reward = RewardConfig(
        failed_score=-1.0,
        parts={"a": PartConfig("math", 2.0), "b": PartConfig("g:f", -0.5, 4.0), "c": None},
    )
    a, b = parts_of(reward)
    assert (a.setting, a.failed_score, b.failed_score) == ("reward.parts.a.name=math", -1.0, 4.0)
    request = ScoreRequest("text", "")
    score = weighted_sum([(a, Score(1.0, {"x": 3.0})), (b, b.failed("timeout", "late", request))])
    assert score == Score(
        2.0 - 2.0, {"a": 1.0, "b": 4.0, "a/x": 3.0}, [Failure("timeout", "late", "text", "b")]
    )
    samples = [
        Sample([1], [0.0], [0], "", 0.0, "stop", failures=score.failures * times)
        for times in (1, 1, 1, 0)
    ]
    samples[0] = Sample(
        [1],
        [0.0],
        [0],
        "",
        0.0,
        "stop",
        failures=[*score.failures, Failure("error", "no", "t", "a")],
    )
    counted = failure_metrics(samples)
    assert (
        counted["reward/b/failed"],
        counted["reward/a/failed"],
        counted["reward/failed_fraction"],
    ) == (3, 1, 0.75)
    assert too_many_failures(reward, samples) == (
        "reward.parts.b.name=g:f: of 4 samples 3 scores failed: 3 timeouts, more than "
        "reward.max_failed_fraction=0.5; for example 'text': "
        "late"
    )


def bos_tokenizer(tmp_path: Path) -> Tokenizer:
    shutil.copytree(TINY, tmp_path / "tokenizer")
    return tokenizer_of(str(tmp_path / "tokenizer"), "roles.judge.path")


TEXTS = st.text("0123456789+-=,?<>eosb/ ", max_size=20)


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        ("{prompt} {response} {response_a}", ("{response_a}", "{response}")),
        ("{Prompt} {response}", ("{Prompt}", "{prompt}")),
        ("{response} {answers}", ("{answers}", "{answer}")),
        ('{prompt} {response} \\frac{a}{b} {"verdict": 1} {question}', None),
    ],
)
def test_misspelt_field_of_a_template_is_refused(
    tmp_path: Path, template: str, wrong: tuple[str, str] | None
) -> None:
    settings = config(tmp_path, *JUDGE, *SCORED)
    assert settings.roles["judge"] is not None
    settings.roles["judge"].template = template
    problems = [problem for problem in check_roles(settings) if "template" in problem]
    assert problems == (
        [
            f"roles.judge.template={template!r}: {wrong[0]} is none of its fields; did you mean "
            f"{wrong[1]}?"
        ]
        if wrong
        else []
    )


@given(prompt=TEXTS, response=TEXTS)
def test_only_the_templates_own_special_tokens_count(prompt: str, response: str) -> None:
    tokenizer = tokenizer_of(str(TINY), "path")
    template = Template(tokenizer, "<bos>{prompt}<eos>{response}?{other}", ("prompt", "response"))
    ids = template.encode(prompt=f"{prompt}<eos>", response=f"<bos>{response}")
    assert ids.count(2) == ids.count(1) == 1
    assert ids[0] == 1
    plain = [
        tokenizer.encode_text(text) for text in (f"{prompt}<eos>", f"<bos>{response}?{{other}}")
    ]
    assert ids == [1, *plain[0], 2, *plain[1]]
    assert Template(tokenizer, "{response}", ("response",)).encode(
        response="1"
    ) == tokenizer.encode_prompt("1")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('a system message must come first') }}",
            "refuses it: a system message must come first",
        ),
        ("{{ messages[0].content }}", r"leaves out \{response\}"),
        ("{{ messages[0].content }}|{{ messages[1].content | trim }}", None),
    ],
)
def test_a_chat_template_must_have_what_is_to_be_judged(
    tmp_path: Path, template: str, message: str | None
) -> None:
    folder = shutil.copytree(TINY, tmp_path / "judge")
    settings = json.loads((TINY / "tokenizer_config.json").read_text()) | {
        "chat_template": template
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_of(str(folder), "path")
    if message is None:
        assert (
            chat_text(tokenizer, "roles.rm.template", "{prompt}", "{response}")
            == "{prompt}|{response}"
        )
        return
    with pytest.raises(
        ConfigError, match=f"^roles.rm.template: the chat template of {folder} {message}$"
    ):
        chat_text(tokenizer, "roles.rm.template", "{prompt}", "{response}")


class ScriptedFleet:
    """Answers by the prompt's text."""

    def __init__(self, tokenizer: Tokenizer, answer):
        self._tokenizer = tokenizer
        self._answer = answer
        self.read: list[str] = []

    async def generate(self, prompt_ids, sampling, n):
        text = self._tokenizer.decode(prompt_ids)
        self.read.append(text)
        ids = self._tokenizer.encode_text(self._answer(text))
        return [
            Completion(
                array("i", ids), array("f", [0.0] * len(ids)), array("i", [-1] * len(ids)), "stop"
            )
        ]


def judge_of(answer, **settings: object) -> tuple[Judge, ScriptedFleet]:
    tokenizer = tokenizer_of(str(TINY), "path")
    role_settings = {
        "template": "{prompt}{response}",
        "verdict": "([0-9]+)",
        "chat": False,
        "path": str(TINY),
        "max_tokens": 4,
        **settings,
    }
    fleet = ScriptedFleet(tokenizer, answer)
    return Judge(
        ServedRole("judge", RoleConfig(**role_settings), load_spec(TINY), "float32"), fleet
    ), fleet  # type: ignore[arg-type]


def test_the_last_verdict_counts_and_none_is_a_failure() -> None:
    numbers = RoleConfig(verdict="([-0-9.einf]+)", verdict_range=(1.0, 5.0))
    assert [verdict_score(text, numbers) for text in ("5 then 2", "1", "5.1", "0", "nan", "inf",
        "1e400", "-", "", "x")] == [
        0.25, 0.0, None, None, None, None, None, None, None, None,
    ]  # fmt: skip
    words = RoleConfig(verdict=r"\[(.*?)\]", verdict_scores={"good": 1, "bad": -2.5})
    assert [
        verdict_score(text, words) for text in ("[bad] [good]", "[ bad ]", "[Good]", "good")
    ] == [1.0, -2.5, None, None]
    part = RewardPart("roles.judge", -3.0, "liked")
    judge, fleet = judge_of(lambda text: "so 1" if text.endswith("7") else "no")

    async def ask(response: str) -> Score:
        return await judge.score(part, ScoreRequest(response, "", prompt="1+6="))

    assert asyncio.run(ask("7")) == Score(1.0)
    assert fleet.read == ["1+6=7"]
    [failure] = asyncio.run(ask("8")).failures
    assert (failure.kind, failure.part, failure.reason) == (
        "error",
        "liked",
        "roles.judge gave no verdict: …'no'",
    )
    assert (
        asyncio.run(ask("7" * 600)).failures[0].reason
        == "roles.judge: 605 tokens to read, where its context has room for 508"
    )
    assert len(fleet.read) == 2


@given(count=st.integers(1, 9), opponents=st.none() | st.integers(1, 5))
def test_every_response_meets_as_many(count: int, opponents: int | None) -> None:
    games = pairs(count, opponents)
    met = [sum(i in pair for pair in games) for i in range(count)]
    expected = min(count - 1, 2 * opponents if opponents else count - 1)
    assert len(set(games)) == len(games)
    assert all(i < j for i, j in games)
    assert met == [expected] * count


def test_pairs_are_compared_in_both_orders() -> None:
    """The judge prefers the larger number, and the first at a tie.

    If it cannot judge a response, the others keep their games.
    """

    def verdict(text: str) -> str:
        first, second = text.removeprefix("q").split(",")
        return "?" if "x" in text else "1" if first >= second else "0"

    template = "{prompt}{response_a},{response_b}"
    judge, fleet = judge_of(verdict, template=template, mode="pairwise")
    part = RewardPart("roles.judge", -3.0, "liked")
    comparisons = asyncio.run(judge.compare(part, "q", "", ["5", "2", "5", "x"]))
    assert len(fleet.read) == 12
    # of two equal responses, each wins the game in which it is first
    assert [score.reward for score in comparisons] == [0.75, 0.0, 0.75, -3.0]
    assert [score.parts[UNDECIDED] for score in comparisons] == [pytest.approx(1 / 3)] * 3 + [1.0]
    assert [bool(score.failures) for score in comparisons] == [False, False, False, True]


@pytest.mark.parametrize(
    "answer",
    [b'{"embedding":[null]}', b'{"embedding":[]}', b'{"embedding":[1,2]}', b"{}", b'["x"]'],
)
def test_answer_without_a_score_is_an_engine_error(answer: bytes) -> None:
    assert score_in("e", b'{"embedding":[-1.5],"meta_info":{}}') == -1.5
    with pytest.raises(EngineError, match="engine e gave "):
        score_in("e", answer)


def test_an_engine_that_refuses_is_a_failure() -> None:
    async def refuse(prompt_ids, sampling, n):
        raise EngineError("engine e answered 500")

    judge, fleet = judge_of(str)
    fleet.generate = refuse  # type: ignore[method-assign]
    [failure] = asyncio.run(
        judge.score(RewardPart("roles.judge", 0.0), ScoreRequest("1", ""))
    ).failures
    assert (failure.kind, failure.reason) == ("error", "engine e answered 500")
