"""Prints the lab's tables, and writes them with a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fusedonebit.apps.parsing import InputError, missing

from ..pages import markdown
from .contenders import CONTENDERS
from .records import Records
from .report import Rows, rates, rows, views


def publish(records: Records, out: Path) -> None:
    """Print all tables that there are runs for, and write them to ``out``; draw the picture where matplotlib is.

    Raises:
        InputError: for a file that can't be written.
    """
    tables = every_table(records)
    print(page(tables))
    try:
        (out / "table.md").write_text(page(tables))
    except OSError as error:
        raise InputError(f"{out / 'table.md'} can't be written: {error.strerror}") from None
    written = [out / "table.md"]
    if absent := missing("matplotlib"):
        print(f"the picture needs {absent}")
    elif len(tables) > 1:
        from .plots import plot

        try:
            plot(records, out / "worse.png")
        except OSError as error:
            raise InputError(f"{out / 'worse.png'} can't be written: {error.strerror}") from None
        written.append(out / "worse.png")
    print(f"wrote {' and '.join(map(str, written))}")


def every_table(records: Records) -> dict[str, Rows]:
    """Return the tables that there are runs for, under what each shows."""
    optimizers = [name for name in CONTENDERS if any(key.optimizer == name for key in records.found)]
    tables = {view.title: rows(records, view, optimizers) for view in views(records)}
    return tables | {"learning rates": rates(records, optimizers)}


def page(tables: Mapping[str, Rows]) -> str:
    """Return what ``table.md`` has."""
    return "\n".join(f"## {title.capitalize()}\n\n{markdown(table)}" for title, table in tables.items())
