"""Everything that can be handed to `fit` and `score`, as sources of raw samples; scaling is done elsewhere."""

from onefold.sources.arrayfiles import NpyFile, open_npz
from onefold.sources.arrays import ArraySource, NamedSource
from onefold.sources.base import Indexed, Source
from onefold.sources.datasets import DatasetSource, LoaderSource, StreamSource
from onefold.sources.decode import Picture
from onefold.sources.encode import FAR, TableEncoder
from onefold.sources.forms import Form, form_from_json, form_to_json
from onefold.sources.images import ImageFolder
from onefold.sources.opening import form_of, open_source
from onefold.sources.split import Picked, Sifted, Subset, picked, split
from onefold.sources.tablefiles import TableFile, TableFrame
from onefold.sources.tables import Column, Table

__all__ = [
    "FAR",
    "ArraySource",
    "Column",
    "DatasetSource",
    "Form",
    "ImageFolder",
    "Indexed",
    "LoaderSource",
    "NamedSource",
    "NpyFile",
    "Picked",
    "Picture",
    "Sifted",
    "Source",
    "StreamSource",
    "Subset",
    "Table",
    "TableEncoder",
    "TableFile",
    "TableFrame",
    "form_from_json",
    "form_of",
    "form_to_json",
    "open_npz",
    "open_source",
    "picked",
    "split",
]
