"""A model hub with one small repository, org/small, and its revisions."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

_MAIN = "0123456789abcdef0123456789abcdef01234567"


def commit(revision: str) -> str:
    """Of a branch or tag; a commit stays as it is."""
    if revision == "main":
        return _MAIN
    return revision if len(revision) == len(_MAIN) else hashlib.sha1(revision.encode()).hexdigest()


class Hub:
    """Of the weights it sends the first half, and the rest when `open` is set, which it is at first."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.open = threading.Event()
        self.open.set()

    def environ(self, cache: Path) -> dict[str, str]:
        """For processes that are to use it."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "no_proxy": "127.0.0.1",
        }


@contextmanager
def serving_hub(files: Mapping[str, bytes], **others: Mapping[str, bytes]) -> Iterator[Hub]:
    """`files` are those of main, `others` those of more branches or tags."""
    revisions = {"main": files, **others}
    revisions |= {commit(name): each for name, each in revisions.items()}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            _, verb, rest = path.removeprefix("/api/models").partition("/org/small")
            kind, _, rest = rest.lstrip("/").partition("/")  # revision, tree or resolve
            revision, _, name = unquote(rest).partition("/")
            found = revisions.get(revision or "main")
            if not verb or found is None or (kind == "resolve" and name not in found):
                self._refuse("RepoNotFound" if not verb else "EntryNotFound" if found else "RevisionNotFound")
                return
            if kind == "tree":
                listed = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in found.items()]
                data = json.dumps(listed).encode()
            elif kind == "resolve":
                data = found[name]
            else:
                siblings = [{"rfilename": name} for name in found]
                data = json.dumps({"id": "org/small", "sha": commit(revision or "main"), "siblings": siblings}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit(revision or "main"))
            self.end_headers()
            if body:
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                if path.endswith(".safetensors"):
                    hub.open.wait()
                with suppress(OSError):  # who waited has gone
                    self.wfile.write(data[len(data) // 2 :])

        def _refuse(self, code: str) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub = Hub(server.server_port)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield hub
        hub.open.set()
        server.shutdown()
        thread.join()
