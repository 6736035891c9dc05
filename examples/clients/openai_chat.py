"""The same language model over the OpenAI API.

python openai_chat.py [--url http://127.0.0.1:8000] [--question "What does os.path.join do?"]
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="chat")
    parser.add_argument("--question", default="What does os.path.join do?")
    arguments = parser.parse_args()

    client = OpenAI(base_url=f"{arguments.url.rstrip('/')}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=arguments.model,
        messages=[{"role": "user", "content": arguments.question}],
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
