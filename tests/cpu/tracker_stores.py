"""Reads a run's curves from each tracker's own local store, and the expected curves from
metrics.jsonl.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megarl.observe.metrics import METRICS_FILE, read_metrics

Curves = dict[str, list[tuple[int, float]]]


def curves_of(folder: Path, name: str = "tensorboard") -> Curves:
    """The curves in metrics.jsonl, in the form expected from the tracker `name`.

    TensorBoard keeps float32.
    """
    number_type = np.float32 if name == "tensorboard" else float
    curves: Curves = {}
    for row in read_metrics(folder / METRICS_FILE):
        for key, value in row.items():
            if key != "step" and not isinstance(value, list) and value == value:  # not NaN
                curves.setdefault(key, []).append((row["step"], float(number_type(value))))
    return curves


def read_tensorboard(folder: Path, run: str) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not (folder / "tb").exists():
        return {}
    board = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0}).Reload()
    return {
        key: [(event.step, event.value) for event in board.Scalars(key)]
        for key in board.Tags()["scalars"]
    }


def read_wandb(folder: Path, run: str) -> Curves:
    from wandb.proto.wandb_internal_pb2 import Record

    curves: Curves = {}
    for path in sorted(folder.glob(f"wandb/offline-run-*/run-{run}.wandb")):
        for data in log_records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                add(
                    curves,
                    record.history.step.num,
                    {key: value for key, value in items.items() if not key.startswith("_")},
                )
    return curves


def read_mlflow(folder: Path, run: str) -> Curves:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    assert client.get_run(run).data.params["model.path"] == "none"
    keys = {key.replace("_at_", "@"): key for key in client.get_run(run).data.metrics}
    return {
        key: sorted(
            (metric.step, metric.value) for metric in client.get_metric_history(run, mlflow_key)
        )
        for key, mlflow_key in keys.items()
    }


def read_swanlab(folder: Path, run: str) -> Curves:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    curves: Curves = {}
    for path in sorted(folder.glob(f"swanlog/run-*{run}/run-{run}.swanlab")):
        for data in log_records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "scalar":
                add(curves, record.scalar.step, {record.scalar.key: record.scalar.value.number})
    return curves


def read_trackio(folder: Path, run: str) -> Curves:
    import sqlite3

    (path,) = folder.glob("trackio/*.db")
    curves: Curves = {}
    for step, values in sqlite3.connect(path).execute(
        "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (run,)
    ):
        add(curves, step, json.loads(values))
    return curves


def add(curves: Curves, step: int, values: dict[str, float]) -> None:
    for key, value in values.items():
        curves.setdefault(key, []).append((step, float(value)))


def log_records(path: Path) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB; records with checksum, length,
    type (full, first, middle, last).
    """
    data = path.read_bytes()
    position = 7
    record = b""
    while position + 7 <= len(data):
        block_bytes = 32768 - position % 32768
        if block_bytes < 7:
            position += block_bytes
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


READERS = {
    "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow,
    "swanlab": read_swanlab, "trackio": read_trackio
}  # fmt: skip
