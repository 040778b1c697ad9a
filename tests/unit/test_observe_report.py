"""The end of a run: summary, plot, trace, and rollouts that are safe to view."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from batches import batch_of
from json_files import json_lines
from msgspec.structs import replace

from megarl.base.rollout_types import Group, GroupSummary, GroupTexts, Prompt, Sample
from megarl.evaluation.scores import damaged_results, read_results, write_result
from megarl.observe import report
from megarl.observe.metrics import Histogram, MetricsWriter
from megarl.observe.report import finish_report, moving_mean, plot, plot_agreement, summarize
from megarl.observe.samples import OrdinalsWriter, escape, recover_ordinals, write_rollouts
from megarl.observe.status import TraceWriter, merge_traces
from megarl.rollouts.buffer import Ledger
from megarl.rollouts.channel import texts_of


def write_run(run_dir: Path, steps: int) -> None:
    writer = MetricsWriter(run_dir)
    for step in range(steps):
        values = {
            "reward/mean": step / 100,
            "loss": math.nan,
            "staleness/mean": 1.0,
            "staleness/max": 1 + (step == 3),
        }
        values |= {
            "time/step_s": 0.2 + step / 1000,
            "time/train_s": 0.1,
            "samples_per_s": float(step),
            "tokens_per_s": 5.0,
        }
        values |= {"sync/audit_ok": None if step == 0 else step != 5}
        writer.write(
            step, values | ({"logprob/abs_diff_mean": 1e-6 * (1 + step)} if step % 10 == 0 else {})
        )
    writer.close()


def test_summary_states_what_the_metrics_hold(tmp_path: Path) -> None:
    write_run(tmp_path, 31)
    text = " ".join(
        summarize(
            tmp_path, [{"version": 0, "pass@1": 0.125}, {"version": 31, "pass@1": 0.975}]
        ).split()
    )
    assert "31 steps" in text
    # means of 0..9 and 21..30, over 100
    assert "0.045 in the first 10 steps, 0.255 in the last 10 (+0.210)" in text
    assert "0.125 before, 0.975 after" in text
    assert "1.00 steps on average, 2 at most" in text
    assert "at most 3.1e-05 between trainer and generator, 4 probes" in text
    assert "29 of 30 equal bit for bit" in text
    assert "15 samples/s, 5 tokens/s" in text
    assert "a step takes 0.215 s" in text
    assert "training 0.100 s" in text
    assert "turns" not in text
    assert "not measured after" in " ".join(
        summarize(tmp_path, [{"version": 0, "pass@1": 0.1}]).split()
    )


@pytest.mark.parametrize(
    ("versions", "scores"),
    [
        ([0], "0.000 before, not measured after"),
        ([4], "not measured before, 0.040 after"),
        ([2], "not measured before, 0.020 after 2 steps"),
        ([0, 2], "0.000 before, 0.020 after 2 steps"),
        ([2, 4], "not measured before, 0.040 after"),
    ],
)
def test_summary_says_when_it_was_evaluated(
    versions: list[int], scores: str, tmp_path: Path
) -> None:
    """Evaluating engines may have missed the first version, or the last."""
    write_run(tmp_path, 4)
    text = summarize(
        tmp_path, [{"version": version, "pass@1": version / 100} for version in versions]
    )
    assert [
        line.split("pass@1")[1].strip() for line in text.splitlines() if "held-out" in line
    ] == [scores]


def test_summary_has_a_line_for_each_score_of_each_held_out_set(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    hard = {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 0.75, "reward/mean": 0.25}
    first = {"version": 0, "pass@1": 0.5, "reward/mean": 0.625}
    lines = summarize(
        tmp_path, [first, {**first, "version": 2, "suites": {"hard": hard}}]
    ).splitlines()
    assert [line.split() for line in lines if "held-out" in line] == [
        ["held-out", "pass@1", "0.500", "before,", "0.500", "after"],
        ["held-out", "reward", "0.625", "before,", "0.625", "after"],
        ["held-out", "hard", "pass@1", "not", "measured", "before,", "0.250", "after"],
        ["held-out", "hard", "pass@4", "not", "measured", "before,", "0.750", "after"],
    ]


def test_turns_are_reported_where_there_are_any(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in range(20):
        writer.write(
            step,
            {
                "reward/mean": 0.5,
                "turns/mean": 1 + (step >= 10),
                "environment_tokens/fraction": step / 100,
            },
        )
    writer.close()
    text = " ".join(summarize(tmp_path, []).split())
    assert (
        "turns 1.00 a sample in the first 10 steps, 2.00 in the last 10, where the environment "
        "wrote 14% of the tokens" in text
    )


def test_summary_leaves_out_steps_that_train_only_the_critic(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in range(30):
        of_policy = {
            "entropy/mean": step / 10,
            "agreement/ess": 0.5,
            "agreement/abs_diff_mean": step / 1000,
            "reward/trained_mean": 0.25,
        }
        values = {"reward/mean": 0.5, "prompts/dropped": 1.0, "value/loss": 0.1}
        writer.write(step, values | (of_policy if step >= 25 else {}))
    writer.close()
    text = " ".join(summarize(tmp_path, []).split())
    assert "entropy 2.7 nats a token in the first 5 steps that have one, 2.7 in the last 5" in text
    assert "0.027 mean log-prob difference in the first 5 steps that have one" in text
    assert "without them the reward was 0.250 in the last 5 steps that have one" in text
    assert "reward 0.500 in the first 10 steps, 0.500 in the last 10" in text
    assert "nan" not in text


def test_no_line_of_a_summary_prints_nan(tmp_path: Path) -> None:
    """Each metric alone, with a value and without."""
    source = Path(report.__file__).read_text(encoding="utf-8")
    keys = re.findall(r'"([a-z_]+(?:/[a-z0-9_]+)*)"', source)
    assert len(keys) > 30
    for number, key in enumerate(sorted({"reward/mean", "turns/mean", *keys} - {"step"})):
        for value in (2.0, math.nan):
            run_dir = tmp_path / f"{number}-{value == 2.0}"
            always = ("reward/mean", "turns/mean", "environment_tokens/fraction")
            writer = MetricsWriter(run_dir)
            writer.write(0, {**dict.fromkeys(always, value), key: value})
            writer.close()
            assert not re.search(r"\bnan", summarize(run_dir, []).replace(str(run_dir), "")), key


def test_summary_and_plot_of_a_run_without_steps_or_with_one(tmp_path: Path) -> None:
    assert "no step was finished" in summarize(tmp_path, [])
    assert plot(tmp_path).exists()
    write_run(tmp_path, 1)
    assert "0.000 in the first 1 steps" in summarize(tmp_path, [])
    assert plot(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_report_compares_first_and_last_evaluation(
    tmp_path: Path,
) -> None:
    """And it names its files."""
    write_run(tmp_path, 12)
    for version, score in ((8, 0.75), (0, 0.125), (12, 0.5), (12, 1.0)):
        write_result(tmp_path, version, {"pass@1": score})
    text = finish_report(tmp_path)
    assert "0.125 before, 1.000 after" in text
    for name in ("report.png", "trace.json"):
        assert str(tmp_path / name) in text
        assert (tmp_path / name).stat().st_size > 0


def test_run_ends_without_pictures_where_matplotlib_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write_run(tmp_path, 3)
    assert "not drawn, since matplotlib is not installed" in finish_report(tmp_path)
    assert not (tmp_path / "report.png").exists()


def test_moving_mean_is_that_of_the_steps_so_far() -> None:
    values = np.array([1.0, math.nan, 3.0, 5.0, 7.0])
    np.testing.assert_allclose(moving_mean(values, 3), [1, 1, 2, 4, 5])


def test_traces_are_merged_with_a_track_for_each_process(tmp_path: Path) -> None:
    for name in ("trainer.0", "generator.0"):
        trace = TraceWriter(tmp_path, name)
        with pytest.raises(KeyError), trace.span("outer", step=7):
            with trace.span("inner"):
                pass
            raise KeyError
        with trace.span("beside", track="http"):
            pass
        trace.close()
    with open(tmp_path / "trace" / "trainer.0.jsonl", "ab") as file:
        file.write(b'{"name": "torn')
    events = json.loads(merge_traces(tmp_path).read_text())["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert sorted(names.values()) == ["generator.0", "trainer.0"]
    assert len(names) == 2
    for pid in names:
        spans = {
            event["name"]: event for event in events if event["pid"] == pid and event["ph"] == "X"
        }
        outer = spans["outer"]
        inner = spans["inner"]
        beside = spans["beside"]
        assert outer["args"] == {"step": 7}
        assert outer["tid"] == inner["tid"] != beside["tid"]
        # us; floats of 1e15
        assert outer["ts"] <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1
        assert beside["ts"] >= outer["ts"] + outer["dur"] - 1


def group(text: str) -> Group:
    sample = Sample(
        token_ids=[1, 2],
        logprobs=[0.0, 0.0],
        versions=[3, 4],
        text=text,
        reward=0.5,
        finish_reason="length",
    )
    return Group(
        prompt=Prompt(ordinal=11, token_ids=[1], text="1+1=", answer="2"), samples=[sample, sample]
    )


def shown(*groups: Group) -> list[tuple[GroupSummary, GroupTexts]]:
    batch = batch_of(groups)
    return [*zip(batch.groups, map(texts_of, batch.texts))]


def test_rollouts_are_written_for_reading(tmp_path: Path) -> None:
    path = write_rollouts(tmp_path, 12, shown(group("two"), group("drei")))
    assert path == tmp_path / "rollouts" / "step_000012.txt"
    text = path.read_text()
    assert text.count("| two") == 2
    assert text.count("| drei") == 2
    assert "prompt 11" in text
    assert "| 1+1=" in text
    assert "reward 0.5, versions 3 to 4, 2 tokens, finish reason length" in text
    assert write_rollouts(tmp_path, 13, []) is None
    assert len(list(path.parent.iterdir())) == 1


def test_turns_are_told_apart(tmp_path: Path) -> None:
    sample = Sample(
        token_ids=[1, 2, 3], logprobs=[0.0] * 3, versions=[3, 9, 4], text="<2*3>6\n;6", reward=1,
        finish_reason="stop",
        policy_mask=[True, False, True], environment_spans=[(5, 8)],
    )  # fmt: skip
    text = write_rollouts(tmp_path, 0, shown(Group(group("").prompt, [sample]))).read_text()
    assert (
        "versions 3 to 4, 3 tokens, finish reason stop, 2 turns, 1 tokens by the environment "
        "(behind >)" in text
    )
    assert text.endswith("  | <2*3>\n  > 6\n  > ;\n  | 6\n")


def test_model_output_is_escaped_in_rollout_files(tmp_path: Path) -> None:
    """It cannot act on a terminal, nor forge another response."""
    hostile = (
        "ok\n\nresponse 9: reward "
        "1\n\x1b]0;title\x07\x1b[2J\r\u202eevil\u2028\ud800\x9b31m\x00\\x1b é語"
    )
    [(summary, texts)] = shown(group(""))  # messages carry no surrogate, but a file must bear one
    texts = replace(texts, samples=[(hostile, [])] * 2)
    text = write_rollouts(tmp_path, 0, [(summary, texts)]).read_text()
    allowed = {"\n"}
    assert not [c for c in text if not c.isprintable() and c not in allowed]
    assert not [line for line in text.splitlines() if line.startswith("response 9")]
    assert "\\x1b]0;title\\x07" in text
    assert "\\u202e" in text
    assert "\\ud800" in text
    assert "é語" in text
    assert escape("\\x1b") == "\\\\x1b" != escape("\x1b")  # different texts stay different


@pytest.mark.parametrize("damage", ["torn", "gone", "garbage"])
def test_torn_record_of_a_step_is_restored_from_the_ledger(damage: str, tmp_path: Path) -> None:
    writer = OrdinalsWriter(tmp_path)
    for step in range(3):
        writer.write(step, [2 * step, 2 * step + 1])
    writer.close()
    path = tmp_path / "rollouts/ordinals.jsonl"
    ledger = Ledger(consumed_below=5, consumed_beyond=[5])
    assert recover_ordinals(tmp_path, 3, ledger.trained()) == ""
    undamaged = path.read_text()
    lines = undamaged.splitlines(keepends=True)
    path.write_text(
        lines[0]
        + {"torn": lines[1] + lines[2][:-4], "gone": lines[1], "garbage": "garbage\n" + lines[2]}[
            damage
        ]
    )
    step = 1 if damage == "garbage" else 2
    lost = f"{path}: the record of step {step} was torn or lost"
    assert (
        recover_ordinals(tmp_path, 3, ledger.trained())
        == f"{lost}; it has been restored from the checkpoint's ledger"
    )
    assert path.read_text() == undamaged
    path.write_text(lines[0])
    assert (
        "the record of 2 steps from 1 to 2 was torn or lost; it is no longer known"
        in recover_ordinals(tmp_path, 3, ledger.trained())
    )


def test_damaged_files_are_left_out_of_the_report_and_named(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    write_result(tmp_path, 0, {"pass@1": 0.5})
    write_result(tmp_path, 1, {"pass@1": 0.75})
    damaged = tmp_path / "eval/version_000003.json"
    for content in (b"", b"{", b"[]", b'{"version": "x"}', b"\xff"):
        damaged.write_bytes(content)
        assert [result["version"] for result in read_results(tmp_path)] == [
            0,
            1,
        ]
        assert damaged_results(tmp_path) == [damaged]
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b"garbage\n")
    (tmp_path / "trace").mkdir(exist_ok=True)
    (tmp_path / "trace/trainer.0.jsonl").write_bytes(b'garbage\n[]\n{"name": "no time"}\n\xff\n')
    text = finish_report(tmp_path)
    assert "0.500 before, 0.750 after" in text
    assert f"left out, as damaged    {damaged}" in text
    assert f"left out, as damaged    {tmp_path}/metrics.jsonl: line 4" in text
    assert json.loads((tmp_path / "trace.json").read_text())


def test_ordinals_of_steps_that_are_done_again_are_cut_off(tmp_path: Path) -> None:
    for resume_step, mark in ((0, 0), (2, 100)):
        writer = OrdinalsWriter(tmp_path, resume_step)
        for step in range(resume_step, 4):
            writer.write(step, [mark + step, 7])
        writer.close()
    lines = json_lines(tmp_path / "rollouts/ordinals.jsonl")
    assert [(line["step"], line["ordinals"][0]) for line in lines] == [
        (0, 0),
        (1, 1),
        (2, 102),
        (3, 103),
    ]


def test_agreement_is_drawn_and_summed_up_where_it_was_measured(tmp_path: Path) -> None:
    write_run(tmp_path / "without", 3)
    assert not plot_agreement(tmp_path / "without").exists()
    writer = MetricsWriter(tmp_path)
    for step in range(40):
        values = {
            "agreement/tokens": 10,
            "agreement/abs_diff_mean": 0.02 if step < 20 else 0.04,
            "agreement/ess": 0.9,
        }
        values |= {
            "agreement/abs_diff_p99": 0.3,
            "agreement/abs_diff_max": 0.5,
            "logprob/limit": 0.05,
            "reward/mean": 0.5,
        }
        values |= {
            f"agreement/{age}/{meter}": 0.5
            for age in ("age_0", "age_3_4")
            for meter in ("tokens", "abs_diff_mean", "ess")
        }
        counts = Histogram([0.0], [0] * 38 + [4, 6] if step else [0] * 40)
        writer.write(
            step,
            values if step != 7 else {"reward/mean": 0.5},
            {},
            {"agreement/histogram": counts} if step != 7 else {},
        )
    writer.close()
    assert plot_agreement(tmp_path).read_bytes().startswith(b"\x89PNG")
    text = " ".join(summarize(tmp_path, []).split())
    assert (
        "0.02 mean log-prob difference in the first 10 steps that have one, 0.04 in the last 10; effective "
        "sample size 90.00% (median)" in text
    )
