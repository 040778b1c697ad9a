"""Tokenizer, synthetic task, prompt order and supervised batches."""

from __future__ import annotations

import itertools
import json
import operator
import re
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from json_files import write_json_lines
from transformers import AutoTokenizer

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import (
    DatasetConfig,
    EvalConfig,
    LearnedConfig,
    MixedConfig,
    MixtureConfig,
    ModelConfig,
    RunConfig,
    SuiteConfig,
)
from megarl.data.batches import sft_batches, sft_sequence
from megarl.data.check import check_data
from megarl.data.order import permute
from megarl.data.prompts import PromptStream, Sources, held_out_sets, train_prompts
from megarl.data.rows import Row
from megarl.data.synthetic import Chain, Product
from megarl.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_problems
from megarl.models.registry import load_spec
from megarl.models.spec import ModelSpec
from megarl.rollouts.environments.loading import check_rollout

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs/models/tiny-llama")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ModelConfig(path=TINY))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return load_spec(TINY)


def chain_config(**sft: int) -> RunConfig:
    config = RunConfig()
    config.model.path = TINY
    config.data.train = MixtureConfig(source="synthetic:chain")
    config.data.eval = DatasetConfig(source="synthetic:chain", split="eval")
    config.rollout.max_tokens = 16
    config.sft.steps = sft.get("steps", 3)
    config.sft.batch_size = sft.get("batch_size", 4)
    return config


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 300), key=st.text(max_size=8))
def test_permutation_is_one(size: int, key: str):
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_permutation_shuffles_and_depends_on_its_key():
    identity = list(range(1000))
    a = [permute(i, 1000, "a") for i in identity]
    b = [permute(i, 1000, "b") for i in identity]
    for order, base_order in ((a, identity), (b, a)):
        equal_places = sum(map(operator.eq, order, base_order))
        neighbours = sum(abs(i - j) == 1 for i, j in itertools.pairwise(order))
        assert equal_places < 10 and neighbours < 20
    with pytest.raises(IndexError):
        permute(5, 5, "a")


def right_answer(prompt: str) -> str:
    assert re.fullmatch(r"\d([+-]\d){4}=", prompt)
    total = 0
    for sign, digit in re.findall(r"([+-]?)(\d)", prompt):
        total += -int(digit) if sign == "-" else int(digit)
    return str(total % 10)


def test_chain_prompts_answers_and_demonstrations():
    rows = Chain("train", seed=0)
    assert len(rows) == 1_600_000 - 512
    right = 0
    for i in range(0, len(rows), 400):
        row = rows[i]
        assert row.answer == right_answer(row.prompt)
        assert re.fullmatch(r"\d(,\d){4}", row.demonstration)
        assert row.demonstration[0] == row.prompt[0]
        right += row.demonstration[-1] == row.answer
    assert 0.28 < right / len(range(0, len(rows), 400)) < 0.36


def test_chain_clamps_six_of_ten_wraps_and_is_right_elsewhere():
    clamped = wrapped = 0
    for row in map(Chain("train", seed=3).__getitem__, range(3000)):
        totals = [int(x) for x in row.demonstration.split(",")]
        steps = [int(x) for x in re.findall(r"[+-]\d", row.prompt)]
        for before, step, after in zip(totals, steps, totals[1:]):
            exact = before + step
            if 0 <= exact <= 9:
                assert after == exact
            else:
                wrapped += 1
                clamped += after == (0 if exact < 0 else 9)
                assert after in (exact % 10, 0 if exact < 0 else 9)
    assert 0.58 < clamped / wrapped < 0.68  # -10 and +19 sometimes wrap to the clamped digit


def prompts_of(task: Chain | Product, count: int) -> set[str]:
    return {task[i].prompt for i in range(count)}


def test_held_out_expressions_are_in_no_other_split():
    held_out = prompts_of(Chain("eval", seed=0), 512)
    assert len(held_out) == 512
    assert held_out == prompts_of(Chain("eval", seed=9), 512)
    prompts = prompts_of(Chain("train", seed=0), 10_000)
    assert len(prompts) == 10_000 and not prompts & held_out


def test_text_inside_a_sequence_cannot_be_a_special_token(tokenizer: Tokenizer):
    assert tokenizer.encode_text("<eos>") == [tokenizer.token_id(c) for c in "<eos>"]
    assert (
        tokenizer.encode_text("<eos>", special_tokens=True)
        == [tokenizer.eos_id]
        == tokenizer.encode_prompt("<eos>1")[1:2]
    )
    assert tokenizer.token_id("<eos>") == tokenizer.eos_id
    assert tokenizer.token_id("12") is None is tokenizer.token_id("\u00e9")


def test_chain_is_deterministic_by_seed():
    def demonstrations(seed: int) -> list:
        return [Chain("train", seed)[i].demonstration for i in range(50)]

    assert demonstrations(0) == demonstrations(0) != demonstrations(1)


def test_tiny_tokenizer_is_that_of_transformers(tokenizer: Tokenizer):
    reference = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    text = "7+0-9=12,3: so x^2 <= (y/3)!\n  two  blanks"
    assert tokenizer.encode_prompt(text) == reference(text)["input_ids"]
    assert tokenizer.encode_prompt(text)[0] == reference.bos_token_id
    assert tokenizer.encode_response(text)[-1] == reference.eos_token_id == tokenizer.eos_id
    assert tokenizer.decode(tokenizer.encode_response(text)) == text
    assert tokenizer.encode_prompt("<bos>7", rendered=True) == tokenizer.encode_prompt("7"), (
        "a template adds its own"
    )
    assert len(tokenizer.encode_prompt("7+0=")) == 5


def edited_tokenizer(tmp_path: Path, name: str, **changes: object) -> Tokenizer:
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    settings_ = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps({**settings_, **changes}))
    return load_tokenizer(ModelConfig(path="not used", tokenizer=str(tmp_path)))


def test_tokenizer_that_does_not_fit_the_model(
    tmp_path: Path, spec: ModelSpec, tokenizer: Tokenizer
):
    assert tokenizer_problems(tokenizer, spec) == []
    larger = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    larger.add_tokens(["extra"])
    (problem,) = tokenizer_problems(Tokenizer("big", larger, None, None, (2,)), spec)
    assert problem == (
        "tokenizer big has ids up to 64 ('extra'), but the model's vocab_size is 64: they do not "
        "belong together"
    )


def test_end_of_text_ids(tmp_path: Path, spec: ModelSpec):
    assert edited_tokenizer(tmp_path / "a", "config.json", eos_token_id=[2, 0]).eos_ids == (2, 0)
    added = {"__type": "AddedToken", "content": "<pad>"}
    tokenizer = edited_tokenizer(tmp_path / "b", "tokenizer_config.json", eos_token=added)
    assert tokenizer.eos_ids == (0, 2)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    (tmp_path / "c" / "config.json").write_text("{}")
    (tmp_path / "c" / "tokenizer_config.json").write_text("{}")
    without_eos = load_tokenizer(ModelConfig(path=str(tmp_path / "c")))
    (problem,) = tokenizer_problems(without_eos, spec)
    assert "has no end-of-text token" in problem


def test_end_of_text_ids_are_the_union_of_both_files(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": None}), encoding="utf-8"
    )
    assert edited_tokenizer(tmp_path, "config.json", eos_token_id=5).eos_ids == (2, 5)
    both_files = edited_tokenizer(tmp_path, "generation_config.json", eos_token_id=[3, 5])
    assert both_files.eos_ids == (2, 3, 5)


@pytest.mark.parametrize("wrong", ["<eos>", [-1, 3], 1.5, [True]])
def test_end_of_text_id_that_is_no_id_is_refused(wrong: object, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"eos_token_id"):
        edited_tokenizer(tmp_path, "config.json", eos_token_id=wrong)
    shutil.copy(Path(TINY) / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"generation_config.json: eos_token_id=.* must be the id of a token"
    ):
        edited_tokenizer(tmp_path, "generation_config.json", eos_token_id=wrong)


def test_folder_without_tokenizer(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}: holds no tokenizer"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="AutoTokenizer of transformers cannot read it: "):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_epoch_has_each_prompt_once_and_resumes_by_number(tokenizer: Tokenizer, spec: ModelSpec):
    config = chain_config()
    config.data.train.size = 40
    stream = train_prompts(config, tokenizer, spec)
    epochs = [[stream[i].text for i in range(e * 40, (e + 1) * 40)] for e in range(3)]
    assert all(len(set(epoch)) == 40 for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) and epochs[0] != epochs[1] != epochs[2]
    again = train_prompts(config, tokenizer, spec)
    assert [again[i] for i in (77, 5, 119)] == [stream[i] for i in (77, 5, 119)]
    assert stream[77].ordinal == 77 and stream[77].text == epochs[1][37]
    config.seed = 1
    assert [train_prompts(config, tokenizer, spec)[i].text for i in range(40)] != epochs[0]


def test_prompts_without_shuffling_keep_the_order_of_the_rows(tokenizer: Tokenizer):
    rows = [Chain("train", 0)[i] for i in range(5)]
    stream = PromptStream(Sources([rows], "", shuffle=False), tokenizer)
    assert [stream[i].text for i in range(7)] == [rows[i % 5].prompt for i in range(7)]
    assert stream[2].answer == rows[2].answer
    assert stream[2].token_ids == tokenizer.encode_prompt(rows[2].prompt)


def test_held_out_sets(tokenizer: Tokenizer, spec: ModelSpec):
    config = chain_config()
    (default,) = held_out_sets(config, tokenizer, spec)
    assert len(default.prompts) == 512
    assert (default.name, default.samples, default.sampling.temperature) == ("", 1, 0.0)
    assert default.sampling.max_tokens == config.rollout.max_tokens
    config.eval = EvalConfig(limit=8, max_tokens=7, samples=2, temperature=0.5)
    config.eval.suites = {
        "other": SuiteConfig(
            source="synthetic:chain", split="eval", samples=4, temperature=1.0, max_tokens=9
        ),
        "plain": SuiteConfig(source="synthetic:chain", split="eval"),
        "none": None,
    }
    first, suite, plain = held_out_sets(config, tokenizer, spec)
    assert [p.text for p in first.prompts] == [Chain("eval", 0)[i].prompt for i in range(8)]
    for held_out, name, samples, temperature, max_tokens in (
        (first, "", 2, 0.5, 7),
        (suite, "other", 4, 1.0, 9),
        (plain, "plain", 2, 0.5, 7),
    ):
        sampling = held_out.sampling
        assert (held_out.name, len(held_out.prompts), held_out.samples) == (name, 8, samples)
        assert (sampling.temperature, sampling.max_tokens) == (temperature, max_tokens)
    config.data.eval = None
    suite, plain = held_out_sets(config, tokenizer, spec)
    assert (suite.name, plain.name) == ("other", "plain")


def test_sft_batches_teach_the_response_and_its_end(tokenizer: Tokenizer, spec: ModelSpec):
    batches = list(sft_batches(chain_config(), spec))
    assert [len(batch) for batch in batches] == [4, 4, 4]
    for sequence in itertools.chain(*batches):
        prompt = sequence.token_ids[~sequence.loss_mask].tolist()
        response = sequence.token_ids[sequence.loss_mask].tolist()
        assert sequence.token_ids.tolist() == prompt + response
        assert prompt[0] == 1
        assert response[-1] == 2
        assert re.fullmatch(r"\d([+-]\d){4}=", tokenizer.decode(prompt))
        assert re.fullmatch(r"\d(,\d){4}", tokenizer.decode(response))
        assert len(sequence.mu_logprobs) == len(sequence.advantages) == len(sequence.token_ids)


def test_sft_batches_differ_by_seed(spec: ModelSpec):
    config = chain_config(steps=5)
    batches = list(sft_batches(config, spec))
    config.seed = 1
    assert list(sft_batches(config, spec)) != batches


def test_long_demonstration_is_refused_with_its_row(tmp_path: Path, spec: ModelSpec):
    (tmp_path / "d.jsonl").write_text(
        json.dumps({"question": "1+1=", "answer": "2", "how": "1" * 600}) + "\n"
    )
    config = chain_config()
    config.sft.data = LearnedConfig(source=str(tmp_path / "d.jsonl"), demonstration_key="how")
    with pytest.raises(
        ConfigError,
        match=r"d.jsonl, line 1: prompt and demonstration have 606 tokens, more than the model's "
        r"context of 512",
    ):
        next(sft_batches(config, spec))


def test_environment_text_of_a_demonstration_is_not_learned(tokenizer: Tokenizer):
    sequence = sft_sequence(
        Row(prompt="2*3=", answer="6", demonstration=("<2*3>", "6;", "6"), location=""),
        tokenizer,
        64,
    )
    assert sequence.token_ids.tolist() == [
        *tokenizer.encode_prompt("2*3="),
        *tokenizer.encode_text("<2*3>6;6"),
        tokenizer.eos_id,
    ]
    assert sequence.loss_mask.tolist() == [False] * 5 + [True] * 5 + [False] * 2 + [True] * 2


def test_product_rows_are_right_and_held_out_ones_are_apart():
    train = Product("train", seed=0)
    rows = [train[i] for i in range(0, len(train), 200)]
    called = [row for row in rows if not isinstance(row.demonstration, str)]
    for row in rows:
        first_factor, second_factor = re.fullmatch(r"(\d{3})\*(\d{3})=", row.prompt).groups()
        assert row.answer == str(int(first_factor) * int(second_factor))
        if row in called:
            assert row.demonstration == (
                f"<{first_factor}*{second_factor}>",
                f"{row.answer};",
                row.answer,
            )
        else:
            assert re.fullmatch(rf"\?[1-9]\d{{{len(row.answer) - 1}}}", row.demonstration)
    assert 0.27 < len(called) / len(rows) < 0.33
    assert sum(row.demonstration == f"?{row.answer}" for row in rows) < 5, (
        "guesses are hardly ever right"
    )
    held_out = prompts_of(Product("eval", seed=0), 512)
    assert len(train) == 810_000 - 512
    assert len(held_out) == 512
    assert not held_out & {row.prompt for row in rows}
    assert [train[i] for i in range(20)] != [Product("train", seed=1)[i] for i in range(20)]


@pytest.mark.parametrize("name", ["quickstart", "calculator"])
def test_shipped_configs_pass_the_data_checks(name: str, spec: ModelSpec):
    config = load_config(f"configs/{name}.yaml")
    check_rollout(config)
    for command in ("sft", "train", "eval"):
        check_data(config, spec, command)


@pytest.mark.parametrize("key", ["data.eval", "eval.suites.own"])
def test_message_about_lack_of_room_names_the_length(key: str, tmp_path: Path, spec: ModelSpec):
    (tmp_path / "a.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    config = chain_config()
    config.eval.max_tokens = 512
    if key == "data.eval":
        config.data.eval = DatasetConfig(source=str(tmp_path / "a.jsonl"))
        length_key = "eval.max_tokens"
    else:
        suite = SuiteConfig(source=str(tmp_path / "a.jsonl"), max_tokens=512)
        config.eval.suites = {"own": suite}
        length_key = "eval.suites.own.max_tokens"
    with pytest.raises(ConfigError, match=f"room for -6 .*; set a smaller {length_key}"):
        check_data(config, spec, "eval")


def test_check_data_reports_all_problems_together(tmp_path: Path, spec: ModelSpec):
    (tmp_path / "a.jsonl").write_text(
        '{"question": "1+1=", "answer": "2"}\n'
        + json.dumps({"question": "1" * 500, "answer": "2"})
        + "\n"
    )
    (tmp_path / "b.jsonl").write_text(
        '{"question": "r\u00e9sum\u00e9", "answer": "2"}\n{"question"\n'
    )
    (tmp_path / "c.jsonl").write_text('{"question": "r\u00e9sum\u00e9", "answer": "2"}\n')
    config = chain_config()
    config.data.train = MixtureConfig(source=str(tmp_path / "a.jsonl"))
    config.data.eval = DatasetConfig(source=str(tmp_path / "b.jsonl"))
    with pytest.raises(ConfigError) as error:
        check_data(config, spec, "train")
    assert error.value.problems == [
        f"{tmp_path}/a.jsonl, line 2: the prompt has 501 tokens; there is room for 490 (512 "
        "tokens of context less 16 for the response and "
        "6 that SGLang keeps back)",
        f"{tmp_path}/b.jsonl, line 1: the tokenizer does not know some of the characters of "
        "'r\u00e9sum\u00e9'",
        f"{tmp_path}/b.jsonl, line 2: malformed JSON at column 12: Expecting ':' delimiter",
    ]
    config.data.max_prompt_tokens = 300
    limited = "501 tokens; there is room for 300 .data.max_prompt_tokens."
    with pytest.raises(ConfigError, match=limited):
        check_data(config, spec, "train")
    config.data.max_prompt_tokens = None
    config.generator.kv_cache_tokens = 400
    small_cache = "room for 378 .400 tokens of generator.kv_cache_tokens less 16 for the response"
    with pytest.raises(ConfigError, match=small_cache):
        check_data(config, spec, "train")
    config.generator.kv_cache_tokens = 20
    no_room = r"room for -2 .20 tokens of .*; set a smaller rollout.max_tokens"
    with pytest.raises(ConfigError, match=no_room):
        check_data(config, spec, "train")
    config.generator.kv_cache_tokens = 400
    config.data.eval = DatasetConfig(source=str(tmp_path / "c.jsonl"))
    with pytest.raises(
        ConfigError,
        match="c.jsonl, line 1: the tokenizer does not know some of the characters of "
        "'r\u00e9sum\u00e9'",
    ):
        check_data(config, spec, "eval")


def test_prompts_that_another_source_has_are_counted_once(tmp_path: Path, spec: ModelSpec):
    for name, answers in (
        ("a", {1: 2, 3: 4}),
        ("b", {1: 2, 3: 5, 7: 8}),
        ("held_out", {1: 2, 7: 8, 9: 0}),
    ):
        rows = [
            json.dumps({"question": f"{n}+1=", "answer": str(answer)})
            for n, answer in answers.items()
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    config = chain_config()
    config.data.train = MixtureConfig(
        sources={name: MixedConfig(source=str(tmp_path / f"{name}.jsonl")) for name in "ab"}
    )
    config.data.eval = DatasetConfig(source=str(tmp_path / "held_out.jsonl"))
    a, b, held_out = check_data(config, spec, "train")
    assert (a.reading.repeated, b.reading.repeated, b.reading.otherwise) == (0, 2, 1)
    assert (held_out.reading.repeated, held_out.shared) == (0, 2)


def test_run_drops_the_rows_that_its_check_dropped(
    tmp_path: Path, spec: ModelSpec, tokenizer: Tokenizer
):
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
    bad = [
        {"question": "1" * 600, "answer": "2"},
        {"question": "", "answer": "2"},
        {"question": "2+1=", "answer": None},
    ]
    held_out = [{"question": "1+1=", "answer": "2"}, {"question": "7+1=", "answer": "8"}, bad[0]]
    for name, file_rows in (("train", [*bad, *rows]), ("eval", held_out)):
        write_json_lines(tmp_path / f"{name}.jsonl", file_rows)
    config = chain_config()
    config.data.bad_rows = "drop"
    config.data.shuffle = False
    config.data.train = MixtureConfig(source=str(tmp_path / "train.jsonl"))
    config.data.eval = DatasetConfig(source=str(tmp_path / "eval.jsonl"))
    train, evaluation = check_data(config, spec, "train")
    assert (train.dropped, train.rows, evaluation.dropped, evaluation.shared) == (3, 7, 1, 1)
    assert (
        "rows left out (data.bad_rows=drop): 3, of them 1: a prompt of more than 490 tokens"
        in str(train)
    )
    assert "prompts that data.train has too: 1 of 2" in str(evaluation)
    stream = train_prompts(config, tokenizer, spec)
    assert [stream[ordinal].text for ordinal in range(5)] == [
        "0+1=",
        "1+1=",
        "2+1=",
        "3+1=",
        "0+1=",
    ]
    assert [prompt.text for prompt in held_out_sets(config, tokenizer, spec)[0].prompts] == [
        "1+1=",
        "7+1=",
    ]
    config.sft.data = LearnedConfig(source=str(tmp_path / "train.jsonl"))
    assert [checked.dropped for checked in check_data(config, spec, "sft")] == [3]
    assert all(len(sequence.token_ids) < 10 for sequence in next(sft_batches(config, spec)))
