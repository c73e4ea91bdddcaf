"""Models as users bring them: a residual CNN, a transformer encoder, a plain MLP. They know nothing of onefold."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """As torchvision writes them: stem, layers, avgpool, fc."""

    def __init__(self, channels: int = 1, classes: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Block(8, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 24, 2))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(self.dropout(torch.flatten(self.avgpool(x), 1)))


class TextClassifier(nn.Module):
    """A transformer encoder over token numbers with a padding mask, called with names as the hubs' models are."""

    def __init__(self, tokens: int = 50, classes: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, 16)
        self.position = nn.Parameter(torch.randn(12, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        z = self.embedding(input_ids) + self.position[: input_ids.shape[1]]
        z = self.encoder(z, src_key_padding_mask=attention_mask == 0)
        weights = attention_mask.unsqueeze(-1).to(z.dtype)
        return self.head((z * weights).sum(1) / weights.sum(1))


def regressor(inputs: int = 5) -> nn.Module:
    """A plain MLP with one real output."""
    return nn.Sequential(
        nn.Linear(inputs, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
