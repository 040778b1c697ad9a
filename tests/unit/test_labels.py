"""megarl label: pairs from scores and comparisons, the file of scored prompts, and its settings."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from json_files import json_lines, write_json_lines
from msgspec.structs import replace as replaced

from megarl.base.rollout_types import Failure, Group, Prompt, Sample
from megarl.config.errors import ConfigError, RunError
from megarl.config.load import load_config
from megarl.config.schema import LabelConfig, ModelConfig, PreferenceConfig, RunConfig
from megarl.data.check import check_data
from megarl.data.datasets import read_pairs
from megarl.data.prompts import label_data, labelled_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.generator.completions import Sampling
from megarl.labels import state
from megarl.labels.label import Labeller
from megarl.labels.pairs import (
    Response,
    ScoredFile,
    ScoredPrompt,
    preferences,
    read_scored,
    summary,
    write_pairs,
)
from megarl.models import load_spec
from megarl.plan.resolve import RunPlan, resolve
from megarl.rewards.score import RewardPart, Score
from megarl.roles.judge import NoVerdict, comparisons_of, win_shares
from megarl.rollouts.rollout import Scoring

MODELS = Path(__file__).parents[2] / "configs/models"
ALL = LabelConfig(pairs="all")
BEST = LabelConfig(pairs="best_worst")


def scored(*scores: float | None, ordinal: int = 0, **fields) -> ScoredPrompt:
    responses = [Response("abcdef"[i], "sample", score) for i, score in enumerate(scores)]
    return ScoredPrompt(ordinal, "1+1=", responses, **fields)


@pytest.mark.parametrize(
    ("scores", "settings", "pairs"),
    [
        ((1.0, 3.0, 2.0), ALL, [(1, 0, 2.0), (2, 0, 1.0), (1, 2, 1.0)]),
        ((1.0, 3.0, 2.0), BEST, [(1, 0, 2.0)]),
        ((1.0, 1.0, 0.5), ALL, [(0, 2, 0.5), (1, 2, 0.5)]),
        ((1.0, 1.0, 0.5, 0.5), BEST, [(0, 2, 0.5)]),
        ((1.0, 1.0), ALL, []),
        ((1.0, 1.0), BEST, []),
        ((1.0, None, 0.0), ALL, [(0, 2, 1.0)]),
        ((None, None), BEST, []),
        ((None, 1.0), BEST, []),
        ((1.0, 3.0, 2.0), replace(ALL, min_margin=1.5), [(1, 0, 2.0)]),
        ((1.0, 3.0), replace(BEST, min_margin=2.0), [(1, 0, 2.0)]),
        ((1.0, 3.0), replace(BEST, min_margin=2.5), []),
        ((), ALL, []),
    ],
)
def test_pairs_of_scores(scores, settings, pairs) -> None:
    assert list(preferences(scored(*scores), settings)) == pairs


def test_judge_prefers_by_both_orders_of_each_pair() -> None:
    """Its shares of wins would prefer 0 to 1, which it has not compared with that result."""
    no = NoVerdict("error", "no verdict")
    games = {
        (0, 1): 0.0, (1, 0): 1.0,  # 1 wins in both orders
        (0, 2): 1.0, (2, 0): 1.0,  # the first one wins: a tie
        (1, 2): 1.0, (2, 1): no,
    }  # fmt: skip
    comparisons = comparisons_of(games)
    assert comparisons == [(0, 1, 0.0), (0, 2, 0.5)]
    prompt = scored(0.5, 0.9, 0.1, comparisons=comparisons)
    assert list(preferences(prompt, ALL)) == [(1, 0, 1.0)]
    assert list(preferences(prompt, BEST)) == [(1, 2, 0.8)]
    assert list(preferences(scored(0.75, 0.25, comparisons=[(0, 1, 0.75)]), ALL)) == [(0, 1, 0.5)]


def pairs_in(path: Path, model: str = "tiny-llama") -> list[tuple[str, str, str, float]]:
    dataset = PreferenceConfig(source=str(path), margin_key="margin")
    pairs, _ = read_pairs(dataset, "reward_model.data", 0, ModelConfig(path=str(MODELS / model)))
    return [(pair.prompt, pair.chosen, pair.rejected, pair.margin) for pair in pairs]


def test_reward_model_reads_pairs_as_they_are_written(tmp_path: Path) -> None:
    first = replaced(scored(1.0, 0.5, ordinal=0), prompt="0+1=")
    prompts = [first, scored(2.0, 4.0, ordinal=1), scored(0, 1, ordinal=2)]
    assert write_pairs(tmp_path, prompts, replace(BEST, held_out=1)) == 3
    assert pairs_in(tmp_path / "held_out.jsonl") == [("0+1=", "a", "b", 0.5)]
    assert pairs_in(tmp_path / "pairs.jsonl") == [("1+1=", "b", "a", 2.0), ("1+1=", "b", "a", 1.0)]
    [row, _] = json_lines(tmp_path / "pairs.jsonl")
    assert (row["score_chosen"], row["score_rejected"], row["ordinal"]) == (4.0, 2.0, 1)


def test_held_out_prompts_are_never_learned_from(tmp_path: Path) -> None:
    """A small source of a mixture comes again; and an earlier command held out more."""
    again = [scored(1.0, 0.5, ordinal=0), scored(2.0, 4.0, ordinal=1)]
    write_pairs(tmp_path, again, replace(BEST, held_out=1))
    assert len(pairs_in(tmp_path / "held_out.jsonl")) == 2
    assert not (tmp_path / "pairs.jsonl").read_text()
    write_pairs(tmp_path, again, BEST)
    assert len(pairs_in(tmp_path / "pairs.jsonl")) == 2
    assert not (tmp_path / "held_out.jsonl").exists()


def test_conversation_is_written_for_any_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "3*4="}]
    responses = [Response("12", "reference", 1.0), Response("13", "sample", 0.0)]
    write_pairs(tmp_path, [ScoredPrompt(0, messages, responses)], BEST)
    [row] = json_lines(tmp_path / "pairs.jsonl")
    assert row["prompt"] == messages and row["chosen_from"] == "reference"
    assert row["chosen"] == [{"role": "assistant", "content": "12"}]
    [(prompt, chosen, rejected, _)] = pairs_in(tmp_path / "pairs.jsonl", "tiny-agent")
    assert prompt == "<bos><user>3*4=<assistant>" and (chosen, rejected) == ("12", "13")


def test_interrupted_file_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    for ordinal in (3, 0):
        file = ScoredFile(tmp_path)
        file.append(scored(1.0, None, ordinal=ordinal))
        file.close()
    path = tmp_path / "scored.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"ordinal":1,"prom')
    assert [line.ordinal for line in read_scored(tmp_path)] == [0, 3]
    file = ScoredFile(tmp_path)
    file.append(scored(0.0, 1.0, ordinal=1))
    file.close()
    assert path.read_bytes().startswith(whole)
    assert [line.ordinal for line in read_scored(tmp_path)] == [0, 1, 3]
    assert [line.ordinal for line in read_scored(tmp_path, prompts=2)] == [0, 1]
    text = summary(read_scored(tmp_path), 1)
    assert "1 pairs of 6 responses to 3 prompts" in text and "2 failed scores" in text


def test_damaged_line_of_the_file_is_refused_by_number(tmp_path: Path) -> None:
    (tmp_path / "scored.jsonl").write_text('{"ordinal":1}\n')
    with pytest.raises(ConfigError, match=r"scored\.jsonl, line 1: is damaged"):
        read_scored(tmp_path)


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    model = tmp_path / "model"
    if not model.exists():
        shutil.copytree(MODELS / "tiny-llama", model)
        (model / "model.safetensors").write_bytes(bytes(16))
        rows = [
            {"question": f"{i}+1=", "answer": str(i + 1), "others": ["7", "8"], "other": "9"}
            for i in range(3)
        ]
        write_json_lines(tmp_path / "rows.jsonl", rows)
    settings = {
        "model": {"path": str(model)},
        "data": {"train": {"source": str(tmp_path / "rows.jsonl")}, "shuffle": False},
        "rollout": {"max_tokens": 8},
        "run_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return load_config(path, list(overrides))


def plan_of(tmp_path: Path, *overrides: str) -> RunPlan:
    return resolve(config_of(tmp_path, *overrides), "label")


def labelled(
    tmp_path: Path, texts: list[str], score, *overrides: str, comparing=()
) -> ScoredPrompt:
    """The first row's prompt, to which the policy answers `texts`, and `score` scores texts."""
    plan = plan_of(tmp_path, f"label.n={len(texts)}", *overrides)
    tokenizer = load_tokenizer(plan.config.model)
    prompts = labelled_prompts(plan.config, tokenizer, plan.spec)

    async def rollout(prompt: Prompt, sampling: Sampling, n: int) -> Group:
        assert n == len(texts)
        return Group(prompt, [Sample([5], [0.0], [0], text, 0.0, "stop") for text in texts])

    async def one(request) -> Score:
        return score(request)

    scoring = Scoring(one, comparing)
    labeller = Labeller(plan.config, 32, tokenizer, rollout, Sampling(8), scoring)
    return asyncio.run(labeller.label(prompts[0], prompts.sources[0]))


def by_length(request) -> Score:
    return Score(float(len(request.response)))


def test_prompt_has_samples_columns_and_its_reference(tmp_path: Path) -> None:
    columns = ["label.reference=true", "label.columns=[others,other]"]
    prompt = labelled(tmp_path, ["55", "55", " ", "1" * 40], by_length, *columns)
    assert prompt.prompt == "0+1="
    assert [(r.text, r.origin, r.score) for r in prompt.responses] == [
        ("55", "sample", 2.0), ("7", "others", 1.0), ("8", "others", 1.0), ("9", "other", 1.0),
        ("1", "reference", 1.0),
    ]  # fmt: skip
    assert prompt.unusable == 2, "one is blank, and one is longer than the model's context"


def test_failed_score_is_counted_and_in_no_pair(tmp_path: Path) -> None:
    def score(request) -> Score:
        if request.response == "2":
            return Score(9.0, failures=[Failure("timeout", "too slow")])
        return by_length(request)

    prompt = labelled(tmp_path, ["2", "33", "4"], score)
    assert prompt.failed == 1
    assert list(preferences(prompt, ALL)) == [(1, 2, 1.0)]
    labeller = Labeller(config_of(tmp_path), 0, None, None, Sampling(8), None)  # type: ignore[arg-type]
    failing = Sample([5], [0.0], [0], "", 0.0, "stop", failures=[Failure("error", "is away")])
    labeller._count([failing] * 32)
    with pytest.raises(RunError, match="reward.name=math: 33 of 33 scores failed, .* is away"):
        labeller._count([failing])


class LongerWins:
    """A judge that prefers the longer response, and else the first."""

    async def play(self, prompt: str, answer: str, responses: list[str]):
        games: dict[tuple[int, int], float] = {}
        for first, second in permutations(range(len(responses)), 2):
            games[first, second] = float(len(responses[first]) >= len(responses[second]))
        return games

    async def compare(self, part, prompt: str, answer: str, responses: list[str]) -> list[Score]:
        return win_shares(part, answer, responses, await self.play(prompt, answer, responses))


def test_judge_compares_all_responses_of_a_prompt(tmp_path: Path) -> None:
    part = RewardPart("roles.judge", 0.0)
    prompt = labelled(
        tmp_path, ["22", "333"], None, "label.reference=true", comparing=[(part, LongerWins())]
    )
    assert [(r.text, r.score) for r in prompt.responses] == [("22", 0.5), ("333", 1.0), ("1", 0.0)]
    assert list(preferences(prompt, ALL)) == [(1, 0, 1.0), (0, 2, 1.0), (1, 2, 1.0)]
    alone = labelled(tmp_path, ["1"], None, "label.reference=true", comparing=[(part, None)])
    assert list(preferences(alone, ALL)) == [], "the sample is the reference"


def test_weight_of_a_judge_among_parts_counts(tmp_path: Path) -> None:
    part = RewardPart("roles.judge", 0.0, part="longer", weight=-1.0)
    prompt = labelled(tmp_path, ["2", "33"], by_length, comparing=[(part, LongerWins())])
    assert [response.score for response in prompt.responses] == [1.0, 1.0]


REFUSED = {
    ("label.n=1",): "label.n=1: must be at least 2: a pair has two responses",
    ("label.n=0", "label.reference=true"): "label.n=0: must be at least 1: a pair has two",
    ("rollout.name=tool_calls",): "rollout.name=tool_calls: must be single_turn for megarl label",
    ("reward.name=none", "algorithm.name=distill"): "label.reward=null: must be set: reward.name",
    ("label.reward=none",): "label.reward=none: must score something",
    ("label.reward=roles.rm",): "label.reward=roles.rm: there is no such role; there is none",
    ("label.prompts=2", "label.held_out=2"): "label.held_out=2: must be less than label.prompts=2",
    (
        "generator.quantization=fp8_tensor",
    ): "generator.quantization=fp8_tensor: must be null for megarl label",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_label_refuses_what_makes_no_pairs(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        plan_of(tmp_path, *overrides)
    assert any(problem.startswith(REFUSED[overrides]) for problem in error.value.problems)


JUDGE = [
    "roles.judge.path=${model.path}",
    "roles.judge.mode=pairwise",
    "roles.judge.template='{response_a}{response_b}'",
    "roles.judge.verdict=(.)",
    "roles.judge.chat=false",
    "roles.judge.max_tokens=4",
]


def test_judge_of_labels_is_not_served_in_training(tmp_path: Path) -> None:
    settings = [*JUDGE, "label.reward=roles.judge", "rollout.n=1", "algorithm.name=ppo"]
    assert [role.name for role in plan_of(tmp_path, *settings).served] == ["judge"]
    assert resolve(config_of(tmp_path, *settings), "train").served == ()


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.train.answer_key=none_such"], "no column 'none_such' (data.train.answer_key)"),
        (["label.columns=[none_such]"], "no column 'none_such' (label.columns)"),
        (["label.columns=[question,absent]"], "no column 'absent' (label.columns)"),
    ],
)
def test_missing_responses_are_refused_by_column(
    tmp_path: Path, overrides: list[str], problem: str
) -> None:
    plan = plan_of(tmp_path, "label.reference=true", *overrides)
    with pytest.raises(ConfigError) as error:
        check_data(plan.config, plan.spec, "label")
    assert problem in str(error.value)


def begin(tmp_path: Path, *overrides: str) -> list[str]:
    plan = plan_of(tmp_path, *overrides)
    return state.begin(plan, check_data(plan.config, plan.spec, "label"))


def test_labels_go_on_only_with_the_same_settings(tmp_path: Path) -> None:
    assert begin(tmp_path) == []
    for harmless in ("label.prompts=9", "label.pairs=all", "reward.workers=2", "max_steps=7"):
        assert begin(tmp_path, harmless) == []
    labels = f"the labels in label.output={tmp_path}/run/label were made with"
    instead = "; keep that, or set another label.output"
    for override, before in (
        ("label.n=3", "2"),
        ("label.reference=true", "false"),
        ("rollout.temperature=0.5", "1.0"),
        ("seed=1", "0"),
    ):
        with pytest.raises(ConfigError) as error:
            begin(tmp_path, override)
        assert error.value.problems == [f"{override}: {labels} {before}{instead}"]
    with pytest.raises(ConfigError, match="reward.name: what it names differs"):
        begin(tmp_path, "label.reward=last_number")
    (tmp_path / "model/model.safetensors").write_bytes(bytes(17))
    with pytest.raises(ConfigError, match="model.path: other weights than the labels in"):
        begin(tmp_path)


def mixed_config(tmp_path: Path, *overrides: str) -> RunConfig:
    """Two sources, of which the second has columns of its own."""
    single = config_of(tmp_path)
    question = {"role": "user", "content": "2+2="}
    write_json_lines(tmp_path / "chats.jsonl", [{"question": "5", "chat": [question], "gold": "4"}])
    sources = {
        "texts": {"source": str(tmp_path / "rows.jsonl"), "quota": 1},
        "chats": {
            "source": str(tmp_path / "chats.jsonl"),
            "prompt_key": "chat",
            "answer_key": "gold",
        },
    }
    settings = {
        "model": {"path": str(MODELS / "tiny-agent")},
        "data": {"train": {"sources": sources}, "shuffle": False},
        "rollout": {"max_tokens": 8, "prompts_per_step": 2},
        "label": {"prompts": 2},
        "run_dir": single.run_dir,
    }
    return load_config(settings, ["model.random_init=true", *overrides])


def test_conversation_is_in_the_column_of_its_source(tmp_path: Path) -> None:
    config = mixed_config(tmp_path)
    for source, prompt_key in (("texts", None), ("chats", "chat")):
        dataset, key = label_data(config, source)
        assert key == f"data.train.sources.{source}" and dataset.prompt_key == prompt_key
    tokenizer = load_tokenizer(config.model)
    spec = load_spec(config.model.path)
    prompts = labelled_prompts(config, tokenizer, spec)

    async def rollout(prompt: Prompt, sampling: Sampling, n: int) -> Group:
        return Group(prompt, [Sample([5], [0.0], [0], text, 0.0, "stop") for text in "12"])

    async def one(request) -> Score:
        return by_length(request)

    labeller = Labeller(config, 32, tokenizer, rollout, Sampling(8), Scoring(one))
    labels = [asyncio.run(labeller.label(prompts[i], prompts.sources[i])) for i in range(2)]
    assert [label.prompt for label in labels] == ["0+1=", [{"role": "user", "content": "2+2="}]]


def test_labels_go_on_only_with_the_same_mixture(tmp_path: Path) -> None:
    """Numbers of prompts would mean other rows."""

    def settings(config: RunConfig) -> dict[str, Any]:
        plan = SimpleNamespace(config=config, weights_path="none", served=())
        return state.settings_of(cast(RunPlan, plan))

    before = settings(mixed_config(tmp_path))
    assert settings(mixed_config(tmp_path, "max_steps=7")) == before
    assert settings(mixed_config(tmp_path, "rollout.prompts_per_step=3")) != before
    turned = mixed_config(tmp_path)
    turned.data.train.sources = dict(reversed(turned.data.train.sources.items()))
    assert settings(turned) != before


def test_changed_rows_are_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    rows = json_lines(tmp_path / "rows.jsonl")
    write_json_lines(tmp_path / "rows.jsonl", [*rows[:2], {"question": "5+5=", "answer": "0"}])
    with pytest.raises(ConfigError, match="data.train: row 2 is the first that differs"):
        begin(tmp_path)


def test_complete_labels_need_no_engines(tmp_path: Path) -> None:
    file = ScoredFile(tmp_path)
    for ordinal in range(5):
        file.append(scored(1.0, ordinal=ordinal))
    file.close()
    assert not state.is_complete(tmp_path, 5)
    state.note_complete(tmp_path, prompts=5, wanted=5)
    assert state.is_complete(tmp_path, 5) and state.is_complete(tmp_path, 4)
    assert not state.is_complete(tmp_path, 6) and not state.is_complete(tmp_path, None)
    state.note_complete(tmp_path, prompts=5, wanted=9)
    assert state.is_complete(tmp_path, None), "there are only five rows"
    lines = (tmp_path / "scored.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "scored.jsonl").write_bytes(b"".join(lines[:-1]))
    assert not state.is_complete(tmp_path, 5), "the user has removed a damaged line"


def test_settings_names_the_date_of_templates(tmp_path: Path) -> None:
    begin(tmp_path, "model.chat_template.date=2020-01-02")
    assert json.loads((tmp_path / "run/label/settings.json").read_text())
    assert plan_of(tmp_path).config.model.chat_template.date == "2020-01-02"


def test_part_is_that_of_labels() -> None:
    from megarl.rewards.score import parts_in_labels

    config = RunConfig()
    config.label.reward = "last_number"
    assert parts_in_labels(config) == [RewardPart("last_number", 0.0, key="label.reward")]
