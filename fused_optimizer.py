"""Fused AdamW: the whole update in a few kernels.

AdamW reads a weight, its gradient and two moments and writes three of them back: a handful of multiplications for 28
bytes of traffic. PyTorch's default runs each of these operations over a list of tensors, one kernel after the other,
and every kernel reads and writes memory again. The fused version does all of them while the numbers are in registers.

Changes   which kernels update the weights.
Keeps     AdamW's formula, float32 throughout, the same hyperparameters.
Costs     nothing but the order of a few roundings.
Needs     a CUDA device or a CPU; all parameters floating point.
Sources   https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html
          https://arxiv.org/abs/1711.05101   Decoupled Weight Decay Regularization
"""

from Utils.train import main

import torch

LABEL = "FuOp"


def optimize(run):
    """AdamW with `fused=True`."""
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=run.learning_rate, fused=True)


if __name__ == "__main__":
    main(optimize, LABEL)
