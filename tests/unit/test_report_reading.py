"""The data of the report page: columns, spans and samples equal those of the files, in whatever
state the files are.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from json_files import write_json_lines
from report_runs import group, piece, summary, texts, write_run

from megarl.cli import main
from megarl.observe.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megarl.observe.samples import SamplesWriter, TokensWriter
from megarl.report.command import ReportServer, page
from megarl.report.reading import SETTLED_S, RunReader, advice

TEXT_BYTES = 64 << 20


def chunks(run_data: dict) -> list[list[dict]]:
    return [
        json.loads(gzip.decompress(base64.b64decode(chunk)))
        for chunk in run_data["samples"]["chunks"]
    ]


def test_columns_tell_values_that_are_not_finite_from_absent(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, 12)
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write(
            '{"step": 12, "loss": NaN, "grad_norm": Infinity, "reward/mean": null}\n{"step": 13, '
            '"sync/audit_ok": false}\n'
        )
    run_data = RunReader(tmp_path, TEXT_BYTES).read()
    rows = read_metrics(tmp_path / METRICS_FILE)
    assert run_data["steps"] == [row["step"] for row in rows]
    assert run_data["metrics"]["tokens_per_s"][:12] == [row["tokens_per_s"] for row in rows[:12]]
    assert [
        run_data["metrics"][key][12] for key in ("loss", "grad_norm", "reward/mean", "entropy/mean")
    ] == ["n", "n", "n", None]
    assert run_data["metrics"]["sync/audit_ok"] == [1] * 12 + [None, 0]


@pytest.mark.parametrize(
    "end",
    [
        b'{"step": 12, "lo',
        b"\xff\xfe\n",
        b"[1, 2]\n",
        b'{"step": true}\n',
        b'{"loss": 1}\n',
        b"[" * 5000 + b"\n",
    ],
)
def test_a_damaged_or_half_written_line_is_left_out_and_counted(tmp_path: Path, end: bytes) -> None:
    write_run(tmp_path, 12)
    files = [
        tmp_path / METRICS_FILE,
        tmp_path / "trace" / "trainer.0.jsonl",
        tmp_path / "rollouts" / "samples.jsonl",
        tmp_path / "rollouts" / "tokens.0.jsonl",
    ]
    before = RunReader(tmp_path, TEXT_BYTES).read()
    for path in files:
        with open(path, "ab") as file:
            file.write(end)
    after = RunReader(tmp_path, TEXT_BYTES).read()
    assert after["skipped"] == {str(path.relative_to(tmp_path)): 1 for path in files}
    assert before["skipped"] == {}
    assert {**after, "skipped": {}} == before


EVENT = {"name": "pause for weights 1", "track": "weights", "ts": 1.8e15, "dur": 5.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ts": math.nan}, {"ts": 10**400}, {"dur": "5"}, {"args": None},
        {"args": {"engine_tokens": 5}}, {"args": {"bytes": math.inf}},
        {"name": "weights map", "args": {"to": [["x", 5]]}},
    ],
)  # fmt: skip
def test_event_with_wrong_types_is_skipped_and_counted(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    write_run(tmp_path, 2)
    with open(tmp_path / "trace" / "generator.0.jsonl", "a") as file:
        file.write(
            json.dumps({**EVENT, **wrong})
            + "\n"
            + json.dumps({**EVENT, "args": {"at": "x", "pause_s": None}})
            + "\n"
        )
    run_data = RunReader(tmp_path, TEXT_BYTES).read()
    assert run_data["skipped"] == {"trace/generator.0.jsonl": 1}
    assert run_data["pauses"][-1]["pause_s"] == 5e-6
    assert len(page([run_data], "now")) > 1000


def test_report_survives_huge_numbers_and_broken_settings(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, 2)
    (tmp_path / METRICS_FILE).open("a").write(json.dumps({"step": 2, "loss": 10**400}) + "\n")
    for text in (b"seed: .nan\nmodel: {path: [1]}\nmax_steps: 7\n", b"\xff\xfe"):
        (tmp_path / "config.yaml").write_bytes(text)
        run_data = RunReader(tmp_path, TEXT_BYTES).read()
        assert run_data["metrics"]["loss"][2] == "n"
        assert len(page([run_data], "now")) > 1000
        assert run_data["settings"].get("max_steps") == (7 if text.isascii() else None)
        assert not run_data["settings"].get("model.path")


def test_damaged_line_inside_is_skipped_and_steps_stay_ordered(tmp_path: Path) -> None:
    write_run(tmp_path, 6)
    lines = (tmp_path / METRICS_FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / METRICS_FILE).write_bytes(b"".join([*lines[:3], b"{]\n", lines[1], *lines[3:]]))
    run_data = RunReader(tmp_path, TEXT_BYTES).read()
    assert run_data["steps"] == list(range(6))
    assert run_data["skipped"] == {METRICS_FILE: 1}
    assert run_data["out_of_order"] == 1


def test_samples_have_the_numbers_that_each_rank_wrote(tmp_path: Path) -> None:
    write_run(tmp_path, 7, groups=2, n=4, ranks=2)
    run_data = RunReader(tmp_path, TEXT_BYTES).read()
    index = run_data["samples"]["index"]
    read = chunks(run_data)
    assert len(index["step"]) == 7 * 2 * 4
    assert set(index["step"]) == set(range(7))
    lines = {
        (rank, line["step"], line["ordinal"], line["sample"]): line
        for rank in range(2)
        for line in map(json.loads, (tmp_path / "rollouts" / f"tokens.{rank}.jsonl").open())
    }
    groups = {
        line["ordinal"]: line
        for line in map(json.loads, (tmp_path / "rollouts" / "samples.jsonl").open())
    }
    for place in range(len(index["step"])):
        step = index["step"][place]
        ordinal = index["ordinal"][place]
        number = index["sample"][place]
        shown = read[index["chunk"][place]][index["place"][place]]
        sample = shown["samples"][number]
        line = lines[number % 2, step, ordinal, number]
        recorded = groups[ordinal]["samples"][number]
        assert (shown["step"], shown["ordinal"], sample["text"], sample["reward"]) == (
            step,
            ordinal,
            recorded["text"],
            recorded["reward"],
        )
        assert sample["numbers"]["diff"] == line["diff"]
        assert sample["numbers"]["mu"] == line["mu"]
        assert sample["numbers"]["positions"] == line["positions"]
        assert sample["numbers"]["pieces"] == [piece(token) for token in line["ids"]]
        assert (
            sample["numbers"]["advantage"]
            == line["advantage"]
            == pytest.approx(sample["reward"] - 0.5)
        )
        assert index["age"][place] == step - min(version for version, _ in recorded["versions"])
        assert index["tokens"][place] == recorded["tokens"]
        assert index["spread"][place] == pytest.approx(
            np.std([sample_record["reward"] for sample_record in groups[ordinal]["samples"]])
        )
        policy_tokens = sum(count for _, count in recorded["versions"])
        assert len(line["ids"]) == policy_tokens == recorded["tokens"] - (3 if number == 1 else 0)


def test_numbers_keep_four_digits_and_non_finite_are_null(tmp_path: Path) -> None:
    writer = TokensWriter(tmp_path, 0, "t{}".format)
    numbers = np.array([0, -1.23456e-7, np.nan, 98765.4, -np.inf], np.float32)
    row = SimpleNamespace(
        ids=np.array([3, 4, 3, 5, 5]),
        positions=np.array([0, 1, 5, 6, 7]),
        logprobs=numbers,
        mu_logprobs=np.zeros(5, np.float32),
        advantages=numbers,
    )
    writer.write(0, 7, 0, row)
    writer.write(1, 8, 0, row)
    first, second = map(json.loads, (tmp_path / "rollouts" / "tokens.0.jsonl").open())
    assert first["diff"] == first["advantage"] == [0, -1.235e-7, None, 98770, None]
    assert first["pieces"] == {"3": "t3", "4": "t4", "5": "t5"}
    assert "pieces" not in second
    assert first["positions"] == [[0, 2], [5, 3]]


def test_a_resumed_run_cuts_what_it_makes_again(tmp_path: Path) -> None:
    write_run(tmp_path, 9, groups=1, n=2)
    before = [
        (tmp_path / "rollouts" / name).read_bytes()
        for name in ("samples.jsonl", "tokens.0.jsonl", "tokens.1.jsonl")
    ]
    with open(tmp_path / "rollouts" / "samples.jsonl", "ab") as file:
        file.write(b'{"step":9,"half')
    SamplesWriter(tmp_path, resume_step=6).close()
    for name, old in zip(("samples.jsonl", "tokens.0.jsonl", "tokens.1.jsonl"), before):
        assert (tmp_path / "rollouts" / name).read_bytes() == b"".join(
            old.splitlines(keepends=True)[:6]
        )


def test_too_many_texts_leave_out_whole_steps_of_texts(tmp_path: Path) -> None:
    """The index has all samples."""
    write_run(tmp_path, 20, groups=2, n=4)
    run_data = RunReader(tmp_path, 20_000).read()
    index = run_data["samples"]["index"]
    every = run_data["samples"]["every"]
    assert every > 1
    assert len(index["step"]) == 160
    assert all(
        (chunk >= 0) == (step % every == 0) for step, chunk in zip(index["step"], index["chunk"])
    )


def test_new_lines_are_read_once_and_cut_files_afresh(tmp_path: Path) -> None:
    write_run(tmp_path, 8, groups=1, n=2)
    reader = RunReader(tmp_path, TEXT_BYTES)
    first = reader.read(follow=True)
    assert first["afresh"]
    assert first["steps"] == list(range(8))
    # some ranks may still write the last one
    assert first["samples"]["index"]["step"] == [step for step in range(7) for _ in range(2)]
    empty = reader.read(follow=True)
    assert not empty["afresh"]
    assert not (empty["steps"] or empty["lanes"] or empty["marks"] or empty["samples"]["chunks"])
    writer = MetricsWriter(tmp_path, resume_step=8)
    writer.write(8, {"loss": 1.0, "new": 2.0})
    samples = SamplesWriter(tmp_path, resume_step=8)
    samples.write(
        8,
        [
            (summary(new_group), texts(new_group))
            for new_group in [group(8, 8, 2, np.random.default_rng(0))]
        ],
    )
    appended = reader.read(follow=True)
    assert appended["steps"] == [8]
    assert appended["metrics"]["new"] == [2.0]
    assert appended["samples"]["index"]["step"] == [7, 7]
    writer.close()
    writer = MetricsWriter(tmp_path, resume_step=3)
    for step in range(3, 12):
        writer.write(step, {"loss": -1.0})
    reread = reader.read(follow=True)
    assert reread["afresh"]
    assert reread["steps"] == list(range(12))
    assert reread["metrics"]["loss"][3:] == [-1.0] * 9


def test_followed_run_shows_the_samples_of_its_last_step(tmp_path: Path) -> None:
    write_run(tmp_path, 4, groups=1, n=2)
    reader = RunReader(tmp_path, TEXT_BYTES)
    assert reader.read(follow=True)["samples"]["index"]["step"] == [0, 0, 1, 1, 2, 2]
    for path in (tmp_path / "rollouts").glob("*.jsonl"):
        os.utime(path, (0, time.time() - 2 * SETTLED_S))
    last = reader.read(follow=True)
    assert last["samples"]["index"]["step"] == [3, 3]
    assert all(group["samples"][0]["numbers"] for group in chunks(last)[0])
    assert reader.read(follow=True)["samples"]["index"]["step"] == []
    assert RunReader(tmp_path, TEXT_BYTES).read(follow=True)["samples"]["index"]["step"] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_faults_and_the_plan_come_from_the_trace(tmp_path: Path) -> None:
    run_data = RunReader(write_run(tmp_path, 30, faults=True), TEXT_BYTES).read()
    assert [(mark["who"], mark["what"]) for mark in run_data["marks"]] == [
        ("launcher.0", "start"),
        ("engine.1", "lost"),
        ("engine.1", "start engine.1 again"),
        ("launcher.0", "end"),
        ("launcher.0", "start"),
        ("launcher.0", "end"),
    ]
    assert run_data["expected"]["step_s"] == 1.9
    assert run_data["pairs"]["trainer.1"] == [
        [0, 803968],
        [1, 803968],
    ]
    assert [span[0] for span in run_data["lanes"]["engine.1"]] == ["away"]
    assert len(run_data["pauses"]) == 30
    assert run_data["pauses"][10]["engines"] == [0]
    assert run_data["engine_tokens"] == [
        150_000,
        49_980,
    ]


def test_engines_are_compared_only_while_all_serve(tmp_path: Path) -> None:
    def read(*events: tuple[str, str, float, dict]) -> list[str]:
        lines = [
            {"name": name, "track": track, "ts": 1e6 * time_s, "dur": dur, "args": args}
            for time_s, (name, track, dur, args) in enumerate(events)
        ]
        write_json_lines(tmp_path / "trace" / "generator.0.jsonl", lines)
        return [
            text
            for text in RunReader(tmp_path, TEXT_BYTES).read()["advisories"]
            if "fewer tokens" in text
        ]

    write_run(tmp_path, 20)

    def batch(number, *tokens):
        return f"generate batch {number}", "main", 1.0, {"engine_tokens": list(tokens)}

    lost = ("lost", "engine.1", 0.0, {"why": "x"})
    away = ("away", "engine.1", 9.0, {})
    assert read(batch(0, 90_000, 20_000))[0].endswith("engine 1 22%")
    assert read(batch(0, 20_000, 20_000), lost, batch(1, 90_000, 0)) == []
    assert (
        read(batch(0, 20_000, 20_000), lost, batch(1, 90_000, 0), away, batch(2, 20_000, 20_000))
        == []
    )
    # another start
    assert read(lost, batch(0, 90_000, 0), batch(0, 90_000, 20_000))[0].endswith("engine 1 22%")


def test_advice_is_given_only_where_the_numbers_say_so() -> None:
    calm = {
        "time/step_s": 1.0,
        "time/trainer_wait_s": 0.2,
        "time/generator_wait_s": 0.1,
        "truncated_fraction": 0.01,
        "zero_advantage_fraction": 0.2,
        "prompts/buffered": 1,
    }

    def advice_of(changes, tokens=None, settings=None):
        steps = [{"step": step, **calm, **changes} for step in range(40)]
        return advice(steps, settings or {}, tokens or {})

    assert advice_of({}) == []
    assert advice_of({}, {0: 50_000, 1: 48_000}) == []
    waits = {"time/trainer_wait_s": 0.6}
    assert "the trainer waits 60% of a step" in advice_of(waits)[0]
    assert advice_of(waits, settings={"async.capacity": 0}) == []
    assert "the engines wait 60%" in advice_of({"time/generator_wait_s": 0.6})[0]
    assert "25% of the responses" in advice_of({"truncated_fraction": 0.25})[0]
    assert "in 80% of the groups" in advice_of({"zero_advantage_fraction": 0.8})[0]
    assert "engine 1 40%" in advice_of({}, {0: 50_000, 1: 20_000, 2: 51_000})[0]
    rows_alike = [{"step": step, **calm} for step in range(40)]
    settings = {}
    assert (
        advice(rows_alike, settings, {0: 50_000, 1: 20_000, 2: 51_000}, {0: 0, 1: 1, 2: 0}) == []
    ), "it is of another group"
    assert (
        "engine 2 40%"
        in advice(rows_alike, settings, {0: 50_000, 1: 20_000, 2: 20_000}, {0: 0, 1: 1, 2: 0})[0]
    )
    rows = [{"step": step, **calm, "prompts/buffered": 2 if step < 20 else 9} for step in range(40)]
    assert advice(rows, {}, {}) == [
        "the queue of finished groups grows: 9 wait, 2 waited 20 steps ago; samples grow older "
        "than needed"
    ]
    assert advice(rows[:5], {}, {}) == []


def test_mistakes_are_one_message_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal
) -> None:
    run = write_run(tmp_path / "run", 2)
    for arguments, message in (
        ([str(tmp_path)], f"RUN_DIR {tmp_path}: holds no metrics.jsonl"),
        ([str(run), "--output", str(tmp_path / "a.png")], "must end in .html"),
        ([str(run), "--port", "80"], "--port 80: needs --serve"),
        (
            [str(run), "--serve", "--output", "a.html"],
            "--output: a page that is served is not written",
        ),
        ([str(run), "--text-mib", "0"], "--text-mib 0: must be above 0 and finite"),
        ([str(run), "--text-mib", "inf"], "--text-mib inf: must be above 0 and finite"),
    ):
        assert message in refusal("report", *arguments)
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").stat().st_size > 50_000
    assert capsys.readouterr().out.startswith(f"{run / 'report.html'}: ")


def test_server_requires_its_token_and_its_own_host_name(tmp_path: Path) -> None:
    import http.client
    import threading

    with ReportServer([write_run(tmp_path, 3)], TEXT_BYTES, 0, lambda: "now") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def ask(path: str, **headers: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

        token = f"?token={server.token}"
        assert server.server_address[0] == "127.0.0.1"
        assert [
            ask(path)[0]
            for path in (
                "/",
                "/?token=",
                "/?token=x",
                "/new",
                "/etc/passwd" + token,
                "/..%2f" + token,
            )
        ] == [403] * 4 + [404] * 2
        assert ask("/" + token, Host="evil.example")[0] == 403
        status, text = ask("/" + token)
        name = json.loads(text.decode().partition('id="live-data">')[2].partition("</script>")[0])[
            "page"
        ]
        assert status == 200
        status, answer = ask(f"/new{token}&page={name}&number=0")
        assert status == 200
        assert json.loads(answer)[0]["steps"] == []
        assert (
            ask(f"/new{token}&page={name}&number=0")[0]
            == 409
            == ask(f"/new{token}&page=other&number=0")[0]
        )
        server.shutdown()
        thread.join(30)
