"""The same language model over OpenAI's Responses API. The server keeps the conversation.

python openai_responses.py [--url http://127.0.0.1:8000] [--question "What does os.path.join do?"]
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="chat")
    parser.add_argument("--question", default="What does os.path.join do?")
    parser.add_argument("--then", default="And os.path.split?")
    arguments = parser.parse_args()

    client = OpenAI(base_url=f"{arguments.url.rstrip('/')}/v1", api_key="none")
    previous = None
    for question in (arguments.question, arguments.then):
        events = client.responses.create(
            model=arguments.model, input=question, previous_response_id=previous, stream=True
        )
        for event in events:
            if event.type == "response.created":
                previous = event.response.id
            elif event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
