"""Pairs of responses: their loss, reading and order."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from json_files import write_json_lines

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema import ModelConfig, PreferenceConfig, RunConfig
from megarl.data.batches import batch_of, evaluated_pairs, load_pairs, pair_tokens, training_steps
from megarl.data.datasets import read_pairs
from megarl.data.tokenizer import load_tokenizer
from megarl.launch.commands import accuracy_line
from megarl.models import load_spec
from megarl.plan.resolve import resolve
from megarl.roles.training import bradley_terry, to_score, weighted_values

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs/models/tiny-llama"
ROWS = [
    {"prompt": "1+2=", "chosen": "3", "rejected": "4"},
    {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
]


def test_loss_and_weights_are_the_formulas_and_its_derivatives() -> None:
    torch.manual_seed(0)
    scores = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    margins = torch.tensor([0.0, 0.5, 1.0, 0.0, -0.3, 0.0, 2.0], dtype=torch.float64)
    d = scores[:, 0] - scores[:, 1]
    loss = -(1 / (1 + torch.exp(-(d - margins)))).log().sum()
    (grad,) = torch.autograd.grad(loss, scores)
    result = bradley_terry(scores.detach(), margins)
    torch.testing.assert_close(result.weights, grad, rtol=0, atol=1e-12)
    assert result.metrics["loss"] == pytest.approx(loss.item() / 7, abs=1e-12)
    assert result.metrics["accuracy"] == (d > 0).sum().item() / 7
    assert result.metrics["score_difference/mean"] == pytest.approx(
        result.metrics["score/chosen"] - result.metrics["score/rejected"]
    )


def test_far_apart_scores_have_a_finite_loss() -> None:
    result = bradley_terry(
        torch.tensor([[-500.0, 500.0], [500.0, -500.0]], dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
    )
    assert result.metrics["loss"] == 500.0
    assert result.weights.tolist() == [[-1.0, 1.0], [0.0, 0.0]]


def test_a_score_is_the_value_after_the_last_token() -> None:
    sequence = to_score([5, 6, 7], weight=-0.25)
    assert sequence.token_ids[:3].tolist() == [5, 6, 7]
    assert sequence.loss_mask.tolist() == [
        False,
        False,
        False,
        True,
    ]
    values = torch.tensor([1.0, 2.0, 3.0])
    microbatch = SimpleNamespace(
        loss_mask=torch.from_numpy(sequence.loss_mask[1:]),
        advantages=torch.from_numpy(sequence.advantages[1:]),
    )
    out = weighted_values(values, microbatch)
    assert out.loss.item() == -0.75
    assert out.sums["tokens"].item() == 1


def pairs_of(folder: Path, rows: list[dict], tokenizer: str = str(TINY), **settings: str) -> list:
    write_json_lines(folder / "pairs.jsonl", rows)
    return list(
        read_pairs(
            PreferenceConfig(source=str(folder / "pairs.jsonl"), **settings),
            "reward_model.data",
            0,
            ModelConfig(path=tokenizer),
        )[0]
    )


def test_pairs_are_read_from_texts_and_from_messages(tmp_path: Path) -> None:
    [first, _] = pairs_of(tmp_path, ROWS)
    assert (first.prompt, first.chosen, first.rejected, first.margin) == ("1+2=", "3", "4", 0.0)
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    [pair] = pairs_of(
        tmp_path,
        [{"q": "1+2", "good": messages, "bad": {"text": "4"}, "by": 2}],
        prompt_key="q", chosen_key="good", rejected_key="bad.text", margin_key="by",
        prompt_template="{prompt}=",
    )  # fmt: skip
    assert (pair.prompt, pair.chosen, pair.rejected, pair.margin) == ("1+2=", "3", "4", 2.0)


def test_a_prompt_may_be_what_both_responses_begin_with(tmp_path: Path) -> None:
    """TRL's implicit prompts. Unlike TRL's own rule, this one cuts no word."""
    question = {"role": "user", "content": "1+2="}
    good = {"role": "assistant", "content": "3"}
    bad = {"role": "assistant", "content": "4"}
    for better, worse, expected in (
        ("1+2=3", "1+2=4", ("1+2=", "3", "4")),
        ("is it so? yes it is", "is it so? yes it was", ("is it so? yes it", " is", " was")),
        ("the cat", "the car sees", ("the", " cat", " car sees")),
        ("one two", "one two three", ("one", " two", " two three")),
    ):
        [pair] = pairs_of(tmp_path, [{"chosen": better, "rejected": worse}])
        assert (pair.prompt, pair.chosen, pair.rejected) == expected
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    )
    [pair] = pairs_of(
        tmp_path, [{"chosen": [question, good], "rejected": [question, bad]}], tokenizer=str(model)
    )
    assert (pair.prompt, pair.chosen, pair.rejected) == ("[user]1+2=[assistant]", "3", "4")
    for better, worse in (
        ([good], [bad]),
        ([question, good, question, good], [question, bad]),
        ("3", "4"),
        ("3", [bad]),
    ):
        with pytest.raises(
            ConfigError,
            match="no column 'prompt', and fields 'chosen' and 'rejected' do not begin with the same",
        ):
            pairs_of(tmp_path, [{"chosen": better, "rejected": worse}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rejected": "3"}, "fields 'chosen' and 'rejected' are the same: nothing is preferred"),
        ({"chosen": ""}, "field 'chosen' is empty"),
        (
            {"chosen": [{"role": "user", "content": "3"}]},
            "field 'chosen' must be text, or a list of messages that ends with the response",
        ),
        ({"by": "much"}, "field 'by' must be a finite number, not 'much'"),
        ({"by": math.inf}, "field 'by' must be a finite number, not inf"),
    ],
)
def test_mistakes_in_pairs_are_named_with_their_line(
    tmp_path: Path, change: dict, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        pairs_of(tmp_path, [ROWS[0] | {"by": 1}, ROWS[0] | {"by": 1} | change], margin_key="by")
    assert error.value.problems == [f"{tmp_path}/pairs.jsonl, line 2: {message}"]


def test_missing_columns_are_named_with_their_settings(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no column 'chosen' \(reward_model.data.chosen_key\) and none 'rejected'",
    ):
        pairs_of(tmp_path, [{"prompt": "1+2="}])


def test_held_out_pairs_have_the_columns_of_trained_pairs(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"q": "1+2=", "good": "3", "bad": "4"}) + "\n")
    columns = ["reward_model.data.prompt_key=q", "reward_model.data.chosen_key=good"]
    config = config_of(
        *columns,
        "reward_model.data.rejected_key=bad",
        f"reward_model.eval.source={tmp_path}/pairs.jsonl",
    )
    (pair,) = load_pairs(
        config, evaluated_pairs(config.reward_model), "reward_model.eval", load_spec(TINY)
    )
    assert (pair.prompt, pair.chosen, pair.rejected) == ("1+2=", "3", "4")
    config = config_of(*columns, f"reward_model.eval.source={tmp_path}/pairs.jsonl")
    with pytest.raises(
        ConfigError, match=r"no column 'rejected' \(reward_model.data.rejected_key\)"
    ):
        load_pairs(
            config, evaluated_pairs(config.reward_model), "reward_model.eval", load_spec(TINY)
        )


def config_of(*overrides: str) -> RunConfig:
    return load_config(ROOT / "configs/examples/reward_model.yaml", overrides)


def test_synthetic_pairs_have_one_right_response() -> None:
    config = config_of()
    pairs = load_pairs(
        config, evaluated_pairs(config.reward_model), "reward_model.eval", load_spec(TINY)
    )
    assert len(pairs) == 512
    for pair in map(pairs.__getitem__, range(200)):
        text = pair.prompt.removesuffix("=")
        totals = [eval(text[: 2 * n + 1]) % 10 for n in range(5)]
        assert pair.chosen == ",".join(map(str, totals)) != pair.rejected
        assert len(pair.rejected) == 9
    with pytest.raises(
        ConfigError,
        match="source=synthetic:product: no such task; there is synthetic:chain, synthetic:summary",
    ):
        read_pairs(PreferenceConfig(source="synthetic:product"), "reward_model.data", 0, None)


def test_every_epoch_has_each_pair_once(tmp_path: Path) -> None:
    pairs = pairs_of(
        tmp_path,
        [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(10)],
    )
    config = config_of(
        "reward_model.steps=null", "reward_model.epochs=2", "reward_model.batch_size=4"
    )
    assert training_steps(config, len(pairs)) == 5
    assert training_steps(config_of("reward_model.steps=7"), 10) == 7
    order = [pair.location for step in range(5) for pair in batch_of(config, pairs, step)]
    assert sorted(order[:10]) == sorted(order[10:]) == sorted(pair.location for pair in pairs)
    assert order[:10] != order[10:]


def test_tokens_are_those_of_a_rollout(tmp_path: Path) -> None:
    pair, _ = pairs_of(tmp_path, ROWS)
    tokenizer = load_tokenizer(config_of().model)
    better, worse = pair_tokens(pair, tokenizer, 100)
    assert better == tokenizer.encode_prompt("1+2=") + tokenizer.encode_response("3")
    assert better[-1] == tokenizer.eos_id
    assert better[:-2] == worse[:-2]
    with pytest.raises(ConfigError, match="more than the model's context of 6"):
        pair_tokens(pair, tokenizer, 6)


def test_command_refuses_unsupported_settings(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").write_text("")
    wrong = [
        "reward_model.data=null",
        "reward_model.eval=null",
        "reward_model.dp=1000",
        f"reward_model.output={tmp_path}/there",
    ]
    with pytest.raises(ConfigError) as error:
        resolve(config_of(*wrong, f"run_dir={tmp_path}", "reward_model.every=3"), "reward-model")
    assert error.value.problems == [
        "reward_model.data=null: megarl reward-model needs pairs of responses: set "
        "reward_model.data.source",
        "reward_model.batch_size=128: its 256 sequences must be at least reward_model.dp=1000",
        "reward_model.every=3: needs held-out pairs: set reward_model.eval.source",
        f"reward_model.output={tmp_path}/there: is there already, and is not empty; remove it, or "
        "name another",
    ]


def test_a_reward_model_is_no_policy(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    scores = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (tmp_path / "model/config.json").write_text(
        json.dumps(json.loads((TINY / "config.json").read_text()) | scores)
    )
    overrides = [f"model.path={tmp_path}/model", f"model.tokenizer={TINY}", f"run_dir={tmp_path}"]
    for command in ("sft", "train", "eval", "plan"):
        with pytest.raises(
            ConfigError,
            match=r"is a reward model or critic \(ForSequenceClassification\), which generates no text",
        ):
            resolve(config_of(*overrides), command)
    assert resolve(config_of(*overrides), "reward-model").spec.head == "scalar"


def test_no_reward_model_is_made_beside_a_vision_tower(tmp_path: Path) -> None:
    seeing = [
        f"model.path={ROOT}/configs/models/qwen3.5-397b-a17b",
        f"model.tokenizer={TINY}",
        f"run_dir={tmp_path}",
    ]
    with pytest.raises(ConfigError, match="must have no vision tower for megarl reward-model"):
        resolve(config_of(*seeing), "reward-model")


def test_last_line_has_accuracy_of_held_out_pairs() -> None:
    assert accuracy_line('{"step": 0, "loss": 1}\n') == ""
    one = {"before/accuracy": 0.5, "before/loss": 0.7, "eval/accuracy": 0.75, "eval/loss": 0.25}
    line = (
        "Held-out pairs in the right order: 0.500 (loss 0.7000) before, 0.750 (loss 0.2500) after\n"
    )
    assert accuracy_line(json.dumps(one)) == line
    assert (
        accuracy_line(
            f"{json.dumps(one | {'eval/accuracy': 0.1})}\n{json.dumps({'eval/accuracy': 0.75, 'eval/loss': 0.25})}"
        )
        == line
    )
