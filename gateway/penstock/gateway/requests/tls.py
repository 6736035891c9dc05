"""TLS of a port: which files it needs, and reading them again while the server runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.gateway.configuration.config import ConfigError

logger = logging.getLogger("penstock")

_LOOK_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Paths of PEM files; `root_cert` names who signs the clients' certificates when these are asked for."""

    port: Literal["http", "grpc"]
    """Its flags have this name in front."""
    use_ssl: bool = False
    use_ssl_mutual: bool = False
    """Clients must have a certificate; implies `use_ssl`."""
    server_cert: str = ""
    server_key: str = ""
    root_cert: str = ""
    http2: bool = True
    """Clients of the HTTP port are offered HTTP/2, too."""

    @property
    def enabled(self) -> bool:
        return self.use_ssl or self.use_ssl_mutual

    @property
    def unused(self) -> str:
        """The flag of a file that is named although TLS is off, or empty."""
        named = {"server-cert": self.server_cert, "server-key": self.server_key, "root-cert": self.root_cert}
        return "" if self.enabled else next((f"{self.port}-{flag}" for flag, path in named.items() if path), "")

    def read(self) -> Certificates:
        """Raises ConfigError, with the flag to blame, when a file that is needed is not named, cannot be read, or does
        not hold what it should."""
        contents = self._contents()
        context = self._context()
        if self._contents() != contents:  # the context reads the files by itself: both must be of the same moment
            raise ConfigError(f"{self.port}-server-cert: the files of TLS change while they are read")
        key, cert, root = contents
        return Certificates(key, cert, root, context)

    @property
    def protocols(self) -> list[str]:
        """What a client is offered in the handshake, the best first."""
        if self.port == "grpc":
            return ["h2"]
        return ["h2", "http/1.1"] if self.http2 else ["http/1.1"]

    def _contents(self) -> tuple[bytes, bytes, bytes | None]:
        key = self._pem(self.server_key, "server-key")
        cert = self._pem(self.server_cert, "server-cert")
        return key, cert, self._pem(self.root_cert, "root-cert") if self.root_cert or self.use_ssl_mutual else None

    def _pem(self, path: str, flag: str) -> bytes:
        if not path:
            raise ConfigError(f"{self.port}-{flag}: TLS needs this file")
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{self.port}-{flag}: the file cannot be read: {error.strerror}") from None
        if b"-----BEGIN " not in data:
            raise ConfigError(f"{self.port}-{flag}: the file is no PEM file")
        return data

    def _context(self) -> ssl.SSLContext:
        self._trust(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.server_cert, "server-cert")  # for the flag's name
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(self.protocols)
        try:
            context.load_cert_chain(self.server_cert, self.server_key, password=self._refuse_encrypted)
        except OSError as error:  # of which the ssl module's own are a kind
            reason = getattr(error, "reason", None) or error.strerror
            raise ConfigError(
                f"{self.port}-server-cert: it cannot be used with {self.port}-server-key: {reason}"
            ) from None
        if self.root_cert:
            self._trust(context, self.root_cert, "root-cert")
        if self.use_ssl_mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _refuse_encrypted(self) -> str:
        raise ConfigError(f"{self.port}-server-key: the key has a password; use a key without one")

    def _trust(self, context: ssl.SSLContext, path: str, flag: str) -> None:
        try:
            context.load_verify_locations(path)
        except OSError:
            raise ConfigError(f"{self.port}-{flag}: the file has no certificate that can be read") from None


@dataclass(frozen=True, slots=True, eq=False)
class Certificates:
    """What a port serves with: the files' contents, and the same as a context."""

    key: bytes
    cert: bytes
    root: bytes | None
    context: ssl.SSLContext


class ReloadedCertificates:
    """The certificates of a port as its files have them now, or had them when they could last be used."""

    def __init__(self, settings: TlsSettings, look_seconds: float = _LOOK_SECONDS) -> None:
        """Raises ConfigError as `TlsSettings.read`."""
        self._settings = settings
        self._look_seconds = look_seconds
        self._seen = self._stamps()
        self._reload_event = asyncio.Event()
        self.current = settings.read()

    def reload(self) -> None:
        """Reads the files soon, even if they look unchanged. Returns at once."""
        self._reload_event.set()

    async def follow(self, use: Callable[[Certificates], Awaitable[None]]) -> None:
        """Looks at the files now and then until it is cancelled; `use` gets certificates that are new."""
        while True:
            try:
                async with asyncio.timeout(self._look_seconds):
                    await self._reload_event.wait()
            except TimeoutError:
                pass
            forced = self._reload_event.is_set()
            self._reload_event.clear()
            certificates = await asyncio.to_thread(self._read, forced)
            if certificates is not None:
                self.current = certificates
                await use(certificates)
                logger.info("the %s port has read its certificate again, for new connections", self._settings.port)

    def _read(self, forced: bool) -> Certificates | None:
        """None where nothing is new, or the new files cannot be used."""
        stamps = self._stamps()
        if stamps == self._seen and not forced:
            return None
        self._seen = stamps  # of before: what changes from now on is seen the next time
        try:
            return self._settings.read()
        except ConfigError as error:
            logger.error("%s; the %s port keeps its certificate", error, self._settings.port)
            return None

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        """What changes when a file is written or replaced."""
        return [
            _stamp(path) for path in (self._settings.server_cert, self._settings.server_key, self._settings.root_cert)
        ]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
