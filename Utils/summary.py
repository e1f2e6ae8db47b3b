"""What an experiment's tables say: speedups with intervals, signs of trouble, and the page that tells it in words.

Speedup   mean step time of the baseline / mean step time of the technique, warm-up left out. Nothing else is dropped: a
          slow step happened, so it counts.
Interval  95 %, bootstrapped: draw the steps of both runs anew, with replacement, and see how far the ratio moves. Steps
          that follow each other resemble each other (clocks, heat, the allocator), and steps drawn one by one would
          hide that and promise too much; so blocks of about n^(1/3) neighbours are drawn (circular block bootstrap,
          Politis and Romano 1992). Rounds are drawn within themselves. The seed is fixed: same file, same interval.
          It covers chance *within* these processes. That another process may run a little faster or slower as a
          whole, it cannot know (the same script twice on an H200: 0.6 % apart, with intervals of 0.2 %): that is what
          ROUNDS is for, and why a verdict wants more than 1 % beyond the interval.
Slow      beyond Tukey's outer fence, Q3 + 3 IQR, and 5 % above the median: counted and marked, never dropped.
Drift     the median of a run's last third differs from its first third's by more than 5 %.
"""

import dataclasses
import math
import os
import zlib
from pathlib import Path

from Utils.errors import UserError
from Utils.results import ADVICE, BASELINE, SEVERAL, companion, number, parse, read_table, round_of, warmup

import numpy as np
import pandas as pd

NOTABLE = 0.05  # differences that deserve a warning
SAME = 0.01  # processes that do the same may differ by this much as a whole, whatever their steps' spread
RESAMPLES = 2000
FEW = 20  # steps after warm-up below which a bootstrap interval is known to be too narrow

SETTINGS = ("model", "parameters", "batch_size", "block_size", "vocab_size", "steps", "rounds", "seed", "text",
            "data", "vocabulary", "learning_rate")
MACHINE = ("device", "device_name", "device_memory_mib", "compute_capability", "gpus", "driver", "cuda", "torch",
           "python", "bitsandbytes", "peak_tflops")
FINGERPRINT = ("matmul_precision", "matmul_error", "logits_dtype", "kernels_per_step", "launches_per_step",
               "graph_breaks", "cuda_graphs", "attention_kernel", "optimizer_kernels", "optimizer_state_dtypes",
               "compile_cache", "sm_clock_mhz", "temperature_c")


@dataclasses.dataclass
class Summary:
    """Everything that plots.py draws and prints. Rows are steps, in order; columns are labels, as in results.csv."""

    table: pd.DataFrame          # one row a label; the columns are those of _compare()
    milliseconds: pd.DataFrame   # (rows, labels)
    slow: pd.DataFrame           # (rows, labels) bool: isolated slow steps
    losses: pd.DataFrame | None  # (rows, labels)
    runs: pd.DataFrame           # runs.csv as text, no rows where there is none
    steps: int                   # a round
    rounds: int
    warmup: int                  # steps of each round that are in no statistic
    notes: list[str]             # what was left out of the files
    warnings: list[str]          # what makes the numbers less trustworthy than they look


def summarize(results_path):
    """Read an experiment's tables and compare every label with the baseline.

    Takes this project's files and the original project's (any CSV with `step` and `no_optimization`; the companions may
    be missing). UserError: no file, no measurement, no baseline, or a line that cannot be read.
    """
    notes = []
    milliseconds, _ = _frame(results_path, notes, times=True)
    if milliseconds is None:
        raise UserError(f"{results_path} does not exist: run the scripts first, for example with `make all`")
    if BASELINE not in milliseconds:  # nor has a file that only init() has written
        raise UserError(f"{results_path} holds no measurement named '{BASELINE}' to compare with: run `make baseline`")
    losses, invalid = _frame(companion(results_path, "losses.csv"), notes)
    if losses is not None:
        losses = losses.reindex(milliseconds.index)
        losses = losses[[label for label in milliseconds if label in losses]]
        losses = losses if BASELINE in losses and losses[BASELINE].notna().any() else None
    table = read_table(companion(results_path, "runs.csv"), notes)
    if table and "label" not in table:
        notes.append(f"{companion(results_path, 'runs.csv')}: left out, because no column is named 'label'. "
                     "A spreadsheet may have written semicolons: save it with commas.")
    runs = pd.DataFrame(table | {"label": _plain(table["label"])} if "label" in table else {"label": []}, dtype=str)
    runs = runs[runs["label"].isin(milliseconds.columns)]
    if "valid" in runs:
        invalid |= set(runs["label"][runs["valid"].str.lower() == "false"])

    rows = int(milliseconds.index[-1]) + 1
    rounds, steps = (_number(runs, name, "max", runs["label"].unique()).max() for name in ("rounds", "steps"))
    fits = rounds >= 1 and steps >= 1 and rows <= rounds * steps  # fewer: a file that was cut; rounds begin as before
    rounds, steps = (int(rounds), int(steps)) if fits else (1, rows)
    step, within = milliseconds.index.to_numpy() // steps, milliseconds.index.to_numpy() % steps  # round, step in it
    measured = milliseconds.where(pd.Series(within >= warmup(steps), milliseconds.index), axis=0)
    samples = {label: _rounds(measured[label].to_numpy(), step, rounds) for label in measured}
    if not samples[BASELINE]:
        raise UserError(f"{results_path}: '{BASELINE}' holds no step after warm-up: run `make baseline`")
    slow = measured.apply(_slow)
    first = milliseconds[milliseconds.index == 0]
    table = _compare(samples, invalid)
    table["slow"] = slow.sum()
    table["first_step_ms"] = first.iloc[0] if len(first) else math.nan
    table["loss_difference"] = math.nan if losses is None else losses.sub(losses[BASELINE], axis=0).abs().max()
    for name in ("tokens_per_second", "mfu", "gpu_busy_percent"):
        table[name] = _number(runs, name, "mean", table.index)
    for name in ("peak_allocated_mib", "peak_reserved_mib", "optimizer_state_mib"):
        table[name] = _number(runs, name, "max", table.index)
    table["scaling"] = _scaling(results_path, table, runs, notes)
    table["verdict"] = [_verdict(label, row, invalid) for label, row in table.iterrows()]
    warnings = _instabilities(table, samples, rounds) + _complaints(runs, table)
    return Summary(table, milliseconds, slow, losses, runs, steps, rounds, warmup(steps), notes, warnings)


def _frame(path, notes, times=False):
    """A table as (DataFrame of floats indexed by step, labels with a loss that is no number); (None, set()) if absent.

    With `times`, columns that cannot be times are left out, which `notes` says.
    """
    texts = read_table(path, notes)
    if not texts:
        return None, set()
    if "step" not in texts:
        raise UserError(f"{path} has no column named 'step', so it is not a table of this project: {ADVICE}")
    steps = pd.Index(parse(path, "step", texts.pop("step")), name="step")
    if not len(steps):
        raise UserError(f"{path} holds no rows: run the scripts first, for example with `make all`")
    whole = steps[(steps >= 0) & (steps % 1 == 0) & (steps < 2**31)]
    if len(whole) < len(steps) or steps.has_duplicates:
        raise UserError(f"{path}: the column 'step' does not count 0, 1, 2, ...: {ADVICE}")
    columns, invalid, unusable = {}, set(), []
    for label, column in zip(_plain(texts), texts.values(), strict=True):
        if times and label != BASELINE and (not label.strip() or label.startswith("Unnamed:") or _words(column)):
            unusable.append(label or "(no name)")
            continue
        values = np.array(parse(path, label, column), dtype=float)
        if any(text and not math.isfinite(value) for text, value in zip(column, values, strict=True)):
            invalid.add(label)
        bad = np.flatnonzero((values <= 0) | np.isinf(values)) if times else []
        if len(bad) and label == BASELINE:
            raise UserError(f"{path}, line {bad[0] + 2}, column '{label}': {values[bad[0]]:g} is no time: {ADVICE}")
        if len(bad):
            unusable.append(label)
        elif np.isfinite(values).any() or not times:
            columns[label] = values
    if unusable:
        notes.append(f"{path}: left out, because they hold no times: {', '.join(unusable)}.")
    return pd.DataFrame(columns, index=steps.astype(int)).sort_index(), invalid


def _plain(labels):
    """Labels without the number of GPUs in front, which all columns of an experiment share."""
    labels = list(labels)
    fronts = {match[0] if (match := SEVERAL.match(label)) else "" for label in labels}
    return [label.removeprefix(*fronts) for label in labels] if len(fronts) == 1 else labels


def _scaling(results_path, table, runs, notes):
    """Scaling efficiency: a step on one GPU / a step on several, which train on as many times the tokens in it.

    The experiment on one GPU is looked for in the folder beside this one.
    """
    path = Path(os.path.abspath(results_path))
    single = path.parent.with_name(SEVERAL.sub("", path.parent.name, count=1)) / path.name
    if single == path or not single.exists():
        return math.nan
    try:
        one = summarize(single)
    except UserError as error:
        notes.append(f"No scaling efficiency: {error}")
        return math.nan
    different = [name for name in ("model", "batch_size", "block_size", "device_name", "torch", "data")
                 if {*one.runs.get(name, ())} != {*runs.get(name, ())}]
    if different:
        notes.append(f"No scaling efficiency: {single.parent} differs in {', '.join(different)}.")
        return math.nan
    return one.table["mean_ms"].reindex(table.index) / table["mean_ms"]


def _words(column):
    """Whether no field of the column is a number."""
    filled = pd.Series([text for text in column if text.strip()], dtype=object)
    return len(filled) > 0 and pd.to_numeric(filled, errors="coerce").isna().all()


def _rounds(values, belongs_to, rounds):
    """A label's measured times, one array a round that has any."""
    parts = [values[(belongs_to == k) & np.isfinite(values)] for k in range(rounds)]
    return [part for part in parts if len(part)]


def _number(runs, name, how, labels):
    """A column of runs.csv as numbers, one a label: the `how` of its rounds, NaN where there is none."""
    if name not in runs:
        return pd.Series(math.nan, index=labels)
    return pd.to_numeric(runs[name], errors="coerce").groupby(runs["label"]).agg(how).reindex(labels)


def _compare(samples, invalid):
    """Speedups, one row a label. `samples` is {label: [times of a round, ...]}."""
    pooled = {label: np.concatenate(parts) if parts else np.empty(0) for label, parts in samples.items()}
    baseline = pooled[BASELINE]
    resampled = bootstrap_means(samples[BASELINE], BASELINE)
    rows = {}
    for label, times in pooled.items():
        row = dict.fromkeys(("speedup", "low", "high", "median_speedup", "mean_ms", "median_ms"), math.nan)
        row |= {"mean_ms": times.mean(), "median_ms": np.median(times)} if len(times) else {}
        row["n"] = len(times)
        if len(times) and len(baseline) and not {label, BASELINE} & invalid:
            row["speedup"] = baseline.mean() / times.mean()
            row["median_speedup"] = np.median(baseline) / np.median(times)
            if label != BASELINE and min(len(times), len(baseline)) > 1:
                ratios = resampled / bootstrap_means(samples[label], label)
                row["low"], row["high"] = np.quantile(ratios, [0.025, 0.975])
        rows[label] = row
    return pd.DataFrame.from_dict(rows, orient="index")


def bootstrap_means(rounds, name):
    """(RESAMPLES,) means of block-resampled times. `rounds` is a list of arrays; `name` seeds the generator.

    At most 500 blocks are drawn from a round: where it is very long, the blocks are longer.
    """
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    total = np.zeros(RESAMPLES)
    for times in rounds:
        n = len(times)
        length = max(round(n ** (1 / 3)), math.ceil(n / 500))
        blocks = n // length
        sums = np.cumsum(np.concatenate([[0.0], times, times[:length - 1]]))
        means = (sums[length:] - sums[:-length]) / length                        # (n,): of the block that starts at i
        drawn = means[generator.integers(n, size=(RESAMPLES, blocks))].mean(axis=1)
        wider = math.sqrt(n / (n - length)) if n > length else 1  # what blocks lack of the spread of independent steps
        total += n * (times.mean() + wider * (drawn - times.mean()))
    return total / sum(map(len, rounds)) if rounds else total


def _slow(times):
    """Which of one label's measured times are isolated slow steps. NaN is not."""
    if times.notna().sum() < 4:
        return times > math.inf
    q1, median, q3 = np.nanquantile(times, [0.25, 0.5, 0.75])
    return times > max(q3 + 3 * (q3 - q1), (1 + NOTABLE) * median)


def _verdict(label, row, invalid):
    if label in invalid:
        return "invalid: loss became NaN"
    if label == BASELINE:
        return "baseline"
    if BASELINE in invalid:
        return "not compared: the baseline's loss became NaN"
    if math.isnan(row["speedup"]):
        return "not measured"
    if math.isnan(row["low"]):
        return "one step: no interval"
    if row["low"] * (1 - SAME) <= 1 <= row["high"] * (1 + SAME):
        return "no measurable difference"
    return "faster" if row["speedup"] > 1 else "slower"


def _instabilities(table, samples, rounds):
    """Warnings about the times themselves."""
    warnings = []
    for label, parts in samples.items():
        if slow := table.at[label, "slow"]:
            warnings.append(f"{label}: {slow} of {table.at[label, 'n']} steps {'was' if slow == 1 else 'were'} much "
                            "slower than the rest. That counts and pulls the mean: look at the median as well.")
        thirds = [(np.median(part[:len(part) // 3]), np.median(part[-(len(part) // 3):])) for part in parts
                  if len(part) >= 15]
        drift = max((last / first - 1 for first, last in thirds), key=abs, default=0)
        if abs(drift) > NOTABLE:
            warnings.append(f"{label}: the last third of the steps took {abs(drift):.0%} "
                            f"{'more' if drift > 0 else 'less'} time than the first, so the machine was not steady. "
                            "Close other programs, let it cool down or warm up, and run it again.")
        medians = [np.median(part) for part in parts]
        if medians and max(medians) > (1 + NOTABLE) * min(medians):
            warnings.append(f"{label}: one round took {max(medians) / min(medians) - 1:.0%} more time than another. "
                            "Believe no difference smaller than that.")
        if 0 < len(parts) < rounds:
            warnings.append(f"{label}: only {len(parts)} of {rounds} rounds measured. Run it again to have them all.")
    few = int(table["n"][table["n"] > 0].min())
    if few < FEW:
        warnings.append(f"Only {few} step{'s' * (few != 1)} left after warm-up: intervals of so few are too narrow. "
                        "Use STEPS=30 or more.")
    return warnings


def _complaints(runs, table):
    """Warnings out of runs.csv; every column is optional and so is every field."""
    warnings = []
    for _, run in runs.iterrows():
        label = run["label"]
        if round_of(run) != "0":
            label += f" (round {run['round']})"
        elif _far(number(run.get("first_step_ms")), table.at[run["label"], "first_step_ms"]):
            warnings.append(f"{label}: its times and its row in runs.csv are of two different runs. Run it again.")
        if run.get("throttled", "").lower() not in ("", "0", "no", "none", "false"):
            warnings.append(f"{label}: the GPU slowed itself down ({run['throttled']}). At a power limit that is what "
                            "full load does, on a laptop without its plug more so; against heat, let it cool down.")
        reserved, memory, others = (number(run.get(name)) for name in
                                    ("peak_reserved_mib", "device_memory_mib", "other_gpu_processes"))
        if reserved > 0.95 * memory:
            warnings.append(f"{label}: used {reserved:,.0f} of the {memory:,.0f} MiB that the GPU has. Nearly full, it "
                            "may spend time on making room: use a smaller BATCH_SIZE.")
        if others > 0:
            warnings.append(f"{label}: {others:.0f} other process{'' if others == 1 else 'es'} used the GPU meanwhile. "
                            "Close what is not needed and run it again.")
        warnings += [f"{label}: {text.strip()}" for text in run.get("warnings", "").split("; ") if text.strip()]
    clocks = _number(runs, "sm_clock_mhz", "mean", runs["label"].unique()).dropna()
    if len(clocks) and clocks.max() > (1 + NOTABLE) * clocks.min():
        warnings.append(f"{clocks.idxmin()}: the GPU's clock ran at {clocks.min():.0f} MHz, but at {clocks.max():.0f} "
                        f"for {clocks.idxmax()}. Part of the difference is the clock's.")
    return list(dict.fromkeys(warnings))


def _far(a, b):
    return abs(a - b) > 0.01 + 0.01 * abs(b)  # False where either is NaN


# The page. A cell is text; a column in which no technique has anything is left out.

def _cell(form):
    return lambda value: "" if pd.isna(value) else form(value)


def ratio(value):
    """`1.69x`; of what is very slow, two digits that are not 0."""
    return f"{value:.2f}x" if value >= 0.1 else f"{value:.2g}x"


def _milliseconds(value):
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _duration(value):
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{_milliseconds(value)} ms"


COLUMNS = {
    "speedup": ("speedup", ratio),
    "interval": ("95 % interval", str),
    "verdict": ("verdict", str),
    "median_speedup": ("by medians", ratio),
    "mean_ms": ("mean ms", _milliseconds),
    "median_ms": ("median ms", _milliseconds),
    "first_step_ms": ("first step", _duration),
    "scaling": ("scaling", lambda value: f"{value:.1%}"),
    "tokens_per_second": ("tok/s", lambda value: f"{value:,.0f}"),
    "mfu": ("MFU", lambda value: f"{value:.1%}"),
    "gpu_busy_percent": ("GPU busy", lambda value: f"{value:.0f} %"),
    "peak_allocated_mib": ("peak MiB", lambda value: f"{value:,.0f}"),
    "peak_reserved_mib": ("reserved MiB", lambda value: f"{value:,.0f}"),
    "optimizer_state_mib": ("optimizer MiB", lambda value: f"{value:,.1f}"),
    "loss_difference": ("loss differs", lambda value: f"{value:.1e}" if value else "0"),
}


def cells(summary):
    """The table as text: [[header, ...], [cell, ...], ...]."""
    table = summary.table.copy()
    table["interval"] = [math.nan if math.isnan(low) else f"{low:.3f}-{high:.3f}"
                         for low, high in zip(table["low"], table["high"], strict=True)]
    table.loc[BASELINE, "loss_difference"] = math.nan
    columns = [["technique", *table.index]]
    for name, (header, form) in COLUMNS.items():
        column = list(map(_cell(form), table[name]))
        if any(column):
            columns.append([header, *column])
    return [list(row) for row in zip(*columns, strict=True)]


def as_text(rows, width=120):
    """Aligned columns. Those that find no place in `width` characters go on below, the first column repeated."""
    columns = list(zip(*rows, strict=True))
    wide = [max(map(len, column)) for column in columns]
    blocks, room = [], 0
    for i in range(1, len(columns)):
        if room < wide[i] + 2:
            blocks.append([0])
            room = width - wide[0]
        blocks[-1].append(i)
        room -= wide[i] + 2
    lines = []
    for block in blocks:
        for row in rows:
            padded = (row[i].ljust(wide[i]) if columns[i][0] in ("technique", "verdict") else row[i].rjust(wide[i])
                      for i in block)
            lines.append("  ".join(padded).rstrip())
        lines.append("")
    return "\n".join(lines)


def as_markdown(rows):
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    escaped.insert(1, ["---", *["---:"] * (len(rows[0]) - 1)])
    return "\n".join("| " + " | ".join(row) + " |" for row in escaped) + "\n"


def subject(summary):
    """The experiment in one line: `NVIDIA H200 · gpt2 (124 M parameters) · batch 16 x 1024 tokens · 150 steps`.

    What is not known, or not the same in all runs, is left out.
    """
    def one(name):
        values = [value for value in summary.runs.get(name, pd.Series(dtype=str)).unique() if value]
        return values[0] if len(values) == 1 else ""

    gpus = f"{one('gpus')} x " if one("gpus") not in ("", "0", "1") else ""
    millions = f" ({int(one('parameters')) / 1e6:.3g} M parameters)" if one("parameters").isdigit() else ""
    batch = f"batch {one('batch_size')}" + (f" x {one('block_size')} tokens" if one("block_size") else "")
    steps = f"{summary.steps:,} step{'s' * (summary.steps != 1)}"
    rounds = f" x {summary.rounds} rounds" if summary.rounds > 1 else ""
    parts = [gpus + one("device_name"), one("model") + millions, batch if one("batch_size") else "", steps + rounds]
    return " · ".join(part for part in parts if part)


def on_cpu(summary):
    return "device" in summary.runs and bool(summary.runs["device"].str.startswith("cpu").any())


CPU = "These times are of this machine's CPU. They say nothing about a GPU."
HOW_TO_READ = """\
- **speedup**: mean step time of the baseline divided by the technique's; 2.00x is half the time. Not counted: a run's
  first {warmup} steps, in which it compiles and allocates; the very first stands in a column of its own.
- **by medians**: the same of the medians, which a few slow steps do not move. Where the two differ, look for those.
- **95 % interval**: how far chance within these runs moves the speedup (block bootstrap). Two processes
  that do the same may differ by 1 % as a whole (ROUNDS=3 shows it), so an interval that contains 1, or comes that close
  to it, reads "no measurable difference".
- **mean, median**: milliseconds a step.
- **scaling**, where there are several GPUs: a step's time on one divided by its time on all of them; each has a batch
  of its own, so 100 % means that n GPUs train on n times as many tokens in the same time.
- **tok/s**: tokens trained on in a second, by all GPUs. **MFU**: share of their measured matrix throughput that the
  model's own arithmetic uses. **GPU busy**: share of the time in which a kernel ran; low means waiting for Python.
- **peak MiB**: most memory that tensors held at once; **reserved MiB**: what PyTorch took from the GPU for that;
  **optimizer MiB**: AdamW's moments, part of the peak.
- **loss differs**: largest difference between a step's loss and the baseline's, from the same weights and batches.
"""


def page(summary):
    """summary.md: the table, what to be wary of, what was measured on what, how to read it."""
    warnings = [f"- {text}" for text in summary.notes + summary.warnings]
    parts = [f"# {subject(summary)}\n", as_markdown(cells(summary)), f"{CPU}\n" if on_cpu(summary) else "",
             "## Warnings\n", "\n".join(warnings or ["None."]) + "\n",
             "## What each run really did\n", _facts(summary.runs, FINGERPRINT, by_label=True),
             "## Settings\n", _facts(summary.runs, SETTINGS),
             "## Hardware and versions\n", _facts(summary.runs, MACHINE),
             "## How to read this\n", HOW_TO_READ.format(warmup=summary.warmup)]
    return "\n".join(part for part in parts if part)


def _facts(runs, names, by_label=False):
    """Columns of runs.csv as Markdown: one row a label, or, what is the same for all, one line a column."""
    runs = runs.drop_duplicates("label").set_index("label")
    names = [name for name in names if name in runs and runs[name].ne("").any()]
    if not names:
        return "Not known: there is no runs.csv, or it does not say.\n"
    if by_label:
        return as_markdown([["technique", *names], *map(list, runs[names].reset_index().to_numpy())])
    lines = []
    for name in names:
        values = runs[name][runs[name] != ""]
        same = values.nunique() == 1
        lines.append(f"- {name}: " + (values.iloc[0] if same else
                                      "; ".join(f"{value} ({label})" for label, value in values.items())))
    return "\n".join(lines) + "\n"
