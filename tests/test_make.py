"""The Makefile asks for what it needs, runs the right scripts one at a time, and ends as they do.

Most tests give it a stub for an interpreter, which writes down its arguments. Two train for real. To
test another make, put it first in PATH.
"""

import contextlib
import csv
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from Utils.results import BASELINE, PICTURES

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAKE = shutil.which("make")
SETTINGS = ("STEPS=6", "BATCH_SIZE=4", "PREFIX=./out")
OPTIONS = ["--steps", "6", "--batch_size", "4", "--results_path=./out/4B_6N_experiment/4B_6N_results.csv"]
SCRIPTS = {
    "baseline": ["no_optimization.py"],
    "tf32": ["tensorFloat32.py"],
    "bf16": ["brainFloat16.py"],
    "torch_compile": ["torch_compile.py"],
    "flash": ["flash_attention.py"],
    "fused": ["fused_optimizer.py"],
    "8bit": ["8-bit_optimizer.py"],
    "combined": ["fused_optimizer.py", "--with", "brainFloat16", "torch_compile", "flash_attention"],
}
NEEDY = [*SCRIPTS, "stack", "ladder", "all", "plots", "init_results", "reset"]
pytestmark = pytest.mark.skipif(MAKE is None, reason="needs make")


def environment(**changes):
    """The environment without what a make around the tests has put there."""
    ours = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "MAKEFILES")
    return {name: value for name, value in os.environ.items() if name not in ours} | changes


class Tool:
    """A copy of the Makefile with what lies beside it, and a stub that writes down how it was called."""

    def __init__(self, folder):
        self.folder = folder / "the tool"
        self.folder.mkdir()
        self.log = folder / "log"
        self.python = folder / "an interpreter"
        shutil.copy(ROOT / "Makefile", self.folder)
        shutil.copy(ROOT / "requirements.txt", self.folder)
        (self.folder / "Utils").symlink_to(ROOT / "Utils")
        (self.folder / "tests").symlink_to(ROOT / "tests")
        self.stub()
        self.before = self.files()

    def stub(self, body="", path=None):
        """An interpreter that does `body`, where $1 is the script, and writes down its start and its end."""
        path = path or self.python
        path.write_text(f"""#!/bin/sh
            {{ printf start; printf '\\t%s' "$@"; echo; }} >>'{self.log}'
            {body}
            echo end >>'{self.log}'
        """)
        path.chmod(0o755)
        return path

    def command(self, *arguments):
        python = () if any(text.startswith("PYTHON=") for text in arguments) else (f"PYTHON={self.python}",)
        return [MAKE, *arguments, *python]

    def make(self, *arguments, **changes):
        return subprocess.run(self.command(*arguments), cwd=self.folder, env=environment(**changes),
                              capture_output=True, text=True, timeout=60)

    def lines(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    def calls(self):
        """The arguments of each call, in order."""
        return [line.split("\t")[1:] for line in self.lines() if line.startswith("start")]

    def files(self):
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*"))

    def assert_nothing_happened(self):
        assert self.calls() == [] and self.files() == self.before


@pytest.fixture
def tool(tmp_path):
    return Tool(tmp_path)


def the_line(done):
    """What is said on stderr where a command is refused: one line."""
    assert done.returncode != 0 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


# Help


@pytest.mark.parametrize("goal", [(), ("help",)])
def test_help_needs_no_settings_and_no_interpreter_and_lists_everything(goal, tool):
    done = tool.make(*goal, "PYTHON=/nowhere/python")
    assert done.returncode == 0 and done.stderr == ""
    for target in (*NEEDY, "help", "clean", "test", "peers", "notebook"):
        assert re.search(rf"^    {target} +\S", done.stdout, re.MULTILINE), target
    for setting in ("STEPS", "BATCH_SIZE", "PREFIX", "MODEL", "DATA", "DEVICE", "SEED", "ROUNDS", "GPUS", "PYTHON"):
        assert re.search(rf"^    {setting}=", done.stdout, re.MULTILINE), setting
    tool.assert_nothing_happened()


def test_every_target_that_a_person_may_call_is_phony_and_in_the_help(tool):
    rules = subprocess.run([MAKE, "-pRrq"], cwd=tool.folder, env=environment(), capture_output=True, text=True).stdout
    phony = {name for line in re.findall(r"^\.PHONY:(.*)", rules, re.MULTILINE) for name in line.split()}
    listed = set(re.findall(r"^    ([a-z0-9_]+) ", tool.make().stdout, re.MULTILINE))
    assert phony - {"ready", "tests_ready"} == listed == {*NEEDY, "help", "clean", "test", "peers", "notebook"}


# Settings


@pytest.mark.parametrize("missing", ["STEPS", "BATCH_SIZE", "PREFIX"])
@pytest.mark.parametrize("target", NEEDY)
def test_a_missing_setting_is_named_in_one_line_with_an_example(target, missing, tool):
    line = the_line(tool.make(target, *(text for text in SETTINGS if not text.startswith(missing))))
    assert f"{missing} is missing; for example: make all STEPS=150 BATCH_SIZE=256 PREFIX=./out" in line
    tool.assert_nothing_happened()


@pytest.mark.parametrize("setting", ["STEPS", "BATCH_SIZE", "ROUNDS", "GPUS"])
@pytest.mark.parametrize("value", ["0", "00", "-1", "+1", "1e3", "abc", "1.5", "007", "1 2", "5\n6", "5,6", "0x10", "٣",
                                   "5;touch x", "$(shell touch x)", "`touch x`", "$$(touch x)", '5"', "5'"])
def test_what_is_no_positive_whole_number_is_refused_and_never_executed(value, setting, tool):
    rest = [text for text in SETTINGS if not text.startswith(setting)]
    line = the_line(tool.make("all", *rest, f"{setting}={value}"))
    assert f"{setting}=" in line and "not a positive whole number" in line and "for example: make all" in line
    tool.assert_nothing_happened()


@pytest.mark.parametrize("setting", ["STEPS", "BATCH_SIZE", "PREFIX"])
def test_an_empty_setting_is_a_missing_one(setting, tool):
    rest = [text for text in SETTINGS if not text.startswith(setting)]
    assert f"{setting} is missing" in the_line(tool.make("baseline", *rest, f"{setting}="))
    tool.assert_nothing_happened()


@pytest.mark.parametrize("given", ["GPU=2", "steps=6", "CUDA_VISIBLE_DEVICES=1"])
def test_what_is_no_setting_is_refused_and_the_settings_are_named(given, tool):
    name = given.split("=")[0]
    line = the_line(tool.make("baseline", *SETTINGS, given))
    assert f"{name} is no setting, these are: STEPS BATCH_SIZE" in line and f"in front: {name}=... make" in line
    tool.assert_nothing_happened()


def test_an_empty_setting_that_may_be_left_out_is_left_out(tool):
    assert tool.make("baseline", *SETTINGS, "ROUNDS=", "MODEL=", "DATA=", "DEVICE=", "SEED=").returncode == 0
    assert tool.calls() == [["no_optimization.py", "--round", "1", *OPTIONS]]


def test_blanks_around_a_number_do_not_count(tool):
    assert tool.make("baseline", "STEPS=6 ", "BATCH_SIZE= 4", "PREFIX=./out").returncode == 0
    assert tool.calls() == [["no_optimization.py", "--round", "1", *OPTIONS]]


def test_settings_in_the_environment_do_not_count(tool):
    for missing in ("STEPS", "BATCH_SIZE", "PREFIX"):
        given = [text for text in SETTINGS if not text.startswith(missing)]
        line = the_line(tool.make("all", *given, STEPS="7", BATCH_SIZE="7", PREFIX="/usr"))
        assert f"{missing} is missing" in line
    others = dict(MODEL="gpt2", DATA="/x", DEVICE="cuda", SEED="7", ROUNDS="7", GPUS="7", WITH="x",
                  PYTHON="/nowhere/python")
    assert tool.make("baseline", *SETTINGS, **others).returncode == 0
    assert tool.calls() == [["no_optimization.py", "--round", "1", *OPTIONS]]


def test_all_settings_reach_the_script(tool):
    given = ["MODEL=tiny", "DATA=my text.txt", "DEVICE=cpu", "SEED=3", "ROUNDS=2"]
    assert tool.make("tf32", *SETTINGS, *given).returncode == 0
    options = [*OPTIONS[:-1], "--results_path=./out/tiny_4B_6N_experiment/4B_6N_results.csv", "--model", "tiny",
               "--data=my text.txt", "--device", "cpu", "--seed", "3", "--rounds", "2"]
    assert tool.calls() == [["tensorFloat32.py", "--round", number, *options] for number in "12"]


def test_several_gpus_are_given_to_torchrun(tool):
    assert tool.make("combined", *SETTINGS, "GPUS=1").returncode == 0
    launcher = ["-m", "Utils.launch", "--standalone", "--nproc-per-node=1"]
    assert tool.calls() == [[*launcher, *SCRIPTS["combined"], "--round", "1", *OPTIONS]]


@pytest.mark.parametrize("settings, path", [
    (["STEPS=150", "BATCH_SIZE=256"], "./out/256B_150N_experiment/256B_150N_results.csv"),
    (["STEPS=150", "BATCH_SIZE=256", "MODEL=small"], "./out/256B_150N_experiment/256B_150N_results.csv"),
    (["STEPS=30", "BATCH_SIZE=16", "MODEL=gpt2"], "./out/gpt2_16B_30N_experiment/16B_30N_results.csv"),
    (["STEPS=30", "BATCH_SIZE=16", "GPUS=1"], "./out/16B_30N_experiment/16B_30N_results.csv"),
    (["STEPS=30", "BATCH_SIZE=16", "GPUS=4"], "./out/4gpu_16B_30N_experiment/16B_30N_results.csv"),
    (["STEPS=30", "BATCH_SIZE=16", "GPUS=4", "MODEL=gpt2"], "./out/4gpu_gpt2_16B_30N_experiment/16B_30N_results.csv"),
])
@pytest.mark.parametrize("target", ["baseline", "plots", "init_results", "reset"])
def test_an_experiments_folder_and_file_are_named_after_its_settings(target, settings, path, tool):
    assert tool.make(target, *settings, "PREFIX=./out").returncode == 0
    (call,) = tool.calls()
    assert f"--results_path={path}" in call


ODD = ["an out", "o'ut", 'o"ut', "$HOME/out", "${HOME}", "$(shell touch x)", "`touch x`", "$(touch x)", "a;touch x",
       "~/out", "/an/out", "../out", "out//", "a&b", "a|b", "a>b", "a#b", "a%b", "a*b", "a?b", "a\\b", "a$$b", "a$",
       "-out", "a,b", "a)b", "(a", "a:b", "a=b", "a!b", "öut"]


@pytest.mark.parametrize("prefix", ODD)
def test_a_prefix_reaches_the_script_as_it_was_given(prefix, tool):
    for target in ("baseline", "plots", "init_results", "reset"):
        assert tool.make(target, "STEPS=6", "BATCH_SIZE=4", f"PREFIX={prefix}").returncode == 0
    path = f"--results_path={prefix}/4B_6N_experiment/4B_6N_results.csv"
    assert [path in call for call in tool.calls()] == [True] * 4
    assert tool.files() == tool.before


@pytest.mark.parametrize("name", ["o'ut", "$HOME", "a b.txt", 'a"b', "a;touch x"])
def test_odd_names_of_texts_and_interpreters_are_taken_as_they_are(name, tool, tmp_path):
    python = tool.stub(path=tmp_path / name)
    assert tool.make("baseline", *SETTINGS, f"DATA={name}", f"PYTHON={python}").returncode == 0
    assert tool.calls()[0][-1] == f"--data={name}" and tool.files() == tool.before


def test_a_home_folder_that_the_shell_leaves_alone_is_the_same_one_for_every_target(tool, tmp_path):
    """dash and zsh hand `PREFIX=~/out` on as it is; scripts, plots and reset have to agree on what it means."""
    settings = ["STEPS=6", "BATCH_SIZE=4", "PREFIX=~/out", f"PYTHON={sys.executable}"]
    path = tmp_path / "out" / "4B_6N_experiment" / "4B_6N_results.csv"
    assert tool.make("init_results", *settings, HOME=str(tmp_path)).returncode == 0
    assert path.exists()
    assert tool.make("reset", *settings, HOME=str(tmp_path)).returncode == 0
    assert not path.parent.exists()
    tool.make("init_results", *settings, HOME=str(tmp_path))
    assert tool.make("clean", *settings[2:], HOME=str(tmp_path)).returncode == 0
    assert not path.parent.exists() and tool.files() == tool.before


# Which scripts are run


@pytest.mark.parametrize("target", SCRIPTS)
def test_a_target_runs_its_script(target, tool):
    assert tool.make(target, *SETTINGS).returncode == 0
    assert tool.calls() == [[*SCRIPTS[target], "--round", "1", *OPTIONS]]


def test_several_targets_run_in_the_order_they_are_named(tool):
    assert tool.make("tf32", "baseline", "plots", *SETTINGS).returncode == 0
    assert [call[0] for call in tool.calls()] == ["tensorFloat32.py", "no_optimization.py", "plots.py"]


@pytest.mark.parametrize("asked, script, others", [
    ("brainFloat16", "brainFloat16.py", []),
    ("brainFloat16 torch_compile", "torch_compile.py", ["--with", "brainFloat16.py"]),
    ("bf16 fused", "fused_optimizer.py", ["--with", "brainFloat16.py"]),
    (" flash_attention.py  8-bit_optimizer.py ", "8-bit_optimizer.py", ["--with", "flash_attention.py"]),
    ("tensorFloat32 brainFloat16 fused_optimizer", "fused_optimizer.py",
     ["--with", "tensorFloat32.py", "brainFloat16.py"]),
    ("brainFloat16 brainFloat16", "brainFloat16.py", ["--with", "brainFloat16.py"]),  # which the script refuses
])
def test_a_stack_is_run_in_the_order_of_with(asked, script, others, tool):
    assert tool.make("stack", *SETTINGS, f"WITH={asked}").returncode == 0
    assert tool.calls() == [[script, *others, "--round", "1", *OPTIONS]]


@pytest.mark.parametrize("asked, words", [
    (None, "WITH is missing; for example: make stack"),
    ("", "WITH is missing; for example: make stack"),
    ("nonsense", "there is no script nonsense.py; choose from no_optimization.py"),
    ("brainFloat16 plots", "there is no script plots.py"),
    ("--help", "there is no script --help.py"),
    ("brainFloat16;touch x", "there is no script brainFloat16;touch.py"),
    ("$(shell touch x)", "there is no script"),
])
def test_a_stack_of_what_is_no_script_is_refused(asked, words, tool):
    assert words in the_line(tool.make("stack", *SETTINGS, *([] if asked is None else [f"WITH={asked}"])))
    tool.assert_nothing_happened()


def test_the_ladder_adds_one_technique_at_a_time(tool):
    assert tool.make("ladder", *SETTINGS).returncode == 0
    assert tool.calls() == [[*call, *OPTIONS] for call in (
        ["brainFloat16.py"],
        ["torch_compile.py", "--with", "brainFloat16"],
        ["flash_attention.py", "--with", "brainFloat16", "torch_compile"],
        ["fused_optimizer.py", "--with", "brainFloat16", "torch_compile", "flash_attention"],
        ["8-bit_optimizer.py", "--with", "brainFloat16", "torch_compile", "flash_attention"],
    )]


def test_peers_needs_no_setting_and_takes_three(tool):
    assert tool.make("peers").returncode == 0
    assert tool.make("peers", "STEPS=3", "BATCH_SIZE=2", "MODEL=tiny", "PREFIX=./out").returncode == 0
    assert tool.calls() == [["-m", "tests.peers"],
                            ["-m", "tests.peers", "--model", "tiny", "--batch_size", "2", "--steps", "3"]]


def test_a_ladder_ends_at_the_step_that_fails(tool):
    tool.stub('test "$1" != flash_attention.py || exit 1')
    assert tool.make("ladder", *SETTINGS).returncode != 0
    assert len(tool.calls()) == 3


def test_all_runs_everything_and_draws(tool):
    done = tool.make("all", *SETTINGS)
    assert (done.returncode, done.stderr) == (0, "")
    assert tool.calls() == [*([*call, "--round", "1", *OPTIONS] for call in SCRIPTS.values()),
                            ["plots.py", OPTIONS[-1]]]


def test_rounds_alternate_the_order(tool):
    assert tool.make("all", *SETTINGS, "ROUNDS=3").returncode == 0
    forth = list(SCRIPTS.values())
    expected = [[*call, "--round", str(number), *OPTIONS, "--rounds", "3"]
                for number, order in ((1, forth), (2, forth[::-1]), (3, forth)) for call in order]
    assert tool.calls() == [*expected, ["plots.py", OPTIONS[-1]]]


def test_ten_rounds_alternate_too(tool):
    assert tool.make("all", *SETTINGS, "ROUNDS=11").returncode == 0
    firsts = [call[0] for call in tool.calls()[:88:8]]
    assert firsts == ["no_optimization.py", "fused_optimizer.py"] * 5 + ["no_optimization.py"]


@pytest.mark.parametrize("goals", [["all"], list(SCRIPTS), ["ladder", "baseline"]])
def test_never_two_at_once(goals, tool):
    tool.stub("sleep 0.05")
    assert tool.make("-j4", *goals, *SETTINGS).returncode == 0
    kinds = [line.split("\t")[0] for line in tool.lines()]
    assert kinds == ["start", "end"] * (len(kinds) // 2) and len(kinds) >= 12


@pytest.mark.parametrize("make_it", [Path.touch, Path.mkdir])
def test_files_that_are_named_like_targets_change_nothing(make_it, tool):
    (tool.folder / "tests").unlink()
    for name in (*NEEDY, "clean", "help", "test", "peers", "notebook", "ready", "tests_ready", "tests"):
        make_it(tool.folder / name)
    assert tool.make("all", "plots", "baseline", *SETTINGS).returncode == 0
    assert len(tool.calls()) == 11
    assert tool.make("test").returncode == 0
    assert tool.calls()[-1] == ["-m", "pytest"]
    assert "usage: make" in tool.make("help").stdout


def test_make_works_from_elsewhere(tool, tmp_path):
    done = subprocess.run(tool.command("-C", str(tool.folder), "baseline", *SETTINGS), cwd="/", env=environment(),
                          capture_output=True, text=True)
    assert done.returncode == 0
    assert tool.calls() == [["no_optimization.py", "--round", "1", *OPTIONS]]
    asked = subprocess.run([MAKE, "-C", str(tool.folder)], cwd="/", env=environment(), capture_output=True, text=True)
    assert tool.make().stdout in asked.stdout


# When scripts fail


@pytest.mark.parametrize("target", [*SCRIPTS, "stack", "plots", "init_results", "reset"])
@pytest.mark.parametrize("status", [1, 77, 139])
def test_a_script_that_fails_fails_its_target(target, status, tool):
    tool.stub(f"echo why >&2; exit {status}")
    done = tool.make(target, *SETTINGS, "WITH=brainFloat16")
    assert done.returncode != 0 and "why" in done.stderr
    assert len(tool.calls()) == 1


def test_all_goes_on_without_what_this_machine_cannot_run_and_names_it_at_the_end(tool):
    tool.stub('test "$1" != 8-bit_optimizer.py || { echo "Warning: x" >&2; echo "no bitsandbytes here" >&2; exit 77; }')
    done = tool.make("all", *SETTINGS)
    assert done.returncode == 0
    assert [call[0] for call in tool.calls()] == [*(call[0] for call in SCRIPTS.values()), "plots.py"]
    assert done.stderr.splitlines()[-2:] == ["not measured:", "8bit: no bitsandbytes here"]


def test_all_goes_on_after_a_failure_and_fails_in_the_end(tool):
    tool.stub("""case "$1 $2" in
        torch_compile.py*) echo "no compiler" >&2; exit 1;;
        "fused_optimizer.py --with") exit 77;;
        flash_attention.py*) kill -9 $$;;  # as the kernel does where memory runs out: not a word
    esac""")
    done = tool.make("all", *SETTINGS)
    assert done.returncode != 0
    assert [call[0] for call in tool.calls()] == [*(call[0] for call in SCRIPTS.values()), "plots.py"]
    said = done.stderr[done.stderr.index("not measured:"):].splitlines()
    assert said[1] == "torch_compile: no compiler" and said[3] == "combined: ended with status 77"
    assert said[2] == "flash: killed, as happens where memory runs out: a smaller BATCH_SIZE needs less"


def test_all_fails_where_nothing_can_be_drawn(tool):
    tool.stub('test "$1" != plots.py || exit 1')
    assert tool.make("all", *SETTINGS).returncode != 0
    assert len(tool.calls()) == 9


@pytest.mark.parametrize("goals", [["all"], ["ladder"], ["baseline", "tf32", "bf16"]], ids=" ".join)
@pytest.mark.parametrize("number, group", [(signal.SIGINT, True), (signal.SIGQUIT, True), (signal.SIGHUP, True),
                                           (signal.SIGTERM, True), (signal.SIGTERM, False)],
                         ids=["Ctrl-C", "Ctrl-Backslash", "terminal closed", "SIGTERM to all", "SIGTERM to make alone"])
def test_whoever_stops_make_stops_everything_at_once(number, group, goals, tool, tmp_path):
    ours = tmp_path / "process"
    tool.stub(f"test $(wc -l <'{tool.log}') -lt 3 || {{ echo $$ >'{ours}'; exec sleep 30; }}")  # the second one hangs
    process = subprocess.Popen(tool.command(*goals, *SETTINGS), cwd=tool.folder, env=environment(),
                               start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: ours.exists() and ours.read_text().strip())
        (os.killpg if group else os.kill)(process.pid, number)
        assert process.wait(timeout=5) != 0
        wait_for(lambda: not alive(int(ours.read_text())))
        time.sleep(0.1)
        assert len(tool.calls()) == 2
    finally:
        with_group_gone(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_what_make_keeps_to_itself_ends_it_after_the_script_that_runs(number, tool):
    """Of what is sent to make alone it hands on only SIGTERM; of the others its recipe hears nothing."""
    tool.stub("sleep 0.5")
    process = subprocess.Popen(tool.command("tf32", "baseline", *SETTINGS), cwd=tool.folder, env=environment(),
                               start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_for(tool.calls)
        os.kill(process.pid, number)
        assert process.wait(timeout=5) != 0
        assert [line.split("\t")[0] for line in tool.lines()] == ["start", "end"]
    finally:
        with_group_gone(process)


def wait_for(condition, seconds=5):
    stop = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < stop, "waited in vain"
        time.sleep(0.01)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # whoever adopts orphans may be slow to bury them
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def with_group_gone(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


# clean, init_results, reset


@pytest.fixture
def out(tool):
    """An experiment's folder with a file of the tool and one of the user."""
    folder = tool.folder / "out" / "4B_6N_experiment"
    folder.mkdir(parents=True)
    (folder / "4B_6N_results.csv").write_text("step\n0\n")
    (folder / "thoughts.txt").touch()
    for name in ("tokens", "inductor", "of the user"):
        (tool.folder / ".cache" / name).mkdir(parents=True)
        (tool.folder / ".cache" / name / "file").touch()
    return folder


@pytest.mark.parametrize("arguments, changes", [((), {}), (("PREFIX=",), {}), ((), {"PREFIX": "./out"}),
                                                (("PREFIX=",), {"PREFIX": "./out"})])
def test_clean_without_a_prefix_deletes_only_caches(arguments, changes, tool, out):
    kept = [name for name in tool.files() if not name.startswith((".cache/tokens", ".cache/inductor"))]
    assert tool.make("clean", *arguments, f"PYTHON={sys.executable}", **changes).returncode == 0
    assert tool.files() == kept


def test_clean_with_a_prefix_deletes_the_files_of_its_experiments(tool, out):
    assert tool.make("clean", "PREFIX=./out", f"PYTHON={sys.executable}").returncode == 0
    assert [path.name for path in out.iterdir()] == ["thoughts.txt"]


@pytest.mark.parametrize("prefix", ["/usr", "/", ".", "..", "~", "-x", "nowhere"])
def test_clean_of_a_folder_without_experiments_asks_to_delete_nothing_else(prefix, tool, out):
    """The stub stands for the interpreter, so whatever make itself deletes is seen, and nothing of /usr is at stake."""
    kept = [name for name in tool.files() if not name.startswith((".cache/tokens", ".cache/inductor"))]
    assert tool.make("clean", f"PREFIX={prefix}").returncode == 0
    assert tool.calls() == [["-m", "Utils.results", "clean", f"--prefix={prefix}"]]
    assert tool.files() == kept


@pytest.mark.parametrize("target", ["init_results", "reset", "clean"])
def test_what_needs_no_packages_works_before_any_are_installed(target, tool):
    done = tool.make(target, *SETTINGS, "PYTHON=/nowhere/python")
    assert done.returncode == 0 and ".venv" not in tool.files()


def test_init_results_makes_the_steps_and_reset_removes_them(tool):
    python = f"PYTHON={sys.executable}"
    assert tool.make("init_results", *SETTINGS, python).returncode == 0
    path = tool.folder / "out" / "4B_6N_experiment" / "4B_6N_results.csv"
    assert path.read_text().split() == ["step", *"012345"]
    assert tool.make("reset", *SETTINGS, python).returncode == 0
    assert not path.parent.exists()


# The environment that make makes


@pytest.fixture
def machine(tool, tmp_path):
    """Runs make where `python3` is a stub that knows venv and pip."""
    folder = tmp_path / "bin"
    folder.mkdir()
    python3 = folder / "python3"
    tool.stub(f"""test ! -e '{tmp_path}/old' || exit 1
        test "$2" != pip || test ! -e '{tmp_path}/no network' || exit 1
        test "$2" != venv || {{ mkdir -p "$3/bin"; ln -sf '{python3}' "$3/bin/python"; }}""", path=python3)

    def make(*arguments):
        tool.log.unlink(missing_ok=True)
        done = tool.make(*arguments, "PYTHON=", PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
        return done, [call for call in tool.calls() if call[0] != "-c"]

    return make


VENV = ["-m", "venv", ".venv"]
PIP = ["-m", "pip", "install", "--disable-pip-version-check", "-r", "requirements.txt"]
PLOTS = ["plots.py", OPTIONS[-1]]


def test_an_environment_is_made_once_and_again_when_the_versions_change(machine, tool):
    done, calls = machine("plots", *SETTINGS)
    assert done.returncode == 0 and calls == [VENV, PIP, PLOTS]
    assert machine("plots", *SETTINGS)[1] == [PLOTS]
    os.utime(tool.folder / ".venv" / "ready", (1, 1))  # older than requirements.txt
    assert machine("baseline", *SETTINGS)[1][:2] == [VENV, PIP]
    assert machine("plots", *SETTINGS)[1] == [PLOTS]


def test_the_tests_install_what_they_need_beside_it(machine):
    of_tests = [*PIP[:-1], "tests/requirements.txt"]
    assert machine("test")[1] == [VENV, PIP, of_tests, ["-m", "pytest"]]
    assert machine("test")[1] == [["-m", "pytest"]]
    done, calls = machine("notebook")
    assert calls == [["-m", "nbconvert", "--to", "notebook", "--execute", "--inplace",
                      "Optimizing_GPU_Utilization.ipynb"]]


def test_an_environment_that_was_left_half_made_is_made_again(machine, tmp_path):
    (tmp_path / "no network").touch()
    done, calls = machine("plots", *SETTINGS)
    assert done.returncode != 0 and calls == [VENV, PIP]
    (tmp_path / "no network").unlink()
    assert machine("plots", *SETTINGS)[1] == [VENV, PIP, PLOTS]


def test_an_old_python_is_refused_in_one_clear_line(machine, tmp_path, tool):
    (tmp_path / "old").touch()
    done, calls = machine("plots", *SETTINGS)
    said = [line for line in done.stderr.splitlines() if "***" not in line]  # make adds which target has failed
    assert done.returncode != 0 and calls == [] and ".venv" not in tool.files()
    assert said == ["make: python3 is missing or older than 3.11; install Python 3.12, or name one with PYTHON=..."]


def test_a_machine_without_python_is_told_the_same(tool, tmp_path):
    done = tool.make("plots", *SETTINGS, "PYTHON=", PATH=str(tmp_path / "nothing"))
    assert done.returncode != 0 and "python3 is missing or older than 3.11" in done.stderr


def test_a_machine_without_seq_measures_nothing_and_says_why(tool, tmp_path):
    done = tool.make("baseline", *SETTINGS, PATH=str(tmp_path / "nothing"))
    assert done.returncode != 0 and "the program seq is missing" in done.stderr
    tool.assert_nothing_happened()


def test_an_environment_that_hides_the_scripts_own_folder_changes_nothing(tool):
    assert tool.make("init_results", *SETTINGS, f"PYTHON={sys.executable}", PYTHONSAFEPATH="1").returncode == 0


def test_an_interpreter_that_does_not_exist_is_named(tool):
    done = tool.make("baseline", *SETTINGS, "PYTHON=/nowhere/python")
    assert done.returncode != 0 and "/nowhere/python" in done.stderr


# For real


def read(path):
    with open(path, newline="") as file:
        names, *rows = csv.reader(file)
    return {name: [float(row[i]) for row in rows] for i, name in enumerate(names)}


def make_for_real(*arguments):
    return subprocess.run([MAKE, "-C", ROOT, *arguments, f"PYTHON={sys.executable}"],
                          env=environment(OMP_NUM_THREADS="1"),  # several threads wait long on a busy machine
                          capture_output=True, text=True, timeout=500)


def test_targets_add_up_to_one_experiment(tmp_path):
    prefix = tmp_path / "an out"
    done = make_for_real("baseline", "tf32", "plots", "STEPS=6", "BATCH_SIZE=4", "MODEL=tiny", "DEVICE=cpu",
                         f"PREFIX={prefix}")
    assert done.returncode == 0, done.stderr
    folder = prefix / "tiny_4B_6N_experiment"
    table = read(folder / "4B_6N_results.csv")
    assert list(table) == ["step", BASELINE, "TF32"] and all(len(column) == 6 for column in table.values())
    assert (folder / "4B_6N_summary.md").exists() and (folder / f"4B_6N_{PICTURES[0]}").exists()


@pytest.mark.slow
def test_make_all_measures_everything_and_draws_it(tmp_path):
    done = make_for_real("all", "STEPS=6", "BATCH_SIZE=4", "MODEL=tiny", "DEVICE=cpu", "ROUNDS=1", f"PREFIX={tmp_path}")
    assert done.returncode == 0, done.stderr
    labels = [BASELINE, "TF32", "BF16", "TC", "FA", "FuOp", "8bOp", "BF16+TC+FA+FuOp"]
    if not importlib.util.find_spec("bitsandbytes"):
        labels.remove("8bOp")
        assert "not measured:\n8bit: " in done.stderr
    folder = tmp_path / "tiny_4B_6N_experiment"
    for name in ("results", "losses"):
        table = read(folder / f"4B_6N_{name}.csv")
        assert list(table) == ["step", *labels]
        assert table["step"] == [0, 1, 2, 3, 4, 5] and all(x > 0 for label in labels for x in table[label])
    with open(folder / "4B_6N_runs.csv", newline="") as file:
        assert [row["label"] for row in csv.DictReader(file)] == labels
    drawn = {path.name for path in folder.glob("*.png")}
    assert drawn == {f"4B_6N_{name}" for name in PICTURES if name != "memory_comparison.png"}  # a CPU's is not measured

    *_, last = re.split(r"^BF16\+TC\+FA\+FuOp: mean .*$", done.stdout, flags=re.MULTILINE)
    assert all(re.search(rf"^\W*{re.escape(label)}\b", last, re.MULTILINE) for label in labels)  # the table comes last
    assert done.stdout.count("No GPU in use") == 1
