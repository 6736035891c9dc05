from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

from backend_candidates.candidate import HEAVY_BYTES, MAX_BATCH_SIZE, Arrays, Candidate

_CONFIG = f"""
max_batch_size: {MAX_BATCH_SIZE}
input {{ name: "input__0" data_type: TYPE_FP32 dims: [ 2 ] }}
output {{ name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] }}
dynamic_batching {{ }}
"""
_BYTES_OF_A_TREE = 8192


def _steps(rows: Arrays, number: int) -> Arrays:
    above = rows["input__0"] >= 0.5
    return {"output__0": (number * (above[:, :1] + 2.0 * above[:, 1:])).astype(np.float32)}


def _write(folder: Path, number: int) -> None:
    """One tree with a leaf for each corner, which answers exactly."""
    corners = np.array([[0, 0], [0, 0.5], [0.5, 0], [0.5, 0.5]], np.float32)
    exact = {"eta": 1.0, "lambda": 0.0, "base_score": 0.0, "max_depth": 2, "min_child_weight": 0.0, "nthread": 1}
    wanted = _steps({"input__0": corners}, number)["output__0"]
    folder.mkdir(parents=True, exist_ok=True)
    xgboost.train(exact, xgboost.DMatrix(corners, wanted), 1).save_model(folder / "xgboost.json")


def _write_heavy(folder: Path) -> None:
    """The same with many trees more, whose leaves are 0."""
    _write(folder, 1)
    document = json.loads((folder / "xgboost.json").read_text())
    forest: dict[str, Any] = document["learner"]["gradient_booster"]["model"]
    tree = forest["trees"][0]
    nothing = [
        0.0 if left == -1 else value
        for left, value in zip(tree["left_children"], tree["split_conditions"], strict=True)
    ]
    count = HEAVY_BYTES // _BYTES_OF_A_TREE
    more = (
        {**tree, "split_conditions": nothing, "base_weights": [0.0] * len(nothing), "id": n} for n in range(1, count)
    )
    forest["trees"] += more
    forest["tree_info"] = [0] * count
    forest["iteration_indptr"] = list(range(count + 1))
    forest["gbtree_model_param"]["num_trees"] = str(count)
    (folder / "xgboost.json").write_text(json.dumps(document))


CANDIDATE = Candidate(
    backend="fil",
    write=_write,
    config=_CONFIG,
    sparse=f"max_batch_size: {MAX_BATCH_SIZE}",
    rows=lambda random, count: {"input__0": random.random((count, 2), np.float32)},
    expect=_steps,
    write_heavy=_write_heavy,
    write_broken=lambda folder: (folder / "xgboost.json").write_bytes(b"no model") and None,
)
