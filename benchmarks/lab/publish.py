"""Prints the lab's tables, and writes them with a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fusedonebit.apps.parsing import InputError, missing

from .contenders import CONTENDERS
from .records import Records
from .report import Rows, markdown, rates, rows, views


def publish(records: Records, out: Path) -> None:
    """Print all tables that there are runs for, and write them to ``out``; draw the picture where matplotlib is.

    Raises:
        InputError: for a file that can't be written.
    """
    tables = every_table(records)
    console = Console(highlight=False)
    for title, table in tables.items():
        for part in parts(table, console.width):
            console.print(_on_a_terminal(title, part))
    try:
        (out / "table.md").write_text(page(tables))
    except OSError as error:
        raise InputError(f"{out / 'table.md'} can't be written: {error.strerror}") from None
    written = [out / "table.md"]
    if absent := missing("matplotlib"):
        console.print(f"the picture needs {absent}")
    elif len(tables) > 1:
        from .plots import plot

        try:
            plot(records, out / "worse.png")
        except OSError as error:
            raise InputError(f"{out / 'worse.png'} can't be written: {error.strerror}") from None
        written.append(out / "worse.png")
    console.print(f"wrote {' and '.join(map(str, written))}", soft_wrap=True)


def every_table(records: Records) -> dict[str, Rows]:
    """Return the tables that there are runs for, under what each shows."""
    optimizers = [name for name in CONTENDERS if any(key.optimizer == name for key in records.found)]
    tables = {view.title: rows(records, view, optimizers) for view in views(records)}
    return tables | {"learning rates": rates(records, optimizers)}


def page(tables: Mapping[str, Rows]) -> str:
    """Return what ``table.md`` has."""
    return "\n".join(f"## {title.capitalize()}\n\n{markdown(table)}" for title, table in tables.items())


def parts(table: Rows, width: int) -> list[Rows]:
    """Cut a table between columns into tables that fit a terminal, each with the first column."""
    columns = list(zip(*table, strict=True))
    first, parts = columns[0], [[columns[0]]]
    for column in columns[1:]:
        if len(parts[-1]) > 1 and _width([*parts[-1], column]) > width:
            parts.append([first])
        parts[-1].append(column)
    return [list(map(list, zip(*part, strict=True))) for part in parts]


def _width(columns: Sequence[Sequence[str]]) -> int:
    """Return a table's characters in a line: each column has a border and two blanks, the table one border more."""
    return 1 + sum(3 + max(map(len, column)) for column in columns)


def _on_a_terminal(title: str, table: Rows) -> Table:
    shown = Table(title=title)
    for i, name in enumerate(table[0]):
        shown.add_column(name, justify="right" if i else "left")
    for row in table[1:]:
        shown.add_row(*row)
    return shown
