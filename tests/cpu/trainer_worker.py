"""The ranks of a real gloo trainer, for test_trainer.py: they run a list of scenarios and save what they saw.

    trainer_worker.py WORLD_SIZE RENDEZVOUS_FILE SCENARIOS_JSON OUT_DIR

Scenarios run one after another, up to the first that fails; each in ranks of its own, forked once everything is imported, as every gloo
group polls a hundred times a second for as long as its process lives. They write to OUT_DIR/world<size>.<rank>.log; what a scenario
function returns is saved as OUT_DIR/<scenario name>.<rank>.pt.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from megarl.algorithms.base import LossOutput
from megarl.config.schema import OptimizerConfig, TrainerConfig
from megarl.models.registry import load_spec
from megarl.models.routing import RoutingFormat
from megarl.topology import TrainerTopology
from megarl.trainer import cpu_support, hf_io
from megarl.types import TrainSequence

DENOMINATOR = 37.0
TEMPERATURE = 0.7


LENGTHS = (3, 10, 17, 5, 12, 19, 7, 14, 21, 1, 2)


def sequences(vocab: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[TrainSequence]:
    """Every third sequence has zero advantage. Some have an environment's tokens in the middle: masked, and garbage on them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, length in enumerate(lengths):
        prompt = max(1, min(1 + i % 3, length - 1))
        weights = torch.randn(length, generator=generator) if i % 3 else torch.zeros(length)
        mask = [j >= prompt and not (i % 2 and prompt + 2 <= j < prompt + 5) for j in range(length)]
        made.append(
            TrainSequence(
                token_ids=torch.randint(0, vocab, (length,), generator=generator).tolist(),
                loss_mask=mask,
                mu_logprobs=[0.0] * length,
                advantages=[w if j >= prompt else 0.0 for j, w in enumerate(weights.tolist())],
            )
        )
    return made


def scored(trainer: Any, batch: list[TrainSequence], **how: Any) -> list[list[float]]:
    return [row.tolist() for row in trainer.token_logprobs(batch, **how)]


def forced(batch: list[TrainSequence], routing: RoutingFormat) -> list[TrainSequence]:
    """With experts drawn at random: at all positions, in every fourth sequence at the first half only, in every fifth at none."""
    random, made = np.random.default_rng(3), []
    for i, sequence in enumerate(batch):
        positions = len(sequence.token_ids) - 1
        known = 0 if i % 5 == 4 else positions // 2 if i % 4 == 3 else positions
        ids = random.random((known, routing.shape[0], routing.num_experts)).argsort(axis=-1)[..., : routing.top_k]
        made.append(msgspec.structs.replace(sequence, routing=routing.pack(ids)))
    return made


def weighted_nll(logprobs: torch.Tensor, microbatch: Any) -> LossOutput:
    assert logprobs.dtype == torch.float32
    loss = -(microbatch.advantages * logprobs)[microbatch.loss_mask].sum()
    return LossOutput(loss, {"tokens": microbatch.loss_mask.sum(), "weights": microbatch.advantages.sum()})


def plain_adam(lr: float) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, clip_grad=0.0, weight_decay=0.01, eps=1e-4)


def make(scenario: dict[str, Any], optimizer: OptimizerConfig, total_steps: int = 10) -> Any:
    from megarl.trainer.step import MegatronTrainer

    return MegatronTrainer(
        load_spec(scenario["model"]),
        TrainerTopology(**scenario["topology"]),
        TrainerConfig(**{"logprob_chunk_tokens": 16, **scenario.get("trainer", {})}),  # several chunks of a microbatch
        scenario.get("dtype", "float32"),
        seed=1,
        total_steps=total_steps,
        timeout_s=60,
        optimizer=optimizer,
    )


def poison_padding(trainer: Any) -> None:
    """Large garbage in the rows that no token has: it must reach nothing."""
    parameters = trainer.local_parameters()
    for tensor in trainer.layout.tensors(dist.get_rank()):
        used = max((piece.local.end[0] for piece in tensor.pieces), default=0)
        parameters[tensor.name][used:] = 5.0


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """main_grad of every local parameter; NaN where, under the distributed optimizer, another rank has the sum."""
    found = {}
    from megarl.trainer.model import parameters_by_name

    t, here = trainer.topology, trainer.coordinate
    dense = (here.dp * t.cp + here.cp, t.dp * t.cp)
    expert = (dist.get_rank() // (t.etp * t.ep) % t.expert_dp, t.expert_dp) if trainer.spec.num_experts else dense
    buffers = [(b, dense) for chunk in trainer.ddp for b in chunk.buffers]
    buffers += [(b, expert) for chunk in trainer.ddp for b in chunk.expert_parallel_buffers]
    for name, parameter in parameters_by_name(trainer.chunks).items():
        if not parameter.requires_grad:  # a router's bias
            continue
        grad = parameter.main_grad.detach().float().clone()
        ((buffer, (rank, size)),) = [entry for entry in buffers if parameter in entry[0].param_index_map]
        if t.zero == 1 and size > 1:
            start, end, number = buffer.param_index_map[parameter]
            bucket = buffer.buckets[number]
            shard = bucket.grad_data.numel() // size
            position = torch.arange(start, end) - bucket.offset
            mine = (position >= rank * shard) & (position < (rank + 1) * shard)
            grad = torch.where(mine.view_as(grad), grad, torch.nan)
        found[name] = grad
    return found


def all_logprobs(trainer: Any, batch: list[TrainSequence], model: Any = "policy", temperature: float = 1.0) -> list[list[float]]:
    """Of all tokens, not only of those that the loss is about."""
    whole = [msgspec.structs.replace(s, loss_mask=[False] + [True] * (len(s.token_ids) - 1)) for s in batch]
    return scored(trainer, whole, model=model, temperature=temperature)


def one_step(trainer: Any, chosen: list[TrainSequence]) -> dict[str, Any]:
    result = trainer.train_step(chosen, weighted_nll, DENOMINATOR, temperature=TEMPERATURE)
    return {**vars(result), "grads": gradients(trainer)}


def scenario_gradients(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Logits, log-probs, gradients and the exported checkpoint at the weights of a HF checkpoint (learning rate 0)."""
    trainer = make(scenario, plain_adam(lr=0.0))
    trainer.load_hf(scenario["model"])
    trainer.export_hf(str(out / (scenario["name"] + ".hf")), scenario["model"])
    poison_padding(trainer)
    all_sequences = sequences(trainer.spec.vocab_size)
    found = {
        "all": one_step(trainer, all_sequences),
        "dropped": one_step(trainer, [s for s in all_sequences if any(s.advantages)]),
        "none": one_step(trainer, []),
        "logprobs": all_logprobs(trainer, all_sequences, temperature=TEMPERATURE),
        "masked_logprobs": scored(trainer, all_sequences, temperature=TEMPERATURE),
        "logits": logits(trainer, all_sequences[:1]),
    }
    trainer.max_tokens = 48  # several microbatches of different shapes
    found["microbatches"] = one_step(trainer, all_sequences)
    if trainer.routing:
        replayed = forced(all_sequences, trainer.routing)
        found["replayed"] = one_step(trainer, replayed)
        found["replayed_logprobs"] = all_logprobs(trainer, replayed, temperature=TEMPERATURE)
        found["afterwards"] = all_logprobs(trainer, all_sequences, temperature=TEMPERATURE)
    return found


def logits(trainer: Any, chosen: list[TrainSequence]) -> Any:
    """[1, t, vocab] of one sequence on the last stage, gathered over the tensor ranks; None elsewhere."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, gather_from_tensor_model_parallel_region

    from megarl.trainer import context
    from megarl.trainer.microbatch import build, plan_microbatches
    from megarl.trainer.model import output_weight

    stages = trainer.topology.pp if trainer.topology.vpp > 1 else 1
    (plan,) = plan_microbatches([len(chosen[0].token_ids)], 1, 1000, trainer.alignment, count_multiple=stages)

    def head(microbatch: Any, hidden: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
        whole = gather_from_sequence_parallel_region(hidden[0]) if trainer.sequence_parallel else hidden[0]
        z = gather_from_tensor_model_parallel_region(whole @ output_weight(trainer.chunks[-1]).T)
        return context.join(z, microbatch.plan.boundaries, parallel_state.get_context_parallel_group())[None]

    with torch.no_grad():
        results = trainer._run(plan, lambda p: build(p, chosen, trainer.device, routing=trainer.routing), head, forward_only=True)
    return results[0][:, : len(chosen[0].token_ids) - 1, : trainer.spec.vocab_size] if results else None


def scenario_lengths(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    from trainer_lengths import any_lengths

    return any_lengths(scenario)


def scenario_save(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, a third step; the reference model keeps the first weights."""
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    vocab = trainer.spec.vocab_size
    probe = sequences(vocab)
    start = all_logprobs(trainer, probe)
    trainer.hold_reference()
    for seed in (1, 2):
        one_step(trainer, sequences(vocab, seed=seed))
    checkpoint.save(trainer, scenario["checkpoint"], {"prompts": 17})
    after = all_logprobs(trainer, probe)
    found = {"start": start, "reference": all_logprobs(trainer, probe, model="reference"), "after": after}
    found["still"] = all_logprobs(trainer, probe)
    found |= continue_from(trainer, scenario, out)
    return found


def scenario_load(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    state = checkpoint.load(trainer, scenario["checkpoint"])
    return {"state": state, **continue_from(trainer, scenario, out)}


def scenario_other_settings(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """A checkpoint goes on with another configuration of the optimizer."""
    from megarl.trainer import checkpoint

    trainer = make(scenario, OptimizerConfig(**scenario["optimizer"]))
    checkpoint.load(trainer, scenario["checkpoint"])
    one_step(trainer, sequences(trainer.spec.vocab_size))
    return {"groups": [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]}


def continue_from(trainer: Any, scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """The third step, then one without sequences (momentum alone); the weights after each."""
    result = trainer.train_step(sequences(trainer.spec.vocab_size, seed=3), weighted_nll, DENOMINATOR, temperature=TEMPERATURE)
    trainer.export_hf(str(out / (scenario["name"] + ".3.hf")), scenario["model"])
    idle = trainer.train_step([], weighted_nll, DENOMINATOR)
    trainer.export_hf(str(out / (scenario["name"] + ".4.hf")), scenario["model"])
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "idle": (idle.loss, idle.grad_norm, idle.sums),
        "position": trainer.learning_rate.position,
        "random": torch.get_rng_state(),
    }


def scenario_init(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    trainer = make(scenario, plain_adam(lr=0.0))
    trainer.init_random(scenario["seed"])
    folder = str(out / (scenario["name"] + ".hf"))
    hf_io.export_hf(trainer.spec, trainer.layout, trainer.local_parameters(), folder, scenario["model"], max_file_bytes=20_000).finish()
    return {}


def scenario_train(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Four steps with everything on: warm-up, cosine, clipping, weight decay."""
    trainer = make(scenario, OptimizerConfig(**scenario["optimizer"]), total_steps=4)
    trainer.load_hf(scenario["model"])
    results = [trainer.train_step(sequences(trainer.spec.vocab_size, seed=seed), weighted_nll, DENOMINATOR) for seed in range(4)]
    trainer.export_hf(str(out / (scenario["name"] + ".hf")), scenario["model"])
    return {"rates": [r.learning_rate for r in results], "grad_norms": [r.grad_norm for r in results]}


def scenario_logprobs(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """linear_logprobs and its gradient, of hidden states that are logits: this rank's output layer is its slice of the unit matrix."""
    from megarl.kernels import linear_logprobs

    found = {}
    for name, (logits, targets, vocab_size, temperature) in torch.load(scenario["inputs"]).items():
        hidden = logits.clone().requires_grad_()
        weight = torch.eye(logits.size(1), dtype=logits.dtype).chunk(dist.get_world_size())[dist.get_rank()]
        logprobs, _ = linear_logprobs(hidden, weight, targets, dist.group.WORLD, vocab_size, temperature, chunk_tokens=4)
        (logprobs * torch.arange(1.0, targets.numel() + 1)).sum().backward()
        found[name] = (logprobs.detach(), hidden.grad)
    return found


def scenario_settings_on_gpus(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Megatron's configuration where CUDA is; in a process of its own, which may think so."""
    from megarl.trainer.model import transformer_config

    torch.cuda.is_available = lambda: True
    spec, topologies = load_spec(scenario["model"]), {vpp: TrainerTopology(pp=2, vpp=vpp) for vpp in (1, 2)}
    return {
        vpp: vars(transformer_config(spec, topology, torch.bfloat16, TrainerConfig(recompute=True))) for vpp, topology in topologies.items()
    }


def scenario_megatron_settings(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """What Megatron's own objects hold of `trainer.megatron`, `trainer.ddp` and `optimizer.megatron`."""
    from megarl.trainer.model import transformer_config

    trainer = make(scenario, OptimizerConfig(megatron=scenario["optimizer"]))
    trainer.load_hf(scenario["model"])
    one_step(trainer, sequences(trainer.spec.vocab_size))
    flash = transformer_config(trainer.spec, trainer.topology, trainer.dtype, TrainerConfig(megatron={"attention_backend": "flash"}))
    held = trainer.ddp[0].config, trainer.ddp[0].ddp_config, trainer.optimizer.chained_optimizers[0].config
    wanted = (scenario["trainer"]["megatron"], scenario["trainer"]["ddp"], scenario["optimizer"])
    found = [{name: getattr(each, name) for name in names} for each, names in zip(held, wanted, strict=True)]
    return {"held": found, "backend": flash.attention_backend.name}


def scenario_killed_while_saving(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Saves step 1, then dies by SIGKILL as soon as the folder of step 2 is being written."""
    from megarl.plan.checkpoints import checkpoint_path
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    root = scenario["run_dir"]
    checkpoint.save(trainer, str(checkpoint_path(root, 1)), {"step": 1})
    partial = checkpoint_path(root, 2).with_name(checkpoint_path(root, 2).name + ".partial")

    def kill() -> None:
        while not partial.exists():
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    checkpoint.save(trainer, str(checkpoint_path(root, 2)), {"step": 2})
    return {}


def scenario_saved_beside(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Saves and exports the same state twice: while steps are made, and alone. Then a save that rank 1 cannot write, and one more."""
    from megarl.trainer import checkpoint
    from megarl.trainer.checkpoint_state import SAVED, runs

    def state() -> dict[str, torch.Tensor]:
        return {f"{name} {kind}": run.values[kind].clone() for name, run in runs(trainer).items() for kind in SAVED}

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    batch = sequences(trainer.spec.vocab_size)
    one_step(trainer, batch)
    held = state()
    checkpoint.save(trainer, out / "alone", {"step": 1}, {"ledger.msgpack": b"of prompts"} if dist.get_rank() == 0 else {})
    trainer.export_hf(str(out / "alone.hf"), scenario["model"])
    files = {"ledger.msgpack": b"of prompts"} if dist.get_rank() == 0 else {}
    saving = checkpoint.begin(trainer, out / "beside", {"step": 1}, files, beside=True)
    export = trainer.begin_export(str(out / "beside.hf"), scenario["model"], beside=True)
    one_step(trainer, batch)
    one_step(trainer, batch)
    before_finish = [name for name in ("beside", "beside.hf") if (out / name).exists()]
    while not (saving.written() and export.written()):
        time.sleep(0.01)
    saving.finish()
    export.finish()
    moved = any(not torch.equal(now, held[name]) for name, now in state().items())
    assert checkpoint.load(trainer, out / "beside") == {"step": 1}
    loaded = state()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, most))
    failing, message = checkpoint.begin(trainer, out / "failing", {"step": 1}, beside=True), ""
    try:
        failing.finish()
    except RuntimeError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    checkpoint.begin(trainer, out / "after", {"step": 1}, beside=True).finish()
    left = [name for name in ("after", "alone", "beside", "beside.hf", "alone.hf", "failing", "failing.partial") if (out / name).exists()]
    found = {"there_before_finish": before_finish, "moved": moved, "message": message, "left": left}
    return {**found, "loaded": {n: v.tolist() for n, v in loaded.items()}, "held": {n: v.tolist() for n, v in held.items()}}


def scenario_saving(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Exports every second step, saves every third; export 2 is held back until checkpoint 3 could be complete. Then failures of rank 0."""
    from megarl.config.load import load_config
    from megarl.executors.saving import Saving
    from megarl.observe.trace import TraceWriter
    from megarl.plan.checkpoints import checkpoint_path, export_path
    from megarl.trainer import checkpoint
    from megarl.trainer.folders import Writing

    trainer, run_dir, held_back = make(scenario, plain_adam(lr=1e-2)), out / "run", threading.Event()
    trainer.load_hf(scenario["model"])
    keys = [f"run_dir={run_dir}", "max_steps=4", "checkpoint.every=3", "checkpoint.hf_every=2"]
    saving = Saving(load_config(scenario["config"], keys), trainer, TraceWriter(run_dir, f"trainer.{dist.get_rank()}"), saved=0)
    trainer.begin_export = lambda path, _, *, beside: Writing(path, lambda folder: held_back.wait() and None, beside=beside)
    export_path(run_dir, 2).mkdir(parents=True, exist_ok=True)  # left by a run that died before its checkpoint of step 2
    dist.barrier()
    saving.after_step(2, dict, last=False)
    found: dict[str, Any] = {"old_export": export_path(run_dir, 2).exists()}
    saving.after_step(3, dict, last=False)

    def release() -> None:
        time.sleep(1.0)
        found["checkpoint_before_export"] = checkpoint_path(run_dir, 3).exists()
        held_back.set()

    threading.Thread(target=release).start()
    saving.after_step(4, dict, last=True)
    found["there"] = [path(run_dir, step).exists() for path, step in ((export_path, 2), (checkpoint_path, 3), (checkpoint_path, 4))]
    del trainer.begin_export
    (out / "file").touch()
    failing = {"no_folder": lambda: checkpoint.begin(trainer, out / "file" / "step", {}, beside=True)}
    failing["no_configuration"] = lambda: trainer.export_hf(str(out / "hf"), scenario["model"] + ".gone")
    for name, fail in failing.items():
        try:
            fail()
        except RuntimeError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def scenario_full_disk(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """Saves step 1; then no file of rank 1 may grow beyond 64 KiB, and saving step 2 fails, as does an export. Step 1 is loaded again."""
    from megarl.plan.checkpoints import checkpoint_path
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    root = scenario["run_dir"]
    checkpoint.save(trainer, str(checkpoint_path(root, 1)), {"step": 1})
    probe = sequences(trainer.spec.vocab_size)
    before = all_logprobs(trainer, probe)
    one_step(trainer, probe)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, most))  # writing beyond it fails as on a full disk, with another number
    message = exported = ""
    try:
        checkpoint.save(trainer, str(checkpoint_path(root, 2)), {"step": 2})
    except RuntimeError as error:
        message = str(error)
    try:
        trainer.export_hf(str(out / "export"), scenario["model"])
    except RuntimeError as error:
        exported = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    dist.barrier()
    left = sorted(path.name for path in checkpoint_path(root, 2).parent.iterdir())
    checkpoint.load(trainer, str(checkpoint_path(root, 1)))
    return {"message": message, "exported": exported, "left": left, "before": before, "after": all_logprobs(trainer, probe)}


def scenario_damaged(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """What loading a checkpoint says when one of its files is damaged, by file and damage; and that it loads when all is mended."""
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    folder = Path(scenario["checkpoint"])
    checkpoint.save(trainer, folder, {"step": 1}, {"ledger.msgpack": b"of prompts"} if dist.get_rank() == 0 else {})
    said = {}
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        dist.barrier()  # all have read it before it is harmed
        for damage, harmed in damages(content).items():
            if dist.get_rank() == 0:
                file.unlink() if harmed is None else file.write_bytes(harmed)
            dist.barrier()
            try:
                checkpoint.load(trainer, folder)
                said[file.name, damage] = ""
            except RuntimeError as error:
                said[file.name, damage] = f"{type(error).__name__}: {error}"
            dist.barrier()
            if dist.get_rank() == 0:
                file.write_bytes(content)
    dist.barrier()
    return {"said": said, "whole": checkpoint.load(trainer, folder)}


def damages(content: bytes) -> dict[str, Any]:
    """None: the file is gone."""
    found: dict[str, Any] = {"missing": None, "empty": b"", "cut short": content[:-1], "longer": content + b"\0"}
    for place in sorted({0, len(content) // 3, len(content) // 2, len(content) - 1}):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        found[f"bit of byte {place}"] = bytes(flipped)
    return found


def scenario_ranks_differ(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """What saving says where the state is not what it must be: one element is changed on rank 1 alone, of what, and of which tensor."""
    from megarl.trainer import checkpoint
    from megarl.trainer.checkpoint_state import runs

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    one_step(trainer, sequences(trainer.spec.vocab_size))
    said = {}
    for kinds in scenario["kinds"]:
        run = runs(trainer)["decoder.final_layernorm.weight"]
        before = {kind: run.values[kind].clone() for kind in kinds}
        if dist.get_rank() == 1:
            for kind in kinds:
                run.values[kind][3] += 0.5
        try:
            checkpoint.save(trainer, out / "differing", {})
        except RuntimeError as error:
            said["+".join(kinds)] = f"{type(error).__name__}: {error}"
        for kind, values in before.items():
            run.values[kind].copy_(values)
    left = [path.name for path in out.glob("differing*")]
    checkpoint.save(trainer, out / "alike", {})
    return {"said": said, "left": left}


def scenario_disk_that_lies(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """On rank 1 the disk keeps another byte than was written."""
    from megarl.trainer import checkpoint

    trainer = make(scenario, plain_adam(lr=1e-2))
    trainer.load_hf(scenario["model"])
    written = os.posix_fadvise

    def lie(descriptor: int, *args: int) -> None:
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, 5000)[0] ^ 1]), 5000)
        written(descriptor, *args)

    if dist.get_rank() == 1:
        os.posix_fadvise = lie
    try:
        checkpoint.save(trainer, out / "lied", {})
        message = ""
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    os.posix_fadvise = written
    return {"message": message, "left": [path.name for path in out.glob("lied*")]}


def scenario_vendor_warns(scenario: dict[str, Any], out: Path) -> dict[str, Any]:
    """What comes of Megatron's own format of checkpoints, which loses elements of a tied embedding, and warns."""
    from megatron.core import parallel_state

    trainer = make(scenario, plain_adam(lr=1e-2))
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False, "dp_cp_group": group}
    model = {"model": trainer.chunks[0].sharded_state_dict(metadata=metadata)}
    try:
        trainer.optimizer.sharded_state_dict(model, metadata=metadata)
    except RuntimeError as error:
        return {"said": str(error)}
    return {"said": ""}


def main() -> None:
    world_size, rendezvous, scenarios, out = int(sys.argv[1]), sys.argv[2], json.loads(Path(sys.argv[3]).read_text()), Path(sys.argv[4])
    cpu_support.install()
    import torch._dynamo  # noqa: F401  which the first optimizer would import

    import megarl.trainer.step  # noqa: F401  takes seconds, and so once for all

    for number, scenario in enumerate(scenarios):
        ranks = [start(rank, world_size, f"{rendezvous}.{number}", scenario, out) for rank in range(world_size)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        if any(statuses):
            break
    print(json.dumps(statuses))


def start(rank: int, world_size: int, rendezvous: str, scenario: dict[str, Any], out: Path) -> int:
    """Process id."""
    if child := os.fork():
        return child
    status = 1
    try:
        log = os.open(out / f"world{world_size}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        run(rank, world_size, rendezvous, scenario, out)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)  # all is saved; taking the interpreter apart takes a second


def run(rank: int, world_size: int, rendezvous: str, scenario: dict[str, Any], out: Path) -> None:
    began = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=60)
    )
    found = globals()["scenario_" + scenario["run"]](scenario, out)
    torch.save(found, out / f"{scenario['name']}.{rank}.pt")
    print(f"{scenario['name']} {time.monotonic() - began:.2f} s", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
