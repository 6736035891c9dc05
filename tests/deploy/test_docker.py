"""The Dockerfile: linted; and what it builds, in a folder instead of an image (`image_folder.py`), run as the image's
user, with a root that cannot be written to."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.image_folder import DOCKERFILE, environment, lines
from deploy.places import ROOT, program, run

_LISTENING = re.compile(r"listening on \S+:(\d+) \(gRPC (\d+), metrics (\d+)\)")


def test_it_has_no_lint() -> None:
    run(program("hadolint"), DOCKERFILE)


def test_what_it_copies_is_sent_to_the_builder() -> None:
    sent = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    for line in lines():
        if line.instruction == "COPY" and not line.value.startswith("--from="):
            for name in line.value.split()[:-1]:
                assert (ROOT / name).exists()
                assert f"!{name}" in sent


def test_both_images_end_as_the_user_of_the_manifests() -> None:
    users = {line.stage: line.value for line in lines() if line.instruction == "USER"}
    assert users == {"runtime": "10001:10001", "cuda": "10001:10001"}
    bases = dict(re.findall(r"^FROM (\S+) AS (cpu|cuda)$", DOCKERFILE.read_text(), re.MULTILINE))
    assert bases == {"runtime": "cpu"} or set(bases) == {"runtime"}


@pytest.fixture
def image() -> Path:
    """The folder that .ci/deploy has built with the Dockerfile's commands."""
    if "DEPLOY_IMAGE" not in os.environ:
        pytest.skip("only .ci/deploy builds it")
    return Path(os.environ["DEPLOY_IMAGE"])


@pytest.fixture
def container(image: Path) -> Iterator[subprocess.Popen[str]]:
    """The image's ENTRYPOINT and CMD with its ENV, in namespaces of its own: everything is read-only but /tmp and its
    cache, and it is nobody's user without any right but to read (the interpreter lies in root's home here)."""
    cache = image / "cache"
    cache.mkdir(exist_ok=True)
    os.chown(cache, 10001, 10001)
    environ = environment(("runtime",), image) | {
        "PENSTOCK_ALLOW_ANONYMOUS": "true",
        **{f"PENSTOCK_{port}_PORT": "0" for port in ("HTTP", "GRPC", "METRICS")},
    }
    values = {line.instruction: line.value for line in lines() if line.instruction in ("ENTRYPOINT", "CMD")}
    command = [part for name in ("ENTRYPOINT", "CMD") for part in re.findall(r'"(.*?)"', values[name])]
    rights = (
        "--inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search --bounding-set=-all,+dac_read_search"
    )
    script = f"""
        mount --make-rprivate /
        mount --bind {image} /mnt # the image may lie in /tmp, which is an empty one from here on
        mount -t tmpfs -o mode=1777 tmpfs /tmp
        mkdir -p {image}
        mount --bind /mnt {image}
        mount --bind /mnt/cache {cache}
        for place in / /mnt {image}; do mount -o remount,bind,ro $place; done
        cd {cache}
        ! touch /etc/written 2> /dev/null
        exec setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs {rights} {shlex.join(command)}
    """
    server = subprocess.Popen(
        ["unshare", "--mount", "sh", "-ec", script], env=environ, stderr=subprocess.PIPE, text=True
    )
    yield server
    if server.poll() is None:
        server.kill()
    server.wait()


def test_it_serves_from_a_read_only_root(container: subprocess.Popen[str], image: Path) -> None:
    log: list[str] = []
    for line in container.stderr or ():
        log.append(line)
        if " ready: " in line:
            break
    else:
        pytest.fail("".join(log))
    threading.Thread(target=lambda: list(container.stderr or ()), daemon=True).start()
    listening = next(match for line in log if (match := _LISTENING.search(line)))
    status = Path(f"/proc/{container.pid}/status").read_text()
    assert "Uid:\t10001\t10001" in status
    assert "NoNewPrivs:\t1" in status
    [check] = [line.value for line in lines() if line.instruction == "HEALTHCHECK"]
    code = re.findall(r'CMD \["python", "-c", "(.*)"\]', check)[0]
    subprocess.run(
        [image / "opt/penstock/bin/python", "-c", code], env={"PENSTOCK_METRICS_PORT": listening[3]}, check=True
    )
    with urllib.request.urlopen(f"http://127.0.0.1:{listening[1]}/v1/models", timeout=20) as answer:
        assert b"penstock-demo" in answer.read()
    container.send_signal(signal.SIGTERM)
    assert container.wait(30) == 0


def test_the_health_check_fails_without_a_server(tmp_path: Path) -> None:
    [check] = [line.value for line in lines() if line.instruction == "HEALTHCHECK"]
    code = re.findall(r'CMD \["python", "-c", "(.*)"\]', check)[0]
    done = subprocess.run([sys.executable, "-c", code], env={"PENSTOCK_METRICS_PORT": "1"}, capture_output=True)
    assert done.returncode != 0
