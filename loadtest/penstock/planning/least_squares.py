"""Two small solvers, so that nothing needs SciPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

_ROUNDS = 12
_DIFFERENCE = 0.05
"""Of a parameter's logarithm: simulations move in steps, so a smaller one would measure these."""
_GOOD_ENOUGH = 1e-4


def nonnegative(matrix: Vector, target: Vector) -> list[float]:
    """x >= 0 with the least |matrix x - wanted|: terms that would be negative are left out, the worst first."""
    kept = list(range(matrix.shape[1]))
    while kept:
        solution = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        if solution.min() >= 0:
            break
        kept.pop(int(solution.argmin()))
    terms = [0.0] * matrix.shape[1]
    for index, term in zip(kept, solution if kept else (), strict=True):
        terms[index] = float(term)
    return terms


def minimize(errors: Callable[[Vector], Vector], start: Vector) -> Vector:
    """Levenberg and Marquardt's way to the least sum of squares of `errors`, with measured differences."""
    point, damping = start, 1e-2
    here = errors(point)
    for _ in range(_ROUNDS):
        columns = [(errors(point + step) - here) / _DIFFERENCE for step in np.eye(len(point)) * _DIFFERENCE]
        slope = np.stack(columns, axis=1)
        gain = 0.0
        for _ in range(4):
            normal = slope.T @ slope
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-6), -slope.T @ here)
            there = errors(point + np.clip(move, -1, 1))
            gain = float(here @ here - there @ there)
            if gain > 0:
                point, here, damping = point + np.clip(move, -1, 1), there, damping / 4
                break
            damping *= 8
        if gain < _GOOD_ENOUGH:
            break
    return point
