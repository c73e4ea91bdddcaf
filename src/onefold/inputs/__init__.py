"""Sources of raw, unscaled samples from every kind of data that `fit` and `score` accept."""

from onefold.decode import Picture
from onefold.inputs.arrays import ArraySource, NamedSource, NpyFile, open_npz
from onefold.inputs.datasets import DatasetSource, LoaderSource, StreamSource
from onefold.inputs.images import ImageFolder
from onefold.inputs.lines import LineStream
from onefold.inputs.open import Form, form_of, open_source
from onefold.inputs.source import IndexedSource, Source
from onefold.inputs.split import RandomStreamSubset, StreamSubset, Subset, select, split
from onefold.inputs.table_files import TableFile, TableFrame
from onefold.inputs.tables import FAR, Column, Table, TableEncoder
from onefold.inputs.text import Text, TextSource

__all__ = [
    "FAR",
    "ArraySource",
    "Column",
    "DatasetSource",
    "Form",
    "ImageFolder",
    "IndexedSource",
    "LineStream",
    "LoaderSource",
    "NamedSource",
    "NpyFile",
    "Picture",
    "RandomStreamSubset",
    "Source",
    "StreamSource",
    "StreamSubset",
    "Subset",
    "Table",
    "TableEncoder",
    "TableFile",
    "TableFrame",
    "Text",
    "TextSource",
    "form_of",
    "open_npz",
    "open_source",
    "select",
    "split",
]
