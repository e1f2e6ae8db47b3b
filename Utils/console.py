"""What a person sees while a run goes on, and the line it ends with."""

import shutil
import sys

from Utils.results import is_baseline, number, round_of


class Progress:
    """A bar with the loss and the milliseconds of the latest step; about ten plain lines where output is piped."""

    def __init__(self, label, steps, stream=None):
        self.label, self.steps, self.done = label, steps, 0
        self.stream = stream or sys.stdout
        self.on_terminal = bool(self.stream) and self.stream.isatty()  # there is none where `>&-` has closed it

    def __enter__(self):
        self._show(f"{self.label}: step 1 of {self.steps}, the slow one ...")
        return self

    def update(self, milliseconds, loss):
        """One more step is done."""
        self.done += 1
        numbers = f"step {self.done:>{len(str(self.steps))}}/{self.steps}  {milliseconds:9.2f} ms  loss {loss:.4f}"
        if self.on_terminal:
            filled = 24 * self.done // self.steps
            self._show(f"{self.label} [{'#' * filled}{'.' * (24 - filled)}] {numbers}")
        elif self.done == 1 or self.done * 10 // self.steps > (self.done - 1) * 10 // self.steps:
            self._show(f"{self.label}  {numbers}")

    def __exit__(self, *_):
        if self.on_terminal:
            print(file=self.stream)

    def _show(self, line):
        if self.on_terminal:
            width = shutil.get_terminal_size().columns - 1
            line, end = f"\r{line[:width]:<{width}}", ""
        else:
            end = "\n"
        print(line, end=end, file=self.stream, flush=True)


def duration(milliseconds):
    """Milliseconds for people: 4.28 ms, 31.2 s."""
    return f"{milliseconds:.2f} ms" if milliseconds < 1e4 else f"{milliseconds / 1e3:.1f} s"


def report(row, earlier):
    """The line that a run ends with, from its row of runs.csv and the earlier rows (one may be the baseline's)."""
    parts = [f"mean {duration(row['mean_ms'])}", f"median {duration(row['median_ms'])}"]
    for old in earlier:
        same_round = round_of(old) == str(row["round"])
        both_valid = row["valid"] and old.get("valid", "").lower() != "false"
        before = number(old.get("mean_ms"))
        if is_baseline(old["label"]) and not is_baseline(row["label"]) and same_round and both_valid and before > 0:
            parts.append(f"{before / row['mean_ms']:.2f}x the baseline's speed")
    parts.append(f"first step {duration(row['first_step_ms'])}")
    if "peak_reserved_mib" in row:
        parts.append(f"peak memory {row['peak_reserved_mib']:,.0f} MiB")
    parts.append(f"final loss {row['final_loss']:.4f}")
    return f"{row['label']}: {', '.join(parts)}"
