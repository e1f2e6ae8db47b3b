"""TensorFloat32: matrix products on tensor cores, float32 going in and coming out.

A tensor core rounds each float32 factor to TF32 (float32's eight exponent bits, ten of its twenty-three mantissa bits),
multiplies, and adds up in float32. Nothing is stored in TF32; tensors keep their dtype, so no other code changes.

Changes   how float32 matrix products are computed, in the whole process.
Keeps     the dtype of every tensor; additions, layer norm, softmax, the loss and AdamW in full float32.
Costs     precision of the products: a relative error near 3e-4 instead of 3e-7.
Needs     compute capability 8.0 (Ampere) or newer; older cards and CPUs have no TF32 and go on in float32.
Sources   https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html
          https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf
"""

from Utils.train import main

import torch

LABEL = "TF32"


def optimize(run):
    """Allow TF32 in float32 matrix products."""
    torch.set_float32_matmul_precision("high")


if __name__ == "__main__":
    main(optimize, LABEL)
