from __future__ import annotations

from pathlib import Path

import torch

from backend_candidates.candidate import (
    HEAVY_ROWS,
    LOOKUP,
    MAX_BATCH_SIZE,
    STRINGS,
    TABLE_ROWS,
    Candidate,
    Extra,
    beyond_the_table,
    lookup_answer,
    lookup_rows,
    table,
)


class Lookup(torch.nn.Module):
    def __init__(self, number: int, rows: int = TABLE_ROWS) -> None:
        super().__init__()
        self.number = float(number)
        self.register_buffer("table", torch.from_numpy(table(rows)))

    def forward(self, INPUT0: torch.Tensor, INDEX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.table[INDEX[:, 0]]
        return INPUT0 * self.number + row, INPUT0 - row


class NamedLookup(Lookup):
    def forward(self, INPUT0: torch.Tensor, INDEX: torch.Tensor) -> dict[str, torch.Tensor]:
        row = self.table[INDEX[:, 0]]
        return {"OUTPUT0": INPUT0 * self.number + row, "OUTPUT1": INPUT0 - row}


class Strings(torch.nn.Module):
    def forward(self, INPUT0: list[str]) -> list[str]:
        return [text + "" for text in INPUT0]


def write_script(folder: Path, module: torch.nn.Module) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.jit.script(module.eval()).save(str(folder / "model.pt"))


def exported(number: int, rows: int = TABLE_ROWS) -> torch.export.ExportedProgram:
    """Batches of up to 64."""
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    examples = (torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64))
    return torch.export.export(NamedLookup(number, rows).eval(), examples, dynamic_shapes=(batch, batch))


def write_exported(folder: Path, number: int, rows: int = TABLE_ROWS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.export.save(exported(number, rows), folder / "model.pt2")


TORCHSCRIPT = Candidate(
    backend="pytorch",
    write=lambda folder, number: write_script(folder, Lookup(number)),
    config=LOOKUP,
    sparse=None,
    rows=lookup_rows,
    expect=lookup_answer,
    poison=beyond_the_table,
    write_heavy=lambda folder: write_script(folder, Lookup(1, HEAVY_ROWS)),
    write_broken=lambda folder: (folder / "model.pt").write_bytes(b"no model") and None,
    strings=Extra(write=lambda folder: write_script(folder, Strings()), config=STRINGS),
)

EXPORTED = Candidate(
    backend="pytorch",
    write=write_exported,
    config=LOOKUP,
    sparse=f"max_batch_size: {MAX_BATCH_SIZE}",
    rows=lookup_rows,
    expect=lookup_answer,
    poison=beyond_the_table,
    write_heavy=lambda folder: write_exported(folder, 1, HEAVY_ROWS),
    write_broken=lambda folder: (folder / "model.pt2").write_bytes(b"no model") and None,
)

CANDIDATE = TORCHSCRIPT
