"""megarl eval on benchmarks through a real engine, with a random model that reads and writes bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from json_files import write_json_lines
from run_tools import make_model, succeed

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = make_model(
        tmp_path_factory.mktemp("bytes") / "model", vocab_size=320, max_position_embeddings=4096
    )
    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    config = json.loads((folder / "config.json").read_text()) | {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def evaluated(model: Path, folder: Path, rows: list[dict], *settings: str) -> dict[str, Any]:
    write_json_lines(folder / "rows.jsonl", rows)
    fixed = [
        "data.eval=null",
        "eval.samples=2",
        "eval.temperature=1.0",
        "eval.max_tokens=24",
        "generator.kv_cache_tokens=8192",
    ]
    folders = [
        f"model.path={model}",
        f"run_dir={folder / 'run'}",
        f"eval.suites.own.source={folder / 'rows.jsonl'}",
    ]
    overrides = [*folders, *fixed, *settings]
    process = succeed(["eval", "configs/quickstart.yaml", *overrides, "--json"])
    return json.loads(process.stdout)["suites"]["own"]


def test_ifeval(model: Path, tmp_path: Path) -> None:
    """Random bytes have fewer than 300 words, and are not in capital letters: the first prompt's
    answer is always right, the others' never.
    """
    pytest.importorskip("lm_eval", reason="the extra ifeval is not installed")
    from instructed import record, sentence_data

    if sentence_data() is None:
        pytest.skip("nltk's data punkt_tab is in no package here")
    rule = "length_constraints:number_words"
    few = record(rule, {"num_words": 300, "relation": "less than"})
    many = record(rule, {"num_words": 300, "relation": "at least"})
    combined = record(rule, {"num_words": 300, "relation": "less than"})
    combined["instruction_id_list"] += [rule, rule]
    combined["kwargs"] += many["kwargs"] * 2
    scores = evaluated(model, tmp_path, [few, many, combined], "eval.suites.own.benchmark=ifeval")
    assert scores["prompts"] == 3
    assert scores["samples"] == 6
    assert scores["correct"] == 2
    assert scores["reward/failed_fraction"] == 0.0
    assert scores["prompt_strict"] == scores["prompt_loose"] == pytest.approx(1 / 3)
    assert scores["pass@1"] == scores["prompt_strict"]
    assert scores["instruction_strict"] == scores["instruction_loose"] == pytest.approx(2 / 5)
    assert scores["ci95/instruction_strict/low"] < 2 / 5 < scores["ci95/instruction_strict/high"]


def test_livecodebench(model: Path, tmp_path: Path) -> None:
    """Random bytes hold no program: all responses are graded, and none is right."""
    from programming import row

    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    rows = [
        row([("1\n", "2\n"), ("2\n", "4\n")]),
        row([("1", "2")], "f"),
        row([("1\n", "2\n")], date="2020-01-01T00:00:00"),
    ]
    scores = evaluated(
        model,
        tmp_path,
        rows,
        "eval.suites.own.benchmark=livecodebench",
        "eval.suites.own.since=2024-01-01",
    )
    assert (
        scores["prompts"],
        scores["samples"],
        scores["correct"],
        scores["reward/failed_fraction"],
    ) == (2, 4, 0, 0.0)
    assert scores["pass@1"] == scores["pass@2"] == 0.0 < scores["ci95/pass@2/high"]
