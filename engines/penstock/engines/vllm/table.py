"""The live requests by id, and which of their names vLLM's workers still have to forget."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engines.contract.step import NewRequest
from penstock.engines.vllm.requests import LiveRequest


class RequestTable:
    def __init__(self) -> None:
        self._requests: dict[int, LiveRequest] = {}
        self._finished: set[str] = set()
        self._num_names = 0
        self.tainted: set[int] = set()
        """vLLM's blocks that requests with broken logits have held, and that nobody has cleaned since."""

    def __getitem__(self, request_id: int) -> LiveRequest:
        return self._requests[request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, new: NewRequest) -> None:
        self.drop([new.id])
        self._requests[new.id] = LiveRequest.create(new, self._new_name())

    def drop(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._finished.add(request.name)

    def rename(self, request_id: int) -> None:
        """The workers are to forget the request under its old name, and will be told all of it under a new one."""
        request = self._requests[request_id]
        self._finished.add(request.name)
        request.name = self._new_name()

    def take_finished(self) -> set[str]:
        """Names that the workers have to forget, each told once."""
        finished, self._finished = self._finished, set()
        return finished

    def _new_name(self) -> str:
        self._num_names += 1
        return f"r{self._num_names}"

    def clear(self) -> None:
        self.drop(list(self._requests))
