"""Settings inside a role: separate overrides for megarl sft, mappings whose names YAML reads as
other types, and the paths in messages.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from resolving import MODEL, config, problems_of

from megarl import cli
from megarl.config import errors
from megarl.config.load import dump_config, load_config, read_config
from megarl.data.tokenizer import tokenizer_of
from megarl.launch.inputs import check_complete
from megarl.models import load_spec
from megarl.plan.resolve import resolve
from megarl.roles.opening import check_role_weights, check_served

pytestmark = pytest.mark.usefixtures("hub_offline")
DISTILLATION = "configs/examples/distillation.yaml"
FIRST = {
    "model.path": "configs/models/tiny-llama",
    "sft.data.source": "synthetic:right_chain",
    "sft.steps": 600,
}
FIRST_SFT = (
    "roles.teacher.sft={model.path: configs/models/tiny-llama, sft.data.source: "
    "'synthetic:right_chain', sft.steps: 600}"
)


def test_warm_start_of_a_role_takes_dotted_and_nested_overrides(tmp_path: Path) -> None:
    def sft(*overrides: str) -> dict:
        role_overrides = [f"roles.teacher.sft{override}" for override in overrides]
        return load_config(DISTILLATION, [FIRST_SFT, *role_overrides]).roles["teacher"].sft

    assert sft() == FIRST
    assert sft(".sft.steps=10", ".sft.optimizer.lr=1e-5") == FIRST | {
        "sft.steps": 10,
        "sft.optimizer.lr": 1e-5,
    }
    assert sft(".sft={data: {source: 'synthetic:chain'}, steps: 7}") == FIRST | {
        "sft.data.source": "synthetic:chain",
        "sft.steps": 7,
    }
    assert sft("={sft: {steps: 3}}", ".sft.steps=4", ".data.train.prompt_template=Q: {prompt}") == {
        "sft.steps": 4,
        "data.train.prompt_template": "Q: {prompt}",
    }
    written = tmp_path / "config.yaml"
    changed = load_config(DISTILLATION, ["roles.teacher.sft.sft.steps=10"])
    written.write_text(dump_config(changed))
    assert load_config(written) == changed


def test_overrides_of_a_warm_start_must_be_settings() -> None:
    wrong = ["sft.stepz=10", "sft.steps=many", "sft.batch_size=0", "nonsense={a: 3}"]
    overrides = [f"roles.teacher.sft.{override}" for override in wrong]
    assert read_config(DISTILLATION, overrides).problems == [
        "roles.teacher.sft.sft.stepz=10: unknown key; did you mean sft.steps?",
        "roles.teacher.sft.sft.steps=many: must be an integer",
        "roles.teacher.sft.sft.batch_size=0: must be at least 1",
        "roles.teacher.sft.nonsense.a=3: unknown key; docs/config.md lists every key",
    ]


def test_all_warm_starts_are_resolved_before_the_first_runs(
    monkeypatch: pytest.MonkeyPatch, refusal
) -> None:
    from megarl.launch import commands

    trained = []
    monkeypatch.setattr(commands, "sft", lambda plan: trained.append(plan.config))
    second_role = [
        "roles.other.role=teacher",
        "roles.other.on=trainer",
        "roles.other.path=there",
        "run_dir=runs/x",
        FIRST_SFT,
    ]
    assert (
        "sft.tp=3" in refusal("sft", DISTILLATION, *second_role, "roles.other.sft={sft.tp: 3}")
        and not trained
    )
    steps = "roles.other.sft={sft.steps: 5, data.eval: null}"
    assert cli.main(["sft", DISTILLATION, *second_role, steps]) == 0
    outputs = [config.sft.output for config in trained]
    assert outputs == ["runs/x/teacher/hf", "there", "runs/x/sft/hf"]
    assert [config.sft.steps for config in trained[:2]] == [600, 5]
    assert [config.data.eval is None for config in trained] == [False, True, False]


def test_verdicts_may_be_numbers_but_no_truth_values_of_yaml(tmp_path: Path) -> None:
    judge = [
        f"roles.judge.path={MODEL}",
        "roles.judge.template={response}",
        "roles.judge.verdict=([01])",
        "reward.name=roles.judge",
    ]
    role = config(tmp_path, *judge, "roles.judge.verdict_scores={1: 0.5, 0: 0}").roles["judge"]
    assert role is not None and role.verdict_scores == {"1": 0.5, "0": 0}
    problems = read_config(DISTILLATION, ["roles.judge.verdict_scores={yes: 1, no: 0}"]).problems
    assert problems[0] == (
        'roles.judge.verdict_scores={"true": 1, "false": 0}: true must be in quotes to be a text; '
        "so must yes, no, on, off and null"
    )


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (
            "config.json",
            b"{",
            "{folder}/config.json: cannot be read as JSON: Expecting property name enclosed in "
            "double quotes",
        ),
        ("config.json", b"[1]", "{folder}/config.json: holds list, expected a JSON object"),
        (
            "tokenizer_config.json",
            b"\xff",
            "{folder}/tokenizer_config.json: cannot be read as JSON: 'utf-8' codec can't decode "
            "byte 0xff",
        ),
        ("model.safetensors", b"\x10", "roles.judge.path={folder}: {folder}/model.safetensors: "),
    ],
)
def test_damaged_checkpoint_of_a_role_is_refused_early(
    tmp_path: Path, name: str, damage: bytes, message: str
) -> None:
    """Before its engine starts."""
    folder = shutil.copytree("configs/models/tiny-llama", tmp_path / "judge")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    judge = [
        f"roles.judge.path={folder}",
        "roles.judge.template={response}",
        "roles.judge.verdict=([01])",
        "reward.name=roles.judge",
    ]
    judge += ["roles.judge.chat=false", "roles.judge.max_tokens=8", "rollout.max_tokens=8"]

    def problems() -> list[str]:
        def check() -> None:
            plan = resolve(config(tmp_path, *judge), "plan")
            check_role_weights(plan.served[0])
            check_served(plan.served[0], tokenizer_of("configs/models/tiny-llama", "model.path"))

        return errors.problems_of(check)

    assert problems() == []
    (folder / name).write_bytes(damage)
    [problem] = problems()
    assert problem.startswith(message.format(folder=folder))


def test_model_path_to_a_file_or_without_weights_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert problems_of(tmp_path, f"model.path={file}") == [
        f"model.path={file}: must be a folder, not a file"
    ]
    with pytest.raises(
        cli.ConfigError, match=f"^roles.teacher.path={MODEL}: holds neither model.safetensors nor"
    ):
        check_complete("roles.teacher.path", load_spec(str(MODEL)), Path(MODEL))
