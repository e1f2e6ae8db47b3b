"""This project's combination beside transformers' GPT-2: the same shape, batches, training loop and clock.

    python -m tests.peers --model gpt2 --batch_size 16 --steps 20

    ours, baseline           no_optimization.py
    transformers             GPT2LMHeadModel asked for nothing: float32, eager attention, AdamW
    transformers, compiled   the means its documentation names: attn_implementation="sdpa", torch.compile of the model
                             with mode="reduce-overhead", bfloat16 autocast, AdamW(fused=True)
    transformers, helped     the same by somebody who has read its source (see `helped`), in two modes of torch.compile
    ours, combined           BF16+TC+FA+FuOp, as `make combined` trains

All live in one process and take turns, forth and back, so that heat and the power limit hit them alike.

What differs: transformers draws other initial weights, and it shifts the labels itself, so it is handed the input as
labels. The last token of each sequence takes the way of all others, logits and loss included, and counts for nothing.
"""

from functools import partial

from tests.clock_overhead import COMBINED
from Utils import data, hardware, measure, scripts
from Utils.advice import advice, full
from Utils.arguments import Parser, positive
from Utils.console import duration
from Utils.errors import UserError
from Utils.model import GPT2, PRESETS
from Utils.train import Run, stack, train

import torch

try:
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
except ImportError as error:
    raise UserError(f"tests.peers needs {error.name or error}: pip install -r tests/requirements.txt") from None

WARMUP, ROUNDS = 5, 4  # measure.timing leaves out as many steps; an even number of rounds goes back as often as forth

transformers.logging.set_verbosity_error()
transformers.AttentionInterface.register("causal", sdpa_attention_forward)


def ours(config, batch, device, names):
    run = Run(GPT2(config), batch, device)
    stack(run, map(scripts.load, names))
    return run


def peer(config, batch, device, attention, *changes):
    """A Run of transformers' GPT-2 after `changes`, functions like a script's `optimize`."""
    torch.manual_seed(0)
    run = Run(transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
        n_head=config.n_head, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation=attention)), batch, device)
    run.forward = lambda x, y: run.model(input_ids=x, labels=x, use_cache=False).loss
    for change in changes:
        change(run)
    return run


def compiled(run):
    run.model = torch.compile(run.model, mode="reduce-overhead")


def helped(run, mode="reduce-overhead"):
    """Compile one graph that returns the loss alone: logits beside it would be given a gradient of zeros.

    A model that knows its loss does not log a warning, which cuts the graph in two. It also needs the attention
    "causal", the function behind "sdpa": for "sdpa" compiled models build a mask that PyTorch's flash kernel refuses.
    """
    run.model.loss_type = "ForCausalLM"
    run.forward = torch.compile(run.forward, mode=mode)


def contenders(*shape):
    """Runs by name. `shape` is what all share: the config, the batches and the device."""
    bf16, fused = (scripts.load(name).optimize for name in ("brainFloat16", "fused_optimizer"))
    return {
        "ours, baseline": ours(*shape, ()),
        "transformers": peer(*shape, "eager"),
        "transformers, compiled": peer(*shape, "sdpa", compiled, bf16, fused),
        "transformers, helped": peer(*shape, "causal", bf16, helped, fused),
        "transformers, helped, default mode": peer(*shape, "causal", bf16, partial(helped, mode="default"), fused),
        "ours, combined": ours(*shape, COMBINED),
    }


def measured(runs, steps):
    """The (milliseconds, losses) of each run by name: a turn of WARMUP steps, then ROUNDS turns of `steps` steps.

    No turn begins with torch.compiler.cudagraph_mark_step_begin(): a compiled call begins a new step by itself wherever
    all backward passes have ended.
    """
    seen, order = {name: [] for name in runs}, list(runs)
    starts = range(WARMUP, WARMUP + ROUNDS * steps, steps)
    for turn in (range(WARMUP), *(range(start, start + steps) for start in starts)):
        for name in order:
            seen[name] += train(runs[name], turn)
        order.reverse()
    return {name: tuple(zip(*results, strict=True)) for name, results in seen.items()}


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--model", choices=PRESETS, default="gpt2")
    parser.add_argument("--batch_size", type=positive, default=16)
    parser.add_argument("--steps", type=positive, default=20, help=f"of each of {ROUNDS} turns (default: 20)")
    args = parser.parse_args()

    device, config = hardware.choose_device(), PRESETS[args.model]
    print(f"{args.model}, batch {args.batch_size}, on {hardware.describe(device)['device_name']}, "
          f"torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    if notice := hardware.notice(device):
        print(notice, flush=True)
    tokens = data.load(config.vocab_size).tokens

    def batch(step):
        return data.batch(tokens, step, args.batch_size, config.block_size, seed=0)

    try:
        seen = measured(contenders(config, batch, device), args.steps)
    except Exception as error:
        if full(error):
            raise UserError("not all of them fit into memory at once: choose a --batch_size (make: BATCH_SIZE) below "
                            f"{args.batch_size}") from None
        raise (advice(error, "one of them", args.batch_size, device, None) or error) from None

    rows = {name: measure.timing(*results, args.batch_size * config.block_size) for name, results in seen.items()}
    print(f"{'':35}{'mean ms':>10}{'median ms':>11}{'tok/s':>11}{'first step':>12}{'last loss':>11}")
    for name, row in rows.items():
        print(f"{name:35}{row['mean_ms']:10.2f}{row['median_ms']:11.2f}{row['tokens_per_second']:11,.0f}"
              f"{duration(row['first_step_ms']):>12}{row['final_loss']:11.4f}")
    for name in rows:
        if name.startswith("transformers"):
            mine = "ours, combined" if "," in name else "ours, baseline"
            mean, median = (rows[mine][key] / rows[name][key] for key in ("mean_ms", "median_ms"))
            print(f"{mine} / {name}: {mean:.3f} of the time (medians: {median:.3f})")


if __name__ == "__main__":
    main()
