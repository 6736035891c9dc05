"""The rate limiter: instances of models that share a resource, of which there are two."""

from __future__ import annotations

import json
import time
from typing import Any

from differential.cases_describe import get
from differential.cases_http import model, text
from differential.cases_models import Queue, load, post, wait_until
from differential.observe import Case, client
from differential.peers import Peer


class Limited(Queue):
    """Requests to several models, each of which holds its slots until the gate is opened."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer, "limited_one")

    def begins(self, name: str, label: str) -> None:
        """It is sent and has begun."""
        self._model = name
        before = self.begun()
        self.send(label)
        wait_until(lambda: len(self.begun()) > len(before))

    def waits(self, name: str, label: str) -> None:
        """It is sent, and had time to begin if it may."""
        self._model = name
        self.send(label)
        time.sleep(0.2)

    def begun(self) -> str:
        return "".join(sorted(self._order.read_text())) if self._order.exists() else ""

    def end(self) -> Any:
        """What had begun before the gate was opened, in which order all ran, and the answers."""
        begun = self.begun()
        return {"before": begun, **self.open()}


def both_slots(peer: Peer) -> Any:
    """One that needs both waits for nothing; one that needs one waits for it."""
    queue = Limited(peer)
    queue.begins("limited_two", "a")
    queue.waits("limited_one", "b")
    return queue.end()


def one_slot_each(peer: Peer) -> Any:
    """Two instances run; the model that needs both slots waits for both, and its request is the last."""
    queue = Limited(peer)
    queue.begins("limited_one", "a")
    queue.begins("limited_one", "a")
    queue.waits("limited_two", "b")
    return queue.end()


def too_much(peer: Peer) -> Any:
    """A model that asks for more than there is does not load, and the old one goes on."""
    config = client(peer).get("/v2/models/limited_two/config").json()
    config["instance_group"][0]["rate_limiter"]["resources"][0]["count"] = 3
    refused = load(peer, "limited_two", config=json.dumps(config))["status"] >= 400
    answer = post(peer, model("limited_one"), {"inputs": [text("INPUT0", f"{peer.folder}|", (1, 1))]})
    return refused, answer["status"]


CASES = [
    *(get(f"/v2/models/{name}/config", exact=False) for name in ("limited_one", "limited_two")),
    Case("rate limiter: both slots are taken", both_slots),
    Case("rate limiter: one slot each", one_slot_each),
    Case("rate limiter: more than there is", too_much),
]
