"""Texts of files and tables, to fit and to score."""

from typing import Any

from onefold.errors import InputError
from onefold.inputs import Text, TextSource, open_source


def read_texts(x: Any, text: str | None = None) -> TextSource:
    """Return the texts in a file or a table, for `fit` of a detector on an encoder of texts.

    A detector that is fitted on a column reads the same column of later tables by itself.

    Args:
        x: Path to a .txt (one text a line), .jsonl, .csv, .tsv or .parquet file; a data frame; or an Arrow table.
        text: Column of the texts in a table or in JSON lines; not needed if there is one column.

    Returns:
        The texts; `len` is their number.

    Raises:
        InputError: The column is missing or holds numbers, a text is empty or missing, or the file cannot be read.
    """
    source = open_source(x, form=Text(text))
    if not isinstance(source, TextSource):
        raise InputError("no texts", argument="x", hint="Pass a file, a data frame or a list of texts.")
    return source
