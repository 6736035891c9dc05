"""A hook of mkdocs: links to files beside docs/ lead to the repository, in which they have to be."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, config: Any, page: Any, **_: Any) -> str:
    def link(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        place = ROOT / path
        if not place.exists():
            raise ValueError(f"{page.file.src_uri}: there is no {path}")
        kind = "tree" if place.is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path}{anchor})"

    return OUTSIDE.sub(link, markdown)
