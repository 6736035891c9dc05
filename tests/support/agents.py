"""Tools and answers for the tests of agent frameworks. Every argument is one of a few, so that also a model that knows
nothing of tools calls them within a few tokens, by grammar."""

# LlamaIndex reads annotations as they are: no `from __future__ import annotations` here.
from typing import Literal

from pydantic import BaseModel, ConfigDict

MODEL = "penstock-demo"
QUESTION = "Is it warmer in Oslo or in Rome?"

City = Literal["Oslo", "Rome"]


class Verdict(BaseModel):
    """How the question was answered."""

    model_config = ConfigDict(extra="forbid")

    warmer: City
    sure: bool


class Calls:
    """Three tools, and what was asked of them."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def temperature(self, city: City) -> str:
        """The temperature in a city."""
        assert city in ("Oslo", "Rome")
        self.seen.append("temperature")
        return "4" if city == "Oslo" else "18"

    def season(self, hemisphere: Literal["north", "south"]) -> str:
        """The season of the year."""
        assert hemisphere in ("north", "south")
        self.seen.append("season")
        return "autumn"

    def compare(self, left: Literal["4", "18"], right: Literal["4", "18"]) -> str:
        """The larger of two numbers."""
        self.seen.append("compare")
        return max(left, right, key=int)
