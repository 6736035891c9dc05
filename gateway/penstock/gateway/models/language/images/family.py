"""The seam of image families: how a model's processor prepares a picture, and what stands for it in a prompt.

Imports nothing of the server's: the process that decodes images uses it, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FILTERS = range(6)
"""Pillow's numbers of what may be named `resample`."""
_HALVES = (0.5, 0.5, 0.5)
CLIP_VALUES = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and deviation of pixels with encoders that take CLIP's."""


class RefusedImageError(Exception):
    """For the client: its message says what is wrong with the picture."""


class Tiles(NamedTuple):
    """A picture as an encoder takes it."""

    pictures: Sequence[Picture]
    """In RGB."""
    rows: int = 0
    """Of those that the picture was cut into; 0: it was not."""
    columns: int = 0


class PreparedImage(NamedTuple):
    """The same as bytes."""

    pixels: bytes
    """Of the tiles, one after the other: [height, width, 3] in 8 bits."""
    tiles: tuple[tuple[int, int], ...]
    """(height, width) of each."""
    rows: int
    columns: int


@dataclass(frozen=True)
class ImageFamily(ABC):
    """What a model's files say of its images. All fields are numbers and truth values: by these the process that
    decodes images knows it."""

    architectures: ClassVar[tuple[str, ...]]
    marker: ClassVar[str]
    """The token that a chat template writes for an image."""
    token: ClassVar[str]
    """The one that stands, in a prompt, for each row that the encoder gives."""
    newlines: ClassVar[int] = 0
    """So many stand before and behind an image. They are one with those of the text around it."""

    cell: int
    """Pixels of the side of a square that takes one token."""
    side: int
    """Pixels of the side of each tile; 0: tiles have any size that cells fill."""

    @classmethod
    @abstractmethod
    def of(cls, settings: Mapping[str, Any], processor: Mapping[str, Any]) -> Self:
        """Of config.json, and of the image processor's settings. Raises KeyError, TypeError, ValueError for those of
        another kind than the published ones."""

    @abstractmethod
    def prepared(self, picture: Picture) -> Tiles:
        """`picture`: upright, in RGB. Raises RefusedImageError for one that the model cannot be shown."""

    @abstractmethod
    def text(self, image: PreparedImage) -> str:
        """What stands in a prompt in the place of the marker."""

    def coarse(self) -> Self:
        """For an image of which a client wants little detail."""
        return self

    @property
    def fewest_tokens(self) -> int:
        """Of an image, however small it is."""
        return self.tokens((self.side, self.side)) or 1

    def tokens(self, tile: tuple[int, int]) -> int:
        """Those that the encoder gives for a tile of so many pixels (height, width)."""
        height, width = tile
        return (height // self.cell) * (width // self.cell)


def resample_of(processor: Mapping[str, Any], usual: int) -> int:
    """Raises ValueError for what is none of Pillow's filters."""
    resample = int(processor.get("resample", usual))
    if resample not in FILTERS:
        raise ValueError(f"resample={resample}")
    return resample


def check_values(
    processor: Mapping[str, Any], mean: Sequence[float] = _HALVES, deviation: Sequence[float] = _HALVES
) -> None:
    """Raises ValueError where pixels become other values than the family's encoders take."""
    expected = {"do_resize": True, "image_mean": list(mean), "image_std": list(deviation)}
    for key, usual in expected.items():
        if processor.get(key, usual) != usual:
            raise ValueError(f"{key}={str(processor[key])[:50]}")
