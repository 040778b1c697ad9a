"""Studies that compare whole runs refuse results of other settings; every mutation can be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation, broken
from offpolicy import Study
from whole_runs import check_settings, note_settings

from megarl.config.errors import ConfigError
from megarl.config.load import load_config

CHAIN = "configs/offpolicy/chain.yaml"
GOLD = "configs/offpolicy/gold.yaml"


def test_runs_with_other_settings_are_not_taken_for_a_studys(tmp_path: Path):
    check_settings(tmp_path, load_config(CHAIN))  # the folder is empty
    with pytest.raises(
        ConfigError, match=r"--runs configs/offpolicy/chain\.yaml: is a file, must be a folder"
    ):
        check_settings(Path(CHAIN), load_config(CHAIN))
    note_settings(tmp_path, load_config(CHAIN))
    check_settings(
        tmp_path,
        load_config(CHAIN, ["timeouts.weights_s=7", "run_dir=elsewhere", "checkpoint.every=3"]),
    )
    with pytest.raises(
        ConfigError,
        match=r"--runs \S+: the runs there were made with sft\.steps=400; name another folder",
    ):
        check_settings(tmp_path, load_config(CHAIN, ["sft.steps=4"]))
    with pytest.raises(
        ConfigError, match=r"data\.train\.source=synthetic:chain, .*name another folder"
    ):
        Study(GOLD, [], tmp_path, learned=True).prepare([])


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_still_applies(mutation: Mutation):
    text = Path(mutation.file).read_text()
    assert broken(mutation, text) != text
    with pytest.raises(RuntimeError, match=r"0 times, must have it once"):
        broken(mutation, text.replace(mutation.now, ""))
    assert all(Path("tests", name).is_file() for name in mutation.tests)
