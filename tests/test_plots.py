"""plots.py draws whatever was measured, on any machine, and refuses in one line what it cannot draw."""

import os
import subprocess
import sys
import time
from pathlib import Path

import plots
from Utils import results
from Utils.results import BASELINE, PICTURES, record
from Utils.summary import summarize

import matplotlib
import matplotlib.image
import numpy as np
import pytest

ROOT = Path(results.__file__).resolve().parent.parent
SEVEN = {BASELINE: 25.3, "TF32": 15, "BF16": 9, "TC": 22.8, "FA": 24.2, "FuOp": 24.9, "8bOp": 28.4,
         "BF16+TC+FA+FuOp": 4.2}
FACTS = {"model": "small", "parameters": 8_690_000, "batch_size": 4, "block_size": 64, "device": "cuda",
         "device_name": "NVIDIA H200", "peak_allocated_mib": 2390, "peak_reserved_mib": 2820,
         "optimizer_state_mib": 66.5}
WITHOUT_COMPANIONS = PICTURES[:3]


def experiment(folder, means=None, steps=30, rounds=1, facts=FACTS):
    """An experiment as the scripts leave it behind; compiled labels have a first step of seconds. Returns its path."""
    path = str(folder / f"4B_{steps}N_experiment" / f"4B_{steps}N_results.csv")
    for round in range(rounds):
        for i, (label, mean) in enumerate((means or SEVEN).items()):
            generator = np.random.default_rng(100 * round + i)
            times = mean * (1 + 0.01 * generator.standard_normal(steps))
            times[0] = 15_000 if "TC" in label else 1.3 * mean
            losses = np.linspace(8.3, 4, steps) + 1e-5 * i * generator.standard_normal(steps)
            record(path, times, losses, {"label": label, **facts}, round, rounds)
    return path


def draw(*arguments, before="", **environment):
    """plots.py in a process of its own, after the lines `before`."""
    code = f"import sys\n{before}\nsys.argv = ['plots.py', *sys.argv[1:]]\nimport runpy\n" \
           f"runpy.run_path({str(ROOT / 'plots.py')!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)} | environment, timeout=60)


def pictures(path):
    """{name: (height, width, 3) pixels} of the pictures beside an experiment's results.csv; each shows something."""
    found = {}
    for name in PICTURES:
        file = results.companion(path, name)
        if os.path.exists(file):
            pixels = matplotlib.image.imread(file)[..., :3]
            assert min(pixels.shape[:2]) > 300
            assert (pixels != 1).any(axis=2).mean() > 0.01, f"{name} is blank"
            edges = pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]
            assert all((edge == 1).all() for edge in edges), f"{name} is cut off at an edge"
            found[name] = pixels
    return found


def shows(pixels, colour):
    """Whether more than a few of the picture's pixels, of which every ninth is looked at, have that colour."""
    return (abs(pixels[::3, ::3] - matplotlib.colors.to_rgb(colour)).max(axis=2) < 0.01).sum() >= 20


def test_an_experiment_becomes_a_table_a_page_and_five_pictures(tmp_path):
    path = experiment(tmp_path)
    done = draw("--results_path", path)
    assert (done.returncode, done.stderr) == (0, "")
    written = [line.strip() for line in done.stdout.split("\nwrote\n")[1].splitlines()]
    assert written == [results.companion(path, name) for name in ("summary.md", *PICTURES)]
    assert tuple(pictures(path)) == PICTURES
    page = Path(results.companion(path, "summary.md")).read_text()
    assert page.startswith("# NVIDIA H200 · small (8.69 M parameters) · batch 4 x 64 tokens · 30 steps\n")
    for label in SEVEN:
        assert f"| {label} |" in page and f"\n{label} " in done.stdout
    assert sorted(os.listdir(os.path.dirname(path))) == sorted(
        f"4B_30N_{name}" for name in (*results.TABLES, "summary.md", *PICTURES))


def test_every_technique_is_in_every_picture(tmp_path):
    path = experiment(tmp_path, {label: 2.0**i for i, label in enumerate(SEVEN)})
    plots.main(["--results_path", path])
    found = pictures(path)
    for name in (PICTURES[0], PICTURES[1], PICTURES[3]):
        assert [label for label in SEVEN if not shows(found[name], plots.colour(label))] == []
    assert [label for label in SEVEN if label != BASELINE and not shows(found[PICTURES[4]], plots.colour(label))] == []


def test_the_same_file_gives_the_same_bytes(tmp_path):
    path, written = experiment(tmp_path, {BASELINE: 25.3, "TF32": 15}), []
    for _ in range(2):
        plots.main(["--results_path", path])
        written.append([Path(results.companion(path, name)).read_bytes() for name in ("summary.md", *PICTURES)])
    assert written[0] == written[1]


def test_without_companions_there_are_three_pictures(tmp_path):
    path = experiment(tmp_path)
    for name in ("losses.csv", "runs.csv"):
        os.unlink(results.companion(path, name))
    plots.main(["--results_path", path])
    assert tuple(pictures(path)) == WITHOUT_COMPANIONS


def test_a_csv_of_the_original_project_is_drawn_where_it_says(tmp_path):
    (tmp_path / "results.csv").write_text(
        "step,no_optimization,TF32\n" + "".join(f"{i},{0.47 + i / 1e5},0.2\n" for i in range(40)))
    plots.main(["--results_path", str(tmp_path / "results.csv"), "--prefix", str(tmp_path / "new" / "mine_")])
    assert sorted(os.listdir(tmp_path / "new")) == sorted(
        f"mine_{name}" for name in ("summary.md", *WITHOUT_COMPANIONS))
    assert os.listdir(tmp_path) and not list(tmp_path.glob("*.png"))


def test_on_a_cpu_there_is_no_picture_of_memory(tmp_path, capsys):
    path = experiment(tmp_path, facts={"device": "cpu", "device_name": "a CPU"})
    plots.main(["--results_path", path])
    assert PICTURES[3] not in pictures(path) and len(pictures(path)) == 4
    assert "They say nothing about a GPU" in capsys.readouterr().out


MANY = {BASELINE: 25.3} | {f"BF16+a long name {i}": 25.3 / i for i in range(1, 41)}
UNUSUAL = {BASELINE: 25.3, "BF16 + TC": 9, "$\\bad$ & <b>": 7, "_hidden": 5, "ü|ü,\"": 3, "+": 2, "A+B+": 2,
           "x" * 40: 1}


@pytest.mark.parametrize(("means", "steps"), [
    pytest.param({BASELINE: 25.3}, 1, id="one step of the baseline"),
    pytest.param({BASELINE: 25.3}, 30, id="baseline only"),
    pytest.param({BASELINE: 25.3, "TF32": 15}, 2, id="one technique, two steps"),
    pytest.param(SEVEN, 1, id="one step"),
    pytest.param(SEVEN, 6, id="one step after warm-up"),
    pytest.param(MANY, 30, id="forty techniques"),
    pytest.param(UNUSUAL, 30, id="unusual labels"),
])
@pytest.mark.filterwarnings("error")
def test_any_experiment_is_drawn(tmp_path, means, steps):
    path = experiment(tmp_path, means, steps)
    plots.main(["--results_path", path])
    assert len(pictures(path)) == 5


@pytest.mark.filterwarnings("error")
def test_rounds_are_drawn_and_every_line_is_named_where_it_ends(tmp_path):
    """A later round's first step, of seconds, must not drag a name away from its line."""
    path = experiment(tmp_path, rounds=3)
    with matplotlib.rc_context(plots.STYLE):
        axes = plots.step_times(summarize(path)).axes[0]
    plots.main(["--results_path", path])
    assert len(pictures(path)) == 5
    names = {text.get_text().split("  ")[0]: text.xy[1] for text in axes.texts}
    assert sorted(names, key=names.get) == sorted(SEVEN, key=SEVEN.get)
    assert max(names.values()) < 0.95


@pytest.mark.filterwarnings("error")
def test_damaged_measurements_are_drawn_as_far_as_they_go(tmp_path):
    """Gaps, a run that became NaN, a cut line, a technique with nothing but warm-up, text."""
    lines = ["step,no_optimization,TF32,BF16,late,comment"]
    lines += [f"{i},{20 + i % 3},{'' if i % 7 == 0 else 10},{5 + i},{1 if i < 4 else ''},fine" for i in range(30)]
    path = str(tmp_path / "results.csv")
    Path(path).write_text("\n".join(lines)[:-7])
    (tmp_path / "losses.csv").write_text(
        "step,no_optimization,TF32,BF16\n" + "".join(f"{i},{8 - i / 9},{8 - i / 9},nan\n" for i in range(30)))
    plots.main(["--results_path", path])
    assert tuple(pictures(path)) == (*WITHOUT_COMPANIONS, PICTURES[4])


def test_the_axis_is_made_for_the_steps_after_warmup(tmp_path):
    """Fifteen seconds of compiling would press all lines together at the bottom."""
    with matplotlib.rc_context(plots.STYLE):
        axes = plots.step_times(summarize(experiment(tmp_path))).axes[0]
    low, high = axes.get_ylim()
    assert 3 < low < 4.2 and 28.4 < high < 60
    assert any("first 15.0 s" in text.get_text() for text in axes.texts)


def test_forty_names_find_room_beside_their_lines(tmp_path):
    summary = summarize(experiment(tmp_path, MANY))
    with matplotlib.rc_context(plots.STYLE):
        for draw_lines in (plots.step_times, plots.losses):
            figure = draw_lines(summary)
            figure.draw_without_rendering()
            axes = figure.axes[-1]
            assert axes.get_legend().get_window_extent().height < 1.05 * axes.get_window_extent().height


def test_the_axes_use_the_figure(tmp_path):
    summary = summarize(experiment(tmp_path))
    with matplotlib.rc_context(plots.STYLE):
        for name, figure in plots.figures(summary).items():
            figure.draw_without_rendering()
            boxes = [axes.get_position() for axes in figure.axes]
            assert min(box.x0 for box in boxes) < 0.2, name
            assert min(box.y0 for box in boxes) < 0.22, name


def test_a_hundred_thousand_steps_take_seconds(tmp_path):
    steps = 100_000
    table = np.stack([np.arange(steps), *(mean * np.random.default_rng(i).gamma(100, 0.01, steps)
                                          for i, mean in enumerate(list(SEVEN.values())[:3]))], axis=1)
    path = str(tmp_path / "results.csv")
    np.savetxt(path, table, fmt=["%d", *["%.4f"] * 3], delimiter=",", header="step,no_optimization,TF32,BF16",
               comments="")
    start = time.monotonic()
    plots.main(["--results_path", path])
    assert time.monotonic() - start < 15
    assert tuple(pictures(path)) == WITHOUT_COMPANIONS


def test_no_display_is_needed(tmp_path):
    """pyplot would choose a window system; some of its versions fall back without a word where there is none."""
    path = experiment(tmp_path, {BASELINE: 25.3, "TF32": 15})
    no_display = "import os; os.environ.pop('DISPLAY', None); sys.modules['matplotlib.pyplot'] = None"
    done = draw("--results_path", path, before=no_display, MPLBACKEND="TkAgg")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(pictures(path)) == 5


def test_no_torch_is_needed(tmp_path):
    path = experiment(tmp_path, {BASELINE: 25.3, "TF32": 15})
    done = draw("--results_path", path, before="sys.modules['torch'] = None")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("text", "words"), [
    ("step,TF32\n0,15\n", "no measurement named 'no_optimization'"),
    ("step\n0\n", "no measurement named 'no_optimization'"),
    ("", "is empty"),
    ("step,no_optimization\n0,fast\n", "'fast' is not a number"),
    (None, "does not exist"),
])
def test_what_cannot_be_drawn_is_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "results.csv"
    if text is not None:
        path.write_text(text)
    done = draw("--results_path", path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert words in done.stderr and done.stderr.startswith("plots.py: ")
    assert not list(tmp_path.glob("*.png"))


def test_a_full_disk_leaves_the_old_pictures(tmp_path, monkeypatch):
    path = experiment(tmp_path, {BASELINE: 25.3})
    plots.main(["--results_path", path])
    before = {name: Path(results.companion(path, name)).read_bytes() for name in ("summary.md", *PICTURES)}
    record(path, [1.0] * 30, [8.0] * 30, {"label": "FA"})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(results.UserError, match="No space left"):
        plots.main(["--results_path", path])
    assert before == {name: Path(results.companion(path, name)).read_bytes() for name in before}


def test_labels_that_lie_too_close_are_moved_apart_and_keep_their_order():
    wanted = np.array([0.5, 0.51, 0.9, 0.5, 0.1])
    moved = plots.spread(wanted, 0.05)
    assert (np.diff(np.sort(moved)) >= 0.05 - 1e-12).all()
    assert moved[[2, 4]] == pytest.approx([0.9, 0.1])
    assert moved[4] < moved[0] < moved[1] < moved[2]
    assert len(plots.spread(np.empty(0), 0.05)) == 0


def test_groups_of_steps_keep_what_they_are_asked_for():
    values = np.arange(1400.0)
    values[5] = np.nan
    assert list(plots.grouped(values[:4], np.nanmedian)) == [0, 1, 2, 3]
    assert len(plots.grouped(np.arange(plots.COLUMNS), np.nanmedian)) == plots.COLUMNS
    assert list(plots.grouped(values, np.nanmax)[:3]) == [2, 4, 8]
    assert np.isnan(plots.grouped(np.full(1400, np.nan), np.nanmean)).all()


def test_a_stack_is_darker_than_what_it_added_last():
    assert plots.colour("FuOp") == matplotlib.colors.to_hex(plots.COLOURS["FuOp"])
    brightness = [sum(matplotlib.colors.to_rgb(plots.colour(label))) for label in ("FuOp", "TC+FuOp", "BF16+TC+FuOp")]
    assert brightness == sorted(brightness, reverse=True) and len(set(brightness)) == 3
