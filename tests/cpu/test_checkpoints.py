"""Checkpoints that are saved under one layout and loaded under another: every element of weights
and moments is compared. Damaged ones are refused.

The tests have real gloo ranks and real Megatron optimizers. checkpoint_worker.py and
trainer_worker.py say how they compare.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import Chain, known_chains, random_chains
from nursery import ForkedRun, script
from trainer_cases import save_model
from trainer_processes import saved, spawn

CHAIN_DEADLINE_S = 300  # for four layouts
FILES = {"index.msgpack", "ledger.msgpack", "state.json", "rank_00000.bin", "rank_00001.bin"}


def run_chains(out: Path, chains: list[Chain]) -> dict[tuple[str, int], list[str]]:
    """The failures under each (chain, layout). A chain ends at its first failure."""
    plan = out / "chains.json"
    plan.write_text(json.dumps(chains))
    ranks = ForkedRun(
        **script("checkpoint_worker", str(plan), str(out)),
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        output, _ = ranks.communicate(timeout=CHAIN_DEADLINE_S * len(chains))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    digests = [json.loads(line) for line in output.splitlines()]
    return {(entry["chain"], entry["layout"]): entry["failures"] for entry in digests}


def assert_equal_under_all_layouts(out: Path, chains: list[Chain]) -> None:
    digests = run_chains(out, chains)
    expected = {
        (chain["name"], number) for chain in chains for number in range(len(chain["layouts"]))
    }
    assert {case: failures for case, failures in digests.items() if failures} == {}
    assert set(digests) == expected


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seldom", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_tensor_and_moment_is_the_same_under_other_layouts(
    seldom: bool, tmp_path: Path
) -> None:
    """Layouts that were once wrong, one for each cause first; and random ones."""
    chains_by_name = {chain["name"]: chain for chain in known_chains(tmp_path)}
    soon = [chains_by_name.pop(name) for name in ("tied_odd_width", "no_experts_zero0")]
    chains = (
        [*chains_by_name.values(), *random_chains(tmp_path, seed=0, count=1, layouts=4)]
        if seldom
        else soon
    )
    assert_equal_under_all_layouts(tmp_path, chains)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 7))
def test_checkpoint_is_equal_under_pairs_of_random_layouts(tmp_path: Path, seed: int) -> None:
    """Every tensor and moment is the same under 51 pairs."""
    assert_equal_under_all_layouts(tmp_path, random_chains(tmp_path, seed, count=17, layouts=4))


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(what the ranks saved, the damaged checkpoint)"""
    model = tmp_path_factory.mktemp("hf")
    out = tmp_path_factory.mktemp("harmed")
    save_model("untied", model)
    tied = known_chains(out)[0]["model"]
    checkpoint = out / "step_000001"

    def scenario(run: str, **fields: Any) -> dict[str, Any]:
        return {
            "run": run,
            "name": run,
            "model": str(model),
            "topology": {"tp": 2},
            "checkpoint": str(checkpoint),
        } | fields

    kinds = [["live"], ["master", "live"], ["exp_avg"], ["exp_avg_sq"]]
    differing = [
        {"name": f"ranks_differ.{axis}", "topology": dict(zero=0, **{axis: 2}), "dtype": "bfloat16"}
        for axis in ("tp", "dp")
    ]
    spawn(2, out, [
        scenario("damaged"), scenario("disk_that_lies"),
        scenario("vendor_warns", model=tied, topology={"pp": 2}),
        *(scenario("ranks_differ", kinds=kinds, **settings) for settings in differing),
    ])  # fmt: skip
    return out, checkpoint


def test_every_rank_names_a_damaged_file(
    harmed: tuple[Path, Path],
) -> None:
    """Nothing is made of it."""
    runs, checkpoint = harmed
    for rank in saved(runs, "damaged"):
        assert rank["whole"] == {"step": 1}
        assert {file for file, _ in rank["said"]} == FILES
        for (file, damage), message in rank["said"].items():
            assert message.startswith("CheckpointError: "), (file, damage)
            assert f"checkpoint {checkpoint} cannot be used: " in message and message.endswith(
                "Move it away to use the one before it"
            )
            assert f"{file} is " in message, (damage, message)
            assert "\n" not in message


def test_export_names_the_damaged_checkpoint(
    harmed: tuple[Path, Path],
) -> None:
    """It does not name its own copy of it."""
    runs, checkpoint = harmed
    for rank in saved(runs, "damaged"):
        assert (
            f"checkpoint {checkpoint} cannot be used: rank_00001.bin is damaged" in rank["of_copy"]
        )
        assert "exporting" not in rank["of_copy"] and rank["of_copy"].endswith(
            "Move it away to use the one before it"
        )


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_ranks_with_unequal_shared_values_save_nothing(
    harmed: tuple[Path, Path], axis: str
) -> None:
    runs, _ = harmed
    for rank in saved(runs, f"ranks_differ.{axis}"):
        assert rank["left"] == []
        messages = rank["said"]
        assert (
            "rank 1: nothing is saved: decoder.final_layernorm.weight is not the optimizer's "
            "master weight, rounded" in messages["live"]
        )
        for kinds, tensor in (
            ("master+live", "master"),
            ("exp_avg", "exp_avg"),
            ("exp_avg_sq", "exp_avg_sq"),
        ):
            assert messages[kinds].startswith("WriteError: "), messages[kinds]
            assert (
                f"{tensor}/model.norm.weight differs between what is held and what is stored"
                in messages[kinds]
            )


def test_a_disk_that_keeps_other_bytes_than_were_written_is_told(harmed: tuple[Path, Path]) -> None:
    runs, _ = harmed
    for rank in saved(runs, "disk_that_lies"):
        assert rank["left"] == []
        assert "rank 1: rank_00001.bin does not hold what was written to it: " in rank["message"]


def test_a_warning_of_megatron_about_corruption_is_an_error(harmed: tuple[Path, Path]) -> None:
    runs, _ = harmed
    messages = {rank["said"] for rank in saved(runs, "vendor_warns")}
    assert any(
        "warns of corruption: " in text and "can lead to data corruption" in text
        for text in messages
    ), messages
