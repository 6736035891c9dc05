"""Images of other servers: which URLs are followed, and where their connections go."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.engines.errors import InvalidRequestError, OverloadedError
from penstock.gateway.configuration.config import Config, ConfigError, overlay
from penstock.gateway.models.language.images import fetching
from penstock.gateway.models.language.images.fetching import ImageFetcher, domain, is_public
from penstock.gateway.server.composition.models import build_image_sources
from support.tls import client_context, make_certificate

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 5\r\n\r\nimage"


class Site:
    """Answers by path, and keeps what it was asked."""

    def __init__(self, **answers: bytes) -> None:
        self.answers = answers
        self.requests: list[bytes] = []
        self.names: list[str] = []
        """That were resolved."""
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(request)
        name = request.split()[1].decode().strip("/").partition("?")[0]
        writer.write(self.answers.get(name, b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"))
        await writer.drain()
        if name != "silent":
            writer.close()

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.names.append(host)
        return ["127.0.0.1"]


@asynccontextmanager
async def site(tls: ssl.SSLContext | None = None, **answers: bytes) -> AsyncIterator[Site]:
    """Its fetchers may connect to this machine."""
    running = Site(**answers)
    server = await asyncio.start_server(running.serve, "127.0.0.1", 0, ssl=tls)
    running.port = server.sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        server.close()


def fetcher(running: Site, *domains: str, tls: ssl.SSLContext | None = None) -> ImageFetcher:
    return ImageFetcher(
        domains or ("pictures.test",), resolve=running.resolve, may_connect=lambda address: True, tls=tls
    )


def moved(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("224.0.0.1", "255.255.255.255", "198.18.0.1", "240.0.0.1", "192.0.0.8", "203.0.113.5"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "::7f00:1"),
    ],
)
def test_addresses_that_are_never_connected_to(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f::1", "::ffff:93.184.215.14", "64:ff9b::5db8:d70e"])
def test_addresses_of_the_internet(address: str) -> None:
    assert is_public(address)


async def test_an_image_comes_from_the_address_that_was_checked() -> None:
    async with site(**{"a.png": OK}) as running:
        checked: list[str] = []

        def may_connect(address: str) -> bool:
            checked.append(address)
            return True

        images = ImageFetcher(("pictures.test",), resolve=running.resolve, may_connect=may_connect)
        url = f"http://Pictures.Test:{running.port}/a.png?x=1&y=ü#top"
        assert await images.fetch(url, 100, "image") == b"image"
        assert (running.names, checked) == (["pictures.test"], ["127.0.0.1"])  # resolved once
        [request] = running.requests
        head = request.decode().split("\r\n")
        assert head[0] == "GET /a.png?x=1&y=%C3%BC HTTP/1.1"
        assert f"host: pictures.test:{running.port}" in head
        assert not [line for line in head if line.startswith(("cookie", "authorization"))]


@pytest.mark.parametrize("other", ["10.0.0.1", "::1", "127.0.0.1"])
async def test_a_name_with_a_private_address_is_refused(other: str) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["93.184.215.14", other]

    images = ImageFetcher(("pictures.test",), resolve=resolve)
    with pytest.raises(InvalidRequestError, match="not public"):
        await images.fetch("https://pictures.test/a.png", 100, "image")


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f.1", "localhost"])
async def test_spellings_of_this_machine_are_refused(host: str) -> None:
    images = ImageFetcher((host,))
    with pytest.raises(InvalidRequestError, match=r"not public|has no address"):
        await images.fetch(f"http://{host}/a.png", 100, "image")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://other.test/a.png", "--allowed-media-domains"),
        ("http://pictures.test.evil.com/a.png", "--allowed-media-domains"),
        ("http://evil-pictures.test/a.png", "--allowed-media-domains"),
        ("http://wide.test/a.png", "--allowed-media-domains"),
        ("http://127.0.0.1/a.png", "--allowed-media-domains"),
        ("http://[::1]/a.png", "--allowed-media-domains"),
        ("http://user:key@pictures.test/a.png", "user or a password"),
        ("http://pictures.test@other.test/a.png", "user or a password"),
        ("http://other.test\\@pictures.test/a.png", "backslashes"),
        ("http://pictures.test/a b", "blanks"),
        ("http://pictures.test/a\r\nhost: other.test", "blanks"),
        ("file:///etc/passwd", "must begin with"),
        ("ftp://pictures.test/a.png", "must begin with"),
        ("//pictures.test/a.png", "must begin with"),
        ("http:///a.png", "must begin with"),
        ("http://pictures.test:x/a.png", "not valid"),
        ("http://pictures.test:99999/a.png", "not valid"),
        ("http://[::1/a.png", "not valid"),
        ("http://" + "ü" * 80 + ".test/", "not valid"),
        ("http://pictures.test/" + "a" * 9000, "too long"),
    ],
)
async def test_urls_that_are_not_followed(url: str, message: str) -> None:
    async with site() as running:
        images = fetcher(running, "pictures.test", "*.wide.test")
        with pytest.raises(InvalidRequestError, match=message) as raised:
            await images.fetch(url, 100, "messages[0]")
        assert raised.value.param == "messages[0]"
        assert not running.names


async def test_names_that_end_with_a_domain() -> None:
    async with site(**{"a.png": OK}) as running:
        images = fetcher(running, "*.wide.test")
        for host in ("a.wide.test", "a.b.wide.test", "a.wide.test."):
            assert await images.fetch(f"http://{host}:{running.port}/a.png", 100, "image") == b"image"


async def test_redirects_are_followed_and_checked_like_the_first_url() -> None:
    async with site(**{"a.png": OK}) as running:
        here = f"http://pictures.test:{running.port}"
        running.answers |= {
            "there": moved(f"{here}/relative", 301),
            "relative": moved("/a.png", 307),
            "loop": moved("/loop"),
            "nowhere": moved("http://["),
            "out": moved("http://other.test/a.png"),
            "file": moved("file:///etc/passwd"),
            "literal": moved(f"http://127.0.0.1:{running.port}/a.png"),
        }
        images = fetcher(running)
        assert await images.fetch(f"{here}/there", 100, "image") == b"image"
        refusals = {"loop": "more than 3 times", "nowhere": "no URL", "file": "must begin with"}
        refusals |= dict.fromkeys(("out", "literal"), "--allowed-media-domains")
        for name, message in refusals.items():
            with pytest.raises(InvalidRequestError, match=message):
                await images.fetch(f"{here}/{name}", 100, "image")


async def test_a_redirect_to_a_private_address_is_refused() -> None:
    async with site() as running:
        running.answers["a"] = moved("http://inside.test/a.png")

        async def resolve(host: str, port: int) -> Sequence[str]:
            return ["10.0.0.1"] if host == "inside.test" else ["127.0.0.1"]

        images = ImageFetcher(("*.test",), resolve=resolve, may_connect=lambda address: address != "10.0.0.1")
        with pytest.raises(InvalidRequestError, match="not public"):
            await images.fetch(f"http://pictures.test:{running.port}/a", 100, "image")


async def test_what_a_server_may_send(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nc8\r\n" + b"x" * 200 + b"\r\n0\r\n\r\n"
    answers = {"chunked": chunk, "broken": b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nx", "silent": b""}
    answers["long"] = b"HTTP/1.1 200 OK\r\ncontent-length: 101\r\n\r\n"
    monkeypatch.setattr(fetching, "_SECONDS", 0.3)
    async with site(**answers) as running:
        images, here = fetcher(running), f"http://pictures.test:{running.port}"
        messages = {"chunked": "longer than 100 bytes", "long": "has more than", "broken": "ended before"}
        for name, message in {**messages, "none": "answers 404", "silent": "took longer than"}.items():
            with pytest.raises(InvalidRequestError, match=message):
                await images.fetch(f"{here}/{name}", 100, "image")


async def test_few_images_are_fetched_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_MOST_WAITING", 1)
    async with site(silent=b"") as running:
        images = fetcher(running)
        first = asyncio.create_task(images.fetch(f"http://pictures.test:{running.port}/silent", 100, "image"))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await images.fetch(f"http://pictures.test:{running.port}/silent", 100, "image")
        first.cancel()


async def test_a_certificate_must_be_the_name_s(tmp_path: Path) -> None:
    make_certificate(tmp_path, "site")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "site.pem", tmp_path / "site.key")
    shown: list[str | None] = []
    tls.sni_callback = lambda _, name, __: shown.append(name)
    async with site(tls, **{"a.png": OK}) as running:
        images = fetcher(running, "localhost", "pictures.test", tls=client_context(tmp_path / "site.pem"))
        assert await images.fetch(f"https://localhost:{running.port}/a.png", 100, "image") == b"image"
        with pytest.raises(InvalidRequestError, match="certificate"):
            await images.fetch(f"https://pictures.test:{running.port}/a.png", 100, "image")
        assert shown == ["localhost", "pictures.test"]


@pytest.mark.parametrize("text", ["", "*", "https://example.com", "example.com/a", "*.*.com", "a..b", "exa mple.com"])
def test_domains_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="must be a domain"):
        domain(text)


def test_domains_of_the_configuration() -> None:
    config = overlay(Config(), {"allowed_media_domains": ("*.Example.com", "images.test.")})
    fetches = build_image_sources(config)._fetcher
    assert isinstance(fetches, ImageFetcher)
    assert (fetches._names, fetches._endings) == (frozenset({"images.test"}), (".example.com",))
    with pytest.raises(ConfigError, match="allowed-media-domains"):
        build_image_sources(overlay(Config(), {"allowed_media_domains": ("https://a.com",)}))
    assert build_image_sources(Config())._fetcher is None
