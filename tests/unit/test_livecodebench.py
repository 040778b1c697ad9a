"""LiveCodeBench: rows, packed tests, releases and dates, and the comparison of results."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path

import pytest
from json_files import write_json_lines
from programming import packed, row
from test_benchmarks import config_of, rows_of

from megarl.config.errors import ConfigError
from megarl.config.schema import SuiteConfig
from megarl.data.datasets import answers_of, load_rows
from megarl.data.rows import files_of, held_out
from megarl.rewards.code import cases_of, program_in, same_output, unpacked

CASES = [("1 2\n", "3\n"), ("4 5\n", "9\n"), ("7 0\n", "7\n")]


def test_rows_have_prompt_and_cases_by_their_starter_code(tmp_path: Path) -> None:
    functional = row([("3\n[1, 2]", "6"), ("1\n[4]", "5")], "total")
    program, function = rows_of("livecodebench", [row(CASES), functional], tmp_path)
    assert "### Question:\nPrint the sum.\n" in program.prompt
    assert "# YOUR CODE HERE" in program.prompt
    assert "stdin" in program.prompt
    assert "def total(self" in function.prompt
    assert "YOUR CODE" not in function.prompt
    assert cases_of(program.answer) == (
        [stdin for stdin, _ in CASES],
        [stdout for _, stdout in CASES],
        None,
    )
    assert cases_of(function.answer) == ([[3, [1, 2]], [1, [4]]], [[6], [5]], "total")


def test_rows_as_apps_and_verl_have_them() -> None:
    assert cases_of(json.dumps({"inputs": ["1"], "outputs": ["2"]})) == (["1"], ["2"], None)
    assert cases_of(json.dumps([{"input": "1", "output": "2"}])) == (["1"], ["2"], None)
    called = cases_of(json.dumps({"inputs": [[[1], 2]], "outputs": [[3]], "fn_name": "f"}))
    assert called == ([[[1], 2]], [[[3], 3]], "f")
    assert called.passed(0, "3")
    assert called.passed(0, "[3]")
    assert not called.passed(0, "[[3]]")


def test_dates_and_releases_choose_problems(tmp_path: Path) -> None:
    for number, date in (
        (1, "2024-05-01T00:00:00"),
        (2, "2024-08-01T00:00:00"),
        (3, "2024-11-01T00:00:00"),
    ):
        rows = [row(CASES, date=date) | {"question_content": f"number {number}"}]
        write_json_lines(tmp_path / f"test{number if number > 1 else ''}.jsonl", rows)

    def problem_numbers(**settings: str) -> list[str]:
        config = config_of("livecodebench", tmp_path, **settings)
        ((_, key, dataset, _),) = [rows for rows in held_out(config) if rows[0] == "own"]
        rows = load_rows(dataset, key, 0, answers_of(config, True, "own"))
        return [problem.prompt.split("number ")[1][0] for problem in rows]

    assert problem_numbers(subset="release_v3") == ["1", "2", "3"]
    assert problem_numbers(subset="v2") == ["2"]
    assert problem_numbers(subset="release_v3", since="2024-08-01") == ["2", "3"]
    assert problem_numbers(subset="release_v3", since="2024-08-01", until="2024-08-01") == ["2"]
    with pytest.raises(
        ConfigError, match=r"has no test4.jsonl, which eval.suites.own.subset=v4 needs"
    ):
        problem_numbers(subset="v4")
    with pytest.raises(ConfigError, match=r"has no rows since 2025-01-01 until 2025-02-01$"):
        problem_numbers(subset="release_v3", since="2025-01-01", until="2025-02-01")
    [hub] = [rows[2] for rows in held_out(config_of("livecodebench")) if rows[0]]
    assert (hub.source, hub.subset) == ("livecodebench/code_generation_lite", "release_v6")
    assert files_of(SuiteConfig(benchmark="livecodebench", subset="release_v2")) == [
        "test.jsonl",
        "test2.jsonl",
    ]


class Evil:
    def __reduce__(self):
        return (print, ("run by the unpickler",))


def compressed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (compressed(pickle.dumps(Evil())), "something other than a text: STACK_GLOBAL"),
        (compressed(pickle.dumps([1, 2])), "something other than a text"),
        # an unpickler would allocate a billion objects
        (compressed(b"]r\xff\xff\xff\x3f."), "something other than a text: EMPTY_LIST"),
        # announces a text of 2^64 bytes
        (compressed(b"\x80\x04\x8d" + b"\xff" * 8 + b"[]."), "neither JSON nor a text"),
        (compressed(b"\x80\x09."), "a pickle of 0 texts"),
        (compressed(b"no pickle"), "neither JSON nor a text"),
        ("not base 64!", "neither JSON nor a text"),
        (packed("[]")[:-8], "cut short|neither JSON"),
        (packed("{}"), "must be a list of tests"),
        (packed([{"input": "1"}]), "an object with input and output"),
    ],
)
def test_packed_tests_that_are_none_are_refused(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=problem):
        rows_of("livecodebench", [row(CASES) | {"private_test_cases": text}], tmp_path)
    assert "run by the unpickler" not in capsys.readouterr().out


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_texts_of_all_protocols_are_unpacked(protocol: int) -> None:
    for text in ("[]", '["é\\n"]\n', "[1]" + " " * 70_000):
        assert unpacked(compressed(pickle.dumps(text, protocol)), "private_test_cases") == text


def test_unpacked_tests_over_the_size_limit_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 1000000 bytes"):
        unpacked(packed(" " * 10_000_000), "private_test_cases", 1_000_000)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True), ("  3  \n 4\n\n", "3\n4", True), ("3.0 4", "3 4.000", True),
        ("1e1", "10", True), ("3 4", "3\n4", False),
        ("3\n\n4", "3\n4", False), ("Yes", "YES", False), ("NaN", "NaN ", True),
        ("NaN", "1", False), ("nan 1", "NaN 1", False),
        ("sNaN", "1", False), ("1e999999999999999999999", "1", False), ("", "0", False),
        ("0.30000000000000004", "0.3", False),
        ("3 4", "3", False), ("50000000000000000 0", "50000000000000001 0", False),
        ("9" * 200_000, "1", False),
    ],
)  # fmt: skip
def test_output_is_compared_line_by_line_and_as_decimals(
    printed: str, expected: str, same: bool
) -> None:
    assert same_output(printed, expected) is same


def test_the_program_is_between_the_last_two_fences() -> None:
    assert program_in("```\na\n```\nthen\n```python\nb\nc\n```\nend") == "b\nc"
    assert program_in("```python\nb") == program_in("b") == ""
