"""docs/extending.md, "A capability": the example is one folder, named in few lines of few files
outside it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Counts samples whose response repeats the prompt, which can fool a careless reward.
FOLDER = {
    "__init__.py": "",
    "settings.py": '''
from dataclasses import dataclass

from megarl.config.limits import at_least, setting

@dataclass
class EchoConfig:
    """A watch for responses that repeat their prompt."""

    letters: int | None = setting(None, "this many of the prompt's first letters make a response an echo; null: off", at_least(1))
''',
    "plan.py": """
def check_echo(config):
    if config.echo.letters is not None and config.rollout.max_tokens < 2:
        yield f"echo.letters={config.echo.letters}: must be null with rollout.max_tokens={config.rollout.max_tokens}"
""",
    "watch.py": """
from msgspec.structs import replace

def watched(rollout, echo):
    if echo.letters is None:
        return rollout

    async def run(context, prompt, sampling, n):
        begins = prompt.text[: echo.letters]
        samples = await rollout(context, prompt, sampling, n)
        echoes = [float(sample.text.startswith(begins)) for sample in samples]
        return [
            replace(sample, metrics=sample.metrics | {"echoed": echo})
            for sample, echo in zip(samples, echoes)
        ]

    return run
""",
}
ROLES = "from megarl.roles.settings import ChatTemplateConfig, RoleConfig\n"
TEACHERS = "from megarl.teachers.plan import check_distillation\n"
PROMPTS = "from megarl.data.rows import stops_on_text\n"
MODEL = "class RunConfig:\n"
TRUNK = {  # file → replaced text and its replacement
    "megarl/config/schema.py": {
        ROLES: "from megarl.echo.settings import EchoConfig\n" + ROLES,
        MODEL: MODEL + "    echo: EchoConfig = field(default_factory=EchoConfig)\n",
    },
    "megarl/plan/checks.py": {
        TEACHERS: "from megarl.echo.plan import check_echo\n" + TEACHERS,
        "    check_ranks,\n": "    check_ranks,\n    check_echo,\n",
    },
    "megarl/rollouts/rollout.py": {
        PROMPTS: PROMPTS + "from megarl.echo.watch import watched\n",
        "            task.rollout.name,\n            rollout,\n": (
            "            task.rollout.name,\n            watched(rollout, config.echo),\n"
        ),
    },
    "tests/unit/test_import_tiers.py": {
        "base config lora.settings": "base config echo lora.settings"
    },
}
# The fifth file, docs/config.md, is generated.
USE = """
import asyncio
from array import array
from megarl.base.rollout_types import Prompt, Sample
from megarl.config.reference import reference
from megarl.config.schema import RolloutConfig, RunConfig
from megarl.echo.settings import EchoConfig
from megarl.plan.checks import CONFIG_CHECKS, check_echo
from megarl.echo.watch import watched

print("echo.letters" in reference(), check_echo in CONFIG_CHECKS)
print(*check_echo(RunConfig(echo=EchoConfig(4), rollout=RolloutConfig(max_tokens=1))), *check_echo(RunConfig(echo=EchoConfig(4))))

async def rollout(context, prompt, sampling, n):
    return [Sample(array("i", [1]), array("f", [0.0]), array("i", [0]), text, 1.0, "stop") for text in ("What is it?", "7")]

samples = asyncio.run(watched(rollout, EchoConfig(4))(None, Prompt(0, [1], "What is 3+4?", "7"), None, 2))
print([sample.metrics for sample in samples], watched(rollout, EchoConfig()) is rollout)
"""


def test_capability_is_a_folder_and_few_lines_outside(tmp_path: Path) -> None:
    for folder in ("megarl", "kernels", "launch"):
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (tmp_path / "megarl/echo").mkdir()
    for name, text in FOLDER.items():
        (tmp_path / "megarl/echo" / name).write_text(text)
    for file, changes in TRUNK.items():
        text = (ROOT / file).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, (file, old)
            text = text.replace(old, new)
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        compile(text, file, "exec")  # importing rollout.py would take seconds
        (tmp_path / file).write_text(text)
    ran = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.stdout.splitlines() == [
        "True True",
        "echo.letters=4: must be null with rollout.max_tokens=1",
        "[{'echoed': 1.0}, {'echoed': 0.0}] True",
    ], ran.stderr
    assert len(TRUNK) + len(["docs/config.md"]) <= 5
