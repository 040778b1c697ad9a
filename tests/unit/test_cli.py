"""The command line as people meet it: exit statuses, where messages go, and nothing heavy before the checks are done."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megarl import cli

MODELS = Path(__file__).parents[2] / "configs" / "models"


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    shutil.copytree(MODELS / "llama-3.1-8b", model)
    (model / "model.safetensors").touch()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "tiny-llama" / name, model)
    rows, path = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    path.write_text(f"model: {{path: {model}}}\ndata: {{train: {{source: {rows}}}}}\nrun_dir: {tmp_path}/run\n")
    return path


def fresh_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=60)


MAIN_AND_IMPORTS = """
    import sys
    from megarl.cli import main
    status = main(sys.argv[1:])
    heavy = {"torch", "sglang", "megatron", "transformers", "datasets", "matplotlib"} & set(sys.modules)
    print(sorted(heavy), file=sys.stderr)
    sys.exit(status)
"""


def test_a_missing_file_ends_with_2_before_any_heavy_import() -> None:
    done = fresh_python(MAIN_AND_IMPORTS, "train", "bad=1")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "megarl: bad=1: no such file; the configuration file comes before the overrides: CONFIG bad=1\n[]\n"


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """Keys and values, sizes, paths, rows, functions and classes; none that only follows from another."""
    (tmp_path / "bad.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+1=",\n')
    (tmp_path / "mine.py").write_text("async def reward(): ...\n")
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {MODELS}/tiny-llama, random_init: true}}\n"
        "data: {train: {source: bad.jsonl}, eval: {source: none.jsonl}}\n"
        "reward: {name: 'mine:rewrd'}\nrollout: {name: 'nothing:here', max_tokens: 64}\nsft: {steps: 1}\n"
    )
    wrong = ["trainer.tpp=3", "algorithm.rho=-1", "generator.tp=7", "trainer.tp=two"]
    for command in (["train"], ["train", "--dry-run", "weights.transport=mine:reward"]):
        argv = [sys.executable, "-m", "megarl", command[0], "run.yaml", *wrong, *command[1:]]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert [line.removeprefix("megarl: ").partition(": ")[0] for line in done.stderr.splitlines()] == [
            "trainer.tpp=3",
            "trainer.tp=two",
            "algorithm.rho=-1.0",
            "generator.tp=7",
            "generator.tp=7",
            *(["model.path=" + f"{MODELS}/tiny-llama"] if command == ["train"] else []),  # a dry run may come before megarl sft
            "bad.jsonl, line 2",
            "data.eval.source=none.jsonl",
            "rollout.name=nothing:here",
            "reward.name=mine:rewrd",
            *(["weights.transport=mine:reward"] if command != ["train"] else []),  # whose look at it imports torch
        ], done.stderr


def test_a_dry_run_says_what_it_has_looked_at(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n' * 1200)
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {MODELS}/tiny-llama, random_init: true, dtype: float32}}\ncluster: {{gpu: cpu}}\nsft: {{steps: 1}}\n"
        "data: {train: {source: rows.jsonl}, eval: {source: HuggingFaceH4/MATH-500}}\nrollout: {max_tokens: 64}\n"
    )
    argv = [sys.executable, "-m", "megarl", "train", "run.yaml", "--dry-run"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "data.train: 1,200 rows of rows.jsonl, all read; the first 1,000 prompts leave room for a response" in done.stdout
    assert "data.eval: HuggingFaceH4/MATH-500, of the hub, is read when the run starts" in done.stdout
    assert "\nWeights: the warm start in sft.output=runs/default/sft/hf\n" in done.stdout


@pytest.mark.parametrize("name", ["8b_aipo", "405b_aipo", "quickstart"])
def test_a_dry_run_predicts_one_time_for_the_update(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MODELS.parents[1])
    assert cli.main(["train", f"configs/{name}.yaml", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (planned,) = [line.split()[2] for line in lines if line.startswith("           weight update")]
    (predicted,) = [line.split()[1] for line in lines if line.startswith("predicted")]
    assert planned == predicted


def test_the_map_that_is_shown_is_that_of_the_machines(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of heads that tp does not divide CPU engines have some more, which are zeros; GPUs have copies of key-value heads."""
    rows = {}
    for gpu in ("cpu", "H100"):
        assert cli.main(["reshard", str(run_yaml), "generator.tp=16", f"cluster.gpu={gpu}"]) == 0
        rows[gpu] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("self_attn.qkv_proj.weight")]
    assert "with zeros" in rows["cpu"][0] and "with zeros" not in rows["H100"][0]


def message(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The last line of what is said before it ends with 2."""
    try:
        status = cli.main(argv)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    return err.splitlines()[-1].removeprefix("megarl: ")


def test_settings_that_are_written_as_options(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, meant in (("--max_steps=5", "max_steps=5"), ("--max-steps", "max_steps=…"), ("--trainer.tpp=2", "trainer.tp=2")):
        said = message(capsys, "train", str(run_yaml), option)
        assert said == f"megarl train: error: unknown option: {option}; settings have no dashes: {meant}"
    assert message(capsys, "train", str(run_yaml), "--colour=5") == "megarl train: error: unknown option: --colour=5"


def test_a_checkpoint_in_the_place_of_a_model(run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "old/checkpoints/step_00000040"
    checkpoint.mkdir(parents=True)
    first = f"first: megarl export CONFIG run_dir={tmp_path}/old"
    config = [str(run_yaml), f"data.eval.source={tmp_path}/rows.jsonl"]
    for path, what in (
        (checkpoint, f"is a checkpoint, not a model; {first} --step 40 --output FOLDER"),
        (tmp_path / "old", f"holds a run's checkpoints, no model; {first} --output FOLDER"),
        (tmp_path / "old/checkpoints", f"holds a run's checkpoints, no model; {first} --output FOLDER"),
    ):
        assert message(capsys, "eval", *config, f"model.path={path}") == f"model.path={path}: {what}"


def test_launching_imports_no_torch() -> None:
    """A run begins seconds earlier so."""
    done = fresh_python("""
        import sys
        from importlib.metadata import version
        from megarl.generator import cpu_support
        from megarl.launch import commands
        import megarl.observe.report
        if version("torch").endswith("+cpu"):  # else it is asked whether there is a GPU
            cpu_support.cuda_available()
        print(sorted({"torch", "sglang", "megatron", "transformers", "datasets", "matplotlib"} & set(sys.modules)))
    """)
    assert done.stdout == "[]\n", done.stderr


def test_a_bad_config_ends_with_2_before_any_heavy_import(run_yaml: Path) -> None:
    done = fresh_python(MAIN_AND_IMPORTS, "train", str(run_yaml), "trainer.tp=3", "rollout.n=1")
    assert done.returncode == 2 and done.stdout == ""
    first, second, imported = done.stderr.splitlines()
    assert first.startswith("megarl: rollout.n=1: must be at least 2") and second.startswith("megarl: trainer.tp=3: must divide")
    assert imported == "[]"


def test_all_problems_go_to_stderr_and_none_to_stdout(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(run_yaml), "--json", "trainer.tpp=2", "generator.tp=x"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "megarl: trainer.tpp=2: unknown key; did you mean trainer.tp?\nmegarl: generator.tp=x: must be an integer\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["trian", "x.yaml"], "invalid choice: 'trian'"),
        (["train"], "required: CONFIG"),
        (["train", "x.yaml", "--json"], "megarl train: error: unknown option: --json"),
        (["export", "x.yaml"], "required: --output"),
        (["export", "x.yaml", "--output", "d", "--step", "two"], "invalid int value: 'two'"),
    ],
)
def test_bad_arguments_end_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and message in err


def test_options_may_stand_anywhere() -> None:
    for argv in ("--json C a=1 b=2", "C --json a=1 b=2", "C a=1 --json b=2", "C a=1 b=2 --json"):
        arguments = cli.parse(["plan", *argv.split()])
        assert (arguments.config, arguments.overrides, arguments.json) == ("C", ["a=1", "b=2"], True)
    arguments = cli.parse(["bench", "staleness", "C", "--seeds", "1", "a=1"])
    assert (arguments.config, arguments.overrides, arguments.seeds) == ("C", ["a=1"], 1)


# From the model cards: 8.03, 70.6 and 405.9 billion. Bytes are worked out by hand below for 8B.
@pytest.mark.parametrize(("model", "parameters"), [("8b", 8_030_261_248), ("70b", 70_553_706_496), ("405b", 405_853_388_800)])
def test_plan_counts_the_parameters(model: str, parameters: int, run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(run_yaml), f"model.path={MODELS}/llama-3.1-{model}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == parameters


def test_plan_counts_bytes_per_rank(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["trainer.tp=2", "trainer.pp=2", "trainer.dp=4", "generator.engines=3", "generator.tp=4"]
    assert cli.main(["plan", str(run_yaml), *sizes, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    hidden, ffn, layers, q_rows, kv_rows, vocab = 4096, 14336, 32, 4096, 1024, 128256
    vocab_tp2 = -(-vocab // 256) * 256  # Megatron pads to a multiple of 128 * tp

    def layer(tp: int) -> int:
        return (hidden * (2 * q_rows + 2 * kv_rows) + 3 * hidden * ffn) // tp + 2 * hidden

    first = layers // 2 * layer(2) + vocab_tp2 // 2 * hidden
    last = first + hidden  # output layer instead of embedding, and the final norm
    engine = layers * layer(4) + 2 * vocab // 4 * hidden + hidden
    assert (facts["trainer"]["ranks"], facts["generator"]["ranks"]) == (16, 12)
    assert (facts["trainer"]["weight_bytes_min"], facts["trainer"]["weight_bytes_max"]) == (2 * first, 2 * last)
    assert facts["generator"]["weight_bytes_min"] == facts["generator"]["weight_bytes_max"] == 2 * engine
    assert cli.main(["plan", str(run_yaml), *sizes]) == 0
    table = capsys.readouterr().out
    assert "8,030,261,248 parameters" in table and "engines 3, tp 4: 12 ranks" in table


def test_reshard_lists_dumps_and_draws(run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["trainer.tp=2", "trainer.dp=2", "generator.engines=2", "generator.tp=4", "generator.quantization=fp8_block"]
    files = tmp_path / "map.jsonl", tmp_path / "map.svg"
    assert cli.main(["reshard", str(run_yaml), *sizes, "--json", "--dump", str(files[0]), "--picture", str(files[1])]) == 0
    facts = json.loads(capsys.readouterr().out)
    head, *copies = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert head["plan_hash"] == facts["plan_hash"] and len(copies) == facts["copies"]
    assert sum(copy["bytes"] for copy in copies) == facts["bytes"]
    assert files[1].read_text().startswith("<?xml") and facts["predicted_s"] > 0
    for rank, key, number in (("trainer:3", "source_rank", 3), ("generator:6", "destination_rank", 6)):
        own = [copy for copy in copies if copy[key] == number]
        assert cli.main(["reshard", str(run_yaml), *sizes, "--rank", rank]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(own) + 1 and lines[-1].startswith(f"{rank}: {len(own):,} copies") and lines[-1].endswith(" ms")
        assert any(" quantise, " in line for line in lines) and any(" scale, " in line for line in lines)
    for rank, message in (("trainer:4", "the trainer has ranks 0 to 3"), ("engine:0", "must be trainer:N or generator:N")):
        assert cli.main(["reshard", str(run_yaml), *sizes, "--rank", rank]) == 2
        assert f"--rank {rank}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(("config", "ranks"), [("70b_aipo", (136, 120)), ("405b_aipo", (512, 512))])
def test_the_papers_large_runs_can_be_planned(
    config: str, ranks: tuple[int, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(MODELS.parents[1])
    path = f"configs/{config}.yaml"
    assert cli.main(["reshard", path, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["trainer_ranks"], facts["generator_ranks"]) == ranks and facts["exactly_once"] is True
    assert facts["bytes"] == facts["bytes_minimum"] and facts["receiver_max_over_mean"] == 1.0
    assert facts["sender_max_over_mean"] < facts["sender_bound"] + 0.001  # 405B: 1.035, of the bf16 embedding on a stage of fp8 layers
    assert cli.main(["plan", path, "--json"]) == 0
    assert cli.main(["eval", path]) == 2
    assert "generator.quantization=fp8_block: must be null for megarl eval" in capsys.readouterr().err


def test_reshard_reports_the_map(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["trainer.tp=2", "trainer.dp=2", "generator.engines=2", "generator.tp=4"]
    assert cli.main(["reshard", str(run_yaml), *sizes, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["trainer_ranks"], facts["generator_ranks"], facts["exactly_once"]) == (4, 8, True)
    assert cli.main(["plan", str(run_yaml), *sizes, "--json"]) == 0
    engine_rank = json.loads(capsys.readouterr().out)["generator"]["weight_bytes_max"]
    assert facts["bytes"] == facts["bytes_minimum"] == 8 * engine_rank
    assert cli.main(["reshard", str(run_yaml), *sizes]) == 0
    table = capsys.readouterr().out
    assert "self_attn.qkv_proj.weight" in table and facts["plan_hash"] in table
    assert table.endswith("proven: every destination byte is written exactly once\n")


def test_what_cannot_be_written_ends_with_2_before_anything_is_computed(
    run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    full = f"{tmp_path}/full: is there already, and is not empty; remove it, or name another"
    for command, message in (
        ("reshard C --picture map.gif", "--picture map.gif: must end in .svg or .png"),
        (f"plan C --picture {tmp_path}/no/plan.svg", f"--picture {tmp_path}/no/plan.svg: there is no folder {tmp_path}/no"),
        (f"reshard C --dump {tmp_path}", f"--dump {tmp_path}: is a folder, must be a file"),
        ("bench sync --picture sync.pdf", "--picture sync.pdf: must end in .svg or .png"),
        (f"export C --output {tmp_path}/full", f"--output {full}"),
        (f"bench faults --keep {tmp_path}/full", f"--keep {full}"),
        ("bench faults --minutes 0", "--minutes 0: must be above 0"),
        (f"export C --output {tmp_path}/file/x", f"--output {tmp_path}/file/x: {tmp_path}/file is a file, must be a folder"),
        (f"sft C sft.steps=1 sft.output={tmp_path}/full", f"sft.output={full}"),
        (f"train C run_dir={tmp_path}/file", f"run_dir={tmp_path}/file: is a file, must be a folder"),
        ("export C", "the following arguments are required: --output"),
        ("export C --output new", f"run_dir={tmp_path}/run: no checkpoint; there is none at all"),
    ):
        try:
            status = cli.main([str(run_yaml) if argument == "C" else argument for argument in command.split()])
        except SystemExit as ended:
            status = ended.code
        out, err = capsys.readouterr()
        assert (status, out) == (2, "") and err.endswith(f"{message}\n"), command
    assert (tmp_path / "full/thesis.tex").exists()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [(RuntimeError("engine.0 died"), 1, "megarl: engine.0 died\n"), (KeyboardInterrupt(), 130, "megarl: ended by Ctrl-C\n")],
)
def test_a_failed_and_an_interrupted_run(
    error: BaseException, status: int, message: str, run_yaml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(plan: object, arguments: object) -> None:
        raise error

    monkeypatch.setitem(cli.RUN, "train", fail)
    assert cli.main(["train", str(run_yaml)]) == status
    assert capsys.readouterr() == ("", message)


def test_help_shows_commands_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "megarl train configs/quickstart.yaml" in text
    assert all(f"\n    {name}" in text for name in cli.COMMANDS)
    with pytest.raises(SystemExit):
        cli.main(["reshard", "--help"])
    assert "megarl reshard configs/8b_aipo.yaml generator.tp=2 --json" in capsys.readouterr().out


def test_a_run_dir_that_cannot_be_written_to_is_a_mistake_in_the_configuration(run_yaml: Path, capsys):
    (run_yaml.parent / "file").touch()
    assert cli.main(["sft", str(run_yaml), "sft.steps=1", f"run_dir={run_yaml.parent}/file/run"]) == 2
    assert f"run_dir={run_yaml.parent}/file/run" in (told := capsys.readouterr().err) and "is a file, must be a folder" in told


@pytest.mark.parametrize("setting", [
    "generator.engines=99999999999", "trainer.cp=99999999999999999999", "trainer.dp=10000000", "seed=4294967296",
    "max_steps=1000000000000000000000000000000", "rollout.prompts_per_step=99999999999999999999",
    "timeouts.request_s=1e300", "reward.timeout_s=2147483648",
    f"model.path={'x' * 300}", f"run_dir={'x' * 300}", f"data.train.source={'x' * 300}.jsonl",
])  # fmt: skip
def test_a_value_beyond_all_reason_is_one_message(setting: str, run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None of them may end in a traceback here, nor begin a run that dies of it: NumPy's seeds, say, have 32 bits."""
    assert cli.main(["train", str(run_yaml), "--dry-run", setting]) == 2
    key, _, value = setting.partition("=")
    told = capsys.readouterr().err
    assert key in told or value in told
