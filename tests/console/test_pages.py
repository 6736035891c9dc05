"""Every page in both themes: drawn, named, reachable by keyboard, as wide as a phone; and nothing that comes from a
model or a person is ever markup."""

from __future__ import annotations

import json
import os
import signal
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from console.conftest import EVIL, keyed_server, reverse_proxy, use_key, wait_js
from support.server import Server, serving

Open = Callable[..., Any]
Keep = Callable[[Any, str], None]
PAGES = ["overview", "live", "request", "playground", "tensors"]
_UNNAMED = """() => {
  const shown = document.querySelectorAll('button, select, input, textarea, a, canvas, dialog');
  const label = (one) => [...(one.labels ?? [])].map((each) => each.textContent).join('');
  const name = (one) => one.getAttribute('aria-label') || label(one) || one.textContent || one.placeholder || '';
  return [...shown].filter((one) => !name(one).trim()).map((one) => one.outerHTML);
}"""
_TOO_PALE = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (one) => {
    const tint = one ? parse(getComputedStyle(one).backgroundColor) : [255, 255, 255];
    return tint.length < 4 || tint[3] === 1 ? tint : behind(one.parentElement);
  };
  const hasText = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const ratio = (one) => {
    const [a, b] = [light(parse(getComputedStyle(one).color)), light(behind(one))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const texts = [...document.querySelectorAll('main *, header *')];
  const pale = texts.filter((one) => one.offsetParent && !one.disabled && hasText(one) && ratio(one) < 4.5);
  return pale.map((one) => `${one.tagName}.${one.className} ${one.textContent.slice(0, 30)}`);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", PAGES)
def test_every_page_in_both_themes(open_page: Open, open_server: Server, picture: Keep, view: str, scheme: str) -> None:
    page = open_page(open_server.url, view, color_scheme=scheme)
    page.get_by_role("heading", level=1, name=view.capitalize()).wait_for()
    page.locator("#status", has_text="ready").wait_for()
    wait_js(page, "document.querySelector('main').innerText.length > 100")
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate(_UNNAMED) == []
    assert page.evaluate(_TOO_PALE) == []
    assert page.locator("h1").count() == 1
    assert page.locator("nav a[aria-current=page]").inner_text() == view.capitalize()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(255, 255, 255)") is (scheme == "light")


@pytest.mark.parametrize("view", PAGES)
def test_a_phone_shows_every_page_without_scrolling_sideways(open_page: Open, open_server: Server, view: str) -> None:
    page = open_page(open_server.url, view, viewport={"width": 375, "height": 740}, is_mobile=True, has_touch=True)
    page.locator("#status", has_text="ready").wait_for()
    wait_js(page, "document.querySelector('main').innerText.length > 100")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_the_keyboard_is_enough(open_page: Open, open_server: Server) -> None:
    page = open_page(open_server.url)
    page.locator("#status", has_text="ready").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("2")
    page.get_by_role("heading", level=1, name="Live").wait_for()
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("button", name="Theme: auto").focus()
    for name, theme in (("light", "light"), ("dark", "dark")):
        page.keyboard.press("Enter")
        page.get_by_role("button", name=f"Theme: {name}").wait_for()
        assert page.evaluate("document.documentElement.dataset.theme") == theme
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.get_by_role("button", name="Key").press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")


def test_names_of_models_are_only_text(open_page: Open, open_server: Server) -> None:
    for view in ("overview", "tensors"):
        page = open_page(open_server.url, view)
        page.locator("#status", has_text="ready").wait_for()
        page.get_by_text(EVIL).first.wait_for(state="attached")
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img").count() == 0


def sse(*deltas: dict[str, Any]) -> str:
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})  # type: ignore[dict-item]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_thoughts_tools_and_probabilities_of_a_chat_are_only_text(open_page: Open, open_server: Server) -> None:
    page = open_page(open_server.url, "playground")
    page.get_by_label("Model", exact=True).first.locator("option").first.wait_for(state="attached")
    function = {"name": f"look{EVIL}", "arguments": '{"at": "<script>hacked=1</script>"}'}
    calls = {"tool_calls": [{"index": 0, "id": "1", "function": function}]}
    answers = [sse({"reasoning_content": f"hm {EVIL}"}, {"content": f"so {EVIL}"}, calls), sse({"content": "done"})]
    bodies: list[Any] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(status=200, content_type="text/event-stream", body=answers[len(bodies) - 1])

    page.route("**/v1/chat/completions", answer)
    page.get_by_label("Your message").fill(f"hello {EVIL}")
    page.get_by_text("Tools and JSON schema").click()
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    page.get_by_label("Tools, as a JSON list").fill(json.dumps([tool]))
    page.get_by_label("JSON schema of the answer").fill('{"type": "object"}')
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_text(f"so {EVIL}").wait_for()
    thoughts = page.locator("details", has_text="Thoughts").last
    assert not thoughts.locator("pre").is_visible()
    thoughts.locator("summary").click()
    assert thoughts.locator("pre").inner_text() == f"hm {EVIL}"
    page.get_by_label("Output of look").fill(f"tool says {EVIL}<script>hacked=1</script>")
    page.get_by_role("button", name="Send the tools' output").click()
    page.get_by_text("done").wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script").count() == 0
    assert bodies[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert bodies[1]["messages"][-1]["role"] == "tool"
    assert bodies[1]["messages"][-2]["tool_calls"][0]["id"] == "1"


def test_a_picture_goes_to_a_model_that_sees(open_page: Open, open_server: Server, tmp_path: Path) -> None:
    page, bodies = open_page(open_server.url, "overview"), []
    sees = {"id": "eyes", "owned_by": "penstock", "capabilities": ["completion", "chat", "vision"]}
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [sees]}))

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(status=200, content_type="text/event-stream", body=sse({"content": "a dot"}))

    page.route("**/v1/chat/completions", answer)
    page.get_by_role("link", name="Playground").click()
    (tmp_path / "dot.png").write_bytes(png(255, 0, 0))
    page.get_by_label("Picture").set_input_files(str(tmp_path / "dot.png"))
    page.get_by_label("Your message").fill("What is it?")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_text("a dot").wait_for()
    text, image = bodies[0]["messages"][-1]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    assert image == {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{b64encode(png(255, 0, 0)).decode()}"},
    }


def test_a_chat_streams_beside_another(open_page: Open, open_server: Server, picture: Keep) -> None:
    with serving() as server:
        page = open_page(server.url, "playground")
        page.get_by_label("Model", exact=True).first.locator("option").first.wait_for(state="attached")
        page.get_by_label("Two models side by side").check()
        page.get_by_label("Colour tokens by their probability").check()
        page.get_by_label("max_tokens").fill("40")
        page.get_by_label("temperature").fill("0")
        page.get_by_label("Your message").fill("Who are you?")
        page.get_by_label("Your message").press("Control+Enter")
        for pane in (page.get_by_label("Answer", exact=True), page.get_by_label("Second answer")):
            pane.get_by_text("together").wait_for()
            assert pane.locator(".token").count() > 3
        page.get_by_role("button", name="Copy as Python").first.click()
        page.locator("pre.copied", has_text="import os").first.wait_for()
        text = page.locator("pre.copied").first.inner_text()
        assert "client.chat.completions.create(" in text
        assert "Who are you?" in text
        compile(text, "copied", "exec")
        page.get_by_role("button", name="Copy as curl").first.click()
        page.locator("pre.copied", has_text="curl -N").first.wait_for()
        picture(page, "playground")


def test_bad_parameters_are_told_where_they_are(open_page: Open, open_server: Server) -> None:
    page = open_page(open_server.url, "playground")
    page.get_by_text("Tools and JSON schema").click()
    page.get_by_label("Tools, as a JSON list").fill("[{")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_text("Tools: ").wait_for()
    page.get_by_label("Tools, as a JSON list").fill("")
    page.get_by_label("temperature").fill("-1")
    page.get_by_label("Your message").fill("hello")
    page.get_by_role("button", name="Send", exact=True).click()
    page.locator("p.bad[role=alert]", has_text="temperature").wait_for()


def test_tensors_go_in_and_come_out(open_page: Open, open_server: Server, tmp_path: Path, picture: Keep) -> None:
    page = open_page(open_server.url, "tensors")
    page.get_by_label("Model", exact=True).first.select_option("echo version 1")
    page.get_by_role("group", name="TEXT (BYTES").get_by_label("Text", exact=True).fill("hello <b>tensor</b>")
    image = page.get_by_role("group", name="IMAGE (FP32")
    for name, data in (("none.png", b"no picture"), ("dot.png", png(255, 0, 0))):
        (tmp_path / name).write_bytes(data)
    image.get_by_label("From a picture").set_input_files(str(tmp_path / "none.png"))
    page.get_by_text("is no picture that this browser knows").wait_for()
    image.get_by_label("From a picture").set_input_files(str(tmp_path / "dot.png"))
    wait_js(page, "[...document.querySelectorAll('textarea')].some((one) => one.value.startsWith('[1,'))")
    page.get_by_role("button", name="Infer").click()
    page.get_by_role("heading", name="TEXT (BYTES, 1)").wait_for()
    page.get_by_text("hello <b>tensor</b>", exact=True).last.wait_for()
    page.get_by_text("1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0").wait_for()
    page.get_by_text("1 inferences in 1 executions").wait_for()
    picture(page, "tensors")
    image.get_by_label("Data, as JSON").fill("[1, 2")
    page.get_by_role("button", name="Infer").click()
    page.get_by_text("IMAGE: ").wait_for()
    image.get_by_label("Data, as JSON").fill("[1, 2]")
    page.get_by_role("button", name="Infer").click()
    page.locator("p.bad[role=alert]", has_text="IMAGE").wait_for()
    for name in ("Load or reload", "Unload"):
        assert page.get_by_role("button", name=name, exact=True).is_disabled()
    page.get_by_text("This server has no keys: its console is read-only.").first.wait_for()


def png(red: int, green: int, blue: int) -> bytes:
    """Two by two pixels of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes((red, green, blue)) * 2) * 2
    head = struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_an_engine_that_is_killed_while_it_is_looked_at(open_page: Open) -> None:
    with serving("--engine", "simulated") as server:
        page = open_page(server.url, "live")
        page.locator("#status", has_text="ready").wait_for()
        os.kill(server.engine_pid(), signal.SIGKILL)
        page.locator("p.bad[role=alert]", has_text="has died and is back: restart 1").wait_for()
        page.locator("#status.good", has_text="ready").wait_for()
        page.goto(server.url + "/console#/overview")
        page.locator("tr", has_text="simulated").wait_for()


def test_a_server_that_goes_and_comes_is_told(open_page: Open) -> None:
    with serving("--engine", "simulated") as server:
        page = open_page(server.url, "overview")
        page.locator("#status", has_text="ready").wait_for()
        assert server.stop(seconds=30) == 0
        page.locator("#notice", has_text="No live data").wait_for()
        page.locator("#status", has_text="no connection").wait_for()


def test_keys_and_roles(open_page: Open, repository: Path, tmp_path: Path) -> None:
    with keyed_server(repository, tmp_path) as server, reverse_proxy(server) as proxy:
        for url in (server.url, proxy):  # behind a proxy a server with keys is the same
            page = open_page(url)
            page.locator("#notice", has_text="API key").wait_for()
            use_key(page, "blue")
            page.locator("#notice", has_text="role 'admin'").wait_for()
            page.goto(url + "/console#/playground")
            page.get_by_label("Model", exact=True).first.locator("option").first.wait_for(state="attached")
            page.goto(url + "/console#/overview")
            use_key(page, "admin")
            page.locator("#status", has_text="ready").wait_for()
            page.locator("#notice").wait_for(state="hidden")
            kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
            assert "admin" not in page.evaluate(kept)
            page.goto(url + "/console#/tensors")
            page.get_by_label("Model", exact=True).last.fill("echo-new")
            page.get_by_role("button", name="Load or reload").click()
            page.get_by_role("button", name="Back").click()
            assert httpx.get(f"{server.url}/v2/models/echo-new/ready", headers=_ADMIN).status_code == 400
            for button, confirm, status in (("Load or reload", "Load it", 200), ("Unload", "Unload it", 400)):
                page.get_by_role("button", name=button, exact=True).click()
                page.get_by_role("button", name=confirm).click()
                page.locator("#announce", has_text="is done").wait_for(state="attached")
                assert httpx.get(f"{server.url}/v2/models/echo-new/ready", headers=_ADMIN).status_code == status
                page.evaluate("document.getElementById('announce').textContent = ''")
            page.reload()
            page.locator("#notice", has_text="API key").wait_for()  # the key has gone with the page


_ADMIN = {"authorization": "Bearer admin"}


def test_a_server_without_keys_shows_nothing_through_a_proxy(open_page: Open, open_server: Server) -> None:
    with reverse_proxy(open_server) as proxy:
        page = open_page(proxy)
        assert "console_refused" in page.content()
