"""The planner against published rows: `python tests/tools/planner_validation.py` prints the tables
of docs/planner.md.

Constants are fitted on rows 1, 3, 5, … of each table; rows 2, 4, 6, … are predicted with them.
`--fit` fits again and prints the constants. The fit is least squares on log(predicted / measured).
A prior pulls every constant towards its first guess, because nine rows do not determine six
constants.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from planner_published import ASSUMED, FIT, FITTED, TABLES, Fit, Row

# First guesses, made before any row was seen, and the factor (one standard deviation) by which each
# may be wrong.
GUESSES = {
    "gemm_efficiency": (0.75, 1.2),
    "expert_pass_s": (1.0e-3, 2.0),
    "decode_layer_s": (40e-6, 2.0),
    "node_latency_s": (40e-6, 2.0),
    "switch_s": (15.0, 2.0),
    "glue_s": (3.0, 2.0),
    "vllm_request_s": (50e-6, 2.0),
}
UNFITTED = "NeMo-RL on GB200"
ROW_FACTOR = 1.3  # the expected error of a row


@dataclass(frozen=True)
class PredictedRow:
    row: Row
    held_out: bool
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_s / self.row.measured_s - 1


def results(constants: Fit = FIT) -> list[list[PredictedRow]]:
    """The results of all rows.

    LlamaRL's are scaled by one factor, the geometric mean over its fitted rows, because only ratios
    count.
    """
    rows = []
    for table in TABLES:
        predicted = [row.predict_s(constants) for row in table]
        factor = _ratio_factor(table, predicted) if table[0].table == "LlamaRL" else 1.0
        held_out = [bool(i % 2) or not _is_fitted(table) for i in range(len(table))]
        rows.append(
            [
                PredictedRow(row, is_held_out, factor * time)
                for row, is_held_out, time in zip(table, held_out, predicted)
            ]
        )
    return rows


def _is_fitted(table: Sequence[Row]) -> bool:
    """Leaves out NeMo-RL's runs on GB200.

    They take longer on 128 GPUs than on 64, so a resource limits them that the planner does not
    count.
    """
    return table[0].table != UNFITTED


def fit(rounds: int = 12, start: Fit | None = None) -> Fit:
    """Gauss-Newton in the logarithms of the constants, on the rows that are not held out.

    It begins at `start`, or else at the guesses.
    """
    guess = np.log([GUESSES[name][0] for name in FITTED])
    width = np.log([GUESSES[name][1] for name in FITTED])
    point = guess.copy() if start is None else np.log([getattr(start, name) for name in FITTED])
    for _ in range(rounds):
        residuals = _residuals(point)
        slope = np.stack(
            [(_residuals(point + 1e-4 * unit) - residuals) / 1e-4 for unit in np.eye(len(point))],
            axis=1,
        )
        matrix = np.concatenate([slope / math.log(ROW_FACTOR), np.diag(1 / width)])
        right = np.concatenate([residuals / math.log(ROW_FACTOR), (point - guess) / width])
        point = point - np.clip(np.linalg.lstsq(matrix, right, rcond=None)[0], -0.7, 0.7)
    return _constants(point)


def _constants(logarithms: np.ndarray) -> Fit:
    return replace(FIT, **dict(zip(FITTED, np.exp(logarithms).tolist())))


def _residuals(logarithms: np.ndarray) -> np.ndarray:
    """log(predicted / measured) of the fitted rows."""
    constants = _constants(logarithms)
    residuals = []
    for table in filter(_is_fitted, TABLES):
        rows = table[::2]
        predicted = [row.predict_s(constants) for row in rows]
        logs = [math.log(time / row.measured_s) for row, time in zip(rows, predicted)]
        mean = statistics.fmean(logs) if rows[0].table == "LlamaRL" else 0.0
        residuals += [value - mean for value in logs]
    return np.array(residuals)


def _ratio_factor(table: Sequence[Row], predicted: Sequence[float]) -> float:
    return math.exp(
        statistics.fmean(
            math.log(row.measured_s / time) for row, time in zip(table[::2], predicted[::2])
        )
    )


def median_error(tables: list[list[PredictedRow]], held_out: bool) -> float:
    """The median error over all tables with fitted rows."""
    rows = (result for table in tables if table[0].row.table != UNFITTED for result in table)
    return statistics.median(abs(result.error) for result in rows if result.held_out == held_out)


def misordered(table: Sequence[PredictedRow]) -> list[tuple[str, str]]:
    """Pairs of rows in which the planner predicts the wrong one to be faster."""
    pairs = [(a, b) for i, a in enumerate(table) for b in table[i + 1 :]]
    wrong = [
        (a, b)
        for a, b in pairs
        if (a.row.measured_s < b.row.measured_s) != (a.predicted_s < b.predicted_s)
    ]
    return [(a.row.name, b.row.name) for a, b in wrong]


def render(tables: list[list[PredictedRow]]) -> str:
    """Markdown."""
    lines = []
    for table in tables:
        name = table[0].row.table
        lines += [f"**{name}.** Assumed: {ASSUMED[name]}.", ""]
        lines += ["| row | use | published s | predicted s | error |", "|---|---|---|---|---|"]
        for r in table:
            use = "held out" if r.held_out else "fitted"
            lines.append(
                f"| {r.row.name} | {use} | {r.row.measured_s:.4g} | {r.predicted_s:.4g} | "
                f"{r.error:+.0%} |"
            )
        wrong = misordered(table)
        pairs = "; ".join(" and ".join(pair) for pair in wrong)
        lines += ["", f"Order wrong: {pairs}." if wrong else "Order: all pairs right.", ""]
    held_out_error = median_error(tables, True)
    fitted = median_error(tables, False)
    return "\n".join(
        [
            *lines,
            f"Median error without {UNFITTED}: {held_out_error:.0%} on held-out rows, {fitted:.0%} on "
            "fitted rows.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser("tests/tools/planner_validation.py", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants anew and print them")
    if parser.parse_args().fit:
        constants = fit()
        print(*(f"{name} = {getattr(constants, name):.3g}" for name in FITTED), sep="\n")
        return
    print(render(results()))


if __name__ == "__main__":
    main()
