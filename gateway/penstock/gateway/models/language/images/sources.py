"""Images that are not in their request: in a file of its tenant, or on another server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.engines.errors import InvalidRequestError, NotFoundError
from penstock.gateway.models.language.images.reader import MOST_BYTES, MOST_IMAGES, RequestImage, too_many
from penstock.gateway.requests.context import RequestContext

_MOST_BYTES_TOGETHER = 64 << 20
"""Of a request's images that are not in its body."""


class Fetcher(Protocol):
    async def fetch(self, url: str, most: int, where: str) -> bytes:
        """Raises InvalidRequestError, OverloadedError."""
        ...


class Files(Protocol):
    async def image(self, tenant: str, file_id: str, most: int, where: str) -> bytes:
        """Raises InvalidRequestError, NotFoundError."""
        ...


class ImageSources:
    """Of a server. Without a fetcher it fetches nothing; without files it keeps none."""

    def __init__(self, fetcher: Fetcher | None = None) -> None:
        self._fetcher = fetcher
        self.files: Files | None = None

    async def load(self, images: Sequence[RequestImage], context: RequestContext) -> None:
        """Gives each its data. What it takes counts with the request's body. Raises InvalidRequestError,
        OverloadedError."""
        outside = [image for image in images if not image.data and (image.url or image.file_id)]
        if not outside:
            return
        if len(images) > MOST_IMAGES:  # before anything is fetched
            raise too_many(len(images))
        left = _MOST_BYTES_TOGETHER
        for image in outside:
            if not left:
                message = f"{image.where}: images outside of the request have more than 64 MiB together."
                raise InvalidRequestError(message, param=image.where)
            image.data = await self._read(image, min(left, MOST_BYTES), context.tenant)
            context.hold_more(len(image.data))
            left -= len(image.data)

    async def _read(self, image: RequestImage, most: int, tenant: str) -> bytes:
        if image.url:
            return await self._fetched(image, most)
        if self.files is None:
            message = f"{image.where}: this server keeps no files (--data-dir, --data-memory)."
            raise InvalidRequestError(message, param=image.where)
        try:
            return await self.files.image(tenant, image.file_id, most, image.where)
        except NotFoundError:
            message = f"{image.where}: there is no file with this id."
            raise InvalidRequestError(message, param=image.where) from None

    async def _fetched(self, image: RequestImage, most: int) -> bytes:
        if self._fetcher is None:
            message = f"{image.where}: this server does not fetch images; send the image itself in a data: URL."
            raise InvalidRequestError(message, param=image.where)
        return await self._fetcher.fetch(image.url, most, image.where)
