"""The command line: exit statuses, where messages are printed, and that nothing slow is imported
before the checks are done.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megarl import cli
from megarl.base.results import CommandResult
from megarl.config.load import dump_config, load_config
from megarl.launch.commands import evaluation_text
from megarl.plan.resolve import RunPlan

MODELS = Path(__file__).parents[2] / "configs" / "models"


def fresh_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


HEAVY = {"torch", "sglang", "megatron", "transformers", "datasets", "matplotlib"}
MAIN_AND_IMPORTS = f"""
    import sys
    from megarl.cli import main
    status = main(sys.argv[1:])
    print(sorted({HEAVY} & set(sys.modules)), file=sys.stderr)
    sys.exit(status)
"""


def test_missing_file_ends_with_2_before_heavy_imports() -> None:
    completed = fresh_python(MAIN_AND_IMPORTS, "train", "bad=1")
    assert completed.returncode == 2 and completed.stdout == ""
    assert (
        completed.stderr
        == "megarl: bad=1: no such file; the configuration file comes before the overrides: "
        "CONFIG bad=1\n[]\n"
    )


@pytest.mark.parametrize(
    ("arguments", "exported", "weights"),
    [
        ([], (None, False), "run/checkpoints/step_000010"),
        (["--step", "5"], (5, False), "run/checkpoints/step_000005"),
        (["--step", "0"], None, "model"),
        (["model.path=other"], None, "other"),
        (["model.path=other", "--best"], (None, True), "run/checkpoints/step_000010"),
    ],
)
def test_eval_scores_checkpoint_or_model(
    arguments: list[str],
    exported: tuple | None,
    weights: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a fake export and a fake engine. tests/cpu/test_run.py has real ones."""
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "other"):
        shutil.copytree(MODELS / "tiny-llama", folder)
        Path(folder, "model.safetensors").touch()
    Path("run/checkpoints/step_000010").mkdir(parents=True)
    Path("rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    Path("run.yaml").write_text(
        "run_dir: run\nmodel: {path: model}\ndata: {train: {source: rows.jsonl}, eval: {source: "
        "rows.jsonl}}\nrollout: {max_tokens: 64}\n"
    )
    Path("run/config.yaml").write_text(dump_config(load_config("run.yaml")))
    exports = []

    def export(plan: RunPlan, output: str, step: int | None, best: bool) -> str:
        exports.append((step, best))
        shutil.copytree("model", output)
        return f"run/checkpoints/step_{step or 10:06d}"

    def evaluate(plan: RunPlan, quiet: bool) -> CommandResult:
        return CommandResult(
            {"weights": plan.weights.scored},
            f"{evaluation_text({}, plan.weights)}\n{plan.weights.scored}",
        )

    monkeypatch.setattr("megarl.launch.commands.export", export)
    monkeypatch.setattr("megarl.launch.commands.evaluate", evaluate)
    status = cli.main(["eval", "run.yaml", *arguments])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert exports == ([] if exported is None else [exported])
    scored = f"the checkpoint {weights}" if exported else f"model.path={weights}"
    assert printed.out == f"held-out scores of {scored}\n{weights}\n"


def test_overrides_follow_the_file_of_every_command() -> None:
    for command in cli.COMMANDS:
        output = ["--output", "folder"] if command == "export" else []
        arguments = cli.parse([command, "run.yaml", "seed=1", *output, "trainer.tp=2"])
        assert arguments.overrides == ["seed=1", "trainer.tp=2"]


def test_eval_is_refused_before_it_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run/checkpoints/step_000010").mkdir(parents=True)
    Path("run.yaml").write_text(
        f"run_dir: run\nmodel: {{path: {MODELS}/llama-3.1-8b}}\ndata: {{train: {{source: "
        f"synthetic:chain}}}}\n"
    )
    assert cli.main(["eval", "run.yaml", "generator.quantization=fp8_block"]) == 2
    stderr = capsys.readouterr().err
    assert "generator.quantization=fp8_block: must be null for megarl eval" in stderr
    assert "data.eval=null: megarl eval needs a held-out set" in stderr


def test_all_mistakes_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong keys, values, sizes, paths, rows, functions and classes, but no mistakes that only
    follow from others.
    """
    (tmp_path / "bad.jsonl").write_text(
        '{"question": "1+1=", "answer": "2"}\n{"question": "1+1=",\n'
    )
    (tmp_path / "all_mistakes.py").write_text("async def reward(): ...\n")
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {MODELS}/tiny-llama, random_init: true}}\n"
        "data: {train: {source: bad.jsonl}, eval: {source: none.jsonl}}\n"
        "reward: {name: 'all_mistakes:rewrd'}\nrollout: {name: 'nothing:here', max_tokens: "
        "64}\nsft: {steps: 1}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the program adds the working directory
    wrong = ["trainer.tpp=3", "algorithm.rho=-1", "generator.tp=7", "trainer.tp=two"]
    for command in (["train"], ["train", "--dry-run", "weights.transport=all_mistakes:reward"]):
        status = cli.main([command[0], "run.yaml", *wrong, *command[1:]])
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        assert [line.removeprefix("megarl: ").partition(": ")[0] for line in err.splitlines()] == [
            "trainer.tpp=3",
            "trainer.tp=two",
            "algorithm.rho=-1.0",
            "generator.tp=7",
            # a dry run may come before megarl sft
            *(["model.path=" + f"{MODELS}/tiny-llama"] if command == ["train"] else []),
            "bad.jsonl, line 2",
            "data.eval.source=none.jsonl",
            "rollout.name=nothing:here",
            "reward.name=all_mistakes:rewrd",
            # checking it imports torch
            *(["weights.transport=all_mistakes:reward"] if command != ["train"] else []),
        ], err


def message(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The last line of output before exit status 2."""
    try:
        status = cli.main(argv)
    except SystemExit as exit_:
        status = exit_.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    return err.splitlines()[-1].removeprefix("megarl: ")


def test_settings_written_as_options_are_refused(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, setting in (
        ("--max_steps=5", "max_steps=5"),
        ("--max-steps", "max_steps=…"),
        ("--trainer.tpp=2", "trainer.tp=2"),
    ):
        assert message(capsys, "train", str(run_yaml), option) == (
            f"megarl train: error: unknown option: {option}; settings have no dashes: {setting}"
        )
    assert (
        message(capsys, "train", str(run_yaml), "--colour=5")
        == "megarl train: error: unknown option: --colour=5"
    )


def test_checkpoint_as_a_model_is_refused(
    run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "old/checkpoints/step_00000040"
    checkpoint.mkdir(parents=True)
    first = f"first: megarl export CONFIG run_dir={tmp_path}/old"
    config = [str(run_yaml), f"data.eval.source={tmp_path}/rows.jsonl"]
    for path, advice in (
        (checkpoint, f"is a checkpoint, not a model; {first} --step 40 --output FOLDER"),
        (tmp_path / "old", f"holds a run's checkpoints, no model; {first} --output FOLDER"),
        (
            tmp_path / "old/checkpoints",
            f"holds a run's checkpoints, no model; {first} --output FOLDER",
        ),
    ):
        assert (
            message(capsys, "eval", *config, f"model.path={path}") == f"model.path={path}: {advice}"
        )


def test_launching_imports_no_torch() -> None:
    """This saves seconds at the start of a run."""
    completed = fresh_python(f"""
        import ctypes, sys
        from megarl.generator import cpu_support
        from megarl.launch import commands
        import megarl.observe.report
        def no_driver(name):
            raise OSError(name)
        ctypes.CDLL = no_driver  # with one, torch is asked
        cpu_support.cuda_available()
        print(sorted({HEAVY} & set(sys.modules)))
    """)
    assert completed.stdout == "[]\n", completed.stderr


def test_bad_config_ends_with_2_before_heavy_imports(run_yaml: Path) -> None:
    completed = fresh_python(
        MAIN_AND_IMPORTS, "train", str(run_yaml), "trainer.tp=3", "rollout.n=1"
    )
    assert completed.returncode == 2 and completed.stdout == ""
    first, second, imported = completed.stderr.splitlines()
    assert first.startswith("megarl: rollout.n=1: must be at least 2")
    assert second.startswith("megarl: trainer.tp=3: must divide")
    assert imported == "[]"


def test_all_problems_go_to_stderr_and_none_to_stdout(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(run_yaml), "--json", "trainer.tpp=2", "generator.tp=x"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err
        == "megarl: trainer.tpp=2: unknown key; did you mean trainer.tp?\nmegarl: generator.tp=x: "
        "must be an integer\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["trian", "x.yaml"], "invalid choice: 'trian'"),
        (["trian", "x.yaml"], "did you mean train?"),
        (["engines", "ad", "runs/a"], "did you mean add?"),
        (["train"], "required: CONFIG"),
        (["train", "x.yaml", "--json"], "megarl train: error: unknown option: --json"),
        (["export", "x.yaml"], "required: --output"),
        (["export", "x.yaml", "--output", "d", "--step", "two"], "invalid int value: 'two'"),
    ],
)
def test_bad_arguments_end_with_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2 and out == "" and message in err


def test_options_may_stand_anywhere() -> None:
    for argv in ("--json C a=1 b=2", "C --json a=1 b=2", "C a=1 --json b=2", "C a=1 b=2 --json"):
        arguments = cli.parse(["plan", *argv.split()])
        assert (arguments.config, arguments.overrides) == ("C", ["a=1", "b=2"])
        assert arguments.json


def test_output_that_cannot_be_written_ends_with_2(
    run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    full = f"{tmp_path}/full: is there already, and is not empty; remove it, or name another"
    for command, message in (
        ("reshard C --picture map.gif", "--picture map.gif: must end in .svg or .png"),
        (
            f"plan C --picture {tmp_path}/no/plan.svg",
            f"--picture {tmp_path}/no/plan.svg: there is no folder {tmp_path}/no",
        ),
        (f"reshard C --dump {tmp_path}", f"--dump {tmp_path}: is a folder, must be a file"),
        ("bench sync --picture sync.pdf", "--picture sync.pdf: must end in .svg or .png"),
        (f"export C --output {tmp_path}/full", f"--output {full}"),
        (
            f"export C --output {tmp_path}/file/x",
            f"--output {tmp_path}/file/x: {tmp_path}/file is a file, must be a folder",
        ),
        (f"sft C sft.steps=1 sft.output={tmp_path}/full", f"sft.output={full}"),
        (
            f"train C run_dir={tmp_path}/file",
            f"run_dir={tmp_path}/file: is a file, must be a folder",
        ),
        ("export C", "the following arguments are required: --output"),
        ("export C --output new", f"run_dir={tmp_path}/run: no checkpoint; there is none at all"),
    ):
        try:
            status = cli.main(
                [str(run_yaml) if argument == "C" else argument for argument in command.split()]
            )
        except SystemExit as exit_:
            status = exit_.code
        out, err = capsys.readouterr()
        assert (status, out) == (2, "") and err.endswith(f"{message}\n"), command
    assert (tmp_path / "full/thesis.tex").exists()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RuntimeError("engine.0 died"), 1, "megarl: engine.0 died\n"),
        (KeyboardInterrupt(), 130, "megarl: ended by Ctrl-C\n"),
    ],
)
def test_failed_and_an_interrupted_run(
    error: BaseException,
    status: int,
    message: str,
    run_yaml: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(plan: object, arguments: object) -> None:
        raise error

    monkeypatch.setitem(cli.RUN, "train", fail)
    assert cli.main(["train", str(run_yaml)]) == status
    assert capsys.readouterr() == ("", message)


def test_help_shows_commands_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert exit_info.value.code == 0 and "megarl train configs/quickstart.yaml" in text
    assert all(f"\n    {name}" in text for name in cli.COMMANDS)
    with pytest.raises(SystemExit):
        cli.main(["reshard", "--help"])
    assert "megarl reshard configs/8b_aipo.yaml generator.tp=2 --json" in capsys.readouterr().out


def test_run_dir_inside_a_file_ends_with_2(run_yaml: Path, capsys: pytest.CaptureFixture[str]):
    (run_yaml.parent / "file").touch()
    run_dir = f"run_dir={run_yaml.parent}/file/run"
    assert cli.main(["sft", str(run_yaml), "sft.steps=1", run_dir]) == 2
    stderr = capsys.readouterr().err
    assert run_dir in stderr and "is a file, must be a folder" in stderr


@pytest.mark.parametrize("setting", [
    "generator.engines=99999999999", "trainer.cp=99999999999999999999", "trainer.dp=10000000",
    "seed=4294967296",
    "max_steps=1000000000000000000000000000000", "rollout.prompts_per_step=99999999999999999999",
    "timeouts.request_s=1e300", "reward.timeout_s=2147483648",
    f"model.path={'x' * 300}", f"run_dir={'x' * 300}", f"data.train.source={'x' * 300}.jsonl",
])  # fmt: skip
def test_absurd_value_is_refused_with_one_message(
    setting: str, run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No such value may end in a traceback here, or begin a run that then dies of it.

    NumPy's seeds, for example, have 32 bits.
    """
    assert cli.main(["train", str(run_yaml), "--dry-run", setting]) == 2
    key, _, value = setting.partition("=")
    stderr = capsys.readouterr().err
    assert key in stderr or value in stderr
