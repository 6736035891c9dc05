"""`penstock top`: rates and quantiles from pages of metrics, and what is shown of them."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from rich.console import Console

from penstock.gateway.cli import main
from penstock.gateway.commands.top.readings import ModelLine, Reading, Readings, RequestLine, TenantLine, quantile
from penstock.gateway.commands.top.view import Picture, PlainLines, TerminalTables

INFINITE = float("inf")


def page(
    tokens: float, *, vllm: bool = False, first_tokens: tuple[int, int] = (0, 0), tenants: str = "", ready: int = 1
) -> str:
    """`first_tokens`: how many came within 10 ms and within 100 ms."""
    if vllm:
        return (
            f'vllm:num_requests_running{{model_name="m"}} 2\nvllm:generation_tokens_total{{model_name="m"}} {tokens}\n'
        )
    quick, all_of_them = first_tokens
    return f"""\
penstock_engine_ready{{model="m"}} {ready}
penstock_requests_running{{model="m"}} 3
penstock_requests_waiting{{model="m"}} 1
penstock_kv_cache_usage_ratio{{model="m"}} 0.25
penstock_generation_tokens_total{{model="m"}} {tokens}
penstock_prefix_cache_queries_total{{model="m"}} {tokens}
penstock_prefix_cache_hits_total{{model="m"}} {tokens / 2}
penstock_time_to_first_token_seconds_bucket{{model="m",le="0.01"}} {quick}
penstock_time_to_first_token_seconds_bucket{{model="m",le="0.1"}} {all_of_them}
penstock_time_to_first_token_seconds_bucket{{model="m",le="+Inf"}} {all_of_them}
{tenants}"""


def readings(*pages: str, seconds: float = 1.0) -> Readings:
    kept = Readings()
    for number, text in enumerate(pages):
        kept.add(Reading.parsed(text, number * seconds))
    return kept


def test_rates_are_those_between_the_readings() -> None:
    [model] = readings(page(100), page(150), page(300)).models()
    assert (model.running, model.waiting, model.cache_share) == (3, 1, 0.25)
    assert model.output_rate == 100
    assert model.hit_share == 0.5
    assert model.ready


def test_one_reading_has_no_rates() -> None:
    [model] = readings(page(100, ready=0)).models()
    assert (model.output_rate, model.hit_share, model.ttft) == (0, None, None)
    assert not model.ready


def test_rates_are_about_the_last_ten_seconds() -> None:
    kept = readings(*(page(1000) for _ in range(5)), *(page(1000 + 10 * n) for n in range(30)))
    assert kept.seconds == 10
    assert kept.models()[0].output_rate == 10


def test_a_server_that_has_restarted_begins_again() -> None:
    kept = readings(page(1000), page(2000), page(5))
    assert kept.seconds == 0
    assert kept.models()[0].output_rate == 0


def test_quantiles_are_those_of_the_window() -> None:
    [model] = readings(page(0, first_tokens=(90, 90)), page(0, first_tokens=(100, 110))).models()
    assert model.ttft is not None
    median, slow = model.ttft
    assert median == pytest.approx(0.01)
    assert slow == pytest.approx(0.091)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({1.0: 10, 2.0: 10, INFINITE: 10}, 0.5, 0.5),
        ({1.0: 0, 2.0: 10, INFINITE: 10}, 0.5, 1.5),
        ({1.0: 5, 2.0: 5, INFINITE: 10}, 0.95, 2.0),  # above the last bound
    ],
)
def test_a_quantile_is_interpolated_in_its_bucket(counts: dict[float, float], share: float, expected: float) -> None:
    assert quantile(counts, share) == pytest.approx(expected)


def test_servers_of_vllm_are_read_by_their_names() -> None:
    [model] = readings(page(0, vllm=True), page(40, vllm=True)).models()
    assert (model.name, model.running, model.output_rate) == ("m", 2, 40)


def test_tenants_are_sorted_by_their_tokens() -> None:
    def tenants(tokens: int) -> str:
        return "".join(
            f'penstock_tenant_requests_total{{tenant="{name}"}} {tokens}\n'
            f'penstock_tenant_completion_tokens_total{{tenant="{name}"}} {tokens * factor}\n'
            for name, factor in (("a", 1), ("b", 7))
        )

    lines = readings(page(0, tenants=tenants(0)), page(0, tenants=tenants(10))).tenants()
    assert [(line.name, line.request_rate, line.token_rate) for line in lines] == [("b", 10, 70), ("a", 10, 10)]


def test_what_is_no_page_of_metrics_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Reading.parsed('nonsense{a="b" 7', 0)


MODEL = ModelLine("m", True, 3, 1, 0.25, 10, 120, 0.5, 2, (0.012, 0.09), None)
SHOWN = {
    "id": "r1",
    "tenant": "\x1b[2Jcruel",
    "model": "m",
    "stage": "generate",
    "seconds": 2.5,
    "completion_tokens": 7,
}
PICTURE = Picture(
    url="http://server:8002",
    models=[MODEL],
    tenants=[TenantLine("a", 0, 1, 70), TenantLine("b", 2, 1, 3)],
    requests=list(RequestLine.all_of({"requests": [SHOWN]})),
    in_flight=1,
)


def test_without_a_terminal_there_is_a_line_for_each_model() -> None:
    stream = io.StringIO()
    lines = PlainLines(stream)
    lines.show(PICTURE)
    lines.show(Picture("u", (), (), (), None, trouble="it cannot be read"))
    first, second = stream.getvalue().splitlines()
    assert " m running 3 waiting 1 kv 25% prompt/s 10 tokens/s 120 hits 50% ttft 12/90 ms itl - preempted 2" in first
    assert second.endswith("it cannot be read")


def drawn(picture: Picture) -> str:
    screen = TerminalTables(io.StringIO())
    try:
        console = Console(file=io.StringIO(), width=160, record=True)
        screen.show(picture)
        console.print(screen._drawing(picture))
        return console.export_text()
    finally:
        screen.close()


def test_on_a_terminal_there_are_tables() -> None:
    text = drawn(PICTURE)
    assert "3 running, 1 waiting" in text
    assert "requests in flight: 1, the oldest first" in text
    assert "█" in text, "the history of tokens per second"
    assert "\x1b" not in text, "names from clients do not reach the terminal as they are"
    assert "?[2Jcruel" in text


def test_requests_that_may_not_be_seen_are_not_shown_as_none() -> None:
    assert "an admin's key" in drawn(Picture("u", [MODEL], (), (), None))


class Server(BaseHTTPRequestHandler):
    pages: ClassVar[list[Any]] = []
    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        is_metrics = self.path == "/metrics"
        body = self.pages.pop(0) if is_metrics and self.pages else json.dumps({"in_flight": 0, "requests": []})
        status = 200 if self.pages or is_metrics else 404
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_is_watched_by_its_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    Server.pages[:] = [page(10), page(30)]
    Server.keys.clear()
    assert main(["top", url, "--count", "2", "--interval", "0.25", "--api-key", "secret"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert " tokens/s 0 " in first
    assert " tokens/s 0 " not in second
    assert set(Server.keys) == {"Bearer secret"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ftp://host"], "no URL of a server"),
        (["--interval", "0"], "at least 0.25"),
        (["--interval", "nan"], "at least 0.25"),
        (["--count", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", *arguments])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_server_that_cannot_be_read_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "127.0.0.1:1"]) == 1
    assert "cannot be read" in capsys.readouterr().err
