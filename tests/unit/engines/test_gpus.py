"""Counting GPUs without a driver's library."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.host.gpus import shown_gpus, visible_gpus


@pytest.fixture
def two_gpus(tmp_path: Path) -> Path:
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
    return tmp_path


def test_none_without_a_driver(tmp_path: Path) -> None:
    assert visible_gpus(tmp_path) == 0


@pytest.mark.parametrize(
    ("chosen", "count"), [(None, 2), ("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-abc", 1)]
)
def test_those_that_cuda_shows(two_gpus: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, count: int) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus(two_gpus) == count


@pytest.mark.parametrize(
    ("chosen", "shown"), [(None, [0, 1]), ("1,0", [1, 0]), ("GPU-abc, 1", ["GPU-abc", 1]), ("1,-1,0", [1]), ("", [])]
)
def test_which_they_are(monkeypatch: pytest.MonkeyPatch, chosen: str | None, shown: list[int | str]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert shown_gpus(2) == shown
