"""What the clock itself costs: the same steps with a synchronization around each, and with none between them.

    python -m tests.clock_overhead --model gpt2 --batch_size 16 --steps 50

Trains with all that `make combined` uses. Both ways are run in turns, three times; the best time of each counts,
because everything that disturbs a measurement only makes it longer.
"""

import time

from Utils import data, measure, scripts
from Utils.arguments import Parser, positive
from Utils.hardware import choose_device
from Utils.model import GPT2, PRESETS
from Utils.train import Run, stack, train

COMBINED = ("brainFloat16", "torch_compile", "flash_attention", "fused_optimizer")
WARMUP, TURNS = 6, 3


class NoClock:
    """In place of measure.clock: the loop runs on without waiting for the GPU."""

    milliseconds = float("nan")

    def __init__(self, device):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class NoLoss:
    """The forward call's loss, which the loop is not to read: .item() would wait for the GPU as well."""

    def __init__(self, loss):
        self.backward = loss.backward

    def item(self):
        return float("nan")


def seconds(run, steps):
    measure.synchronize(run.device)
    start = time.perf_counter()
    for _ in train(run, range(steps)):
        pass
    measure.synchronize(run.device)
    return time.perf_counter() - start


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--model", choices=PRESETS, default="gpt2")
    parser.add_argument("--batch_size", type=positive, default=16)
    parser.add_argument("--steps", type=positive, default=50)
    args = parser.parse_args()

    device, config = choose_device(), PRESETS[args.model]
    tokens = data.load(config.vocab_size).tokens

    def batch(step):
        return data.batch(tokens, step, args.batch_size, config.block_size, seed=0)

    run = Run(GPT2(config), batch, device)
    stack(run, map(scripts.load, COMBINED))
    seconds(run, WARMUP)
    forward, clock, clocked, free = run.forward, measure.clock, [], []
    for _ in range(TURNS):
        clocked.append(seconds(run, args.steps))
        measure.clock, run.forward = NoClock, lambda x, y: NoLoss(forward(x, y))
        free.append(seconds(run, args.steps))
        measure.clock, run.forward = clock, forward
    print(f"{args.steps} steps, {args.model}, batch {args.batch_size}, on {device.type}: "
          f"{min(clocked):.3f} s with the clock, {min(free):.3f} s without any synchronization: "
          f"{min(clocked) / min(free) - 1:+.1%}")


if __name__ == "__main__":
    main()
