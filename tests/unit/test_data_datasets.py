"""Rows from files: the formats of GSM8K and MATH, and every mistake with its file and line."""

from __future__ import annotations

import datetime
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from megarl.config.errors import ConfigError
from megarl.config.schema import LearnedConfig, ModelConfig, PreferenceConfig
from megarl.data.datasets import ROLES, load_rows, read_pairs, read_rows
from megarl.data.rows import Reading, Row, RowProblem

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs/models/tiny-llama"


def write(path: Path, *lines: Any) -> str:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return str(path)


def problems(source: str, **settings: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_rows(LearnedConfig(source=source, **settings), "data.train", seed=0)
    return error.value.problems


def test_gsm8k_shape(tmp_path: Path):
    source = write(
        tmp_path / "a.jsonl",
        {"question": "2+2?", "answer": "Add.\n#### 4"},
        "",
        {"question": "Price?", "answer": "#### $1,250", "id": 7},
    )
    rows = load_rows(
        LearnedConfig(source=source, prompt_template="Q: {prompt} {x}\nA:"), "data.train", seed=0
    )
    assert [(row.prompt, row.answer, row.demonstration) for row in rows] == [
        ("Q: 2+2? {x}\nA:", "4", "Add.\n#### 4"),
        ("Q: Price? {x}\nA:", "1,250", "#### $1,250"),
    ]
    assert rows[1].location == f"{source}, line 3"


def test_math_shape_in_parquet(tmp_path: Path):
    path = tmp_path / "math.parquet"
    rows = [
        {"problem": "Half?", "solution": "So $\\boxed{\\frac{1}{2}}$.", "level": "1"},
        {"problem": "Set?", "solution": "\\boxed{\\{1,2\\}}", "level": "2"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    loaded = load_rows(
        LearnedConfig(
            source=str(path), prompt_key="problem", answer_key="solution", demonstration_key="level"
        ),
        "data.train",
        seed=0,
    )
    assert [(row.prompt, row.answer, row.demonstration) for row in loaded] == [
        ("Half?", "\\frac{1}{2}", "1"),
        ("Set?", "\\{1,2\\}", "2"),
    ]


def test_plain_answers_and_size(tmp_path: Path):
    source = write(
        tmp_path / "a.jsonl",
        {"question": "a", "answer": 42},
        {"question": "b", "answer": "x + 1"},
        "broken beyond the size",
    )
    rows = load_rows(LearnedConfig(source=source, size=2), "data.train", seed=0)
    assert [row.answer for row in rows] == ["42", "x + 1"]


def test_problems_are_reported_with_their_lines(tmp_path: Path):
    source = write(
        tmp_path / "bad.jsonl",
        {"question": "fine", "answer": "1"},
        '{"question": "cut',
        {"qestion": "x", "answer": "1"},
        {"question": 5, "answer": "1"},
        {"question": "x", "answer": None},
        {"question": " ", "answer": "1"},
        "[1, 2]",
        {"question": "x", "answer": "\\boxed{"},
        {"question": "x", "answer": True},
        {"question": "x", "answer": math.nan},
        '{"question": "x", "answer": -1e400}',
    )
    assert problems(source) == [
        f"{source}, line 2: malformed JSON at column 14: Unterminated string starting at",
        f"{source}, line 3: no column 'question' (data.train.prompt_key); its columns are "
        "'qestion', 'answer'",
        f"{source}, line 4: field 'question' must be text, not a number",
        f"{source}, line 5: field 'answer' must be text, not null",
        f"{source}, line 6: field 'question' is empty",
        f"{source}, line 7: a row must be an object with fields, not a list",
        f"{source}, line 8: field 'answer' has no final answer of 1 to 512 characters "
        f"(\\boxed{{}}, after ####, or the whole text)",
        f"{source}, line 9: field 'answer' must be text, not true or false",
        f"{source}, line 10: field 'answer' must be a finite number, not nan",
        f"{source}, line 11: field 'answer' must be a finite number, not -inf",
    ]


def test_demonstration_may_be_turns(tmp_path: Path):
    row = {"question": "2*3=", "answer": "6"}
    source = write(
        tmp_path / "turns.jsonl", {**row, "how": ["<2*3>", "6;", "6"]}, {**row, "how": "6"}
    )
    rows = load_rows(LearnedConfig(source=source, demonstration_key="how"), "data.train", seed=0)
    assert [row.demonstration for row in rows] == [("<2*3>", "6;", "6"), "6"]
    for turns in (["<2*3>", "6;"], [], ["6", 6, "6"], ["", "6;", "6"]):
        source = write(tmp_path / "bad.jsonl", {**row, "how": turns})
        (problem,) = problems(source, demonstration_key="how")
        assert problem.startswith(
            f"{source}, line 1: field 'how' must be text, or an odd number of texts"
        )


def test_many_problems_are_counted(tmp_path: Path):
    source = write(tmp_path / "bad.jsonl", *(" " * n + "{" for n in range(25)))
    counted = problems(source)
    assert len(counted) == 11 and counted[-1] == f"{source}: 15 more rows with problems"


def test_problem_of_all_rows_is_one_line_with_the_settings(tmp_path: Path):
    source = write(tmp_path / "bad.jsonl", *[{"problem": "1+1=", "solution": "2"}] * 25)
    missing = (
        "no column 'question' (data.train.prompt_key) and none 'answer' (data.train.answer_key)"
    )
    assert problems(source) == [
        f"{source}, line 1: {missing}; its columns are 'problem', 'solution' (as in 24 more rows)"
    ]


def test_limit_of_rows_still_checks_all(tmp_path: Path):
    rows = [{"question": "q", "answer": str(n)} for n in range(50)]
    source = write(tmp_path / "many.jsonl", *rows)
    limited, count = read_rows(
        LearnedConfig(source=source), "data.train", 0, "final", None, limit=3
    )
    assert [row.answer for row in limited] == ["0", "1", "2"] and count == 50
    source = write(tmp_path / "late.jsonl", *rows, "{")
    with pytest.raises(ConfigError, match="late.jsonl, line 51: malformed JSON"):
        read_rows(LearnedConfig(source=source), "data.train", 0, "final", None, limit=3)


def test_rows_are_read_from_json_and_from_separated_values(tmp_path: Path):
    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": 'Say "a, b"\nor c', "answer": "c"}]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=2))
    write(tmp_path / "lines.json", *rows)
    (tmp_path / "a.csv").write_text('\ufeffquestion,answer\n1 + 1?,2\n"Say ""a, b""\nor c",c\n')
    (tmp_path / "a.tsv").write_text('question\tanswer\n1 + 1?\t2\n"Say ""a, b""\nor c"\tc\n')
    for name, location in (
        ("list.json", "row 2"),
        ("lines.json", "line 2"),
        ("a.csv", "line 4"),
        ("a.tsv", "line 4"),
    ):
        loaded = load_rows(LearnedConfig(source=str(tmp_path / name)), "data.train", seed=0)
        assert [(row.prompt, row.answer) for row in loaded] == [
            (row["question"], row["answer"]) for row in rows
        ]
        assert loaded[1].location == f"{tmp_path / name}, {location}"


def test_csv_with_unnamed_columns_and_long_values(tmp_path: Path):
    """Pandas writes such index columns, spreadsheets write cells beside the table, and data sets of
    programs have long tests.
    """
    (tmp_path / "a.csv").write_text(f",question,answer,tests,,\n0,1 + 1?,2,{'x' * 200_000},,\n")
    [row] = load_rows(
        LearnedConfig(source=str(tmp_path / "a.csv")), "data.train", seed=0, answers="whole"
    )
    assert (row.prompt, row.answer) == ("1 + 1?", "2")
    assert set(row.record) == {"question", "answer", "tests"}
    assert len(row.record["tests"]) == 200_000


@pytest.mark.parametrize("name", ["list.json", "lines.json", "lines.jsonl"])
def test_byte_order_mark_is_no_part_of_json(name: str, tmp_path: Path):
    rows = [json.dumps({"question": "1 + 1?", "answer": "2"})] * 2
    text = f"[{','.join(rows)}]" if name == "list.json" else "\n".join(rows)
    (tmp_path / name).write_text("\ufeff" + text)
    loaded = load_rows(LearnedConfig(source=str(tmp_path / name)), "data.train", seed=0)
    assert [row.prompt for row in loaded] == ["1 + 1?"] * 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '[{"question": "x"', "a.json: malformed JSON at column 18: "),
        (
            "a.json",
            '{\n "data": []\n}',
            "a.json: holds one value; it must be a list of rows, or have one row on each line",
        ),
        ("a.json", '{\n "data": [\n', "a.json: malformed JSON at column "),
        (
            "a.json",
            '{"question": "x", "answer": "1"}\n{',
            "a.json, line 2: malformed JSON at column 2: ",
        ),
        ("a.csv", "question,answer\nx\n", "a.csv, line 2: field 'answer' must be text, not null"),
        (
            "a.csv",
            "question,answer\nx,1,2\n",
            "a.csv, line 2: it has more values than the first line has columns: 2",
        ),
        ("a.csv", "question,question\nx,1\n", "a.csv: its first line names a column twice"),
        (
            "a.csv",
            'question,answer\n"x,1\n',
            "a.csv: cannot be read as .csv: unexpected end of data",
        ),
        ("a.csv", "question,answer\n", "has no rows"),
    ],
)
def test_malformed_files_are_refused(name: str, text: str, message: str, tmp_path: Path):
    (tmp_path / name).write_text(text)
    [problem] = problems(str(tmp_path / name))
    assert message in problem


def test_dropped_bad_rows_are_counted(tmp_path: Path):
    fine = {"question": "fine", "answer": "1"}
    bad = [
        '{"question": "cut',
        {"question": " ", "answer": "1"},
        {"question": "x", "answer": None},
        {"question": "y", "answer": None},
    ]
    source = write(
        tmp_path / "some.jsonl",
        fine,
        *bad,
        {"question": "far too long", "answer": "1"},
        {**fine, "answer": "2"},
        fine,
    )

    def tokens(row: Row) -> int:
        if len(row.prompt) > 10:
            raise RowProblem(f"{len(row.prompt)} characters", "a long prompt")
        return len(row.prompt)

    reading = Reading(drop=True, tokens=tokens)
    good, count = read_rows(LearnedConfig(source=source), "data.train", 0, "final", None, reading)
    assert [row.answer for row in good] == ["1", "2", "1"]
    assert count == 8
    assert reading.lengths == [4, 4, 4]
    assert {problem: len(lines) for problem, lines in reading.dropped.items()} == {
        "malformed JSON": 1,
        "field 'question' is empty": 1,
        "field 'answer' must be text, not null": 2,
        "a long prompt": 1,
    }
    assert (reading.repeated, reading.otherwise) == (2, 1)
    assert len(problems(source)) == 3, "otherwise nothing starts"
    only_bad = LearnedConfig(source=write(tmp_path / "none.jsonl", *bad[1:]))
    with pytest.raises(ConfigError, match="line 1: field 'question' is empty"):
        read_rows(only_bad, "data.train", 0, "final", None, Reading(drop=True))


def test_sources_that_are_no_dataset_are_refused(tmp_path: Path):
    empty = write(tmp_path / "empty.jsonl", "", "")
    assert problems(empty) == [f"data.train.source={empty}: has no rows"]
    assert problems(f"{tmp_path}/none.jsonl") == [
        f"data.train.source={tmp_path}/none.jsonl: no such file"
    ]
    assert problems(write(tmp_path / "data.txt", "a,b")) == [
        f"data.train.source={tmp_path}/data.txt: a file must end in .jsonl, .json, .csv, .tsv or "
        ".parquet"
    ]
    assert problems("nowhere/rows.json") == ["data.train.source=nowhere/rows.json: no such file"]
    assert problems(write(tmp_path / "x.parquet", "no"))[0].startswith(
        f"{tmp_path}/x.parquet: not a parquet file"
    )
    assert problems(empty, prompt_template="no place") == [
        "data.train.prompt_template=no place: must contain {prompt}, or be chat"
    ]
    assert problems("synthetic:chian") == [
        "data.train.source=synthetic:chian: no such task; there is synthetic:chain, "
        "synthetic:judged_chain, synthetic:product, "
        "synthetic:product_calls, synthetic:right_chain, synthetic:summary"
    ]
    assert problems("synthetic:chain", split="test") == [
        "data.train.split=test: synthetic:chain has train and eval"
    ]
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}\n')
    assert problems(f"{tmp_path}/latin.jsonl") == [
        f"{tmp_path}/latin.jsonl, line 1: not UTF-8 at byte 14"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "JSON that is nested too deeply"),
        (f'{{"question": {"1" * 5000}}}', "a number with too many digits"),
        (
            '{"question": "1\\ud83d1+1=", "answer": "2"}',
            "'\\ud83d' is half of a surrogate pair, and no character",
        ),
    ],
)
def test_line_beyond_the_limits_of_json_is_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "\\ud83d\\ude00", "answer": "2"}\n' + line)
    assert problems(f"{tmp_path}/rows.jsonl") == [f"{tmp_path}/rows.jsonl, line 2: {message}"]


def test_margin_larger_than_any_float_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(
        f'{{"prompt": "1", "chosen": "2", "rejected": "3", "m": -1{"0" * 400}}}'
    )
    with pytest.raises(ConfigError, match="line 1: field 'm' must be a finite number, not -100"):
        read_pairs(
            PreferenceConfig(source=f"{tmp_path}/pairs.jsonl", margin_key="m"),
            "reward_model.data",
            0,
            None,
        )


def test_local_folder_is_read_like_a_data_set_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`datasets` reads a folder with the same call as a hub name, so this covers hub names without
    a network.
    """
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    write(
        tmp_path / "set" / "train.jsonl",
        {"question": "a", "answer": "#### 1"},
        {"question": "b", "answer": "#### 2"},
    )
    rows = load_rows(LearnedConfig(source=str(tmp_path / "set")), "data.train", seed=0)
    assert [(row.prompt, row.answer) for row in rows] == [("a", "1"), ("b", "2")]
    assert "cannot be loaded" in problems(str(tmp_path / "set"), split="validation")[0]


def test_shipped_word_problems():
    rows = load_rows(
        LearnedConfig(source=str(ROOT / "configs/data/word_problems.jsonl")), "data.train", seed=0
    )
    assert len(rows) == 20
    assert [row.answer for row in rows[:5]] == [
        "22",
        "210",
        "30",
        "12.50",
        "16",
    ]


def test_final_whole_and_missing_answers(tmp_path: Path):
    """A user's reward function gets the whole answer, as JSON if it is not a text.

    Demonstrations need no answer.
    """
    long = "So it goes. " * 100 + "#### 4"
    cases = [["1 2", "3"]]
    source = write(
        tmp_path / "a.jsonl",
        *({"question": "q", "answer": answer, "cases": cases} for answer in (long, "#### 4")),
    )
    rows = load_rows(LearnedConfig(source=source), "data.train", 0, "whole")
    assert [row.answer for row in rows] == [long, "#### 4"]
    rows = load_rows(LearnedConfig(source=source, answer_key="cases"), "data.train", 0, "whole")
    assert [row.answer for row in rows] == ['[["1 2", "3"]]'] * 2
    plain = write(tmp_path / "sft.jsonl", {"question": "q", "text": "Once upon a time. " * 100})
    (row,) = load_rows(LearnedConfig(source=plain, demonstration_key="text"), "sft.data", 0, "none")
    assert (row.answer, row.demonstration) == ("", "Once upon a time. " * 100)
    (row,) = load_rows(LearnedConfig(source=plain, answer_key="text"), "sft.data", 0, "none")
    assert row.demonstration == "Once upon a time. " * 100
    with pytest.raises(ConfigError, match="no column 'answer' .data.train.answer_key."):
        load_rows(LearnedConfig(source=plain), "data.train", 0, "whole")
    dates = tmp_path / "dates.parquet"
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"question": "q", "answer": [datetime.date(2026, 1, 1)]}]), dates
    )
    with pytest.raises(
        ConfigError, match="row 1: field 'answer' cannot be written as JSON: Object of type date"
    ):
        load_rows(LearnedConfig(source=str(dates)), "data.train", 0, "whole")


TEMPLATE = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|system|>' + messages[0]['content'] + eos_token }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] != 'user' %}{{ raise_exception('only users') }}{% endif %}
    {{- '<|user|>\n' + message['content'] | trim + eos_token }}
    {%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{% continue %}{% endif %}
{%- endfor %}"""


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "by name"])
def test_prompts_in_the_chat_template_of_the_model(place: str, tmp_path: Path):
    """As rendered by transformers. Columns may be nested, as in verl's files."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    if place == "chat_template.jinja":
        (model / place).write_text(TEMPLATE)
    else:
        named = [{"name": "tool_use", "template": "?"}, {"name": "default", "template": TEMPLATE}]
        settings["chat_template"] = named if place == "by name" else TEMPLATE
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " 1+1? "},
    ]
    rows = [
        {"prompt": turns, "reward_model": {"ground_truth": "#### 2"}}
        for turns in (conversation, "1+1?")
    ]
    columns = {
        "prompt_key": "prompt",
        "answer_key": "reward_model.ground_truth",
        "prompt_template": "chat",
    }
    source = write(tmp_path / "a.jsonl", *rows)
    loaded = load_rows(
        LearnedConfig(source=source, **columns), "data.train", 0, model=ModelConfig(path=str(model))
    )
    reference = AutoTokenizer.from_pretrained(model, local_files_only=True)
    expected = [
        reference.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        for turns in (conversation, conversation[1:])
    ]
    assert expected == [
        "<|system|>Be brief.<eos><|user|>\n1+1?<eos><|assistant|>\n",
        "<|user|>\n1+1?<eos><|assistant|>\n",
    ]
    assert [row.prompt for row in loaded] == expected
    assert [row.answer for row in loaded] == ["2", "2"]
    for turns, problem in (
        (
            [{"role": "tool", "content": "x"}],
            "field 'prompt': the chat template refuses it: only users",
        ),
        (
            [{"role": "robot", "content": "x"}],
            f"field 'prompt', message 1: role 'robot' must be one of {', '.join(ROLES)}",
        ),
        ([{"role": "user"}], "field 'prompt', message 1: content must be text"),
        (5, "field 'prompt' must be text, not a number"),
    ):
        bad = write(tmp_path / "bad.jsonl", {**rows[0], "prompt": turns})
        with pytest.raises(ConfigError) as error:
            load_rows(
                LearnedConfig(source=bad, **columns),
                "data.train",
                0,
                model=ModelConfig(path=str(model)),
            )
        assert error.value.problems == [f"{bad}, line 1: {problem}"]


def test_model_without_chat_template(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", {"question": "a", "answer": "1"})
    with pytest.raises(ConfigError) as error:
        load_rows(
            LearnedConfig(source=source, prompt_template="chat"),
            "data.eval",
            0,
            model=ModelConfig(path=str(TINY)),
        )
    assert error.value.problems == [
        f"data.eval.prompt_template=chat: {TINY} has no chat template; write one with {{prompt}} "
        "in it"
    ]


@pytest.mark.parametrize("source", ["/nowhere/rows", "./rows", "[a, b]", "a/b/c"])
def test_source_that_is_no_hub_name_is_a_missing_file(source: str):
    assert problems(source) == [f"data.train.source={source}: no such file or folder"]


def test_folder_without_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/readme.jsonl").write_text("{")
    (message,) = problems(str(tmp_path / "set"))
    assert message.startswith(f"data.train.source={tmp_path}/set, split train: cannot be loaded: ")
