"""sentence-transformers by itself: run by a Python that has it. Standard input has a line of JSON for each run."""

from __future__ import annotations

import importlib
import json
import sys
import time


def main() -> None:
    library = importlib.import_module("sentence_transformers")
    model = library.SentenceTransformer(sys.argv[1], device="cpu")
    model.max_seq_length = int(sys.argv[2])
    print(library.__version__, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        texts, batch, count = job["texts"], job["batch"], 0
        begin = time.perf_counter()
        while time.perf_counter() - begin < job["seconds"]:
            chosen = [texts[(count + n) % len(texts)] for n in range(batch)]
            model.encode(chosen, batch_size=batch, show_progress_bar=False)
            count += batch
        print(json.dumps(count / (time.perf_counter() - begin)), flush=True)


if __name__ == "__main__":
    main()
