"""What is kept of prepared images: for whom, and how many bytes. The decoder is a double."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.models.language.images import reader
from penstock.gateway.models.language.images.family import ImageFamily, PreparedImage
from penstock.gateway.models.language.images.idefics3 import Idefics3Images
from penstock.gateway.models.language.images.internvl import InternVLImages
from penstock.gateway.models.language.images.reader import PreparedImages, RequestImage

HOW = Idefics3Images(cell=8, side=16, longest=32, resample=1, splits=True)


class Decoder:
    def __init__(self) -> None:
        self.files: list[bytes] = []

    def prepare(self, file: bytes, how: ImageFamily, where: str) -> PreparedImage:
        self.files.append(file)
        if file == b"broken":
            raise InvalidRequestError("broken")
        return PreparedImage(file * 10, ((len(file), 1),), 0, 0)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    decoder = Decoder()
    monkeypatch.setattr(reader, "PROCESSES", decoder)
    return decoder


def test_the_same_file_again_is_not_decoded(decoder: Decoder) -> None:
    images = PreparedImages()
    first = images.prepare(RequestImage("YWJj", "here"), HOW, "salt")
    assert images.prepare(RequestImage(b"abc", "there"), HOW, "salt") is first
    assert decoder.files == [b"abc"]
    assert images.prepare(RequestImage(b"abd", "there"), HOW, "salt").key != first.key


@pytest.mark.parametrize(
    ("how", "salt"),
    [
        (HOW, "another's"),
        (HOW.coarse(), "salt"),
        (replace(HOW, longest=48), "salt"),
        (InternVLImages(8, 16, 32, 1, True), "salt"),
    ],
)
def test_another_tenant_or_preparation_has_its_own(decoder: Decoder, how: ImageFamily, salt: str) -> None:
    images = PreparedImages()
    for _ in range(2):
        images.prepare(RequestImage(b"abc", "here"), HOW, "salt")
        images.prepare(RequestImage(b"abc", "here"), how, salt)
    assert len(decoder.files) == 2


def test_those_used_longest_ago_make_room(decoder: Decoder) -> None:
    images = PreparedImages(max_bytes=100)
    for file in (b"aaaa", b"bbbb", b"aaaa", b"cccc", b"aaaa", b"too large!!", b"too large!!", b"bbbb"):
        images.prepare(RequestImage(file, "here"), HOW, "")
        assert images.num_bytes <= 100
    assert decoder.files == [b"aaaa", b"bbbb", b"cccc", b"too large!!", b"too large!!", b"bbbb"]
    assert images.num_bytes == 80


def test_refused_files_are_refused_again(decoder: Decoder) -> None:
    images = PreparedImages()
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            images.prepare(RequestImage(b"broken", "here"), HOW, "")
    assert len(decoder.files) == 2
