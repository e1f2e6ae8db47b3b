"""FlashAttention: attention without the T x T matrix in memory.

The kernel walks over keys and values in tiles that fit into on-chip memory and keeps a running maximum and sum, so the
softmax is exact though no row of scores is ever whole. What was memory traffic of T x T numbers per head becomes
arithmetic; the backward pass computes the scores again instead of reading them.

PyTorch's FlashAttention kernels take sixteen-bit numbers only, and float32 inputs silently get another kernel. So q, k
and v are handed over as bfloat16 copies and the result is converted back, for this one operation.

Changes   the attention function.
Keeps     everything around it in float32; softmax is accumulated in float32 inside the kernel.
Costs     bfloat16 precision in the two products of attention; three casts and one back.
Needs     compute capability 8.0 (Ampere) or newer for the flash kernel; elsewhere PyTorch picks another one. Which one
          ran is measured: `attention_kernel` in runs.csv.
Sources   https://arxiv.org/abs/2205.14135   FlashAttention
          https://arxiv.org/abs/1805.02867   Online normalizer calculation for softmax
          https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from Utils.train import main

import torch.nn.functional as F

LABEL = "FA"


def optimize(run):
    """Hand q, k and v (B, H, T, D) to PyTorch's fused attention, in the sixteen bits that its flash kernel takes."""
    run.model.attention = lambda q, k, v: F.scaled_dot_product_attention(
        q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True
    ).to(q.dtype)


if __name__ == "__main__":
    main(optimize, LABEL)
