"""The requests that an operator looks at, in all processes of a server."""

from __future__ import annotations

from penstock.gateway.requests.call import DrainState, RequestJournal
from penstock.gateway.requests.context import Principal, RequestContext
from penstock.gateway.requests.request_watch import RequestChoice, RequestWatch, ServerRequests, WatchedRequests


class Process:
    """A process, and a front of another one."""

    def __init__(self) -> None:
        self.journal = RequestJournal()
        self.watch = RequestWatch(self.journal, DrainState())

    def begin(self, id: str, arrival: float, *, tenant: str = "", model: str = "", route: str = "/") -> RequestContext:
        context = RequestContext(id=id, arrival=arrival, principal=Principal(tenant=tenant))
        context.record.model, context.record.route, context.infers = model, route, True
        self.journal.begin(context)
        return context

    async def watch_requests(self, choice: RequestChoice) -> list[WatchedRequests]:
        return [self.watch.look(choice)]

    async def cancel_request(self, request: str) -> bool:
        return self.watch.cancel(request)


async def test_a_look_chooses_among_the_requests_of_all_processes() -> None:
    own, front = Process(), Process()
    requests = ServerRequests(own.watch, front)
    looker = own.begin("looker", 1, tenant="a")
    for number, process in enumerate((own, front, own, front)):
        process.begin(str(number), 10.0 - number, tenant="a" if number < 3 else "b", model=f"m{number % 2}")
    seen = await requests.look(RequestChoice(limit=2, tenant="a"), looker)
    assert (seen.in_flight, seen.chosen, [row.id for row in seen.requests]) == (4, 3, ["2", "1"])
    seen = await requests.look(RequestChoice(limit=9, model="m1"), looker)
    assert (seen.chosen, [row.id for row in seen.requests]) == (2, ["3", "1"])
    assert not await requests.cancel("unknown")


async def test_only_a_look_at_what_has_ended_has_requests_noted() -> None:
    own, front = Process(), Process()
    requests = ServerRequests(own.watch, front)
    seen = await requests.look(RequestChoice(limit=9))
    front.journal.end(front.begin("before", 1))
    assert (seen.ended, seen.tenants) == ([], {})
    await requests.look(RequestChoice(limit=9, since=0.0))
    console = own.begin("page", 2, route="/console/live")
    front.journal.end(front.begin("after", 3, tenant="t"))
    seen = await requests.look(RequestChoice(limit=9, since=0.0, request="after"))
    assert ([row.id for row in seen.ended], seen.in_flight) == (["after"], 0)
    assert seen.detail is not None
    assert (seen.detail.id, seen.tenants["t"].ended) == ("after", 1)
    seen = await requests.look(RequestChoice(limit=9))
    assert ([row.id for row in seen.requests], seen.ended) == (["page"], [])
    own.journal.end(console)
