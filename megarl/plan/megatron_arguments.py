"""Reads the fields of Megatron's configuration classes from the source of the installed megatron-core."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
from collections.abc import Mapping

from megarl.plan.vendor_arguments import Argument, as_type, fields_of, package_folder

CLASSES = {  # key of the run's config → the classes whose fields its names are
    "trainer.megatron": (("model_parallel_config.py", "ModelParallelConfig"), ("transformer/transformer_config.py", "TransformerConfig")),
    "trainer.ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "trainer.optimizer.megatron": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}


ATTENTION_BACKENDS = ("flash", "fused", "unfused", "local", "auto")  # the names of megatron.core.transformer.enums.AttnBackend


def version() -> str:
    return importlib.metadata.version("megatron-core")


@functools.cache
def arguments(key: str) -> Mapping[str, Argument]:
    """All fields by name; empty if Megatron is not installed, as on a machine that only plans."""
    root = package_folder("megatron.core")
    found: dict[str, Argument] = {}
    for file, name in CLASSES[key] if root else ():
        assert root is not None
        for block in ast.parse((root / file).read_text()).body:
            if isinstance(block, ast.ClassDef) and block.name == name:
                found |= {field: _argument(hint) for field, hint in fields_of(block)}
    return found


def _argument(hint: ast.expr) -> Argument:
    annotation = ast.unparse(hint)
    return Argument(str, annotation, ATTENTION_BACKENDS) if annotation == "AttnBackend" else Argument(as_type(hint), annotation)
