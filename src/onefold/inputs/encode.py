"""Encoding of table codes as floats for a network, in operations that torch.export supports."""

import torch
from jaxtyping import Float32, Float64
from torch import Tensor, nn

from onefold.inputs.tables import UNSEEN, Table

FAR = 10.0
LARGEST = 1e6


class TableEncoder(nn.Module):
    """Map from codes [n, C] to floats [n, D].

    The floats are the scaled numbers, then one-hot categories, then one missing-value flag per column. Each category
    column has one more entry, for unlisted categories. An entry that is always 0 in training has the value FAR
    instead of 1 when it is set, because a network gives little weight to such an entry. Numbers are clipped to
    ±LARGEST, since the largest float64 values are infinite as float32.
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
                slots.append((i, UNSEEN, 1.0 if column.unlisted_share else FAR))
        self._register("numbers", [i for i, _ in numbers], torch.int64)
        self._register("centre", [column.centre for _, column in numbers])
        self._register("scale", [column.scale for _, column in numbers])
        self._register("owner", [i for i, _, _ in slots], torch.int64)
        self._register("category", [code for _, code, _ in slots])
        self._register("worth", [worth for _, _, worth in slots])
        self._register("missing_worth", [1.0 if column.missing else FAR for _, column in columns])
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

    def _register(self, name: str, values: list[float] | list[int], dtype: torch.dtype = torch.float64) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=dtype))
