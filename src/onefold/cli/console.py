"""Lines that commands print."""

from onefold.errors import visible


def print_lines(*lines: str) -> None:
    """Print lines that may contain names of files; control characters are escaped."""
    print(*map(visible, lines), sep="\n")
