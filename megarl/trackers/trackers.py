"""Experiment trackers, each through its own library (observe.trackers).

They get the contents of metrics.jsonl: see `megarl.observe.tracking`.

A library is imported when its tracker is opened. It keeps its files in the run's folder, unless its
own environment variables name another place (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR and so
on).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megarl.config.errors import ConfigError
from megarl.observe.agreement import HISTOGRAM_EDGES

_PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "swanlab": "swanlab",
    "trackio": "trackio",
}


@dataclass(frozen=True)
class TrackerSettings:
    """The arguments for opening a tracker."""

    folder: Path  # the folder with metrics.jsonl
    project: str
    name: str  # name of the run
    config: Mapping[str, Any]  # all settings, nested
    run: str = ""  # the tracker's own id of the run to continue; empty: a new run
    entity: str | None = None  # owner of the project; None: the user
    tags: Sequence[str] = ()


class Tracker(Protocol):
    run: str  # id with which to continue the run

    def log(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[int]]
    ) -> None:
        """Adds values to a step: to a new step, or, when all rows have been sent, scores to an
        earlier one (W&B then takes only those of the last step).
        """
        ...

    def close(self) -> None: ...

    # A tracker that can show texts also has samples(step, columns, rows), for the step of its last
    # log.


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError for trackers whose packages are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        command = [sys.executable, "-m", "pip", "install"]
        for name in missing:
            command += _requirements(name)
        raise ConfigError(
            f"observe.trackers=[{', '.join(names)}]: {' and '.join(missing)} cannot be imported "
            f"here; install with: {shlex.join(command)}"
        )


def _requirements(name: str) -> list[str]:
    """The requirements of this package's extra `name`."""
    requirements = []
    for line in importlib.metadata.requires("megarl") or ():
        requirement, _, marker = line.partition(";")
        if re.search(rf"extra == ['\"]{name}['\"]", marker):
            requirements.append(requirement.strip())
    return requirements or [_PACKAGES[name]]


def _library(name: str) -> Any:
    """Imports a library by name, since an import statement would have types only if the extra is
    installed.
    """
    return importlib.import_module(name)


def open_tracker(name: str, settings: TrackerSettings) -> Tracker:
    return _KINDS[name](settings)


class _TensorBoard:
    """Writes event files to tb/, without torch. A new run replaces older files."""

    def __init__(self, settings: TrackerSettings):
        event = _library("tensorboard.compat.proto.event_pb2")
        summary = _library("tensorboard.compat.proto.summary_pb2")
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = settings.folder / "tb"
        if not settings.run:
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
        self.run = "tb"
        self._event = event.Event
        self._summary = summary.Summary
        self._writer = EventFileWriter(str(folder))

    def log(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[int]]
    ) -> None:
        entries = [
            self._summary.Value(tag=key, simple_value=value) for key, value in values.items()
        ]
        for key, counts in histograms.items():
            if len(counts) == len(HISTOGRAM_EDGES) + 1:
                histogram = _histogram(HISTOGRAM_EDGES, counts)
                entries.append(self._summary.Value(tag=key, histo=histogram))
        summary = self._summary(value=entries)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _histogram(edges: np.ndarray, counts: Sequence[int]) -> Any:
    """A histogram in TensorBoard's form.

    `counts` [n + 1]: values below, between and above [n] edges. Values count as the middles of
    their bins, values beyond the edges as the nearest edge.
    """
    limits = np.array([edges[0], *edges, edges[-1]])
    weights = np.array(counts, dtype=np.float64)
    middles = (limits[1:] + limits[:-1]) / 2
    return _library("tensorboard.compat.proto.histogram_pb2").HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=weights.sum(),
        sum=weights @ middles,
        sum_squares=weights @ middles**2,
        bucket_limit=[*edges, math.nextafter(edges[-1], math.inf)],
        bucket=weights.tolist(),
    )


class _Wandb:
    """Weights & Biases. Without an API key it keeps the run in wandb/; `wandb sync` uploads it."""

    def __init__(self, settings: TrackerSettings):
        wandb = _library("wandb")

        self.run = settings.run or secrets.token_hex(8)
        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False)
        self._table = wandb.Table
        self._run = wandb.init(
            **({"mode": "offline"} if offline else {}),
            project=settings.project,
            name=settings.name,
            group=settings.name,
            entity=settings.entity,
            tags=list(settings.tags),
            id=self.run,
            resume="allow",
            dir=str(settings.folder),
            config=dict(settings.config),
            settings=wandb.Settings(console="off"),
        )

    def log(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[int]]
    ) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log(
            {"samples": self._table(columns=list(columns), data=list(map(list, rows)))},
            step=step,
        )

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """MLflow.

    Without MLFLOW_TRACKING_URI it stores runs in mlflow.db. It allows no @ in a key, so pass@1
    becomes pass_at_1.
    """

    _PARAMS = 100  # most parameters in one call
    _OTHER = re.compile(r"[^\w.\- :/]")

    def __init__(self, settings: TrackerSettings):
        client = _library("mlflow").MlflowClient
        entities = _library("mlflow.entities")
        local = f"sqlite:///{(settings.folder / 'mlflow.db').resolve()}"
        self._client = client(os.environ.get("MLFLOW_TRACKING_URI") or local)
        self._metric = entities.Metric
        self._when = (-1, 0)
        if settings.run:
            self.run = settings.run
            self._client.update_run(self.run, "RUNNING")
            return
        experiment = self._client.get_experiment_by_name(settings.project)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(settings.project)
        run = self._client.create_run(
            experiment_id, run_name=settings.name, tags=dict.fromkeys(settings.tags, "")
        )
        self.run = run.info.run_id
        params = [
            entities.Param(self._OTHER.sub("_", key), text[:6000])
            for key, text in _flat(settings.config)
        ]
        for first in range(0, len(params), self._PARAMS):
            self._client.log_batch(self.run, params=params[first : first + self._PARAMS])

    def log(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[int]]
    ) -> None:
        if self._when[0] != step:
            # the same time if a step is sent again, which then changes nothing
            self._when = step, int(time.time() * 1000)
        _, time_ms = self._when
        metrics = [
            self._metric(self.key(key), value, time_ms, step) for key, value in values.items()
        ]
        self._client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.run)

    @classmethod
    def key(cls, key: str) -> str:
        return cls._OTHER.sub("_", key.replace("@", "_at_"))


class _Swanlab:
    """SwanLab. Without an API key it keeps the run in swanlog/; `swanlab sync` uploads it."""

    def __init__(self, settings: TrackerSettings):
        swanlab = _library("swanlab")

        self.run = settings.run or secrets.token_hex(10)
        offline = "SWANLAB_MODE" not in os.environ and not swanlab.Settings().api_key
        self._run = swanlab.init(
            **({"mode": "offline"} if offline else {}),
            project=settings.project,
            name=settings.name,
            group=settings.name,
            **({"workspace": settings.entity} if settings.entity else {}),
            **({"tags": list(settings.tags)} if settings.tags else {}),
            id=self.run,
            resume="allow",
            log_dir=str(settings.folder / "swanlog"),
            config=dict(settings.config),
            # no curves of the host's load
            settings=swanlab.Settings.model_validate(
                {"interactive": False, "probe": {"monitor": False}}
            ),
        )

    def log(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[int]]
    ) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """Trackio. Without TRACKIO_DIR and without a server of its own it stores runs in trackio/."""

    def __init__(self, settings: TrackerSettings):
        places = {"TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"}
        if places.isdisjoint(os.environ):
            # trackio reads it when it is imported
            os.environ["TRACKIO_DIR"] = str(settings.folder / "trackio")
        trackio = _library("trackio")

        # trackio finds runs by their names
        self.run = settings.run or f"{settings.name} {secrets.token_hex(4)}"
        self._run = trackio.init(
            project=settings.project,
            name=self.run,
            group=settings.name,
            resume="allow",
            config=dict(settings.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[int]]
    ) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


_KINDS: dict[str, type] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "swanlab": _Swanlab,
    "trackio": _Trackio,
}
