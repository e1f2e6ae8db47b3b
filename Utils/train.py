"""One training run: what a script may change, the loop that all scripts share, stacking, and the command line."""

import contextlib
import inspect
import logging
import os
import tempfile
import warnings
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from Utils import data, distributed, hardware, measure, results, scripts
from Utils.advice import advice
from Utils.arguments import Parser, filename, positive, whole
from Utils.console import Progress, report
from Utils.errors import UserError
from Utils.fingerprint import doubts, fingerprint
from Utils.model import GPT2, PRESETS

import torch

# What libraries log is advice to others than our users; what ends a run is raised as well.
logging.basicConfig(level=logging.CRITICAL)
warnings.filterwarnings("ignore", category=UserWarning, module="torch._inductor")
LEARNING_RATE = 3e-4
PROFILED_STEPS = 3
# Beside the code, so that graphs are compiled once on a machine; an experiment's first step tells cold from warm.
# PyTorch makes this folder for every script, so where the code lies read-only it has to be a temporary one.
if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):  # empty, it would be the folder that a person stands in
    cache = scripts.ROOT / ".cache" / "inductor"
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    if not os.access(cache, os.W_OK):
        cache = Path(tempfile.gettempdir(), f"inductor_{os.getuid()}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)


class Run:
    """What a training run is made of. A script's `optimize(run)` replaces one of `forward`, `model.attention` and
    `optimizer`, or changes PyTorch's settings for the whole process.

    `batch(step)` gives a (2, B, T) tensor of token ids in host memory: the input and what comes next.
    """

    def __init__(self, model, batch, device, learning_rate=LEARNING_RATE):
        self.device = device
        self.model = model.to(device)
        self.batch = batch
        self.learning_rate = learning_rate
        self.forward = self.model.forward  # (x, y) -> loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)

    def fetch(self, step):
        """The batch of `step`, (2, B, T), on its way to the device."""
        ids = self.batch(step)
        if self.device.type == "cuda":
            ids = ids.pin_memory()  # from ordinary memory Python would wait until the copy has been made
        return ids.to(self.device, non_blocking=True)


def train(run, steps):
    """Yield the milliseconds and the loss of each of `steps`, a range of step numbers."""
    x, y = run.fetch(steps.start)
    for step in steps:
        with measure.clock(run.device) as elapsed:
            loss = run.forward(x, y)                                             # ()
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)
            x, y = run.fetch(step + 1)                                           # travels while the GPU computes
        yield elapsed.milliseconds, loss.item()


def stack(run, modules):
    """Apply several scripts' `optimize` to one run, in order. Raises UserError where one would undo another."""
    chosen = {}
    for module in modules:
        before = run.optimizer, run.model.attention
        module.optimize(run)
        after = run.optimizer, run.model.attention
        for part, old, new in zip(("optimizer", "attention"), before, after, strict=True):
            if new is not old and part in chosen:
                raise UserError(f"{chosen[part]} and {module.LABEL} both choose the {part}: leave one of them out")
            if new is not old:
                chosen[part] = module.LABEL


def main(optimize, label):
    """The command line of every script: train with `optimize` (after those of --with), measure, add to the results."""
    script = inspect.getmodule(optimize)
    args = parse_arguments(script)
    modules = [*map(scripts.load, args.others), script]
    names = [Path(module.__file__).stem for module in modules]
    if len(set(names)) < len(names):
        raise UserError(f"a script is named twice in {' '.join(names)}: name each once")
    if len(names) > 1 and results.BASELINE in names:
        raise UserError(f"{results.BASELINE} changes nothing, so it is part of no stack: leave it out")
    device = hardware.choose_device(args.device, distributed.LOCAL_RANK, distributed.LOCAL_SIZE)
    with distributed.group(device):
        experiment(args, modules, device)


def experiment(args, modules, device):
    """Train once with what `modules` change, and add what was measured to the results."""
    config = PRESETS[args.model]
    label = results.column("+".join(module.LABEL for module in modules), distributed.SIZE)
    text = distributed.from_first(lambda: data.load(config.vocab_size, args.data, need=config.block_size + 1))
    row = {
        "label": label,
        "scripts": " ".join(Path(module.__file__).stem for module in modules),
        "model": args.model,
        "batch_size": args.batch_size,
        "steps": args.steps,
        "round": args.round - 1,
        "rounds": args.rounds,
        "seed": args.seed,
        "data": text.digest,
        "text": text.source,
        "vocabulary": text.vocabulary,
        "block_size": config.block_size,
        "vocab_size": config.vocab_size,
        "learning_rate": LEARNING_RATE,
        "gpus": distributed.SIZE,
        **hardware.describe(device),
    }

    def admitted():
        results.check(args.results_path, row)
        return results.read_runs(args.results_path)

    earlier = distributed.from_first(admitted)
    if not earlier and (notice := hardware.notice(device)):
        print(notice)

    def prepare(batch_size):
        def batch(step):
            return data.batch(text.tokens, step, batch_size, config.block_size, args.seed, distributed.RANK)

        return Run(GPT2(config, seed=args.seed), batch, device)

    def attempt(batch_size):
        for _ in train(prepare(batch_size), range(2)):
            pass

    try:
        run = prepare(args.batch_size)
        stack(run, modules)
        distributed.share(run)
        milliseconds, losses, seen = measured(run, label, args.steps)
        if distributed.RANK:
            return
        peak_tflops = known_peak(earlier, row) or hardware.peak_tflops(device)
    except Exception as error:
        run = None
        raise (advice(error, label, args.batch_size, device, attempt) or error) from None
    row |= seen | measure.timing(milliseconds, losses, distributed.SIZE * args.batch_size * config.block_size)
    row |= measure.utilization(config, run.model.n_parameters, row, peak_tflops)
    doubted = doubts(run, row)
    row["warnings"] = "; ".join(doubted)
    results.record(args.results_path, milliseconds, losses, row, args.round - 1, args.rounds)
    for doubt in doubted:
        print(f"{label}: warning: {doubt}")
    print(report(row, earlier), flush=True)


def measured(run, label, steps):
    """Train `steps` steps, then look at a few more. Returns their milliseconds, their losses and a row of findings.

    Of several processes the slowest one's time counts, the mean of their losses, and most memory that one took.
    """
    milliseconds, losses = [], []
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with Progress(label, steps) as progress:
        for elapsed, loss in train(run, range(steps)):
            milliseconds.append(elapsed)
            losses.append(loss)
            progress.update(elapsed, loss)
    memory = measure.peak_memory(run.device)
    return distributed.largest(milliseconds, run.device), distributed.mean(losses, run.device), {
        "started": started,
        "parameters": run.model.n_parameters,
        **dict(zip(memory, distributed.largest([*memory.values()], run.device), strict=True)),
        **hardware.nvml(run.device),
        **fingerprint(run, train(run, range(steps, steps + PROFILED_STEPS))),
    }


def known_peak(rows, row):
    """The matrix peak (TFLOP/s) that an earlier run of the experiment measured on this card, or None."""
    peaks = (results.number(old.get("peak_tflops")) for old in rows if old.get("device_name") == row["device_name"])
    return next((peak for peak in peaks if peak > 0), None)


def parse_arguments(script):
    """The settings of a run, from the command line of `script`, a module."""
    parser = Parser(
        description=script.__doc__, epilog="`make help` lists the targets that run these scripts for you."
    )
    required = partial(parser.add_argument_group("required").add_argument, required=True)
    required("--steps", "--number_of_steps", type=positive, metavar="N", help="training steps")
    required("--batch_size", type=positive, metavar="B", help="sequences in a batch")
    required("--results_path", type=filename, metavar="FILE", help="the results.csv to add this run to")
    optional = parser.add_argument
    optional("--model", choices=PRESETS, default="small", help="size of the GPT-2 (default: small)")
    optional("--data", type=filename, metavar="FILE", help="text to train on (default: Python's standard library)")
    optional("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where to run (default: auto)")
    optional("--seed", type=whole, default=0, help="fixes the initial weights and the batches (default: 0)")
    optional("--with", dest="others", nargs="+", default=[], metavar="SCRIPT",
             help="scripts whose optimization is applied first, for instance brainFloat16 torch_compile")
    optional("--rounds", type=positive, default=1, metavar="N", help="repetitions that are pooled (default: 1)")
    optional("--round", type=positive, default=1, metavar="K", help="which of them this is (default: 1)")
    args = parser.parse_args()
    if args.round > args.rounds:
        parser.error(f"--round {args.round} of --rounds {args.rounds}: there is no such round")
    return args
