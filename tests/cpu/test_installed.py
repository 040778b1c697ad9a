"""The installed SGLang and transformers: MegaRL's statements about them, made without an import,
are true; and a user's process can import transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from sglang_engine import ENGINES

from megarl.plan import vendor_settings

ROOT = Path(__file__).parents[2]


def print_server_args() -> None:
    """Runs in a process that has imported SGLang."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    print(*(field.name for field in msgspec.structs.fields(ServerArgs)))


def test_table_of_arguments_is_what_sglang_takes(
    tmp_path: Path,
) -> None:
    with open(tmp_path / "names", "wb") as output:
        process = ENGINES.start("test_installed:print_server_args", [], {}, output)
    assert psutil.wait_procs([process], timeout=120)[1] == []
    sglang_names = (tmp_path / "names").read_text().split()
    assert set(vendor_settings.vendor_arguments("sglang", "generator.server_args")) == {
        name for name in sglang_names if not name.startswith("_")
    }
    # another name of tp_size
    parsed_names = {
        *vendor_settings.SGLANG_BY_KEY,
        *vendor_settings.SET_BY_LAUNCHER,
        *vendor_settings.SGLANG_REFUSED,
    } - {"tp"}
    assert parsed_names <= set(sglang_names)
    untyped = [
        name
        for name, argument in vendor_settings.vendor_arguments(
            "sglang", "generator.server_args"
        ).items()
        if argument.type is Any
    ]
    assert len(untyped) < 5, untyped


TO_HF_AND_BACK = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
config = AutoConfig.from_pretrained("configs/models/tiny-llama")
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = AutoTokenizer.from_pretrained("configs/models/tiny-llama")("1+2=", return_tensors="pt").input_ids
print(*model(ids).logits.shape)
"""


def test_transformers_can_load_a_model_in_this_environment(tmp_path: Path) -> None:
    """In a user's process, without MegaRL's replacements for missing packages.

    It failed while torchvision's wheel for CUDA was installed.
    """
    result = subprocess.run(
        [sys.executable, "-c", TO_HF_AND_BACK, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, (
        f"{result.stderr}\nIs .venv older than requirements/cpu.txt? make setup"
    )
    tokens = 5
    vocabulary = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    assert result.stdout == f"1 {tokens} {vocabulary}\n"
