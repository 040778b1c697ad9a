"""An engine's answers, parsed directly into arrays, against json.loads: all numbers are equal, and
only numbers are accepted.
"""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.generator.completions import Completion, EngineError, Sampling, completions_of
from megarl.kernels.json_numbers import read_floats, read_id_lists, read_token_logprobs


def read(text: bytes, start: int = 0) -> tuple[list[float], list[int], int] | None:
    room = len(text) + 1
    values = np.empty(room, np.float32)
    ids = np.empty(room, np.int32)
    count, end = read_token_logprobs(np.frombuffer(text, np.uint8), start, values, ids)
    return (values[:count].tolist(), ids[:count].tolist(), end) if count >= 0 else None


def read_list(text: bytes) -> list[float] | None:
    values = np.empty(len(text) + 1, np.float32)
    count, end = read_floats(np.frombuffer(text, np.uint8), 0, values)
    assert count < 0 or end == len(text)
    return values[:count].tolist() if count >= 0 else None


float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
written = st.one_of(
    float32.map(repr),
    float32.map(lambda value: orjson.dumps(value).decode()),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"\A-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][-+]?[0-9]{1,4})?\Z"),
)


@given(st.lists(st.tuples(written, st.integers(0, (1 << 31) - 1)), max_size=12))
@example(
    [
        ("-0.0", 0),
        ("-1e-45", 1),
        ("1e400", 2),
        ("16777217", 3),
        ("0.1000000014901161138", 4),
        ("1.00000005960464477539", 5),
    ]
)
@settings(max_examples=500, deadline=None)
def test_numbers_are_those_of_json_in_float32(entries):
    """Each number is read exactly, or left to the decoder.

    Numbers as engines write them, float32 of usual size, are always read.
    """
    for text, token in entries:
        parsed = read(f"[[{text},{token},null]]".encode())
        decoded = float(text)
        with np.errstate(over="ignore"):
            expected = np.float32(decoded)
        if parsed is not None:
            [value], ids, _ = parsed
            assert ids == [token]
            assert struct.pack("f", value) == struct.pack("f", expected), text
        elif (
            decoded == float(expected)
            and 1e-20 < abs(decoded) < 1e20
            and len(text.strip("-0.")) <= 18
            and "e" not in text.lower()
        ):
            raise AssertionError(f"{text} is a float32 and was not read")
    all_entries = f"[{','.join(f'[{text},{token},null]' for text, token in entries)}]".encode()
    parsed = read(b"xy" + all_entries + b"}", 2)
    if parsed is not None:
        _, ids, end = parsed
        assert ids == [token for _, token in entries]
        assert end == 2 + len(all_entries)
    floats = f"[{','.join(text for text, _ in entries)}]".encode()
    values = read_list(floats)
    if values is not None:
        assert values == [float(np.float32(value)) for value in json.loads(floats)]


@given(st.lists(float32, max_size=5), st.data())
@settings(max_examples=500, deadline=None)
def test_damaged_list_is_read_like_json_or_not_at_all(logprobs, data):
    """A list with a byte changed, removed or inserted, or with its end cut off, is read like by a
    decoder, or not at all.
    """
    text = bytearray(
        json.dumps([[value, 7, None] for value in logprobs], separators=(",", ":")).encode()
    )
    position = data.draw(st.integers(0, len(text) - 1))
    change = data.draw(st.sampled_from(["replace", "remove", "insert", "cut"]))
    byte = data.draw(st.sampled_from(b'0123456789.,-+eE[]{}" nul\x00\xff'))
    text[position : len(text) if change == "cut" else position + (change != "insert")] = bytes(
        [byte] * (change in ("replace", "insert"))
    )
    parsed = read(bytes(text))
    if parsed is None:
        return
    values, ids, end = parsed
    decoded = json.loads(text[:end])
    assert [token for _, token, _ in decoded] == ids
    assert all(third is None for _, _, third in decoded)
    assert values == [float(np.float32(value)) for value, _, _ in decoded]


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), max_size=5),
    st.sampled_from(["", ",7]", "}"]),
)
def test_lists_of_ids_are_those_of_json(lists, after):
    text = json.dumps(lists, separators=(",", ":")).encode()
    ids = np.zeros(len(text), np.int32)
    sizes = np.zeros(len(text), np.int32)
    count, end = read_id_lists(np.frombuffer(text + after.encode(), np.uint8), 0, ids, sizes)
    assert (count, end) == (len(lists), len(text))
    assert sizes[:count].tolist() == [len(tokens) for tokens in lists]
    assert ids[: sizes[:count].sum()].tolist() == [token for tokens in lists for token in tokens]


@pytest.mark.parametrize(
    "text",
    "[[]] [[5,]] [[05]] [[5][6]] [[5,-1]] [[5,6 [[5] [[2147483648]] [5] [[5.0]] [[null]] "
    "[[5],[]]".split(),
)
def test_lists_of_ids_written_otherwise_are_declined(text):
    room = np.zeros(20, np.int32)
    assert read_id_lists(np.frombuffer(text.encode(), np.uint8), 0, room, room.copy())[0] == -1


def answer(logprobs, meta=None, text="", **fields) -> bytes:
    meta_info = {
        "finish_reason": {"type": "stop"},
        "weight_version": "3",
        "prompt_tokens": 4,
        "output_token_logprobs": logprobs,
        **(meta or {}),
    }
    response = {"text": text, "output_ids": [7], "meta_info": meta_info, **fields}
    return json.dumps([response], separators=(",", ":")).encode()


GREEDY = Sampling(8)
TRUNCATED = Sampling(8, top_k=4)
THREE = [[-0.25, 5, None], [-1.5, 6, None], [-0.1, 7, None]]
COMPLETION = Completion([5, 6, 7], [-0.25, -1.5, -0.1], [3, 3, 3], "stop", prefill=(4, 0))


@pytest.mark.parametrize(
    "body",
    [
        answer(THREE),
        json.dumps(json.loads(answer(THREE)), indent=1).encode(),  # spaces are left to the decoder
        # with texts among the numbers
        answer([[-0.25, 5, "a"], [-1.5, 6, '"]]'], [-0.1, 7, None]]),
        # a model may write anything
        answer(THREE, text='\\","output_token_logprobs":[[-9.0,9,null]],"'),
        answer(THREE, text='"output_token_logprobs":[[-9.0,9,null]]'),
        answer(
            THREE, {"output_token_logprobs_length": 3, "output_token_sampling_mask": [[5, 6]] * 3}
        ),
        answer(THREE, later={"output_token_logprobs": [[-9.0, 9, None]]}),  # in an unexpected place
    ],
)
def test_answers_are_read_in_any_form(body):
    assert completions_of("e", body, [GREEDY]) == [COMPLETION]


def test_many_answers_and_truncated_distributions():
    sampling = {"output_token_sampling_logprobs": [-0.125, -0.5, 0.0]}
    two = (
        b"["
        + answer(THREE, sampling)[1:-1]
        + b","
        + answer([], sampling | {"output_token_sampling_logprobs": []})[1:-1]
        + b"]"
    )
    first, second = completions_of("e", two, [TRUNCATED, TRUNCATED])
    assert first == Completion([5, 6, 7], [-0.125, -0.5, 0.0], [3] * 3, "stop", prefill=(4, 0))
    assert second == Completion([], [], [], "stop", prefill=(4, 0))
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    [completion] = completions_of("e", answer(THREE, {"weight_versions": spans}), [GREEDY])
    assert completion.versions.tolist() == [3, 3, 4]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (answer([[None, 5, None]]), "unreadable"),
        (answer([[math.nan, 5, None]]), "unreadable"),
        (answer([[-math.inf, 5, None]]), "unreadable"),
        (answer(THREE).replace(b"-1.5", b"-1e39"), "the log-prob -inf"),
        (answer(THREE).replace(b"-1.5", b"1.5"), "the log-prob 1.5"),
        (answer([[-0.5, 5.5, None]]), "unreadable"),
        (answer([[-0.5, "5", None]]), "unreadable"),
        (answer([[-0.5, 1 << 31, None]]), "unreadable"),
        (answer([[-0.5, 5]]), "unreadable"),
        (answer([[-0.5, 5, None]])[:-9], "unreadable"),
        (answer(0), "unreadable"),
        (answer(THREE, {"output_token_sampling_logprobs": 0}), "unreadable"),
        (
            answer(THREE, {"weight_versions": [{"version": "3", "start": 0, "end": 2}]}),
            "3 tokens, 3 log-probs, 2 versions",
        ),
        (answer(THREE, {"weight_version": "default"}), "unreadable"),
        (answer(THREE, {"weight_version": "99999999999"}), "unreadable"),
        (answer(THREE).replace(b'"stop"', b'"st\xffp"'), "unreadable"),
        (b"[" + answer(THREE)[1:-1] + b"," + answer(THREE)[1:-1] + b"]", "2 answers to 1 requests"),
        (b"[]", "0 answers to 1 requests"),
    ],
)
def test_malformed_answer_is_refused_with_the_engine(body, problem):
    with pytest.raises(EngineError, match=f"engine e .*{problem}"):
        completions_of("e", body, [GREEDY])
