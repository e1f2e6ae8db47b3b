"""torch.compile: fewer kernels, each doing more, launched all at once.

TorchDynamo reads the Python of the forward pass into one graph, AOTAutograd derives the backward graph from it, and
TorchInductor writes Triton kernels that fuse neighbouring operations: a bias, a GELU and a cast become one kernel that
reads and writes memory once. The kernels of each graph are recorded in a CUDA graph, so that Python launches hundreds
of them with one call, as mode "reduce-overhead" does. A mode takes no further options, so the options are spelled out:

    triton.cudagraphs            what the mode stands for
    guard_filter_fn              the modules stay as they are, so no step has to look whether they did
    online_softmax               off: two passes over the logits are faster than one that rescales its sum as it goes
    triton.mix_order_reduction   off: it adds more kernels to layer norm's backward pass than it saves memory traffic

Changes   which kernels run the forward and the backward pass, and how they are launched.
Keeps     the mathematics; only the order of float32 additions moves.
Costs     a first step of many seconds, while the graphs are compiled and recorded; memory for the recorded graphs;
          shapes and control flow have to stay the same from step to step, and changes of a module are not noticed.
Needs     Triton and a C compiler; compute capability 7.0 (Volta) or newer, on a CPU a C++ compiler.
Sources   https://docs.pytorch.org/docs/stable/generated/torch.compile.html
          https://docs.pytorch.org/assets/pytorch2-2.pdf   PyTorch 2 (ASPLOS 2024)
"""

from Utils.train import main

import torch

LABEL = "TC"


def optimize(run):
    """Compile the forward call; the backward pass is compiled along with it."""
    run.forward = torch.compile(run.forward, options={
        "triton.cudagraphs": True,
        "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
        "online_softmax": False,
        "triton.mix_order_reduction": False,
    })


if __name__ == "__main__":
    main(optimize, LABEL)
