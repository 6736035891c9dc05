"""The tracer that counts executed lines of Penstock in every process of a server, started through `sitecustomize`.

`count.py` has it imported in each process. Two commands: `c` clears the counts, `r` gives them. Lines inside of
LOCALITY_INSIDE (`path:function`, the end of a file's path) are counted a second time, by themselves.
"""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

from support.inside import answer_commands

MARK = f"{os.sep}penstock{os.sep}"

_place, _, _function = os.environ.get("LOCALITY_INSIDE", ":").rpartition(":")
_lines: dict[tuple[CodeType, int], int] = {}
_inside_lines: dict[tuple[CodeType, int], int] = {}
_ours: dict[CodeType, bool] = {}
_thread = threading.local()


def _is_entry(code: CodeType) -> bool:
    return code.co_name == _function and bool(_place) and code.co_filename.endswith(_place)


def _trace_call(frame: FrameType, event: str, argument: Any) -> Any:
    code = frame.f_code
    ours = _ours.get(code)
    if ours is None:
        ours = _ours[code] = MARK in code.co_filename and "site-packages" not in code.co_filename
    if not ours:
        return None
    if _is_entry(code):
        _thread.inside = True
        return _trace_entry
    return _trace_line


def _trace_line(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line":
        key = (frame.f_code, frame.f_lineno)
        _lines[key] = _lines.get(key, 0) + 1
        if getattr(_thread, "inside", False):
            _inside_lines[key] = _inside_lines.get(key, 0) + 1
    return _trace_line


def _trace_entry(frame: FrameType, event: str, argument: Any) -> Any:
    _trace_line(frame, event, argument)
    if event == "return":
        _thread.inside = False
    return _trace_entry


def _by_file(counts: dict[tuple[CodeType, int], int]) -> dict[str, dict[int, int]]:
    files: dict[str, dict[int, int]] = {}
    for (code, line), count in list(counts.items()):
        lines = files.setdefault(code.co_filename, {})
        lines[line] = lines.get(line, 0) + count
    return files


def _clear() -> None:
    _lines.clear()
    _inside_lines.clear()


def _report() -> dict[str, Any]:
    return {"all": _by_file(_lines), "inside": _by_file(_inside_lines)}


answer_commands({b"c": _clear, b"r": _report})
threading.settrace(_trace_call)
sys.settrace(_trace_call)
