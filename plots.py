"""Draw an experiment: results.csv -> a table on the screen, summary.md and the pictures.

    python plots.py --results_path out/256B_150N_experiment/256B_150N_results.csv

mean_speedup_comparison.png               how many times faster than the baseline, with 95 % intervals
optimization_performance_comparison.png   milliseconds of every step
performance_heatmap.png                   the same as a map, where a hiccup or a drift shows as a stripe or a fade
memory_comparison.png                     peak memory, and the optimizer's share of it      (if runs.csv knows)
loss_comparison.png                       does the technique still learn the same?          (if losses.csv is there)

`--prefix` is put in front of these names; left out, it is what results.csv's own name begins with. Needs no display,
no GPU and no torch. What the numbers mean is said in summary.md and in Utils/summary.py.
"""

import io
import zlib

from Utils.arguments import Parser, filename
from Utils.results import BASELINE, PICTURES, beginning, locked, write
from Utils.summary import CPU, as_text, cells, on_cpu, page, ratio, subject, summarize

import matplotlib
import matplotlib.colors
import matplotlib.figure
import matplotlib.lines
import matplotlib.patches
import matplotlib.ticker
import numpy as np

# Okabe and Ito's colours, which readers with any kind of colour blindness can tell apart. A label keeps its own in
# every picture and every experiment; a stack has the colour of what it added last, darker with every layer below.
COLOURS = {BASELINE: "#808080", "TF32": "#E69F00", "BF16": "#56B4E9", "TC": "#009E73", "FA": "#D55E00",
           "FuOp": "#CC79A7", "8bOp": "#B8A800"}
OTHERS = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#CC6677", "#882255", "#AA4499")  # Paul Tol's muted
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#999999",
         "axes.labelcolor": "#333333", "text.color": "#222222",
         "xtick.color": "#666666", "xtick.labelcolor": "#333333", "ytick.color": "#666666",
         "ytick.labelcolor": "#333333", "grid.color": "#E4E4E4", "axes.axisbelow": True, "figure.facecolor": "white",
         "savefig.facecolor": "white", "text.parse_math": False}
MANY = 12      # more lines than this cannot be labelled at their ends
COLUMNS = 600  # more steps than this are drawn as groups of steps


def main(argv=None):
    parser = Parser(description="Draw an experiment's results and summarize them in a table.")
    parser.add_argument("--results_path", type=filename, default="results.csv", help="the experiment's results.csv")
    parser.add_argument("--prefix", help="what the names of the files begin with (default: as results.csv's does)")
    args = parser.parse_args(argv)

    summary = summarize(args.results_path)
    prefix = beginning(args.results_path) if args.prefix is None else args.prefix
    print(subject(summary), as_text(cells(summary)), sep="\n\n")
    for line in ([CPU] if on_cpu(summary) else []) + summary.notes + summary.warnings:
        print(f"- {line}")

    contents = {prefix + "summary.md": page(summary).encode(errors="backslashreplace")}
    with matplotlib.rc_context(STYLE):
        for name, figure in figures(summary).items():
            contents[prefix + name] = png(figure)
    with locked(prefix + "summary.md"):
        write(contents)
    print("\nwrote", *contents, sep="\n  ", flush=True)


def figures(summary):
    """{file name: Figure}, only those that there are data for. Figures know no display, whatever MPLBACKEND says."""
    drawn = [draw(summary) for draw in (speedups, step_times, heatmap, memory, losses)]
    return {name: figure for name, figure in zip(PICTURES, drawn, strict=True) if figure}


def png(figure):
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160)
    return file.getvalue()


def colour(label):
    *below, last = label.split("+")
    known = COLOURS.get(last) or OTHERS[zlib.crc32(last.encode()) % len(OTHERS)]
    return darker(known, 0.88 ** len(below))


def darker(colour, share):
    return matplotlib.colors.to_hex(np.array(matplotlib.colors.to_rgb(colour)) * share)


def canvas(summary, title, rows=None, names=0, height=6.4, **subplots):
    """A figure with its title and what was measured on what, high enough for `rows` bars or a legend of `names`."""
    height = 2.1 + 0.42 * rows if rows else max(height, 1.8 + 0.18 * names)
    figure = matplotlib.figure.Figure(figsize=(11, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0.01, 0.1 / height, 0.98, 1 - 1 / height), h_pad=0.08)
    figure.text(0.015, 1 - 0.4 / height, title, fontsize=17, fontweight="bold")
    figure.text(0.015, 1 - 0.7 / height, subject(summary), color="#666666")
    return figure, figure.subplots(**subplots)


def bars(axes, labels):
    """Room for one horizontal bar a label, the first on top. Returns their (labels,) positions."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    return np.arange(len(labels))


def say(axes, text, end, place):
    """What there is to say about a bar, right of its end and on top of whatever lines run there."""
    axes.annotate(text, (end, place), (6, 0), textcoords="offset points", va="center",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})


def speedups(summary):
    table = summary.table
    figure, axes = canvas(summary, "How many times faster than the baseline", rows=len(table))
    places = bars(axes, table.index)
    axes.barh(places, table["speedup"].fillna(0), height=0.68, color=list(map(colour, table.index)))
    whiskers = table[["low", "high"]].sub(table["speedup"], axis=0).abs()
    axes.errorbar(table["speedup"], places, xerr=whiskers.to_numpy().T, fmt="none", color="#222222", elinewidth=1.3,
                  capsize=3.5)
    for place, (_, row) in zip(places, table.iterrows(), strict=True):
        ends = np.nanmax([row["speedup"], row["high"], 0])
        words = [ratio(row["speedup"])] * (row["speedup"] > 0)
        words += [row["verdict"]] * (row["verdict"] not in ("baseline", "faster", "slower"))
        say(axes, "  ".join(words), ends, place)
    axes.axvline(1, color="#222222", linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1.02 * np.nanmax([1, *table["speedup"], *table["high"]]))
    axes.set_xlabel("mean step time of the baseline / mean step time of the technique (whiskers: 95 % interval)")
    return figure


def step_times(summary):
    """Milliseconds of every step. The axis is made for the steps after warm-up; what is above it is said, not drawn."""
    times = summary.milliseconds
    figure, axes = canvas(summary, "Milliseconds of every step", names=len(times.columns))
    steps, width = grouped(times.index.to_numpy(), np.nanmedian), group_width(times)
    warm = times.index % summary.steps < summary.warmup
    low, high = np.nanmin(times), np.nanmax(times[~warm])
    top, ends, tops = high * (high / low) ** 0.1 * 1.1, {}, 0
    for label in times:
        line = grouped(times[label].to_numpy(), np.nanmedian)
        axes.plot(steps, np.where(line > top, np.nan, line), color=colour(label), linewidth=1.5,
                  marker="o" if len(steps) == 1 else None)
        above = np.flatnonzero(line > top)
        tops += len(above)
        axes.plot(steps[above], np.full(len(above), top), "^", color=colour(label), clip_on=False, markersize=6,
                  in_layout=False)  # an empty line that is not clipped would ask for room at the figure's corner
        slow = summary.slow[label].to_numpy().nonzero()[0]
        slow = slow[np.argsort(times[label].to_numpy()[slow])[-200:]]  # of a hundred thousand steps, the slowest do
        axes.plot(times.index[slow], times[label].to_numpy()[slow], "o", color=colour(label), markersize=6,
                  markerfacecolor="white", markeredgewidth=1.4)
        measured = times[label][~warm].dropna().to_numpy()
        ends[label] = np.median(measured[-1 - len(measured) // 10:]) if len(measured) else np.nan
    for start in range(0, summary.steps * summary.rounds, summary.steps) if summary.warmup else ():
        axes.axvspan(start - 0.5, start + summary.warmup - 0.5, color="#EFEFEF", linewidth=0, zorder=0)
    axes.set_yscale("log")
    axes.set_ylim(low / (high / low) ** 0.05 / 1.1, top)
    plain_ticks(axes.yaxis)
    count_steps(axes, steps, width)
    axes.grid(axis="y")
    axes.set_ylabel("ms (logarithmic)")
    signs = ["grey: warm-up, in no statistic"] * (summary.warmup > 0) + ["\u25b2 above the axis"] * (tops > 0)
    signs += ["\u25cb slow step"] * bool(summary.slow.to_numpy().any())
    axes.set_xlabel("step" + f", medians of {width} steps" * (width > 1) + f"    ({';  '.join(signs)})" * bool(signs))
    names = {}
    for label, row in summary.table.iterrows():
        names[label] = f"{label}  {row['mean_ms']:{'.3g' if row['mean_ms'] < 1000 else ',.0f'}} ms"
        if row["first_step_ms"] > max(top, 10 * row["mean_ms"]):
            names[label] += f", first {row['first_step_ms'] / 1000:.1f} s"
    name_lines(axes, ends, names)
    return figure


def heatmap(summary):
    times = summary.milliseconds
    figure, axes = canvas(summary, "Where the time went: every step of every technique", rows=len(times.columns))
    grid = np.stack([grouped(times[label].to_numpy(), np.nanmean) for label in times])
    measured = times[times.index % summary.steps >= summary.warmup]
    low, high = np.nanmin(grid), np.nanquantile(measured, 0.999)
    norm = matplotlib.colors.LogNorm(low * 0.999, high * 1.001)
    edges = np.append(times.index[::group_width(times)] - 0.5, times.index[-1] + 0.5)
    axes.set_facecolor("#E4E4E4")  # what is missing
    image = axes.pcolormesh(edges, np.arange(len(grid) + 1) - 0.5, np.ma.masked_invalid(grid), norm=norm,
                            cmap="viridis_r", rasterized=True)
    bars(axes, times.columns)
    axes.set_ylim(len(grid) - 0.5, -0.5)
    axes.grid(False)
    axes.hlines(np.arange(1, len(grid)) - 0.5, *axes.get_xlim(), color="white", linewidth=2)
    for start in range(summary.steps, summary.steps * summary.rounds, summary.steps):
        axes.axvline(start - 0.5, color="white", linewidth=1.5)
    count_steps(axes, times.index)
    axes.set_xlabel("step")
    bar = figure.colorbar(image, ax=axes, pad=0.01, extend="max" if np.nanmax(grid) > norm.vmax else "neither",
                          extendfrac=0.4 / len(grid), aspect=max(8, 2 * len(grid)))
    bar.set_label("ms (dark: slow)")
    plain_ticks(bar.ax.yaxis)
    bar.outline.set_visible(False)
    return figure


def memory(summary):
    table = summary.table[["peak_allocated_mib", "peak_reserved_mib", "optimizer_state_mib"]]
    table = table[table["peak_allocated_mib"] > 0]
    if not len(table):
        return None
    figure, axes = canvas(summary, "Peak memory, and the optimizer's share of it", rows=len(table) + 1)
    places = bars(axes, table.index)
    shades = {"peak_reserved_mib": ("reserved by PyTorch", lambda label: "#E6E6E6"),
              "peak_allocated_mib": ("held by tensors", colour),
              "optimizer_state_mib": ("of it the optimizer's state", lambda label: darker(colour(label), 0.5))}
    keys = []
    for name, (words, shade) in shades.items():
        if table[name].notna().any():
            axes.barh(places, table[name].fillna(0), height=0.68, color=list(map(shade, table.index)))
            keys.append(matplotlib.patches.Patch(color=shade(BASELINE), label=words))
    for place, (_, row) in zip(places, table.iterrows(), strict=True):
        text = f"{row['peak_allocated_mib']:,.0f} MiB"
        if row["optimizer_state_mib"] > 0:
            text += f"  (optimizer {row['optimizer_state_mib']:,.0f})"
        say(axes, text, np.nanmax(row), place)
    axes.set_xlim(0, 1.02 * np.nanmax(table))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("MiB")
    figure.legend(handles=keys[::-1], loc="outside lower right", frameon=False, ncols=3)
    return figure


def losses(summary):
    """Above, the losses: lines that lie on each other. Below, how far they are from the baseline's, step by step (thin)
    and the most until then (thick)."""
    if summary.losses is None:
        return None
    losses = summary.losses.replace([np.inf, -np.inf], np.nan)
    figure, (above, below) = canvas(summary, "Does it still learn the same?", names=1.6 * len(losses.columns), height=8,
                                    nrows=2, sharex=True, height_ratios=(2, 3))
    steps, ends, same = grouped(losses.index.to_numpy(), np.nanmedian), {}, []
    marker = "o" if len(steps) == 1 else None
    for label in losses:
        line = grouped(losses[label].to_numpy(), np.nanmedian)
        above.plot(steps, line, color=colour(label), linewidth=1.5, marker=marker)
        difference = grouped((losses[label] - losses[BASELINE]).abs().to_numpy(), np.nanmax)
        difference[difference == 0] = np.nan  # a logarithmic axis has no place for it
        if np.isfinite(difference).any():
            most = np.fmax.accumulate(difference)
            below.plot(steps, difference, color=colour(label), linewidth=0.8, alpha=0.45)
            below.plot(steps, most, color=colour(label), linewidth=2, marker=marker)
            ends[label] = most[-1]
        elif label != BASELINE:
            same.append(label)
    middle, half = np.mean(above.get_ylim()), np.ptp(above.get_ylim()) / 2
    above.set_ylim(middle - max(half, 0.05), middle + max(half, 0.05))  # where losses agree, do not magnify the rest
    above.set_ylabel("loss")
    below.set_ylabel("difference to the baseline's loss")
    signs = ["thin: of that step", "thick: largest so far"] * (bool(ends) and len(steps) > 1)
    signs += [f"no difference at all: {', '.join(same)}"] * bool(same)
    below.set_xlabel("step" + f"    ({';  '.join(signs)})" * bool(signs))
    count_steps(below, steps, group_width(losses))
    for axes in (above, below):
        axes.grid(axis="y")
    if ends:
        below.set_yscale("log")
        below.yaxis.set_major_formatter("{x:.0e}")
        below.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        name_lines(below, ends, {label: f"{label}  {end:.1e}" for label, end in ends.items()})
    else:
        below.set_yticks([])
    return figure


def group_width(times):
    return -(-len(times) // COLUMNS)


def grouped(values, how):
    """(rows,) -> (at most COLUMNS,): `how` of each group of neighbours, NaN left out; of few, the values themselves."""
    width = group_width(values)
    groups = np.pad(values.astype(float), (0, -len(values) % width), constant_values=np.nan).reshape(-1, width)
    filled = np.isfinite(groups).any(axis=1)
    groups[~filled] = 0  # what NumPy would warn of
    return np.where(filled, how(groups, axis=1), np.nan)


def count_steps(axes, steps, width=1):
    """A horizontal axis from the first step to the last, which has no halves of steps."""
    axes.set_xlim(steps[0] - width / 2, steps[-1] + width / 2)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def plain_ticks(axis):
    """1, 2, 5, 10, ... written out, where a logarithmic axis would write powers of ten or nothing."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5) if high > 30 * low else (1, 2, 3, 5, 7)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def name_lines(axes, ends, names):
    """Each line's name at its right end, moved up or down where they would overlap; a legend where they are many."""
    ends = {label: end for label, end in ends.items() if np.isfinite(end)}
    if len(ends) > MANY:
        order = sorted(ends, key=ends.get, reverse=True)  # from top to bottom, as the lines end
        lines = [matplotlib.lines.Line2D([], [], color=colour(label), linewidth=2) for label in order]
        axes.legend(lines, [names[label] for label in order], loc="center left", bbox_to_anchor=(1.01, 0.5),
                    frameon=False, fontsize=8)
        return
    axes.figure.draw_without_rendering()  # scales and limits are known only now
    wanted = axes.transAxes.inverted().transform(axes.transData.transform([(0, end) for end in ends.values()]))[:, 1]
    tall = axes.get_window_extent().height / axes.figure.dpi * 72  # points
    for label, y, place in zip(ends, wanted, spread(wanted, 15 / tall), strict=True):
        axes.annotate(names[label], (1, y), (14, (place - y) * tall), xycoords="axes fraction",
                      textcoords="offset points", va="center", color=colour(label), fontweight="bold", fontsize=10,
                      arrowprops={"arrowstyle": "-", "color": colour(label), "linewidth": 0.8, "shrinkA": 2,
                                  "shrinkB": 1, "relpos": (0, 0.5)})


def spread(places, gap):
    """(n,) places moved as little as needed for neighbours to be `gap` apart, order kept."""
    order = np.argsort(places, kind="stable")
    groups = []  # [members' wanted places less their offsets]: neighbours that touch move as one
    for rank, i in enumerate(order):
        groups.append([places[i] - rank * gap])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    moved = np.concatenate([np.full(len(group), np.mean(group)) for group in groups]) if groups else np.empty(0)
    result = np.empty(len(places))
    result[order] = moved + np.arange(len(places)) * gap
    return result


if __name__ == "__main__":
    main()
