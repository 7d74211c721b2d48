"""What every benchmark leaves: a table for people, a JSON file, and one JSON object as the last line."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from kvpilot_tools.repository import BUILD


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case against its peer, both in `unit`, in the same run."""

    case: str
    ours: float
    peer: float
    unit: str

    @property
    def ratio(self) -> float:
        return self.ours / self.peer if self.peer else float("nan")


def publish(name: str, peer: str, rows: list[Row]) -> None:
    """Print the table, write build/bench/NAME.json, print the JSON object."""
    table = Table(title=f"{name}: ours against {peer}")
    for column in ("case", "ours", "peer", "unit", "ratio"):
        table.add_column(column, justify="left" if column in ("case", "unit") else "right")
    for row in rows:
        table.add_row(row.case, f"{row.ours:.1f}", f"{row.peer:.1f}", row.unit, f"{row.ratio:.2f}")
    Console(width=100).print(table)
    machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    result = {"bench": name, "peer": peer, "machine": machine, "rows": [{**asdict(r), "ratio": r.ratio} for r in rows]}
    folder = BUILD / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
