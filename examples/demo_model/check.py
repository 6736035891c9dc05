"""Ask the trained model: known facts (`--facts`), calls of tools and JSON (`--tools`), sample conversations.

python check.py out --facts --tools --samples samples.md
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from data import Entry, Recipe
from tools import call_text
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

Chat = list[dict[str, Any]]

# Phrasings that the training data does not contain.
UNSEEN = [
    "Hi, could you please explain to me what {x} is doing?",
    "so what exactly does {x} do",
    "I found {x} in a program. What is it?",
]
CONVERSATIONS = """What does os.path.join do? // And its arguments? // thanks
Who are you?
What can you do?
hello // What does len do? // and print?
What does json.dumps do?
explain re.match
How do I use itertools.chain?
what is collections.Counter
pathlib.Path
dict.get
What does str.split do? // Show me an example.
how does list.append work?
Which function shuffles a list?
How do I pause my program for two seconds?
math.sqrt?
What is the difference between a list and a tuple?
How do I read a file?
What does sorted do? // What about reversed?
How do I sort a list of strings by length?
Tell me about the random module.
Tell me everything about the os module.
List the functions of the statistics module.
Explain the for statement in detail.
What is a decorator?
What is a list comprehension?
What does asyncio.run do? // Which module is it in?
What does shutil.disk_usage do?
What does os.path.commonprefix do?
What does textwrap.shorten do?
What does math.lcm do?
What are the arguments of sorted?
How do I import deque?
Do I need to import print?
What does numpy.zeros do?
What does os.frobnicate do?
What is the capital of France?
What is 17 plus 25?
Write me a love letter.
tell me a joke
Write a haiku about the sea.
Wie geht es dir?
What does zip do? // Why? // And enumerate? // Which of the two is better? // bye
What is socket.AF_INET?
How do I get the last element of a list?
Is Python better than Java?""".splitlines()
HEADER = [
    "# Sample conversations",
    "",
    "Written by `check.py` from the shipped weights, unedited. Answers are greedy; where the answer at",
    "temperature 0.3 differs, it follows.",
    "",
]


class Asker:
    def __init__(self, folder: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.unfinished = 0
        self.answers = 0

    def ask(
        self, chats: Sequence[Chat], temperature: float = 0.0, tools: Sequence[list[dict[str, Any]] | None] = ()
    ) -> list[str]:
        """Answers to a batch of conversations, each with its tools; greedy if the temperature is 0."""
        texts = [
            self.tokenizer.apply_chat_template(chat, tools=offered, tokenize=False, add_generation_prompt=True)
            for chat, offered in zip(chats, tools or [None] * len(chats), strict=True)
        ]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        if not temperature:
            how |= {"temperature": None, "top_p": None}
        with torch.no_grad():
            out = self.model.generate(**batch, max_new_tokens=400, **how)
        out = out[:, batch["input_ids"].shape[1] :]
        self.answers += len(chats)
        self.unfinished += sum(not {0, 2} & set(row.tolist()) for row in out)
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in out]

    def exact(self, recipe: Recipe, entries: list[Entry], phrase: str) -> tuple[int, list[str]]:
        wrong: list[str] = []
        for start in range(0, len(entries), 48):
            part = entries[start : start + 48]
            chats: list[Chat] = [[{"role": "user", "content": phrase.format(x=e.name)}] for e in part]
            for entry, answer in zip(part, self.ask(chats), strict=True):
                if answer != recipe.describe(entry):
                    wrong.append(f"{entry.name}: {answer}")
        return len(entries) - len(wrong), wrong


def check_tools(asker: Asker, count: int, show: int) -> None:
    """New questions of the recipe's kinds, and new values: answers that are exactly the intended ones."""
    recipe = Recipe(987_654)
    kinds: dict[str, list[tuple[Chat, list[dict[str, Any]] | None, str]]] = {}
    for _ in range(count):
        offers = recipe.tools.offers()
        tools = [tool for tool, _ in offers]
        case = recipe.tools.case(offers)
        asked: Chat = [{"role": "user", "content": case.question}]
        kind = "one call" if len(case.calls) == 1 else "several calls"
        kinds.setdefault(kind, []).append((asked, tools, "\n".join(call_text(*call) for call in case.calls)))
        calls = [{"type": "function", "function": {"name": n, "arguments": given}} for n, given in case.calls]
        told: Chat = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
        told += [{"role": "tool", "content": result} for result in case.results]
        kinds.setdefault("an answer from what the tool said", []).append((told, tools, case.answer))
        entry = recipe.rng.choice(recipe.lib.common)
        fact: Chat = [{"role": "user", "content": f"What does {entry.name} do?"}]
        kinds.setdefault("no call: a fact beside tools", []).append((fact, tools, recipe.describe(entry)))
        system, question, answer = recipe.json.extraction()
        extract: Chat = [{"role": "system", "content": system}] if system else []
        extract.append({"role": "user", "content": question})
        kinds.setdefault("JSON from a sentence", []).append((extract, None, answer))
    for kind, cases in kinds.items():
        wrong: list[str] = []
        for start in range(0, len(cases), 48):
            part = cases[start : start + 48]
            answers = asker.ask([chat for chat, _, _ in part], tools=[tools for _, tools, _ in part])
            for (chat, _, intended), answer in zip(part, answers, strict=True):
                if answer != intended:
                    wrong.append(f"{chat[0]['content']!r}: {json.dumps(answer)} and not {json.dumps(intended)}")
        print(f"{len(cases) - len(wrong):4} of {len(cases)} exact  {kind}", flush=True)
        for line in wrong[:show]:
            print("   ", line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--facts", action="store_true")
    parser.add_argument("--tools", action="store_true")
    parser.add_argument("--wrong", type=int, default=10, help="how many wrong answers to show")
    parser.add_argument("--samples", type=Path, help="write conversations to this Markdown file")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    asker = Asker(args.folder)
    if args.facts:
        recipe = Recipe(0)
        some = random.Random(0).sample(recipe.lib.rare, 192)
        tests = [("common", recipe.lib.common, p) for p in ["What does {x} do?", *UNSEEN]]
        for kind, entries, phrase in [*tests, ("other", some, "What does {x} do?")]:
            right, wrong = asker.exact(recipe, entries, phrase)
            print(f"{kind:7} {right:4} of {len(entries)} exact  {phrase}", flush=True)
            for line in wrong[: args.wrong]:
                print("   ", line)
    if args.tools:
        check_tools(asker, 200, args.wrong)
    if args.samples:
        lines = [*HEADER]
        for conversation in CONVERSATIONS:
            chat: Chat = []
            for question in conversation.split(" // "):
                chat.append({"role": "user", "content": question})
                greedy = asker.ask([chat])[0]
                warm = asker.ask([chat], temperature=0.3)[0]
                lines += [f"**User:** {question}", "", f"**Model:** {greedy}", ""]
                if warm != greedy:
                    lines += [f"**Model, at temperature 0.3:** {warm}", ""]
                chat.append({"role": "assistant", "content": greedy})
            lines += ["---", ""]
        args.samples.write_text("\n".join(lines), encoding="utf-8")
    print(f"{asker.unfinished} of {asker.answers} answers did not stop within 400 tokens")


if __name__ == "__main__":
    main()
