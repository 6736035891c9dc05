"""guidellm, a load generator, over the chat completions API."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kit import DEMO, Place, check, main, server

VERSION = "0.8.1"
REQUESTS = 6


def install(place: Place) -> None:
    place.pip(f"guidellm=={VERSION}", "torch==2.13.0+cpu")


def converse(place: Place) -> Iterator[str]:
    with server("penstock-demo") as running:
        options = {
            "--backend": f"kind=openai_http,target={running.url},model=penstock-demo",
            "--tokenizer": f"kind=huggingface_auto,model={DEMO}",
            "--profile": "kind=concurrent,streams=2",
            "--constraint": f"kind=max_requests,count={REQUESTS}",
            "--data": "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            "--output": "kind=json,path=report.json",
        }
        flags = [word for option in options.items() for word in option]
        place.run("guidellm", "run", *flags, "--disable-console", HF_HUB_OFFLINE="1")
        [benchmark] = json.loads((place.work / "report.json").read_text())["benchmarks"]
        counts = {kind: len(benchmark["requests"][kind]) for kind in ("successful", "errored", "incomplete")}
        check(counts["successful"] == REQUESTS, "every request succeeds", counts)
        yield f"a benchmark of {REQUESTS} requests, two at a time"


if __name__ == "__main__":
    main(f"guidellm {VERSION}", install, converse)
