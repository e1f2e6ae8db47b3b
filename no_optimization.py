"""The baseline: PyTorch, asked for nothing.

Every number is a float32, every product a full-precision product, every operation a kernel of its own, and attention
writes its T x T matrix to memory. What the other scripts gain, they gain over this.

Changes   nothing.
Keeps     PyTorch's defaults: matrix products in float32, eager execution, AdamW looping over groups of tensors.
Costs     time and memory: most kernels wait for memory, and the tensor cores stand idle.
Needs     nothing; it runs on any device that PyTorch runs on.
Sources   https://docs.pytorch.org/docs/stable/optim.html
          https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
"""

from Utils.train import main

LABEL = "no_optimization"


def optimize(run):
    """Leave the run as it is."""
    pass


if __name__ == "__main__":
    main(optimize, LABEL)
