"""The tools and the answer of both agents: as classes, whose fields the model fills in."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

City = Literal["Oslo", "Rome", "Vienna"]
WEATHER = {"Oslo": "4 degrees, rain", "Rome": "18 degrees, sunny", "Vienna": "9 degrees, cloudy"}
KILOMETRES = {("Oslo", "Rome"): 2540, ("Oslo", "Vienna"): 1850, ("Rome", "Vienna"): 1120}


class Weather(BaseModel):
    """The weather in a city."""

    city: City

    def run(self) -> str:
        return WEATHER[self.city]


class Distance(BaseModel):
    """The distance between two cities by rail, in kilometres."""

    start: City
    end: City

    def run(self) -> str:
        ends = min(self.start, self.end), max(self.start, self.end)
        return str(KILOMETRES.get(ends, 0))


class Trains(BaseModel):
    """When trains leave a city."""

    city: City
    day: Literal["today", "tomorrow"]

    def run(self) -> str:
        return "14:40, 21:05" if self.day == "today" else "06:10, 14:40, 21:05"


class Trip(BaseModel):
    """The answer."""

    model_config = ConfigDict(extra="forbid")

    destination: City
    by_train: bool
    bring: Literal["coat", "umbrella", "sunglasses"]


TOOLS: dict[str, type[Weather | Distance | Trains]] = {tool.__name__: tool for tool in (Weather, Distance, Trains)}
