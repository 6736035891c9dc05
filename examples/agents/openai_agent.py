"""An agent with three tools, written with OpenAI's client alone: parallel calls, then an answer in JSON, all streamed.

pip install openai
python openai_agent.py [--url http://127.0.0.1:8000] [--model penstock-demo] [--question "..."]

The server holds the calls and the answer to their schemas. So the loop works with any model, however small.
"""

from __future__ import annotations

import argparse
from typing import Any

from openai import LengthFinishReasonError, OpenAI, pydantic_function_tool
from openai.types.chat import ParsedFunctionToolCall
from trips import TOOLS, Trip


def streamed_calls(client: OpenAI, asked: dict[str, Any]) -> list[ParsedFunctionToolCall]:
    """At least one call, printed while the model writes it. A call that `max_tokens` cuts off is dropped."""
    tools = [pydantic_function_tool(tool) for tool in TOOLS.values()]
    with client.chat.completions.stream(**asked, tools=tools, tool_choice="required", max_tokens=300) as stream:
        begun = -1
        try:
            for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    name = f"\n{event.name} <- " if event.index > begun else ""
                    print(name + event.arguments_delta, end="", flush=True)
                    begun = event.index
            print()
            return list(stream.get_final_completion().choices[0].message.tool_calls or [])
        except LengthFinishReasonError as error:
            print(" (cut off)")
            return list(error.completion.choices[0].message.tool_calls or [])[:-1]


def streamed_answer(client: OpenAI, asked: dict[str, Any]) -> Trip | None:
    """The answer, as an object that is checked."""
    with client.chat.completions.stream(**asked, response_format=Trip) as stream:
        for event in stream:
            if event.type == "content.delta":
                print(event.delta, end="", flush=True)
        print()
        return stream.get_final_completion().choices[0].message.parsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="penstock-demo")
    parser.add_argument("--question", default="What is the weather like in Oslo and Rome? Where should I go?")
    arguments = parser.parse_args()

    client = OpenAI(base_url=f"{arguments.url.rstrip('/')}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": arguments.question}]
    asked = {"model": arguments.model, "messages": messages}
    calls = streamed_calls(client, asked)
    messages.append({"role": "assistant", "tool_calls": [call.to_dict() for call in calls]})
    for call in calls:
        result = TOOLS[call.function.name].model_validate_json(call.function.arguments).run()
        print(f"{call.function.name}: {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(repr(streamed_answer(client, asked)))


if __name__ == "__main__":
    main()
