"""Tables of plain text."""

from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Lines with columns under one another: so many flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
