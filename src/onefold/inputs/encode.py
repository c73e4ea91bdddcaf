"""From a table's codes to the floats that a network takes, in operations that torch.export understands."""

import torch
from jaxtyping import Float32, Float64
from torch import Tensor, nn

from onefold.inputs.tables import UNSEEN, Table

FAR = 10.0
LARGEST = 1e6


class TableEncoder(nn.Module):
    """Codes [n, C] to floats [n, D]: scaled numbers, then one entry a category, then one for missing a column.

    Each category column has one more entry, for a category that is not listed. What training never lit, an unlisted
    category or a missing value, is worth FAR when lit, since a network gives little weight to what was always 0.
    Numbers are cut at ±LARGEST, since the largest floats would be infinite as float32.
    """

    centre: Tensor
    scale: Tensor
    numbers: Tensor
    owner: Tensor
    category: Tensor
    worth: Tensor
    missing_worth: Tensor

    def __init__(self, table: Table) -> None:
        super().__init__()
        columns = list(enumerate(table.columns))
        numbers = [(i, column) for i, column in columns if column.kind == "number"]
        slots: list[tuple[int, float, float]] = []
        for i, column in columns:
            if column.kind == "category":
                slots += [(i, float(code), 1.0) for code in range(len(column.categories))]
                slots.append((i, UNSEEN, 1.0 if column.unlisted else FAR))
        self._keep("numbers", [i for i, _ in numbers], torch.int64)
        self._keep("centre", [column.centre for _, column in numbers])
        self._keep("scale", [column.scale for _, column in numbers])
        self._keep("owner", [i for i, _, _ in slots], torch.int64)
        self._keep("category", [code for _, code, _ in slots])
        self._keep("worth", [worth for _, _, worth in slots])
        self._keep("missing_worth", [1.0 if column.missing else FAR for _, column in columns])
        self.width = len(numbers) + len(slots) + len(columns)

    def forward(self, codes: Float64[Tensor, "n c"]) -> Float32[Tensor, "n d"]:
        parts = []
        if len(self.numbers):
            scaled = (codes.index_select(1, self.numbers) - self.centre) / self.scale
            parts.append(torch.where(scaled.isnan(), 0.0, scaled).clamp(-LARGEST, LARGEST))
        if len(self.owner):
            lit = codes.index_select(1, self.owner) == self.category
            parts.append(torch.where(lit, self.worth, 0.0))
        parts.append(torch.where(codes.isnan(), self.missing_worth, 0.0))
        return torch.cat(parts, 1).float()

    def _keep(self, name: str, values: list[float] | list[int], dtype: torch.dtype = torch.float64) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=dtype))
