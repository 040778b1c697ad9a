"""A whole run that trains adapters, killed and resumed; and its exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_tools import OVERRIDES, make_model, rows, run, started, succeed, wait_until

from megarl.plan.checkpoints import complete_checkpoints

pytestmark = pytest.mark.timeout(900)


@pytest.mark.long
def test_a_killed_run_goes_on_with_its_adapters(tmp_path: Path) -> None:
    """With a KL penalty, whose reference is the model without adapters.

    At every other version the probe shows that the engines sample from the trainer's weights.
    """
    model = make_model(tmp_path / "model")
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    settings = [
        "configs/examples/lora.yaml", f"model.path={model}", "model.random_init=false",
        f"run_dir={run_dir}", *OVERRIDES,
        "algorithm.kl_coef=0.05", "lora.rank=4", "trainer.optimizer.lr=1e-2",
    ]  # fmt: skip
    with started(["train", *settings], log) as process:
        wait_until(
            lambda: any(step >= 2 for step, _ in complete_checkpoints(run_dir)),
            process,
            "second step's checkpoint",
        )
    assert (
        "Adapters: rank 4, alpha 32, of all linear layers, A random by seed 0, B zero; the "
        "weights are frozen" in log.read_text()
    )
    assert "Adapters: sent alone, into the memory from which SGLang serves them" in log.read_text()
    again = succeed(["train", *settings])
    assert f"Adapters: rank 4, of what the run began with, model.path={model}" in again.stdout
    table = rows(run_dir)
    assert [row["step"] for row in table] == list(range(6)) and all(
        row["sync/audit_ok"] for row in table
    )
    sent = [row["sync/bytes"] for row in table]
    assert max(sent) == sent[0] > 10 * min(sent) and len(set(sent)) == 2, (
        "everything when a process begins, then adapters alone"
    )
    probed = [row["logprob/abs_diff_mean"] for row in table if "logprob/abs_diff_mean" in row]
    assert len(probed) >= 2 and max(probed) < 1e-5
    _, checkpoint = complete_checkpoints(run_dir)[-1]
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in checkpoint.rglob("*")) < weights
    merged = tmp_path / "merged"
    adapter = tmp_path / "adapter"
    for output, options in ((merged, []), (adapter, ["--lora"])):
        succeed(["export", *settings, "--output", str(output), *options])
    assert json.loads((adapter / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(model)
    assert_same_logits(model, merged, adapter)
    resumed = succeed(
        [
            "train",
            *settings,
            f"run_dir={tmp_path}/second",
            f"lora.init={adapter}",
            "lora.sync=merge",
            "max_steps=1",
            "algorithm.kl_coef=0",
        ]
    )
    assert f"of all linear layers, lora.init={adapter}; the weights" in resumed.stdout, (
        resumed.stderr
    )
    refused = run(["train", *settings, "lora.alpha=16"])
    assert refused.returncode == 2 and "lora.alpha=16.0: the run in run_dir" in refused.stderr
    (file,) = model.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    # The fingerprint has the second; only the checkpoint's hashes of all weights have the first.
    for place, status, message in (
        (-1, 1, "Its adapters belong to the weights that were in"),
        (len(content) // 2, 2, "holds other weights now"),
    ):
        content[place] ^= 1
        file.write_bytes(content)
        refused = run(["train", *settings, "max_steps=7"])
        assert refused.returncode == status and message in refused.stdout + refused.stderr


def assert_same_logits(model: Path, merged: Path, adapter: Path) -> None:
    """The merged export and transformers with PEFT's adapter give the same logits, which differ
    from the model's.
    """
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(10)[None]
    plain, merged_model = (
        AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (model, merged)
    )
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)(
        tokens
    ).logits
    torch.testing.assert_close(adapted, merged_model, rtol=0, atol=1e-5)
    assert (merged_model - plain).abs().max() > 1e-3
