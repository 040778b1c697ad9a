"""`import megarl`: its functions give what the commands print, its objects read a run's files, and
mistakes are ConfigErrors.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import pytest

import megarl
from megarl import api, cli
from megarl.base.coroutines import run_coroutine
from megarl.config.load import dump_config
from megarl.launch import commands, launcher, running
from megarl.launch.nodes import Node
from megarl.launch.watch import Stopped, termination_as_exit
from megarl.plan.resolve import RunPlan

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
GRADERS = "def share(response, answer): ...\nshorter = lambda response: 0.0\n"


def test_import_is_lazy_and_planning_needs_no_torch() -> None:
    code = """if True:
        import sys
        import megarl
        assert len([name for name in sys.modules if name.startswith("megarl")]) == 1 and "numpy" not in sys.modules
        config = megarl.load("configs/8b_aipo.yaml", "trainer.tp=2")
        assert megarl.plan(config).step_s > 0 and megarl.reshard(config).exactly_once
        assert not {"torch", "transformers", "sglang", "matplotlib", "pandas"} & sys.modules.keys()
    """
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", ["plan", "reshard"])
def test_functions_return_what_the_commands_print(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    function = {"plan": megarl.plan, "reshard": megarl.reshard}[command]
    result = function(ROOT / "configs/8b_aipo.yaml", "trainer.tp=4")
    cli.main(
        [
            command,
            str(
                ROOT / "configs/8b_aipo.yaml",
            ),
            "trainer.tp=4",
            "--json",
        ]
    )
    printed = json.loads(capsys.readouterr().out)
    measured = {"build_s"}
    assert {**json.loads(json.dumps(dict(result))), **dict.fromkeys(measured)} == {
        **printed,
        **dict.fromkeys(measured),
    }
    cli.main([command, str(ROOT / "configs/8b_aipo.yaml"), "trainer.tp=4"])
    assert capsys.readouterr().out == f"{result}\n"


def test_simulate_returns_what_the_command_prints(printed, printed_json) -> None:
    config = str(ROOT / "configs/one_gpu.yaml")
    few = ["plan.simulation.steps=2", "cluster.gpu=H200"]
    swept = ["async.capacity=0,1"]
    for sweep, options in (([], []), (swept, ["--sweep", *swept])):
        result = megarl.simulate(config, *few, sweep=sweep)
        command = ["plan", config, *few, "--simulate", *options]
        assert printed_json(*command, "--json") == (result.rows if sweep else dict(result))
        assert printed(*command) == f"{result}\n"
    assert result.take in ([row["settings"] for row in result.rows])
    with pytest.raises(megarl.ConfigError, match="--sweep async.capacity: must be KEY=VALUE"):
        megarl.simulate(config, sweep=["async.capacity"])


def test_results_have_their_values_as_attributes_and_items() -> None:
    plan = megarl.plan(QUICKSTART)
    assert plan.fits is plan["fits"] is True
    assert plan.step_s == plan["step_s"]
    assert "step_s" in dir(plan)
    with pytest.raises(AttributeError, match="no value named steps_s; there are family, "):
        _ = plan.steps_s


def test_packages_with_the_names_of_functions_can_be_called() -> None:
    """megarl.plan.resolve has been imported above, which makes megarl.plan the package."""
    for package in (megarl.plan, megarl.reshard):
        assert isinstance(package, ModuleType)
        assert package(QUICKSTART)["trainer_ranks" if package is megarl.reshard else "fits"]


def test_public_names_exist() -> None:
    assert set(megarl.__all__) == set(api.__all__) <= set(dir(megarl))
    assert all(callable(getattr(megarl, name)) for name in megarl.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = megarl.trian


def test_settings_may_be_a_file_a_mapping_or_a_loaded_config(tmp_path: Path) -> None:
    settings = {
        "run_dir": tmp_path / "run",
        "model": {"path": ROOT / "configs/models/tiny-llama", "random_init": True},
        "data": {"train": {"source": "synthetic:chain"}},
        "trainer": {"optimizer": {"lr": 1e-6, "betas": (0.9, 0.95)}},
    }
    loaded = megarl.load(settings, "seed=3")
    assert (loaded.run_dir, loaded.trainer.optimizer.lr, loaded.seed) == (
        f"{tmp_path}/run",
        1e-6,
        3,
    )
    (tmp_path / "run.yaml").write_text(dump_config(loaded))
    assert megarl.load(tmp_path / "run.yaml") == megarl.load(loaded) == loaded
    loaded.trainer.tp = 2
    assert megarl.load(loaded).trainer.tp == 2


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            3,
            "3: a configuration must be the path of a YAML file, a mapping, or what megarl.load "
            "returns",
        ),
        (
            {"model": {"path": object}},
            "<class 'object'>: a setting must be a number, a text, true, false, null, a list or a "
            "mapping",
        ),
        (
            {"model": {"path": "x", "pth": "y"}},
            "model.pth=y: unknown key; did you mean model.path?",
        ),
        ("none.yaml", "none.yaml: no such file"),
    ],
)
def test_wrong_settings_are_config_errors(settings: Any, problem: str) -> None:
    for function in (
        megarl.load,
        megarl.plan,
        megarl.simulate,
        megarl.reshard,
        megarl.train,
        megarl.sft,
        megarl.evaluate,
    ):
        with pytest.raises(megarl.ConfigError) as raised:
            function(settings)
        assert any(line.startswith(problem) for line in raised.value.problems), (
            raised.value.problems
        )


def test_wrong_options_are_config_errors(tmp_path: Path) -> None:
    for call in (
        lambda: megarl.plan(QUICKSTART, gpus=3),
        lambda: megarl.plan(QUICKSTART, search=True, gpus="8"),  # pyright: ignore[reportArgumentType]
        lambda: megarl.plan(QUICKSTART, picture="plan.jpg"),
        lambda: megarl.reshard(QUICKSTART, rank="trainer:99"),
        lambda: megarl.reshard(QUICKSTART, rank=0),  # pyright: ignore[reportArgumentType]
        lambda: megarl.plan(QUICKSTART, "trainer.tpp=3"),
        lambda: megarl.plan(QUICKSTART, 3),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(megarl.ConfigError):
            call()


def test_pictures_leave_the_backend_of_a_notebook_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "backend", "svg")
    megarl.plan(QUICKSTART, picture=f"{tmp_path}/plan.png")
    megarl.reshard(QUICKSTART, picture=f"{tmp_path}/map.png")
    assert matplotlib.get_backend() == "svg"
    assert {path.name for path in tmp_path.iterdir()} == {
        "plan.png",
        "map.png",
    }


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunPlan]:
    """The plans that megarl.train hands to what trains, which here only writes the run's settings."""
    plans: list[RunPlan] = []

    def train(plan: RunPlan) -> None:
        plans.append(plan)
        folder = Path(plan.config.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(plan.config))

    monkeypatch.setattr(commands, "train", train)
    monkeypatch.setattr("megarl.plan.resolve.missing_weights", lambda config, command: ())
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.chdir(tmp_path)
    return plans


def imported(folder: Path, name: str, text: str) -> Any:
    path = folder / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def test_an_imported_function_is_named_by_its_file(trained: list[RunPlan], tmp_path: Path) -> None:
    graders = imported(
        tmp_path,
        "graders_of_a_file",
        GRADERS + "import functools\nbound = functools.partial(share, answer='')\n",
    )
    for function, name in (
        (graders.share, "share"),
        (graders.shorter, "shorter"),
        (graders.bound, "bound"),
    ):
        run = megarl.train(QUICKSTART, f"run_dir={tmp_path}/{name}", reward=function)
        assert (
            trained[-1].config.reward.name
            == run.config.reward.name
            == f"{tmp_path}/graders_of_a_file.py:{name}"
        )
    assert (
        megarl.train(QUICKSTART, f"run_dir={tmp_path}/text", reward="math").config.reward.name
        == "math"
    )


def test_a_function_of_a_module_that_was_loaded_again_is_found(
    trained: list[RunPlan], tmp_path: Path
) -> None:
    """IPython's autoreload does that whenever the file changes."""
    graders = imported(tmp_path, "graders_loaded_again", GRADERS)
    before = graders.share
    importlib.reload(graders)
    run = megarl.train(QUICKSTART, f"run_dir={tmp_path}/run", reward=before)
    assert before is not graders.share
    assert run.config.reward.name == f"{tmp_path}/graders_loaded_again.py:share"


def test_a_reward_beside_parts_is_refused(trained: list[RunPlan]) -> None:
    with pytest.raises(
        megarl.ConfigError, match="reward=last_number: does not count beside reward.parts.right"
    ):
        megarl.train(QUICKSTART, "reward.parts.right.name=math", reward="last_number")
    assert trained == []


def test_reward_that_no_source_has_is_refused(trained: list[RunPlan]) -> None:
    own = "{source: synthetic:chain, reward: {name: math}}"
    sources = ["data.train.source=sources", f"data.train.sources={{a: {own}, b: {own}}}"]
    with pytest.raises(megarl.ConfigError) as error:
        megarl.train(QUICKSTART, *sources, reward="last_number")
    assert error.value.problems == [
        "reward: does not count: each source in data.train.sources has its own reward.name"
    ]
    assert trained == []


def test_a_rollout_may_be_a_function_or_a_class(trained: list[RunPlan], tmp_path: Path) -> None:
    games = imported(
        tmp_path, "games_of_a_file", "async def play(context, prompt, sampling, n): ...\n"
    )
    run = megarl.train(QUICKSTART, f"run_dir={tmp_path}/run", rollout=games.play)
    assert run.config.rollout.name == f"{tmp_path}/games_of_a_file.py:play"


def test_a_function_of_a_package_is_named_by_its_module(
    trained: list[RunPlan], tmp_path: Path
) -> None:
    (tmp_path / "graders_namespace").mkdir()
    imported(tmp_path, "graders_pkg.__init__", "")
    for name in ("graders_pkg.inner", "graders_namespace.inner"):
        inner = imported(tmp_path, name, GRADERS)
        assert (
            megarl.train(
                QUICKSTART, f"run_dir={tmp_path}/{name}", reward=inner.share
            ).config.reward.name
            == f"{name}:share"
        )


def test_a_package_that_only_this_program_finds_is_refused(
    trained: list[RunPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(tmp_path, "hidden_pkg.__init__", "")
    inner = imported(tmp_path, "hidden_pkg.inner", GRADERS)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(
        megarl.ConfigError,
        match=r"reward.name=share: the run's own processes find none as package hidden_pkg, not "
        r".*install it",
    ):
        megarl.train(QUICKSTART, reward=inner.share)


class Grader:
    def share(self, response: str) -> float:
        return 0.0

    def __call__(self, response: str) -> float:
        return 0.0


def of_a_cell(source: str, name: str) -> Any:
    """What a notebook's cell, or a script, defines."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(source, space)
    return space[name]


@pytest.mark.parametrize(
    "function",
    [
        of_a_cell(GRADERS, "share"),
        of_a_cell(GRADERS, "shorter"),
        of_a_cell("class Grader:\n def __call__(self, response): ...\ngrader = Grader()", "grader"),
        lambda response: 0.0,
        functools.partial(lambda response, answer: 0.0, answer=""),
        Grader().share,
        Grader(),
    ],
    ids=["cell", "lambda of a cell", "object of a cell", "lambda", "partial", "method", "object"],
)
def test_a_function_that_cannot_be_imported_is_refused(function: Any) -> None:
    for call in (megarl.train, megarl.evaluate):
        with pytest.raises(megarl.ConfigError) as raised:
            call(QUICKSTART, reward=function)
        (problem,) = raised.value.problems
        assert problem.startswith(("reward.name=", "eval.reward="))
        assert "%%writefile graders.py" in problem
        assert "write: from graders import " in problem


def test_objects_that_are_no_functions_are_refused() -> None:
    with pytest.raises(
        megarl.ConfigError, match=r"reward.name=\[\]: must be a function, or a text"
    ):
        megarl.train(QUICKSTART, reward=[])  # pyright: ignore[reportArgumentType]


def test_coroutines_run_inside_a_running_loop() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    async def cell() -> int:
        return run_coroutine(answer())

    assert run_coroutine(answer()) == asyncio.run(cell()) == 42


def test_launcher_code_does_not_call_asyncio_run() -> None:
    """asyncio.run fails in a notebook, whose loop runs already.

    Other processes have their own loops.
    """
    launched = {
        "megarl/bench",
        "megarl/agents/hubs",
        "megarl/sandbox",
        "launch/worker_roles.py",
        "megarl/train_loop.py",
    }
    files = [*(ROOT / "megarl").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]
    users = {
        str(path.relative_to(ROOT))
        for path in files
        if "asyncio.run(" in path.read_text(encoding="utf-8")
    }
    unexpected = {path for path in users if not path.startswith(tuple(launched))}
    assert unexpected == {"megarl/base/coroutines.py"}


def test_signals_that_end_the_launcher_raise_stopped(
    trained: list[RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(error: BaseException) -> Any:
        def train(plan: RunPlan) -> None:
            raise error

        return train

    for error in (SystemExit(143), Stopped(number=signal.SIGTERM)):
        monkeypatch.setattr(commands, "train", ends(error))
        with pytest.raises(megarl.Stopped) as raised:
            megarl.train(QUICKSTART)
        assert raised.value.exit_status == 143
        assert str(raised.value).startswith("stopped by SIGTERM")
    monkeypatch.setattr(commands, "train", ends(Stopped(number=signal.SIGINT)))
    assert cli.main(["train", QUICKSTART]) == 130
    monkeypatch.setattr(commands, "train", ends(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        megarl.train(QUICKSTART)


def test_a_thread_leaves_the_signal_handlers_alone() -> None:
    handlers = []

    def work() -> None:
        with termination_as_exit():
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_second_launch_on_several_nodes_has_another_folder(tmp_path: Path) -> None:
    several = Node(0, 2, "slurm.1.0.0")
    alone = Node(0, 1, "local")
    assert [launcher.launch_folder(tmp_path, several).name for _ in range(3)] == [
        "slurm.1.0.0",
        "slurm.1.0.0.1",
        "slurm.1.0.0.2",
    ]
    assert [launcher.launch_folder(tmp_path, alone).name for _ in range(2)] == ["local", "local"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "eval").mkdir()
    rows = [
        {"step": 0, "reward/mean": 0.25, "loss": None},
        {"step": 1, "reward/mean": 0.5, "loss": 1.0, "sync/audit_ok": True},
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 2, "rew'
    )
    (folder / "rollouts/samples.jsonl").write_text(
        '{"step": 0, "ordinal": 3, "samples": [{"reward": 1.0, "text": "7"}]}\n'
    )
    (folder / "rollouts/ordinals.jsonl").write_text(
        '{"step": 0, "ordinals": [3, 4], "dropped": [5]}\n'
    )
    (folder / "eval/version_000001.json").write_text('{"version": 1, "pass@1": 0.5}')
    (folder / "checkpoints/step_000001").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(megarl.load(QUICKSTART)))
    return folder


def test_a_run_reads_its_files(run_dir: Path) -> None:
    run = megarl.Run(run_dir)
    assert run.metrics["reward/mean"].tolist() == [0.25, 0.5]
    assert run.metrics.loc[1, "loss"] == 1.0
    assert run.metrics["loss"].isna().tolist() == [True, False]
    assert run.samples[0]["samples"][0]["text"] == "7"
    assert run.ledger == [{"step": 0, "ordinals": [3, 4], "dropped": [5]}]
    assert run.checkpoints == {1: run_dir / "checkpoints/step_000001"}
    assert run.evaluations == [{"version": 1, "pass@1": 0.5}]
    assert run.config.run_dir == str(run_dir)
    assert run.summary.startswith(f"{run_dir}: 2 steps")
    assert repr(run) == f"Run('{run_dir}'): 2 steps"


def test_metrics_are_lists_without_pandas(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    columns = megarl.Run(run_dir).metrics
    assert columns["reward/mean"] == [0.25, 0.5]
    assert list(columns) == [
        "step",
        "reward/mean",
        "loss",
        "sync/audit_ok",
    ]


def test_a_run_writes_the_page_of_its_report(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = megarl.Run(run_dir)
    assert run.report() == run_dir / "report.html"
    assert run.report(tmp_path / "page.html") == tmp_path / "page.html"
    assert "report.html: 0." in capsys.readouterr().out
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    with pytest.raises(megarl.ConfigError, match="--output .*page.txt: must end in .html"):
        run.report(tmp_path / "page.txt")


def test_a_run_is_exported_by_the_command(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        commands, "export", lambda plan, *arguments: calls.append((plan.config.run_dir, *arguments))
    )
    monkeypatch.chdir(ROOT)
    assert megarl.Run(run_dir).export(tmp_path / "hf", best=True) == tmp_path / "hf"
    assert calls == [(str(run_dir), str(tmp_path / "hf"), None, False, True)]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(megarl.ConfigError, match="full: is there already"):
        megarl.Run(run_dir).export(tmp_path / "full")


def test_a_run_is_stopped_through_its_launch_folder(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(megarl.ConfigError, match="megarl train has never run there"):
        megarl.Run(run_dir).stop()
    going: Any = running.RunningRun(str(run_dir), tmp_path, None)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(running, "find_run", lambda folder: going)
    megarl.Run(run_dir).stop()
    assert launcher.Meeting(tmp_path, Node(0, 1, "local"), 1.0, 1.0).asked_to_stop()


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        megarl.ConfigError,
        match="holds neither config.yaml nor metrics.jsonl: not the folder of a run",
    ):
        megarl.Run(tmp_path)
