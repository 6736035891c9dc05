"""The agent of openai_agent.py with LangChain.

pip install langchain-openai
python langchain_agent.py [--url http://127.0.0.1:8000] [--model penstock-demo] [--question "..."]
"""

from __future__ import annotations

import argparse
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolCall, ToolMessage
from langchain_openai import ChatOpenAI
from trips import TOOLS, Trip


def streamed_calls(model: ChatOpenAI, messages: list[Any]) -> list[ToolCall]:
    """At least one call, printed while the model writes it. A call that `max_tokens` cuts off is dropped."""
    bound = model.bind_tools(list(TOOLS.values()), tool_choice="any", strict=True, parallel_tool_calls=True)
    whole: AIMessageChunk | None = None
    for chunk in bound.stream(messages, max_tokens=300):
        for call in chunk.tool_call_chunks:
            name = f"\n{call['name']} <- " if call["name"] else ""
            print(name + (call["args"] or ""), end="", flush=True)
        whole = chunk if whole is None else whole + chunk
    print()
    if whole is None:
        return []
    return whole.tool_calls[:-1] if whole.response_metadata.get("finish_reason") == "length" else whole.tool_calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="penstock-demo")
    parser.add_argument("--question", default="What is the weather like in Oslo and Rome? Where should I go?")
    arguments = parser.parse_args()

    model = ChatOpenAI(base_url=f"{arguments.url.rstrip('/')}/v1", api_key="none", model=arguments.model)
    messages: list[Any] = [HumanMessage(arguments.question)]
    calls = streamed_calls(model, messages)
    messages.append(AIMessage("", tool_calls=calls))
    for call in calls:
        result = TOOLS[call["name"]](**call["args"]).run()
        print(f"{call['name']}: {result}")
        messages.append(ToolMessage(result, tool_call_id=call["id"]))
    for trip in model.with_structured_output(Trip, method="json_schema", strict=True).stream(messages):
        print(repr(trip))


if __name__ == "__main__":
    main()
