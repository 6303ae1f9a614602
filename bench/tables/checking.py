"""Table of the planted defects that a check found, and of the requests that it needed."""

from collections.abc import Mapping
from typing import Any

from bench.tables.reading import results, table


def checking() -> str:
    header = ["planted in B", "verdict", "asked of each", "identical", "first reason"]
    return table(header, [_cells(row) for row in results("checking")["rows"]])


def _cells(row: Mapping[str, Any]) -> list[str]:
    if row["requests"]:
        asked = f"{row['requests']} requests ({row['kinds']}), {row['tokens']:,} tokens compared"
        identical = str(row["identical"])
    else:
        asked, identical = f"{row['texts']} texts drawn", ""
    return [row["planted"], row["verdict"], asked, identical, row["reason"]]
