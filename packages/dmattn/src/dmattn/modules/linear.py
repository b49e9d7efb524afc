"""A linear layer that computes in float32, whatever the dtype of its input and its weight."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmattn.autocast import without_autocast


class Float32Linear(nn.Linear):
    """`nn.Linear`, computed and returned in float32 (float64 for a float64 input or weight).

    This holds under autocast as well. Parameters, their names and dtypes are those of `nn.Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) of any floating dtype -> (..., out_features), float32 or float64."""
        wider = torch.promote_types(input.dtype, self.weight.dtype)
        dtype = torch.promote_types(wider, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        with without_autocast(input.device.type):
            return F.linear(input.to(dtype), self.weight.to(dtype), bias)
