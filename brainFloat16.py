"""BrainFloat16: multiply in sixteen bits, remember in thirty-two.

bfloat16 keeps the eight exponent bits of float32 and drops sixteen of its mantissa bits: a number loses precision,
never range, so gradients need no loss scaling (float16 ones do). Sixteen-bit factors go through the tensor cores twice
as fast as TF32 ones, and take half the memory and half the time to read. Autocast picks the operations that profit.

Changes   the forward call: matrix products take and give bfloat16; autograd replays each operation in its dtype.
Keeps     weights, gradients, AdamW moments, layer norm, softmax and loss in float32.
Costs     a bfloat16 copy of every weight in every step; about three decimal digits in each product.
Needs     compute capability 8.0 (Ampere) or newer; older cards and many CPUs emulate it, slowly.
Sources   https://docs.pytorch.org/docs/stable/amp.html
          https://arxiv.org/abs/1905.12322   A Study of BFLOAT16 for Deep Learning Training
"""

from Utils.train import main

import torch

LABEL = "BF16"


def optimize(run):
    """`with torch.autocast(...)` around the forward call, written as a decorator."""
    run.forward = torch.autocast(run.device.type, dtype=torch.bfloat16)(run.forward)


if __name__ == "__main__":
    main(optimize, LABEL)
