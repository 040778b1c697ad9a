"""The checkpoint from which a run continues, the one that an export reads meanwhile, and free disk
space.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.keys import settings
from megarl.config.load import dump_config, load_config
from megarl.data.check import check_data, digests_of
from megarl.data.contents import contents_of
from megarl.evaluation.scores import best_checkpoint, spared_steps, write_result
from megarl.launch import inputs
from megarl.launch.commands import best_step
from megarl.launch.resuming import check_resume_point, latest_checkpoint, linked_checkpoint
from megarl.plan.checkpoints import (
    FIXED_KEYS,
    FORMAT,
    INDEX_FILE,
    SCORING_KEYS,
    Index,
    check_names,
    check_resume,
    checkpoint_path,
    complete_checkpoints,
    make_room,
    prune_checkpoints,
    small_file,
)
from megarl.plan.resolve import resolve
from megarl.roles.plan import ENGINE_KEYS
from megarl.rollouts.buffer import LEDGER_FILE, Ledger

CONFIGS = Path(__file__).parents[2] / "configs"


def save(run_dir: Path, step: int) -> Path:
    """Makes a folder that looks like a checkpoint."""
    folder = checkpoint_path(run_dir, step)
    folder.mkdir(parents=True)
    state = json.dumps({"topology": {}, "position": step, "state": {"step": step}}).encode()
    small = {
        "state.json": state,
        LEDGER_FILE: Ledger(consumed_below=step).encode(),
        "tensors": f"tensors of {step}".encode(),
    }
    Index(
        FORMAT,
        "float32",
        [small_file(folder, name, content) for name, content in small.items()],
        {},
        {},
    ).write(folder)
    return folder


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"topology": {}}']
)
@pytest.mark.parametrize("older", [True, False])
def test_damaged_state_is_one_message_with_a_remedy(
    content: bytes | None, older: bool, tmp_path: Path
) -> None:
    if older:
        save(tmp_path, 2)
    newest = save(tmp_path, 4)
    check_resume_point(tmp_path, latest_checkpoint(tmp_path))
    (newest / "state.json").unlink() if content is None else (newest / "state.json").write_bytes(
        content
    )
    with pytest.raises(ConfigError) as raised:
        check_resume_point(tmp_path, latest_checkpoint(tmp_path))
    (problem,) = raised.value.problems
    consequence = (
        "step_000002 serves then" if older else "there is no older one, so the run begins anew then"
    )
    damage = "is missing" if content is None else "is damaged: it has "
    assert problem.startswith(f"{newest}: state.json {damage}")
    assert problem.endswith(f". Move this folder away: {consequence}")


def test_dry_run_checks_the_checkpoint_of_the_next_run(tmp_path: Path, printed, refusal) -> None:
    """As far as a run does before it starts anything. It also says which parts it has not read."""
    arguments = ["train", str(CONFIGS / "quickstart.yaml"), "--dry-run", f"run_dir={tmp_path}"]
    newest = save(tmp_path, 4)
    assert (
        "Their hashes are not checked now; the run does that when it reads them\nWeights: "
        in printed(*arguments)
    )
    (newest / "tensors").write_bytes(b"shorter")
    assert f"{newest}: tensors is damaged: it has 7 bytes instead of " in refusal(*arguments)


def begun_with(folder: Path, date: str, *settings: str) -> list[str]:
    """Writes what a run with these settings leaves that began on `date`, on one row.

    Returns the arguments that resume it.
    """
    row = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    model = shutil.copytree(CONFIGS / "models/tiny-llama", folder / "model")
    template = (
        "{{ strftime_now('%Y%m%d') }}+{% for message in messages %}{{ message.content }}{% "
        "endfor %}"
    )
    (model / "chat_template.jinja").write_text(template)
    run_settings = [
        f"run_dir={folder}",
        f"model.path={model}",
        f"data.train.source={folder}/rows.jsonl",
        "data.train.prompt_key=messages",
    ]
    arguments = [
        str(CONFIGS / "quickstart.yaml"),
        *run_settings,
        "data.train.answer_key=answer",
        "max_steps=8",
        *settings,
    ]
    config = load_config(arguments[0], [*arguments[1:], f"model.chat_template.date={date}"])
    save(folder, 4)
    (folder / "config.yaml").write_text(dump_config(config))
    contents_of(config, digests_of(check_data(config, None, "train")), rewarded=True).write(folder)
    return arguments


def test_dry_run_refuses_rows_that_train_refuses(tmp_path: Path, refusal) -> None:
    arguments = begun_with(tmp_path, "2024-07-26")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text() * 2)
    [problem] = refusal("train", *arguments, "--dry-run").splitlines()
    assert problem.startswith("megarl: data.train: 1 row more at the end. The run in ")


def test_resumed_run_keeps_the_date_of_its_first_day(tmp_path: Path) -> None:
    arguments = begun_with(tmp_path, "2024-07-26")
    config = load_config(arguments[0], arguments[1:])
    assert resolve(config, "dry-run").config.model.chat_template.date == "2024-07-26"
    with_date = load_config(arguments[0], [*arguments[1:], "model.chat_template.date=2025-01-01"])
    assert resolve(with_date, "dry-run").config.model.chat_template.date == "2025-01-01"
    shutil.rmtree(tmp_path / "checkpoints")
    assert resolve(config, "dry-run").config.model.chat_template.date not in (None, "2024-07-26"), (
        "a new run"
    )


def test_scoring_settings_are_fixed_unless_accepted(tmp_path: Path) -> None:
    arguments = begun_with(
        tmp_path, "2024-07-26", "rollout.name=tool_calls", "rollout.args={tool: 'operator:add'}"
    )
    changed = [*arguments[1:], "rollout.args={tool: 'operator:sub'}"]
    with pytest.raises(ConfigError) as raised:
        resolve(load_config(arguments[0], changed), "train")
    [problem] = [
        problem for problem in raised.value.problems if problem.startswith("rollout.args=")
    ]
    assert problem.endswith(
        "keep that, or use another run_dir, or set checkpoint.accept_changed_data=true"
    )
    accepted = load_config(arguments[0], [*changed, "checkpoint.accept_changed_data=true"])
    assert not [
        problem for problem in check_resume(accepted) if problem.startswith("rollout.args=")
    ]


def test_order_of_the_sources_is_fixed(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    sources = [f"data.train.sources.{name}.source={rows}" for name in ("zeros", "ones")]
    arguments = begun_with(tmp_path, "2024-07-26", "data.train.source=sources", *sources)
    config = load_config(arguments[0], arguments[1:])
    assert not [*check_resume(config)]
    config.data.train.sources = dict(reversed(config.data.train.sources.items()))
    assert [*check_resume(config)] == [
        f"data.train.sources: ones, zeros: the run in run_dir={tmp_path} began with the order "
        "zeros, ones, which decides the prompts; keep that, or use another run_dir"
    ]


def test_every_setting_of_a_score_by_a_model_is_fixed() -> None:
    """All but those of engines and answers' lengths, and those of other roles."""
    free = {"sft", "weight", "temperature", "max_tokens", "chat_template.date", *ENGINE_KEYS}
    compared = {*FIXED_KEYS, *SCORING_KEYS}
    keys = {key for key in settings() if key.startswith("roles.NAME.")}
    assert {key for key in keys if key.removeprefix("roles.NAME.") not in free} <= compared


@pytest.mark.parametrize("content", [None, b"", b"\x00", b"garbage"])
def test_missing_or_damaged_ledger_is_refused(content: bytes | None, tmp_path: Path) -> None:
    file = save(tmp_path, 4) / LEDGER_FILE
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{file.parent}: {LEDGER_FILE} is (damaged|missing)"):
        check_resume_point(tmp_path, latest_checkpoint(tmp_path))


def test_a_checkpoint_of_another_version_is_told_as_such(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    Index(FORMAT + 1, "float32", [], {}, {}).write(folder)
    with pytest.raises(
        ConfigError,
        match=f"{folder}: {INDEX_FILE} has format {FORMAT + 1}; this version of MegaRL reads "
        f"format {FORMAT}",
    ):
        check_resume_point(tmp_path, latest_checkpoint(tmp_path))
    (folder / INDEX_FILE).unlink()
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(
        ConfigError,
        match=f"{folder}: it was written by an earlier version of MegaRL: {INDEX_FILE} is missing",
    ):
        check_resume_point(tmp_path, latest_checkpoint(tmp_path))


def copied(source: Path, step: int) -> Path:
    return shutil.copytree(source, source.with_name(f"step_{step:06d}"))


@pytest.mark.parametrize(
    ("command", "run"), [("train", ""), ("dry-run", ""), ("export", ""), ("sft", "sft")]
)
def test_copied_checkpoint_is_refused_by_the_step_in_its_name(
    command: str, run: str, tmp_path: Path
) -> None:
    """A run from it would repeat prompts, and a copy of the last step would count as a complete
    run.
    """
    [source, copy] = [save(tmp_path / run, 4), copied(checkpoint_path(tmp_path / run, 4), 8)]
    assert latest_checkpoint(tmp_path / run).step == 4
    with pytest.raises(ConfigError) as raised:
        resolve(
            load_config(CONFIGS / "quickstart.yaml", [f"run_dir={tmp_path}", "max_steps=8"]),
            command,
        )
    reason = "so it was copied or renamed. Move this folder away: step_000004 is the newest then"
    assert f"{copy}: was saved after step 4, not 8 (state.json), {reason}" in raised.value.problems
    shutil.rmtree(source)
    assert [*check_names(tmp_path / run)] == [
        f"{copy}: was saved after step 4, not 8 (state.json), {reason.partition(':')[0]}: there is "
        "no other"
    ]
    assert latest_checkpoint(tmp_path / run).step == 0


def test_copied_checkpoints_are_neither_newest_nor_best(
    tmp_path: Path,
) -> None:
    settings = [
        f"run_dir={tmp_path}",
        "checkpoint.every=2",
        "eval.every=2",
        "checkpoint.keep_best=eval/pass@1",
    ]
    config = load_config(
        CONFIGS / "quickstart.yaml", [*settings, "data.eval.source=synthetic:chain"]
    )
    copied(save(tmp_path, 2), 8)
    for step, score in ((2, 0.5), (8, 0.75)):
        write_result(tmp_path, step, {"pass@1": score})
    assert best_checkpoint(config) == (2, 0.5)
    prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step_000002",
        "step_000008",
    ]


def test_checkpoint_survives_pruning_while_it_is_exported(tmp_path: Path) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    (tmp_path / "exporting/step_000099").mkdir(parents=True)  # of a killed export
    # a user's folder, from megarl export --output
    (tmp_path / "export/step_000002").mkdir(parents=True)
    with linked_checkpoint(tmp_path, None) as linked:
        assert linked.step == 4
        assert not (tmp_path / "exporting/step_000099").exists()
        assert (tmp_path / "export/step_000002").exists()
        save(tmp_path, 6)
        prune_checkpoints(tmp_path, keep=1)
        assert [step for step, _ in complete_checkpoints(tmp_path)] == [6]
        assert (Path(linked.checkpoint) / "tensors").read_text() == "tensors of 4"
        check_resume_point(tmp_path, linked)
    assert not Path(linked.checkpoint).exists()
    with (
        pytest.raises(ConfigError, match="no checkpoint of step 4; there are those of steps 6"),
        linked_checkpoint(tmp_path, 4),
    ):
        pass


def test_export_takes_the_next_checkpoint_if_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    link = os.link

    def remove_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        save(tmp_path, 4)
        prune_checkpoints(tmp_path, keep=1)
        link(source, target)

    monkeypatch.setattr(os, "link", remove_first)
    with linked_checkpoint(tmp_path, None) as linked:
        assert linked.step == 4
        assert sorted(file.name for file in Path(linked.checkpoint).iterdir()) == sorted(
            file.name for file in checkpoint_path(tmp_path, 4).iterdir()
        )


def small_disk(folder: Path, mib: int) -> Path:
    """A small file system. Skips the test if none can be mounted."""
    folder.mkdir()
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if result.returncode:
        pytest.skip(result.stderr.strip())
    return folder


@pytest.fixture
def disk(tmp_path: Path):
    folder = small_disk(tmp_path / "disk", 20)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_too_small_a_disk_is_refused_before_anything_starts(disk: Path) -> None:
    """The quickstart's model has 803,200 parameters: a checkpoint takes 9.2 MiB, and an HF
    checkpoint 3.1 MiB.
    """
    run = disk / "run"

    def plan(*overrides: str):
        return resolve(load_config(CONFIGS / "quickstart.yaml", [f"run_dir={run}", *overrides]))

    with pytest.raises(ConfigError) as raised:
        inputs.check_room_for_checkpoints(plan())
    (problem,) = raised.value.problems
    assert problem.startswith(
        f"run_dir={run}: 3 checkpoints (checkpoint.keep=2) will take 27.6 MiB"
    )
    assert problem.endswith("20.0 MiB are free there")
    inputs.check_room_for_weights(plan(), "sft.output=", run / "sft/hf")
    (disk / "other").write_bytes(bytes(18 << 20))
    with pytest.raises(
        ConfigError,
        match=r"sft.output=.*/run/sft/hf: the weights will take 3\.\d MiB, and 2\.0 MiB are free there",
    ):
        inputs.check_room_for_weights(plan(), "sft.output=", run / "sft/hf")


def test_old_checkpoints_make_room_but_never_the_newest(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 4, 6):
        (save(disk, step) / "values").write_bytes(bytes(4 << 20))
    make_room(disk)
    assert [step for step, _ in complete_checkpoints(disk)] == [2, 4, 6], "more than 7 MiB are free"
    (disk / "other").write_bytes(bytes(5 << 20))
    make_room(disk, spared={2, 4})
    assert len(complete_checkpoints(disk)) == 3, "the best stays"
    make_room(disk)
    assert [step for step, _ in complete_checkpoints(disk)] == [4, 6]
    assert f"{checkpoint_path(disk, 2)} is removed first" in capsys.readouterr().out
    (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free + (1 << 20)))
    make_room(disk)
    assert [step for step, _ in complete_checkpoints(disk)] == [6]


def test_the_best_checkpoint_by_a_held_out_score_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of equal ones the earliest stays. Checkpoints without an evaluation stay until it comes."""
    settings = [
        f"run_dir={tmp_path}",
        "checkpoint.every=2",
        "eval.every=4",
        "checkpoint.keep_best=eval/hard/pass@1",
    ]
    config = load_config(
        CONFIGS / "quickstart.yaml", [*settings, "eval.suites.hard.source=synthetic:chain"]
    )

    def saved(step: int) -> list[int]:
        save(tmp_path, step)
        prune_checkpoints(tmp_path, 1, spared_steps(config))
        return [complete_step for complete_step, _ in complete_checkpoints(tmp_path)]

    def evaluated(step: int, score: float) -> None:
        write_result(tmp_path, step, {"pass@1": 1.0, "suites": {"hard": {"pass@1": score}}})

    evaluated(0, 0.9)  # before the first step: no checkpoint has these weights
    assert saved(2) == [2]
    assert saved(4) == [4]
    assert saved(6) == [4, 6]
    assert saved(8) == [4, 8]
    assert best_checkpoint(config) is None
    evaluated(4, 0.5)
    evaluated(8, 0.5)
    assert saved(10) == [4, 10]
    assert saved(12) == [4, 12]
    assert best_checkpoint(config) == (4, 0.5)
    assert saved(14) == [4, 12, 14]
    evaluated(12, 0.75)
    assert saved(16) == [12, 16]
    assert best_checkpoint(config) == (12, 0.75)
    evaluated(16, 0.1)
    assert saved(18) == [12, 18] and saved(20) == [12, 20], "12 is old by now"
    assert best_step(config) == (12, ", the best by eval/hard/pass@1: 0.750")
    [damaged] = (tmp_path / "eval").glob("version_000012.json")
    damaged.write_text("{")
    with pytest.raises(ConfigError, match="--best: no checkpoint in run_dir=.* has been evaluated"):
        best_step(config)
    with pytest.raises(
        ConfigError,
        match="--best: checkpoint.keep_best is null; .* to choose by: eval/pass@1, "
        "eval/reward/mean$",
    ):
        best_step(load_config(CONFIGS / "quickstart.yaml", [f"run_dir={tmp_path}"]))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["eval.every=20"], None),
        (
            [],
            "checkpoint.keep_best=eval/pass@1: needs eval.every=0 to be a multiple of "
            "checkpoint.every=10, and neither to be 0",
        ),
        (
            ["eval.every=15"],
            "checkpoint.keep_best=eval/pass@1: needs eval.every=15 to be a multiple of "
            "checkpoint.every=10, and neither",
        ),
        (
            ["eval.every=10", "checkpoint.every=0"],
            "checkpoint.keep_best=eval/pass@1: needs eval.every=10 to be a multiple of",
        ),
        (
            ["eval.every=10", "checkpoint.keep_best=eval/x/pass@1"],
            "checkpoint.keep_best=eval/x/pass@1: must be one of eval/pass@1, eval/rew",
        ),
        (
            [
                "eval.every=10",
                "eval.samples=4",
                "eval.temperature=1",
                "checkpoint.keep_best=eval/avg@4",
            ],
            None,
        ),
    ],
)
def test_keep_best_must_name_a_score_of_each_checkpoint(
    settings: list[str], problem: str | None
) -> None:
    config = load_config(
        CONFIGS / "quickstart.yaml", ["checkpoint.keep_best=eval/pass@1", *settings]
    )
    with pytest.raises(ConfigError) if problem else contextlib.nullcontext() as raised:
        resolve(config)
    assert problem is None or any(message.startswith(problem) for message in raised.value.problems)


FULL_SHARED_MEMORY = """
import subprocess, sys, torch, torch.distributed as dist
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
from megarl.base.geometry import whole_box
from megarl.trainer.checkpoint import HeldBox, write_boxes
from megarl.trainer.hf_io import Writing
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
open("/dev/shm/other", "wb").write(bytes(1 << 20))
boxes = [HeldBox("x", (9, 3), whole_box((9, 3)), torch.randn(9, 3))]
Writing(sys.argv[1], lambda folder: write_boxes(folder / "rank_00000.bin", 0, boxes), beside=True).finish()
"""


def test_full_shared_memory_prevents_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "step_000002"
    result = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", FULL_SHARED_MEMORY, folder],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare:" in result.stderr or "mount:" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr
    assert (folder / "rank_00000.bin").stat().st_size == 9 * 3 * 4
