"""Replay of recorded traffic, with the real files' headers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.loadtest import workload
from penstock.loadtest.errors import LoadTestError
from support.workload import DEMO, calls, demo, joining, letters, saved, sessions, settings, write

MOONCAKE = [
    '{"timestamp": 27482, "input_length": 1500, "output_length": 52, "hash_ids": [46, 47, 2353]}',
    '{"timestamp": 27482, "input_length": 1300, "output_length": 26, "hash_ids": [46, 47, 2353]}',
    '{"timestamp": 30535, "input_length": 700, "output_length": 26, "hash_ids": [46, 48]}',
    '{"timestamp": 30536, "input_length": 1100, "output_length": 5, "hash_ids": [46]}',
    '{"timestamp": 30537, "input_length": 1100, "output_length": 5}',
]
BURSTGPT = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "2,ChatGPT,12,0,12,API log",
    "5,ChatGPT,472,18,490,Conversation log",
    "45,ChatGPT,1087,230,1317,Conversation log",
    "50,GPT-4,0,0,0,Conversation log",
    "118,GPT-4,417,276,693,Conversation log",
]
BURSTGPT_2 = [
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log",
    "19440161.5,,2,ChatGPT,36,29,65,API log",
]
AZURE_2023 = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
]
AZURE_2024 = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2024-05-10 00:00:00.009930+00:00,2162,5",
    "2024-05-10 00:00:01.017335+00:00,2399,6",
]


@pytest.mark.parametrize(
    ("lines", "name", "expected"),
    [
        (MOONCAKE[:3], "mooncake", [(0.0, 1500, 52), (0.0, 1300, 26), (3.053, 700, 26)]),
        (BURSTGPT, "burstgpt", [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276)]),
        (BURSTGPT_2, "burstgpt", [(0.0, 906, 446), (51.5, 36, 29)]),
        (AZURE_2023, "azure", [(0.0, 374, 44), (4.314579, 396, 109)]),
        (AZURE_2024, "azure", [(0.0, 2162, 5), (1.007405, 2399, 6)]),
    ],
)
def test_every_format_is_recognised_and_gives_times_and_lengths(
    lines: list[str], name: str, expected: list[tuple[float, int, int]], tmp_path: Path
) -> None:
    path = write(tmp_path, "trace", *lines)
    for trace_format in ("auto", name):
        found = sessions(trace=path, trace_format=trace_format, tokenizer=str(DEMO))
        assert [session.at for session in found] == pytest.approx([at for at, *_ in expected], abs=1e-6)
        sent = [session.calls[0] for session in found]
        assert [(call.prompt_tokens, call.output_tokens) for call in sent] == [tuple(more) for _, *more in expected]
        assert [len(demo().encode(call.prompt).ids) for call in sent] == [tokens for _, tokens, _ in expected]


def test_a_speed_of_four_divides_the_times(tmp_path: Path) -> None:
    found = sessions(trace=write(tmp_path, "trace", *BURSTGPT), trace_speed=4)
    assert [session.at for session in found] == [0.0, 10.0, 28.25]


def test_failed_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    found = workload.build(settings(trace=write(tmp_path, "trace", *BURSTGPT)))
    assert len(list(found)) == 3
    assert found.skipped == 2


@pytest.mark.parametrize("values", [{}, {"tokenizer": str(DEMO)}, {"tokenizer": str(DEMO), "token_ids": True}])
def test_equal_hash_ids_are_equal_blocks_and_others_are_not(values: dict[str, Any], tmp_path: Path) -> None:
    sent = calls(trace=write(tmp_path, "trace", *MOONCAKE), **values)
    units = [call.prompt if isinstance(call.prompt, list) else str(call.prompt).split(" ") for call in sent]
    assert [len(one) for one in units] == [1500, 1300, 700, 1100, 1100]
    assert units[0][:1300] == units[1], "the last block of the second is the beginning of the first's"
    assert units[0][:512] == units[2][:512] == units[3][:512] != units[4][:512]
    assert units[0][512:516] != units[2][512:516]
    assert units[3][512:516] not in (units[0][512:516], units[2][512:516]), "tokens without a hash id are nobody else's"


def test_requests_without_blocks_are_all_different(tmp_path: Path) -> None:
    path = write(tmp_path, "trace", BURSTGPT[0], *["1,GPT-4,1,1,2,API log"] * 150)
    assert len({call.prompt for call in calls(trace=path)}) == 150, "one word each, and no word twice"


def test_blocks_of_other_sizes(tmp_path: Path) -> None:
    path = write(tmp_path, "trace", '{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 1]}')
    (call,) = calls(trace=path, trace_block=16)
    words = str(call.prompt).split(" ")
    assert words[:8] == words[32:] != words[16:24]
    with pytest.raises(LoadTestError, match="line 1: 3 hash_ids are too many for 40 tokens in blocks of 512"):
        calls(trace=path)


@pytest.mark.parametrize("make", [demo, joining, letters])
@pytest.mark.parametrize("tokens", [1, 16, 17, 320, 325])
def test_blocks_are_exact_for_every_tokenizer(make: Callable[[], Tokenizer], tokens: int, tmp_path: Path) -> None:
    blocks = list(range(-(-tokens // 16)))
    row = {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": blocks}
    path = write(tmp_path, "trace", json.dumps(row))
    (call,) = calls(trace=path, trace_block=16, tokenizer=saved(make(), tmp_path))
    assert len(make().encode(call.prompt).ids) == tokens == call.prompt_tokens


def test_times_without_a_zone_know_no_summer_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TZ", "EST5EDT,M3.2.0,M11.1.0")
    time.tzset()
    try:
        lines = [AZURE_2023[0], "2023-11-05 00:30:00.0000000,5,5", "2023-11-05 02:30:00.0000000,5,5"]
        assert [session.at for session in sessions(trace=write(tmp_path, "trace", *lines))] == [0.0, 7200.0]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_rows_are_read_as_they_are_sent(tmp_path: Path) -> None:
    path = write(tmp_path, "trace", *BURSTGPT, "bad", *BURSTGPT[1:])
    found = workload.build(settings(trace=path))
    assert len(list(islice(found, 3))) == 3
    with pytest.raises(LoadTestError, match="trace, line 7: not a row of a burstgpt trace: 'bad'"):
        next(found)
    assert len(sessions(trace=path, requests=2)) == 2


def test_tensors_have_the_times_alone(tmp_path: Path) -> None:
    found = sessions("kserve-http", trace=write(tmp_path, "trace", *AZURE_2023))
    assert [(session.at, session.calls[0].prompt) for session in found] == [(0.0, ""), (pytest.approx(4.314579), "")]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["a,b,c"], "its first line is of no known format: 'a,b,c'"),
        ([""], "its first line is of no known format"),
        ([*MOONCAKE, '{"timestamp": 1}'], "line 6: .*missing required field `input_length`"),
        (['{"timestamp": 0, "input_length": -5, "output_length": 1}'], "line 1: Expected `int` >= 0"),
        ([*MOONCAKE, MOONCAKE[0]], "line 6: earlier than the request before it"),
        ([*AZURE_2023, "", "yesterday,1,1"], "line 5: not a row of a azure trace: 'yesterday,1,1'"),
        ([*BURSTGPT, "200,GPT-4,7"], "line 7: not a row of a burstgpt trace: '200,GPT-4,7'"),
        ([BURSTGPT[0]], "trace has no requests"),
        (["TIMESTAMP,NumImages,ContextTokens,GeneratedTokens"], "its requests have images, which are not sent"),
    ],
)
def test_bad_files(lines: list[str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=problem):
        calls(trace=write(tmp_path, "trace", *lines))


def test_more_bad_files(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"trace: .*none: No such file"):
        calls(trace=str(tmp_path / "none"))
    with pytest.raises(LoadTestError, match="a azure trace has a column 'TIMESTAMP', this one has"):
        calls(trace=write(tmp_path, "burst", *BURSTGPT), trace_format="azure")
    (tmp_path / "latin").write_bytes(json.dumps({"timestamp": "\xff"}, ensure_ascii=False).encode("latin-1"))
    with pytest.raises(LoadTestError, match="latin: not UTF-8"):
        calls(trace=str(tmp_path / "latin"))
