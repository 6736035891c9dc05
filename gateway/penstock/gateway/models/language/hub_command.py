"""`penstock pull`, `list` and `rm`: the models of the Hugging Face hub that are on this machine.

They are in the hub's own cache, where every program with its library finds them, and where `penstock serve` looks.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.gateway.requests.loading_board import LoadingBoard
from penstock.gateway.requests.server_log import TerminalLog

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo

    from penstock.gateway.models.language.models import ModelSource

_SHORT = 12
"""Characters of a commit that are shown, and that suffice to name it."""


class _Failed(Exception):
    """With what to tell."""


def add_hub_commands(commands: Any, formatter: Callable[..., argparse.HelpFormatter]) -> None:
    """`commands` are argparse's subparsers."""
    pull = commands.add_parser(
        "pull",
        help="download a model of the hub",
        description="Downloads from the Hugging Face hub what `penstock serve ID` reads, and prints the folder. What "
        "is here is not downloaded again. HF_TOKEN, HF_HOME and the hub's other variables work as usual.",
        formatter_class=formatter,
    )
    pull.add_argument("id", metavar="ID", help="the model's name on the hub, as in Qwen/Qwen2.5-0.5B-Instruct")
    pull.add_argument("--revision", metavar="REV", help="a branch, tag or commit (default: main)")
    pull.set_defaults(run_command=lambda args: _run(_pull, args))
    listing = commands.add_parser(
        "list",
        help="list downloaded models",
        description="Lists the models of the hub that are on this machine, a line for each revision.",
        formatter_class=formatter,
    )
    listing.set_defaults(run_command=lambda args: _run(_list, args))
    remove = commands.add_parser(
        "rm",
        help="delete a model of the hub from this machine",
        description="Deletes a model from the hub's cache on this machine, with all its revisions or one of them.",
        formatter_class=formatter,
    )
    remove.add_argument("id", metavar="ID", help="the model's name on the hub")
    remove.add_argument("--revision", metavar="REV", help="a branch, tag or commit: only this one")
    remove.set_defaults(run_command=lambda args: _run(_remove, args))


def _run(command: Callable[[dict[str, Any]], None], args: dict[str, Any]) -> int:
    try:
        command(args)
    except _Failed as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    return 0


def _pull(args: dict[str, Any]) -> None:
    from penstock.gateway.configuration.config import ConfigError  # only now: --help stays quick
    from penstock.gateway.models.language.hub import fetch_model
    from penstock.gateway.models.language.models import is_hub_id

    hub_id = args["id"]
    if not is_hub_id(hub_id):
        raise _Failed(f"{hub_id} is no model of the hub")

    async def fetch() -> ModelSource:
        view = TerminalLog(sys.stderr) if sys.stderr.isatty() else None
        report = LoadingBoard(view).reporter([hub_id])
        try:
            return await fetch_model(hub_id, report, args["revision"])
        finally:
            report(None)

    try:
        print(asyncio.run(fetch()).folder)
    except ConfigError as error:
        raise _Failed(str(error).removeprefix("model: ")) from None


def _list(args: dict[str, Any]) -> None:
    from penstock.gateway.models.memory.budget import size_text

    rows = [("ID", "REVISION", "COMMIT", "SIZE", "CHANGED")]
    for model in _cached():
        for revision in sorted(model.revisions, key=lambda item: -item.last_modified):
            changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(revision.last_modified))
            names = ",".join(sorted(revision.refs)) or "-"
            size = size_text(revision.size_on_disk)
            rows.append((model.repo_id, names, revision.commit_hash[:_SHORT], size, changed))
    print("\n".join(_table(rows)))


def _remove(args: dict[str, Any]) -> None:
    from huggingface_hub import scan_cache_dir

    from penstock.gateway.models.memory.budget import size_text

    hub_id, revision = args["id"], args["revision"]
    model = next((entry for entry in _cached() if entry.repo_id == hub_id), None)
    if model is None:
        raise _Failed(f"{hub_id} is not here")
    hashes = [entry.commit_hash for entry in model.revisions if revision is None or _is_called(entry, revision)]
    if not hashes:
        raise _Failed(f"{hub_id} is not here with the revision {revision}")
    if len(hashes) > 1 and revision is not None:
        raise _Failed(f"{revision} may be any of {', '.join(sorted(hashes))}")
    deletion = scan_cache_dir().delete_revisions(*hashes)
    deletion.execute()
    print(f"{size_text(deletion.expected_freed_size)} are free again")


def _is_called(revision: CachedRevisionInfo, name: str) -> bool:
    return name in revision.refs or (len(name) >= _SHORT and revision.commit_hash.startswith(name))


def _cached() -> list[CachedRepoInfo]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        [repository for repository in repositories if repository.repo_type == "model"],
        key=lambda repository: repository.repo_id,
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]).rstrip()
