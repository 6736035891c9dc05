"""The tools and the answer of both agents: as classes, whose fields the model fills in."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

City = Literal["Oslo", "Rome", "Vienna"]
DEGREES = {"Oslo": 4, "Rome": 18, "Vienna": 9}
KILOMETRES = {("Oslo", "Rome"): 2540, ("Oslo", "Vienna"): 1850, ("Rome", "Vienna"): 1120}


class Temperature(BaseModel):
    """The temperature in a city, in degrees Celsius."""

    city: City

    def run(self) -> str:
        return str(DEGREES[self.city])


class Distance(BaseModel):
    """The distance between two cities by rail, in kilometres."""

    start: City
    end: City

    def run(self) -> str:
        ends = min(self.start, self.end), max(self.start, self.end)
        return str(KILOMETRES.get(ends, 0))


class Timetable(BaseModel):
    """When trains leave a city."""

    city: City
    day: Literal["weekday", "weekend"]

    def run(self) -> str:
        return "06:10, 14:40, 21:05" if self.day == "weekday" else "09:25"


class Trip(BaseModel):
    """The answer."""

    model_config = ConfigDict(extra="forbid")

    destination: City
    by_train: bool
    bring: Literal["coat", "umbrella", "sunglasses"]


TOOLS: dict[str, type[Temperature | Distance | Timetable]] = {
    tool.__name__: tool for tool in (Temperature, Distance, Timetable)
}
