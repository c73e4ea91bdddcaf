"""The HTTP server of an exported detector, and the exported file as a model in Python. It does not import torch."""

from onefold.serve.model import ExportedModel, Results

__all__ = ["ExportedModel", "Results"]
