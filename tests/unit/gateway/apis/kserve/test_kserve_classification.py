"""Outputs as their best classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, InvalidRequestError
from penstock.gateway.apis.kserve.classification import Labels, classified
from support.kserve import identity


def classes(
    values: list[Any], count: int, *, dtype: Any = np.float32, batched: bool = False, labels: tuple[str, ...] = ()
) -> Any:
    tensor = Tensor("OUT", "FP32", np.array(values, dtype))
    found = classified(tensor, count, batched=batched, labels=labels)
    assert found.datatype == "BYTES"
    return found.array.tolist()


def test_the_best_classes_come_first_with_six_decimals() -> None:
    assert classes([0.1, 0.7, 0.2], 2) == [b"0.700000:1", b"0.200000:2"]


def test_labels_are_added_where_there_are_some() -> None:
    assert classes([1, 3, 2], 3, labels=("cat", "dog")) == [b"3.000000:1:dog", b"2.000000:2", b"1.000000:0:cat"]


def test_integers_have_no_decimals() -> None:
    assert classes([1, 200, 3], 1, dtype=np.uint8) == [b"200:1"]
    assert classes([-5, -1], 2, dtype=np.int64) == [b"-1:1", b"-5:0"]


def test_each_entry_of_a_batch_is_classified() -> None:
    assert classes([[1, 2], [4, 3]], 1, batched=True) == [[b"2.000000:1"], [b"4.000000:0"]]


def test_more_classes_than_elements_give_all_elements() -> None:
    assert len(classes([1, 2], 1000)) == 2


def test_equal_values_come_by_index() -> None:
    assert classes([5, 5, 5, 1], 2) == [b"5.000000:0", b"5.000000:1"]
    assert classes([5, 5, 5], 3) == [b"5.000000:0", b"5.000000:1", b"5.000000:2"]


def test_nan_is_never_better_than_a_number() -> None:
    found = classes([float("nan"), 1, float("inf")], 3)
    assert found[:2] == [b"inf:2", b"1.000000:1"]
    assert found[2].endswith(b":0")


def test_half_precision_is_classified_too() -> None:
    assert classes([0.5, 2], 1, dtype=np.float16) == [b"2.000000:1"]
    assert classes([0.5, 2], 1, dtype=ml_dtypes.bfloat16) == [b"2.000000:1"]


def test_an_empty_batch_has_no_classes() -> None:
    tensor = Tensor("OUT", "FP32", np.empty((0, 4), np.float32))
    assert classified(tensor, 2, batched=True).array.size == 0


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL"])
def test_what_has_no_order_is_refused(datatype: str) -> None:
    tensor = Tensor("OUT", datatype, np.array([True]))
    with pytest.raises(InvalidRequestError, match="class result not available for output 'OUT'"):
        classified(tensor, 1, batched=False)


async def test_labels_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    model = identity("FP32", output_extra='label_filename: "labels.txt"', folder=tmp_path)
    labels = Labels()
    assert await labels.of(model, "OUTPUT0") == ("cat", "dog")
    (tmp_path / "labels.txt").unlink()
    assert await labels.of(model, "OUTPUT0") == ("cat", "dog")


async def test_outputs_without_a_file_have_no_labels(tmp_path: Path) -> None:
    assert await Labels().of(identity("FP32", folder=tmp_path), "OUTPUT0") == ()


@pytest.mark.parametrize("name", ["missing.txt", "../outside.txt", "binary.txt"])
async def test_bad_label_files_end_only_the_request(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside.txt").write_text("secret")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "binary.txt").write_bytes(b"\xff\xfe\xff")
    model = identity("FP32", output_extra=f'label_filename: "{name}"', folder=folder)
    with pytest.raises(EngineError) as caught:
        await Labels().of(model, "OUTPUT0")
    assert str(tmp_path) not in caught.value.message
