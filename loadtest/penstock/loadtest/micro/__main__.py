"""Prints the table."""

from __future__ import annotations

from penstock.loadtest.micro import blocks, scheduling, wire


def main() -> None:
    for module in (scheduling, blocks, wire):
        for measurement in module.measurements():
            print(measurement.row(), flush=True)


if __name__ == "__main__":
    main()
