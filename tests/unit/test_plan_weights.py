"""Resolving: the model, a run's initial weights, and the run that it continues."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from resolving import CONFIGS, MODEL, config, problems_of, with_weights

from megarl.config.load import dump_config
from megarl.data import contents
from megarl.plan.checkpoints import changes
from megarl.plan.resolve import resolve
from megarl.plan.weights import WARM_START, begin_with, of_the_run, warm_start_record, with_date

pytestmark = pytest.mark.usefixtures("hub_offline")


def test_missing_model_folder_is_named_with_a_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(MODEL, tmp_path / "tiny-llama")
    near = tmp_path / "tiny-lama"
    exact = tmp_path / "tiny-llama"
    assert problems_of(tmp_path, f"model.path={near}") == [
        f"model.path={near}: no such folder; did you mean {exact}?"
    ]
    assert problems_of(tmp_path, f"model.tokenizer={near}") == [
        f"model.tokenizer={near}: no such folder; did you mean {exact}?"
    ]
    output = tmp_path / "run/sft/hf"
    assert problems_of(tmp_path, "model.path=${sft.output}") == [
        f"model.path={output}: no such folder; megarl sft writes it"
    ]
    monkeypatch.chdir(tmp_path)  # like the configs of a checkout, used from elsewhere
    relative = "weights/models/tiny-llama"
    assert problems_of(tmp_path, f"model.path={relative}") == [
        f"model.path={relative}: no such folder in {tmp_path}"
    ]
    (exact / "config.json").unlink()
    assert "config.json" in problems_of(tmp_path, f"model.path={exact}")[0]


def test_a_hub_name_is_planned_from_model_spec(tmp_path: Path) -> None:
    (message,) = problems_of(tmp_path, "model.path=some-org/some-model")
    assert "some-org/some-model" in message
    assert message.endswith("to plan without the checkpoint, set model.spec")
    plan = resolve(
        config(
            tmp_path,
            "model.path=some-org/some-model",
            f"model.spec={CONFIGS}/models/llama-3.1-70b/config.json",
        )
    )
    assert plan.spec.num_layers == 80
    assert problems_of(tmp_path, "model.path=some-org/some-model", "model.spec=nowhere.json") == [
        "model.spec=nowhere.json: no such file"
    ]
    (tmp_path / "bare").mkdir()
    for key in ("path", "spec"):
        problem = f"model.{key}={tmp_path}/bare: the folder holds no config.json"
        assert problems_of(
            tmp_path, "model.path=some-org/some-model", f"model.{key}={tmp_path}/bare"
        ) == [problem]


def test_a_rope_that_the_trainer_does_not_know(tmp_path: Path) -> None:
    values = json.loads((MODEL / "config.json").read_text())
    values["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (message,) = problems_of(tmp_path, f"model.path={tmp_path}")
    assert message.endswith("its rope_scaling of type yarn must be one of default, linear, llama3")


def test_model_spec_must_agree_with_a_checkpoint_at_hand(tmp_path: Path) -> None:
    (message,) = problems_of(tmp_path, f"model.spec={CONFIGS}/models/llama-3.1-70b")
    assert message.startswith("model.spec=")
    assert "num_layers 80" in message
    assert "hidden_size 8192" in message


class TestWhereWeightsComeFrom:
    def test_from_the_model_folder_or_the_hub(self, tmp_path: Path) -> None:
        assert resolve(
            config(tmp_path, with_weights(tmp_path / "model")), "train"
        ).weights_path == str(tmp_path / "model")
        hub = config(tmp_path, "model.path=some-org/some-model", f"model.spec={MODEL}")
        assert resolve(hub, "train").weights_path == "some-org/some-model"

    def test_from_sft_where_the_folder_holds_none(self, tmp_path: Path) -> None:
        output = tmp_path / "run/sft/hf"
        for command in ("train", "eval"):
            assert problems_of(tmp_path, "data.eval.source=rows.jsonl", command=command) == [
                f"model.path={MODEL}: holds no weights (*.safetensors), and neither does "
                f"sft.output={output}: run megarl sft first"
            ]
        assert problems_of(tmp_path, "sft.steps=1", command="sft") == [
            f"model.path={MODEL}: holds no weights (*.safetensors); set model.random_init=true to "
            "start from random ones"
        ]
        fresh = config(tmp_path, "sft.steps=1", "model.random_init=true")
        for command in ("sft", "export"):  # every node checks this before anything starts
            assert resolve(fresh, command).weights_path == str(MODEL)
        with_weights(output)
        assert resolve(config(tmp_path), "train").weights_path == str(output)

    def test_from_a_warm_start_of_the_same_model(self, tmp_path: Path) -> None:
        """As in `megarl sft run.yaml && megarl train run.yaml`."""
        output = tmp_path / "run/sft/hf"
        run_config = config(tmp_path, with_weights(tmp_path / "model"), "sft.steps=3")
        assert str(resolve(run_config, "train").weights) == (
            f"model.path={tmp_path}/model; sft.steps=3, but there is no warm start in "
            f"sft.output={output}: megarl sft makes it"
        )
        with_weights(output)
        weights = resolve(run_config, "train").weights
        assert weights.path == str(tmp_path / "model")
        assert "not used: it has no warm_start.json" in weights.remark
        (output / WARM_START).write_text(warm_start_record(run_config))
        for command in ("train", "eval", "dry-run"):
            weights = resolve(
                dataclasses.replace(
                    run_config,
                    data=dataclasses.replace(run_config.data, eval=run_config.data.train),
                ),
                command,
            ).weights
            assert (
                str(weights) == f"the warm start in sft.output={output}; megarl sft made it from "
                f"model.path={tmp_path}/model"
            )
        assert resolve(run_config, "sft").weights_path == str(tmp_path / "model")
        other_config = config(tmp_path, with_weights(tmp_path / "other"))
        assert str(resolve(other_config, "train").weights) == (
            f"model.path={tmp_path}/other; the warm start in sft.output={output} is not used: it "
            f"was made from {tmp_path}/model"
        )

    def test_a_warm_start_made_otherwise_is_not_taken_for_done(self, tmp_path: Path) -> None:
        output = tmp_path / "run/sft/hf"
        model = with_weights(tmp_path / "model")
        with_weights(output)
        instead = "remove it to train it anew, or name another folder"
        assert problems_of(tmp_path, model, "sft.steps=3", command="sft") == [
            f"sft.output={output}: is there already, and was not made by megarl sft (it has no "
            f"warm_start.json); {instead}"
        ]
        (output / WARM_START).write_text(warm_start_record(config(tmp_path, model, "sft.steps=3")))
        assert problems_of(tmp_path, model, "sft.steps=4", "seed=1", command="sft") == [
            f"sft.steps=4: the warm start in sft.output={output} was made with 3; {instead}",
            f"seed=1: the warm start in sft.output={output} was made with 0; {instead}",
        ]
        resolve(config(tmp_path, model, "sft.steps=3", "trainer.tp=2", "sft.dp=2"), "sft")
        (output / WARM_START).write_text(
            warm_start_record(with_date(config(tmp_path, model, "sft.steps=3"), "sft"))
        )
        elsewhere = "data.train.source=moved.jsonl"
        assert problems_of(tmp_path, model, "sft.steps=3", elsewhere, command="sft")[0].startswith(
            'data.train.source="moved.jsonl": the'
        )
        (output / contents.FILE).touch()  # so that rows are compared instead of paths
        resolve(config(tmp_path, model, "sft.steps=3", elsewhere), "sft")
        for damaged in ("", "null", "{}", '{"model.path": 3}'):
            (output / WARM_START).write_text(damaged)
            (problem,) = problems_of(tmp_path, model, command="train")
            assert problem.startswith(f"{output}/{WARM_START}: is damaged (")


class TestResume:
    def begin(self, tmp_path: Path, *overrides: str) -> None:
        with_weights(tmp_path / "run/sft/hf")
        run_config = config(tmp_path, *overrides)
        (tmp_path / "run/checkpoints/step_000010").mkdir(parents=True)
        (tmp_path / "run/config.yaml").write_text(dump_config(run_config))

    def test_limits_of_prompts_that_drop_rows_are_fixed(self, tmp_path: Path) -> None:
        self.begin(tmp_path, "data.bad_rows=drop", "data.max_prompt_tokens=512")
        longer = "data.max_prompt_tokens=600"
        (problem,) = problems_of(tmp_path, "data.bad_rows=drop", longer, command="train")
        assert problem.startswith(f"{longer}: the run in run_dir={tmp_path}/run began with 512")

    def test_settings_that_may_not_change_on_resume_are_refused(self, tmp_path: Path) -> None:
        self.begin(tmp_path)
        run = tmp_path / "run"
        assert problems_of(
            tmp_path,
            "seed=1",
            "data.train.source=other.jsonl",
            "data.shuffle=false",
            command="train",
        ) == [
            f"data.train.source=other.jsonl: the run in run_dir={run} began with rows.jsonl; keep "
            "that, or use another run_dir",
            f"data.shuffle=false: the run in run_dir={run} began with true; keep that, or use "
            "another run_dir",
            f"seed=1: the run in run_dir={run} began with 0; keep that, or use another run_dir",
        ]
        message = (
            f"trainer.mtp=keep: the run in run_dir={run} began with ignore; keep that, or use "
            "another run_dir"
        )
        for command in ("train", "export"):
            assert message in problems_of(tmp_path, "trainer.mtp=keep", command=command), (
                "checkpoints have what the setting asked for"
            )
        (run / "config.yaml").write_text("damaged: [")
        resolve(config(tmp_path, "seed=1"), "export")

    def test_resumed_run_has_a_critic_as_before(self, tmp_path: Path) -> None:
        critic = "algorithm.advantage=critic"
        normalized = "algorithm.advantage=normalized"
        kept = "; keep that, or use another run_dir"
        began = f"the run in run_dir={tmp_path}/run began with"
        self.begin(tmp_path)
        assert problems_of(tmp_path, critic, command="train") == [f"{critic}: {began} null{kept}"]
        resolve(config(tmp_path, normalized), "train")
        self.begin(tmp_path / "2", critic)
        began = f"the run in run_dir={tmp_path}/2/run began with"
        assert problems_of(tmp_path / "2", normalized, command="train") == [
            f"{normalized}: {began} critic{kept}"
        ]

    def test_settings_that_may_change_on_resume(self, tmp_path: Path) -> None:
        self.begin(tmp_path)
        changed = config(
            tmp_path,
            "max_steps=500",
            "trainer.tp=2",
            "generator.engines=4",
            "async.capacity=2",
            "trainer.optimizer.lr=1e-5",
        )
        assert resolve(changed, "train").steps == 500
        assert changes(changed) == [
            "trainer.tp=2, was 1", "trainer.optimizer.lr=1e-05, was 1e-06",
            "generator.engines=4, was 1", "async.capacity=2, was 1",
            "max_steps=500, was 100",
        ]  # fmt: skip
        assert changes(config(tmp_path)) == []

    def test_checkpoints_are_of_the_run_that_began_from_the_model(self, tmp_path: Path) -> None:
        model = with_weights(tmp_path / "model")
        other_model = with_weights(tmp_path / "other")
        assert not of_the_run(config(tmp_path, model))
        self.begin(tmp_path, model)
        assert of_the_run(config(tmp_path, model))
        assert of_the_run(config(tmp_path, f"{model}/../model"))
        assert not of_the_run(config(tmp_path, other_model))
        (tmp_path / "run/config.yaml").unlink()
        assert of_the_run(config(tmp_path, other_model))

    def test_half_written_checkpoint_is_ignored(self, tmp_path: Path) -> None:
        self.begin(tmp_path)
        (tmp_path / "run/checkpoints/step_000010").rename(
            tmp_path / "run/checkpoints/step_000010.partial"
        )
        assert resolve(config(tmp_path, "seed=1"), "train").config.seed == 1
        assert changes(config(tmp_path, "seed=1")) == []

    def test_a_run_keeps_to_the_weights_that_it_began_with(self, tmp_path: Path) -> None:
        """Also if a warm start is made meanwhile.

        If the weights are gone, the run does without, unless they are the reference model.
        """
        output = tmp_path / "run/sft/hf"
        model = with_weights(tmp_path / "model")
        first_plan = resolve(config(tmp_path, model), "train")
        (tmp_path / "run/checkpoints/step_000010").mkdir(parents=True)
        begin_with(first_plan.config, first_plan.weights, "00")
        (tmp_path / "run/config.yaml").write_text(dump_config(first_plan.config))
        with_weights(output)
        (output / WARM_START).write_text(warm_start_record(first_plan.config))
        weights = resolve(first_plan.config, "train").weights
        assert (weights.path, weights.warm_start, weights.fingerprint) == (
            str(tmp_path / "model"),
            False,
            "00",
        )
        (tmp_path / "model/model.safetensors").unlink()
        assert resolve(first_plan.config, "train").weights.are_gone
        assert problems_of(
            tmp_path, f"model.path={tmp_path}/model", "algorithm.kl_coef=0.1", command="train"
        ) == [
            "algorithm.kl_coef=0.1: its reference model is what the run began with, but "
            f"{tmp_path}/model holds no weights any more"
        ]

    def test_only_training_over_checkpoints_is_held_to_it(self, tmp_path: Path) -> None:
        self.begin(tmp_path)
        resolve(config(tmp_path, "seed=1"), "plan")
        shutil.rmtree(tmp_path / "run/checkpoints")
        resolve(config(tmp_path, "seed=1"), "train")


@pytest.mark.parametrize(
    ("file", "argument"),
    [("pytorch_model.bin", ""), ("model-q8_0.gguf", ", gguf_file='model-q8_0.gguf'")],
)
def test_weights_in_another_format_name_the_way_out(
    tmp_path: Path, file: str, argument: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(Path(MODEL) / "config.json", folder)
    (folder / file).write_bytes(b"")
    [problem] = problems_of(tmp_path, f"model.path={folder}", command="train")
    assert problem.startswith(
        f"model.path={folder}: holds no weights (*.safetensors), but {file}: convert it"
    )
    assert (
        f"from_pretrained('{folder}', "
        f"dtype='auto'{argument}).save_pretrained('{folder}-safetensors')" in problem
    )
