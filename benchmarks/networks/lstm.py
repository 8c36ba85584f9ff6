"""An LSTM (Hochreiter & Schmidhuber, Long Short-Term Memory, 1997) as a Python loop over the sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LoopLSTM(nn.Module):
    """Embedding, one recurrent layer written as a loop, and logits for each token."""

    def __init__(self, tokens: int = 256, width: int = 128) -> None:
        super().__init__()
        self.width = width
        self.token = nn.Embedding(tokens, width)
        self.of_input = nn.Linear(width, 4 * width)
        self.of_state = nn.Linear(width, 4 * width)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.token(x)
        state = memory = embedded.new_zeros(x.shape[0], self.width)
        states = []
        for t in range(x.shape[1]):
            i, f, g, o = (self.of_input(embedded[:, t]) + self.of_state(state)).chunk(4, 1)
            memory = torch.sigmoid(f) * memory + torch.sigmoid(i) * torch.tanh(g)
            state = torch.sigmoid(o) * torch.tanh(memory)
            states.append(state)
        return self.head(torch.stack(states, 1))
