"""8-bit AdamW: the two moments of every weight in one byte each.

AdamW remembers eight bytes for each weight. bitsandbytes stores both moments as 8-bit codes: a block of 256 numbers
shares one float32 scale, and the 256 codes are spaced so that small numbers keep their relative precision. Each update
reads the codes, works in float32 and writes codes again.

Changes   how the moments are stored.
Keeps     weights, gradients and the update's arithmetic in float32; tensors under 4,096 elements keep 32-bit moments.
Costs     quantization error in the moments; one kernel for each tensor, which is slow where tensors are many and small.
Needs     bitsandbytes with a library for this CUDA version, or its CPU library.
Sources   https://arxiv.org/abs/2110.02861   8-bit Optimizers via Block-wise Quantization
          https://huggingface.co/docs/bitsandbytes/main/en/reference/optim/adamw
"""

from Utils.train import main

import bitsandbytes

LABEL = "8bOp"


def optimize(run):
    """bitsandbytes' AdamW with 8-bit moments."""
    run.optimizer = bitsandbytes.optim.AdamW8bit(run.model.parameters(), lr=run.learning_rate)


if __name__ == "__main__":
    main(optimize, LABEL)
