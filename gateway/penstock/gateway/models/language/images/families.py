"""Registry of image families, by the architectures of config.json."""

from __future__ import annotations

from typing import Any

from penstock.gateway.models.language.images.family import ImageFamily
from penstock.gateway.models.language.images.gemma3 import Gemma3Images
from penstock.gateway.models.language.images.gemma4 import Gemma4Images
from penstock.gateway.models.language.images.idefics3 import Idefics3Images
from penstock.gateway.models.language.images.internvl import InternVLImages
from penstock.gateway.models.language.images.lfm2 import Lfm2Images
from penstock.gateway.models.language.images.pixtral import PixtralImages
from penstock.gateway.models.language.images.qwen import Qwen3Images, QwenImages

FAMILIES: tuple[type[ImageFamily], ...] = (
    Gemma3Images,
    Gemma4Images,
    Idefics3Images,
    InternVLImages,
    Lfm2Images,
    PixtralImages,
    QwenImages,
    Qwen3Images,
)


def family_of(architectures: Any) -> type[ImageFamily] | None:
    """`architectures`: as config.json names them. None: it reads text only, or its images are not known here."""
    names = set(architectures) if isinstance(architectures, list) else set()
    return next((family for family in FAMILIES if names & set(family.architectures)), None)
