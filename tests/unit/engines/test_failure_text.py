"""What is said of a load that failed: one line, whatever was raised."""

from __future__ import annotations

import asyncio
import errno
import logging

import pytest

from penstock.engines.errors import EngineError, MemoryBudgetError, PenstockError, UnsupportedError
from penstock.engines.host.failure_text import as_load_error, failures_of, is_failure, load_failure, one_line

PLUGIN_TRACE = """Exception from src/inference/src/cpp/infer_request.cpp:246:
Exception from src/bindings/python/src/pyopenvino/core/infer_request.hpp:55:
Caught exception: Exception from src/plugins/intel_cpu/src/graph.cpp:1628:
Node PagedAttention_147 of type PagedAttention
Exception from src/plugins/intel_cpu/src/nodes/kernels/x64/brgemm_kernel.cpp:95:
kernel could not be made



"""
SCRIPT_TRACE = f"""The following operation failed in the TorchScript interpreter.
Traceback of TorchScript (most recent call last):
  File "<string>", line 3, in forward
{"    x = y" * 80}
        ~~~~~ <--- HERE
RuntimeError: sizes do not match
"""


class PanicException(BaseException):
    """As pyo3 makes one for each library."""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("all is said", "all is said"),
        (" first \n\n second\n", "first; second"),
        ("in a list:\n a\n b", "in a list: a; b"),
        (PLUGIN_TRACE, "Node PagedAttention_147 of type PagedAttention; kernel could not be made"),
        ("Exception from src/core/src/runtime/allocator.cpp:79:\nstd::bad_alloc\n\n", "std::bad_alloc"),
        (SCRIPT_TRACE, "RuntimeError: sizes do not match"),
        ("expected a key\n  a: [1\n     ^", "expected a key; a: [1"),
        ("a\x1b[31m red\x00 line", "a�[31m red� line"),
        ('Traceback (most recent call last):\n  File "x.py", line 1\nKeyError: 7', "KeyError: 7"),
    ],
)
def test_many_lines_become_one(text: str, line: str) -> None:
    assert one_line(text) == line


def test_a_line_keeps_both_ends_of_a_text_that_is_too_long() -> None:
    line = one_line("begin " + "x" * 10_000_000 + " end", 100)
    assert line.startswith("begin ")
    assert line.endswith(" end")
    assert len(line) <= 110


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("a\nb"), "RuntimeError: a; b (dtype bf16, weights int8, stage compile); try --dtype f32 or"),
        (KeyError("hidden_size"), "KeyError: 'hidden_size' (dtype"),
        (MemoryError(), "MemoryError (dtype bf16, weights int8, stage compile); try a smaller --kv-cache-memory"),
        (RuntimeError("std::bad_alloc"), "stage compile); try a smaller --kv-cache-memory"),
        (OSError(errno.ENOMEM, "no memory", "x"), "[Errno 12] no memory: 'x' (dtype"),
        (OSError(errno.ENOMEM, "no memory", "x"), "try a smaller --kv-cache-memory"),
        (PermissionError(errno.EACCES, "denied", "x"), "[Errno 13] denied: 'x' (dtype bf16, weights int8, stage"),
        (ImportError("no torch", name="torch._C"), "pip install 'penstock-server[torch]'"),
        (ValueError("dtype=f16 is not offered"), "dtype=f16 is not offered (dtype"),
        (UnsupportedError("ours says\nwhat to do"), "ours says; what to do"),
        (PanicException("range end index"), "PanicException: range end index"),
    ],
)
def test_the_line_says_what_with_which_settings_and_what_to_try(error: BaseException, line: str) -> None:
    told = load_failure(error, {"dtype": "bf16", "weights": "int8", "device": None}, "compile")
    assert line in told
    assert "\n" not in told
    assert isinstance(error, PenstockError) or told.endswith("; --log-level debug shows the trace")


def test_the_plainest_settings_are_not_advised_again() -> None:
    assert "try" not in load_failure(RuntimeError("x"), {"dtype": "f32", "weights": "auto"})


def test_the_trace_is_for_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert isinstance(as_load_error(RuntimeError("a\nb")), EngineError)
    [record] = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.exc_info is not None


def test_an_error_of_ours_stays_what_it_is() -> None:
    error = MemoryBudgetError("full", retry_after=3)
    assert as_load_error(error) is error
    with pytest.raises(MemoryBudgetError, match=r"^m: full$"), failures_of("m"):
        raise error
    with pytest.raises(EngineError, match=r"^model 'm' is broken$"), failures_of("m"):
        raise EngineError("model 'm' is broken")


def test_requests_to_end_are_no_failures() -> None:
    assert is_failure(PanicException())
    assert is_failure(ValueError())
    for error in (KeyboardInterrupt(), SystemExit(), asyncio.CancelledError(), GeneratorExit()):
        assert not is_failure(error)
        with pytest.raises(type(error)), failures_of("m"):
            raise error
