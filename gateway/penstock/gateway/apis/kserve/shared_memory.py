"""Regions of system shared memory that clients have registered, for tensors that do not travel in messages.

Contents are copied in and out with pread and pwrite and never mapped: a client that shrinks its object under a running
request would end this process with SIGBUS, one that changes it would change a request that has been validated.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engines.errors import AlreadyExistsError, InvalidRequestError, NotFoundError, UnsupportedError
from penstock.gateway.requests.context import ANYONE, Principal, RequestContext, Role

RESERVED_PREFIXES = ("triton_python_backend_shm_region_", "penstock", "sem.")
"""Of keys: what servers use among their own processes, and the semaphores that live in the same folder."""

MAX_REGIONS = 512
"""Each holds a file descriptor."""

MAX_TENSOR_BYTES = 1 << 30
"""A sparse object may claim any size; this much of it is read for one tensor."""

_FOLDER = "/dev/shm"
"""Where shm_open(3) keeps objects on Linux, as flat names."""

_MOST_ENDED = 16
"""Requests that have ended and that a region still knows."""
_UINT64 = 1 << 64
_MAX_NAME = 256
_NOT_ALLOWED = "client shared memory is off: start the server with --allow-client-shm to use it"
_NO_CUDA = "CUDA shared memory is not supported by this server"


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """A registered region as the status calls show it; sizes in bytes."""

    name: str
    key: str
    offset: int
    byte_size: int


class _Region:
    """An open object. Its descriptor is closed when neither the registry nor a request holds it any more."""

    __slots__ = ("__weakref__", "_requests", "fd", "status", "tenant")

    def __init__(self, status: RegionStatus, fd: int, tenant: str) -> None:
        self.status = status
        self.tenant = tenant
        self.fd = fd
        self._requests: dict[int, RequestContext] = {}
        weakref.finalize(self, os.close, fd)

    def use(self, request: RequestContext) -> None:
        """Until its end. Threads call this."""
        if len(self._requests) >= _MOST_ENDED:
            self._forget_ended()
        self._requests[id(request)] = request

    def is_used(self) -> bool:
        self._forget_ended()
        return bool(self._requests)

    def _forget_ended(self) -> None:
        for key in [key for key, request in list(self._requests.items()) if request.ended]:
            self._requests.pop(key, None)


class SharedMemorySlice:
    """A part of a region that one tensor has for itself. Stays usable when the region is unregistered meanwhile."""

    __slots__ = ("_hold", "_region", "_start", "byte_size")

    def __init__(self, region: _Region, start: int, byte_size: int, hold: Callable[[int], None] | None) -> None:
        self._region = region
        self._start = start
        self._hold = hold
        self.byte_size = byte_size

    @property
    def region_name(self) -> str:
        return self._region.status.name

    def read(self) -> memoryview:
        """A copy of the contents. Raises InvalidRequestError when the object has shrunk meanwhile, and what `hold` of
        `SharedMemoryRegions.of` raises."""
        if self._hold is not None:
            self._hold(self.byte_size)
        data = os.pread(self._region.fd, self.byte_size, self._start)
        if len(data) != self.byte_size:
            raise _beyond_the_end(self._region.status.name)
        return memoryview(data)

    def write(self, data: bytes | memoryview) -> None:
        """Raises InvalidRequestError when the data is larger than the slice or the system has no memory for it."""
        view = memoryview(data).cast("B")
        name = self._region.status.name
        if len(view) > self.byte_size:
            raise InvalidRequestError(
                f"shared memory size specified with the request for region '{name}' ({self.byte_size} bytes) should be "
                f"at least {len(view)} bytes to hold the results"
            )
        start = self._start
        while view:
            try:
                written = os.pwrite(self._region.fd, view, start)
            except OSError:
                raise InvalidRequestError(f"Unable to write to shared memory region: '{name}'") from None
            start += written
            view = view[written:]


class SharedMemoryRegions:
    """The regions by name. Names are shared by system and CUDA regions; of the latter there are none.

    `allowed` is the operator's word: unless it is given, everything but the status calls raises UnsupportedError.
    A region belongs to the tenant that has registered it. Other tenants cannot see it, and admins can.
    """

    def __init__(self, allowed: bool, *, max_tensor_bytes: int = MAX_TENSOR_BYTES) -> None:
        self.allowed = allowed
        self._max_tensor_bytes = max_tensor_bytes
        self._regions: dict[str, _Region] = {}
        self._leaving: dict[str, _Region] = {}
        """Unregistered ones that requests may still use."""
        self.used_elsewhere: Callable[[str], bool] = _nowhere
        """Whether requests of other processes may use an unregistered region of this name."""
        self._request: RequestContext | None = None
        self._caller = ANYONE
        self._hold: Callable[[int], None] | None = None

    def of(
        self,
        caller: Principal,
        hold: Callable[[int], None] | None = None,
        request: RequestContext | None = None,
    ) -> SharedMemoryRegions:
        """The same regions, for this caller and a request that may use them until its end. `hold` is told of the bytes
        of each tensor before it is read, perhaps in a thread, and raises where there is no room for them."""
        if caller is ANYONE and (hold is None or not self.allowed):
            return self
        view = copy.copy(self)
        view._caller = caller
        view._hold = hold
        view._request = request
        if self._leaving:
            self._in_use()
        return view

    def _seen(self, name: str) -> _Region | None:
        region = self._regions.get(name)
        return region if region is not None and self._may_see(region) else None

    def _seen_leaving(self, name: str) -> _Region | None:
        """Threads call this."""
        region = self._leaving.get(name)
        used = region is not None and (region.is_used() or self.used_elsewhere(name))
        return region if region is not None and used and self._may_see(region) else None

    def _may_see(self, region: _Region) -> bool:
        return region.tenant == self._caller.tenant or Role.ADMIN in self._caller.roles

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Opens the object of this POSIX name (`shm_open`) and keeps it as the region `name`.

        `offset` and `byte_size` say which bytes of the object make up the region. Raises AlreadyExistsError,
        UnsupportedError, and InvalidRequestError for a bad key and for a range that does not lie in the object.
        """
        self._check_allowed()
        if not name or len(name) > _MAX_NAME:
            raise InvalidRequestError(f"the name of a shared memory region must have 1 to {_MAX_NAME} characters")
        if name in self._regions or name in self._in_use():
            raise AlreadyExistsError(f"shared memory region '{name}' already in manager")
        if len(self._regions) + len(self._leaving) >= MAX_REGIONS:
            raise InvalidRequestError(f"there are {MAX_REGIONS} shared memory regions already, unregister some first")
        if not (0 <= offset < _UINT64 and 0 < byte_size < _UINT64):
            raise _invalid_args(name)
        region = _Region(RegionStatus(name, key, offset, byte_size), _open(name, key), self._caller.tenant)
        if offset + byte_size > os.fstat(region.fd).st_size:
            raise _invalid_args(name)
        self._regions[name] = region

    def unregister(self, name: str = "") -> None:
        """Forgets the region; all of the caller's without a name. Unknown names are ignored, as in Triton. The status
        has it, its name is taken, and further requests may use it, until none does: a client learns there when it may
        use the memory for something else."""
        self._check_allowed()
        for known in [name] if name else list(self._regions):
            if self._seen(known) is not None:
                self._leaving[known] = self._regions.pop(known)
        self._in_use()

    def status(self, name: str = "") -> list[RegionStatus]:
        """The region, or all of them. Raises NotFoundError."""
        regions = self._regions | self._in_use()
        if not name:
            return [region.status for region in regions.values() if self._may_see(region)]
        region = regions.get(name)
        if region is None or not self._may_see(region):
            raise NotFoundError(f"Unable to find system shared memory region: '{name[:_MAX_NAME]}'")
        return [region.status]

    def _in_use(self) -> dict[str, _Region]:
        """Of those that are unregistered; the others are forgotten."""
        for name, region in list(self._leaving.items()):
            if not region.is_used() and not self.used_elsewhere(name):
                del self._leaving[name]
        return self._leaving

    def opened(self) -> list[tuple[RegionStatus, str, int]]:
        """All regions with their tenants and descriptors, for the server's other processes."""
        regions = self._regions | self._in_use()
        return [(region.status, region.tenant, region.fd) for region in regions.values()]

    def leaving(self) -> list[str]:
        """Those of `opened` that are unregistered."""
        return list(self._in_use())

    def adopt(self, status: RegionStatus, tenant: str, descriptor: int) -> None:
        """A region that another process of the server has registered. The descriptor is closed with it."""
        self._regions[status.name] = _Region(status, descriptor, tenant)

    def forget(self, name: str) -> None:
        """The opposite."""
        self._regions.pop(name, None)

    def is_used(self, name: str) -> bool:
        """Whether a request of this process uses an adopted region."""
        return name in self._regions and self._regions[name].is_used()

    def slice(self, name: str, offset: int, byte_size: int) -> SharedMemorySlice:
        """The `byte_size` bytes at `offset` of the region, for the time of a request.

        Raises NotFoundError, UnsupportedError, and InvalidRequestError for what does not lie in the region.
        """
        self._check_allowed()
        region = self._seen(name) or self._seen_leaving(name)
        if region is None:
            raise NotFoundError(f"Unable to find shared memory region: '{name[:_MAX_NAME]}'")
        status = region.status
        if not 0 <= offset < status.byte_size:
            raise InvalidRequestError(f"Invalid offset for shared memory region: '{name}'")
        if byte_size < 0 or offset + byte_size > status.byte_size:
            raise _beyond_the_end(name)
        if byte_size > self._max_tensor_bytes:
            raise InvalidRequestError(f"a tensor in shared memory may have at most {self._max_tensor_bytes} bytes")
        if self._request is not None:
            region.use(self._request)
        return SharedMemorySlice(region, status.offset + offset, byte_size, self._hold)

    def read(self, name: str, offset: int, byte_size: int) -> memoryview:
        """A copy of a part of the region. Raises as `slice`."""
        return self.slice(name, offset, byte_size).read()

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Copies into the region. Raises as `slice`."""
        self.slice(name, offset, len(data)).write(data)

    def register_cuda(self, name: str) -> None:
        """Raises UnsupportedError."""
        raise UnsupportedError(f"failed to register shared memory region '{name[:_MAX_NAME]}': {_NO_CUDA}")

    def unregister_cuda(self, name: str = "") -> None:
        """Nothing: there are no such regions, and unknown names are ignored."""

    def cuda_status(self, name: str = "") -> list[RegionStatus]:
        """Empty. Raises NotFoundError for a name."""
        if name:
            raise NotFoundError(f"Unable to find cuda shared memory region: '{name[:_MAX_NAME]}'")
        return []

    def _check_allowed(self) -> None:
        if not self.allowed:
            raise UnsupportedError(_NOT_ALLOWED)


def _nowhere(name: str) -> bool:
    return False


def _open(name: str, key: str) -> int:
    """A descriptor of the object. Only its name is accepted: no path can be spelled with it."""
    plain = key.lstrip("/")
    if plain.lower().startswith(RESERVED_PREFIXES):
        raise InvalidRequestError(f"cannot register shared memory region '{name}': its key is reserved")
    if not plain or "/" in plain or "\0" in plain or plain in (".", "..") or len(plain.encode(errors="replace")) > 254:
        raise _cannot_open(key)
    try:
        return os.open(f"{_FOLDER}/{plain}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        raise _cannot_open(key) from None


def _cannot_open(key: str) -> InvalidRequestError:
    return InvalidRequestError(f"Unable to open shared memory region: '{key[:_MAX_NAME]}'")


def _invalid_args(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"failed to register shared memory region '{name}': invalid args")


def _beyond_the_end(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid offset + byte size for shared memory region: '{name}'")
