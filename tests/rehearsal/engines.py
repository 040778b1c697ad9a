"""Resolves SGLang's arguments for a run's engines, as on a GPU that this machine does not have.

    python tests/rehearsal/engines.py H100|B200 CONFIG…

prints for each config what SGLang chooses. Exit status 1 if it refuses a config; 2, with one line,
without the packages of requirements/gpu.txt.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import pretended_cuda

SHOWN = ("attention_backend", "prefill_attention_backend", "decode_attention_backend",
    "sampling_backend", "moe_runner_backend",
         "fp8_gemm_runner_backend", "grammar_backend", "kv_cache_dtype", "page_size",
         "chunked_prefill_size", "cuda_graph_max_bs",
         "mem_fraction_static", "disable_cuda_graph", "disable_radix_cache",
         "quantization")  # fmt: skip


def main(gpu: str, configs: list[str]) -> int:
    if importlib.util.find_spec("sgl_kernel") is None:
        print(
            "engines' arguments as on a GPU: not resolved, since SGLang's packages for GPUs are "
            "not installed (make setup-gpu)"
        )
        return 2
    pretended_cuda.preload()
    pretended_cuda.pretend(
        pretended_cuda.Record(), {"H100": pretended_cuda.H100, "B200": pretended_cuda.B200}[gpu]
    )
    from megarl.config.load import load_config
    from megarl.generator.server import EngineKeys, server_command
    from megarl.launch.start import NodePart
    from megarl.plan.resolve import resolve

    failed = 0
    for config in configs:
        try:
            plan = resolve(load_config(config, []))
            node = types.SimpleNamespace(
                plan=plan, _adapter=lambda device: None, _place=lambda part: {"port": 30000}
            )
            settings = NodePart._settings(node, None, "cuda")  # type: ignore[arg-type]
            arguments = json.loads(
                server_command(settings, EngineKeys("a", "b"), plan.config.generator.server_args)[
                    0
                ][-1]
            )
            from sglang.srt.server_args import ServerArgs

            arguments = ServerArgs(
                **arguments | {"model_path": str(Path(plan.config.model.spec or "").parent)},
                api_key="a",
                admin_api_key="b",
            )
            arguments.resolve_once()
            resolved = arguments.resolved_dict()
            print(
                config,
                gpu,
                json.dumps(
                    {name: resolved[name] for name in SHOWN if resolved.get(name) is not None}
                ),
            )
        except Exception:
            traceback.print_exc()
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
