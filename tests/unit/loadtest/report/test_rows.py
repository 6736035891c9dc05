"""One line for each request."""

from __future__ import annotations

import csv
import io

from penstock.loadtest.messages import Sample
from penstock.loadtest.report.write import COLUMNS, to_csv


def rows(samples: list[Sample], *, open_loop: bool = False) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(samples, open_loop=open_loop))))


def test_figures_of_each_request(samples: list[Sample]) -> None:
    first, second, third, failed, cut = rows(list(reversed(samples)))
    assert first == {
        "index": "0",
        "tag": "chat",
        "intended_s": "1.0",
        "sent_s": "1.0",
        "ttft_ms": "100.0",
        "tpot_ms": "166.667",  # 500 ms for the three tokens after the first piece
        "itl_p50_ms": "250.0",
        "itl_p99_ms": "299.0",
        "itl_max_ms": "300.0",
        "e2e_ms": "1000.0",
        "prompt_tokens": "10",
        "output_tokens": "5",
        "finish_reason": "length",
        "error": "",
    }
    assert second["ttft_ms"] == "300.0"
    assert (third["tpot_ms"], third["itl_max_ms"], third["prompt_tokens"]) == ("", "", "7")
    assert (failed["error"], failed["ttft_ms"]) == ("http_503", "")
    assert cut["error"] == "interrupted"


def test_open_loop_counts_from_the_intended_moment(samples: list[Sample]) -> None:
    assert rows(samples, open_loop=True)[1]["ttft_ms"] == "800.0"


def test_texts_of_others_stay_texts() -> None:
    sample = Sample(index=0, intended=0, sent=0, ended=1, tag='a,"b"\nc', finish_reason="=1+1")
    (row,) = rows([sample])
    assert row["tag"] == 'a,"b"\nc'
    assert row["finish_reason"] == "'=1+1"


def test_no_requests_leave_the_heading() -> None:
    assert to_csv([], open_loop=False) == ",".join(COLUMNS) + "\n"
