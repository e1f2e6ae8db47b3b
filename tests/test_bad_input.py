"""Whatever a person gets wrong ends in one line that says what to do, a status that is not 0, and unchanged files."""

import csv
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from Utils import errors, results
from Utils.arguments import Parser

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "tiny_2B_3N_experiment"
NAME = "2B_3N_results.csv"


@pytest.fixture
def path(tmp_path):
    return tmp_path / FOLDER / NAME


def settings(path, steps=3):
    return ["--steps", str(steps), "--batch_size", "2", "--model", "tiny", "--device", "cpu",
            "--results_path", str(path)]


def contents(folder):
    """{name: bytes} of every file below the folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Runs a script's command line in this process and checks that it is refused as everything should be.

    A training would be noticed: it ends in a traceback. Returns the status and the line."""
    def untimely(*_):
        raise AssertionError("a training has begun")

    def call(script, *arguments):
        monkeypatch.setattr("Utils.train.train", untimely)
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        before, status = contents(tmp_path), 0
        capsys.readouterr()
        try:
            if script == "results.py":
                results.main()
            else:
                runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            status = end.code
        except BaseException as error:  # what the interpreter does at its end
            status = 1
            try:
                errors._end(type(error), error, error.__traceback__)
            except SystemExit as end:
                status = end.code
        said = capsys.readouterr().err
        assert status not in (0, None), "it was not refused"
        assert len(said.splitlines()) == 1 and said.startswith(f"{script}: "), said
        assert "Traceback" not in said
        assert contents(tmp_path) == before
        return status, said

    return call


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder in which the baseline has been measured."""
    folder = tmp_path_factory.mktemp("measured") / FOLDER
    done = script("no_optimization.py", *settings(folder / NAME))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def experiment(measured, path):
    """A copy of it, so that a test may damage it. Its results.csv."""
    shutil.copytree(measured, path.parent)
    return path


def script(name, *arguments, **changes):
    return subprocess.run([sys.executable, ROOT / name, *map(str, arguments)], capture_output=True, text=True,
                          env=os.environ | changes, timeout=120)


# Arguments

NUMBERS = ["", " ", "0", "-1", "+1", "1e3", "abc", "1.5", "1,000", "0x10", "1_0", "٣", "nan", "99999999999"]
NUMBER_CASES = [
    *(("--steps", value) for value in NUMBERS),
    *(("--batch_size", value) for value in NUMBERS),
    *(("--rounds", value) for value in NUMBERS),
    *(("--round", value) for value in NUMBERS),
    *(("--seed", value) for value in NUMBERS if value != "0"),
    ("--steps", "1000001"),
]


@pytest.mark.parametrize("option, value", NUMBER_CASES, ids=lambda text: text.encode("unicode_escape").decode())
def test_what_is_no_number_of_the_right_kind_is_refused(option, value, refused, path):
    _, line = refused("no_optimization.py", *settings(path), f"{option}={value}")
    assert option in line and "is not a whole number" in line


@pytest.mark.parametrize("option", ["--steps", "--batch_size", "--results_path"])
def test_a_required_option_that_is_missing_is_named(option, refused, path):
    arguments = settings(path)
    at = arguments.index(option)
    assert option in refused("no_optimization.py", *arguments[:at], *arguments[at + 2:])[1]
    assert option in refused("no_optimization.py", *arguments[:at], *arguments[at + 2:], option)[1]  # without a value


CHOICES = {
    "an unknown model": (["--model", "gpt3"], ["gpt3", "small", "gpt2", "tiny"]),
    "an empty model": (["--model", ""], ["small", "gpt2", "tiny"]),
    "an unknown device": (["--device", "tpu"], ["tpu", "auto", "cuda", "cpu"]),
    "a device with a number": (["--device", "cuda:0"], ["cuda:0", "auto"]),
    "an unknown option": (["--stepz", "3"], ["--stepz", "--help"]),
    "a stray word": (["fast"], ["fast", "--help"]),
    "an unknown script": (["--with", "warp_drive"], ["'warp_drive'", "choose from", "brainFloat16"]),
    "a file that is no script": (["--with", "plots"], ["'plots'", "choose from"]),
    "a module": (["--with", "Utils.train"], ["'Utils.train'", "choose from"]),
    "a path": (["--with", "../main/brainFloat16"], ["choose from"]),
    "an empty name of a script": (["--with", ""], ["choose from"]),
    "a target of make": (["--with", "bf16"], ["'bf16'", "choose from"]),
    "no script at all": (["--with"], ["--with", "at least one"]),
    "itself": (["--with", "fused_optimizer"], ["twice", "fused_optimizer"]),
    "itself with .py": (["--with", "fused_optimizer.py"], ["twice", "fused_optimizer"]),
    "one twice": (["--with", "brainFloat16", "flash_attention", "brainFloat16"], ["twice", "brainFloat16"]),
    "the baseline": (["--with", "no_optimization"], ["no_optimization"]),  # a stack on nothing is the script alone
    "a round that there is not": (["--rounds", "2", "--round", "3"], ["--round", "--rounds"]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_a_wrong_choice_is_refused_and_the_right_ones_are_named(case, refused, path):
    arguments, words = CHOICES[case]
    _, line = refused("fused_optimizer.py", *settings(path), *arguments)
    assert all(word in line for word in words), line


def test_two_optimizers_are_refused(refused, path):
    pytest.importorskip("bitsandbytes")
    _, line = refused("fused_optimizer.py", *settings(path), "--with", "8-bit_optimizer")
    assert "8bOp and FuOp both choose the optimizer" in line and "leave one of them out" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["no_optimization.py", "brainFloat16.py", "torch_compile.py"])
def test_a_gpu_that_is_not_there_is_not_replaced_by_the_cpu(name, refused, path):
    assert "--device cpu" in refused(name, *settings(path), "--device", "cuda")[1]


# Where results go


def places(folder):
    (folder / "a file").touch()
    (folder / "a folder.csv").mkdir()
    return {
        "nothing": "",
        "a folder": folder,
        "a folder with a slash": f"{folder}/",
        "a folder named like a table": folder / "a folder.csv",
        "under a file": folder / "a file" / "x" / NAME,
        "in a file's place": folder / "a file" / NAME,
        "where nobody can write": "/proc/x/results.csv",
        "in a folder of devices": "/dev/null/results.csv",
    }


PLACES = ["nothing", "a folder", "a folder with a slash", "a folder named like a table", "under a file",
          "in a file's place", "where nobody can write", "in a folder of devices"]


@pytest.mark.parametrize("where", PLACES)
def test_a_place_where_no_results_can_lie_is_refused_before_training(where, refused, tmp_path):
    place = places(tmp_path)[where]
    _, line = refused("no_optimization.py", *settings(place))
    assert "PREFIX" in line or "--help" in line
    assert not place or any(f" {part} " in line or f" {part}:" in line for part in (Path(place), *Path(place).parents))


@pytest.mark.parametrize("where", PLACES)
def test_a_place_where_no_results_can_lie_cannot_be_drawn(where, refused, tmp_path):
    refused("plots.py", "--results_path", places(tmp_path)[where])


@pytest.mark.parametrize("what", ["a pipe", "a device", "a link to a device"])
@pytest.mark.parametrize("name", results.TABLES)
def test_what_never_ends_in_the_place_of_a_table_is_refused(name, what, refused, experiment):
    table = Path(results.companion(experiment, name))
    table.unlink()
    if what == "a pipe":
        os.mkfifo(table)
    elif what == "a link to a device":
        table.symlink_to("/dev/zero")
    else:
        table = experiment = Path("/dev/full")
    assert f"{table} is a folder, a pipe or a device" in refused("tensorFloat32.py", *settings(experiment))[1]
    if name == "results.csv":
        refused("plots.py", "--results_path", experiment)


# Texts

TEXTS = {
    "missing": (None, "no such file"),
    "empty": (b"", "is empty"),
    "too short": (b"a few words", "one window needs 33"),
    "UTF-16 with a mark": (("words " * 400).encode("utf-16"), "iconv -f UTF-16"),
    "UTF-16 of another order": (b"\xfe\xff" + ("words " * 400).encode("utf-16-be"), "iconv -f UTF-16"),
    "Latin-1": (("caf\u00e9 " * 400).encode("latin-1"), "iconv -f LATIN1"),
    "binary": (bytes(range(256)) * 40, "is not UTF-8"),
    "an ELF program": (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\xff\xfe\x90" * 400, "is not UTF-8"),
    "cut in the middle of a character": (("words " * 400 + "\u20ac").encode()[:-1], "is not UTF-8"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_a_text_that_cannot_be_trained_on_is_refused(what, refused, path, tmp_path):
    data, words = TEXTS[what]
    text = tmp_path / "my text.txt"
    if data is not None:
        text.write_bytes(data)
    _, line = refused("no_optimization.py", *settings(path), "--data", text)
    assert "my text.txt" in line and words in line


@pytest.mark.parametrize("text, words", [("", "--data"), (".", "folder"), ("/dev/null", "device"),
                                         ("/dev/zero", "device"), ("pipe", "pipe")])
def test_what_is_no_text_file_is_refused(text, words, refused, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert words in refused("no_optimization.py", *settings(path), "--data", text)[1]


def test_a_text_whose_name_is_not_utf8_is_trained_on(path, tmp_path, monkeypatch):
    text = tmp_path / os.fsdecode(b"caf\xe9.txt")
    text.write_text("Once upon a time there was a loop.\n" * 30)
    monkeypatch.setattr(sys, "argv", ["no_optimization.py", *settings(path), "--data", str(text)])
    runpy.run_path(str(ROOT / "no_optimization.py"), run_name="__main__")
    assert results.read_runs(path)[0]["text"].endswith("caf\\udce9.txt")


def test_a_text_that_spells_a_special_token_is_trained_on(path, tmp_path, monkeypatch):
    text = tmp_path / "stories.txt"
    text.write_text("Once upon a time there was a loop.<|endoftext|>\n" * 30)
    monkeypatch.setattr(sys, "argv", ["no_optimization.py", *settings(path), "--data", str(text)])
    runpy.run_path(str(ROOT / "no_optimization.py"), run_name="__main__")
    assert path.exists()


# A folder that does not fit

DIFFERENT = {
    "model": (["--model", "small"], ["model = tiny", "small"]),
    "batch_size": (["--batch_size", "3"], ["batch_size = 2", "3"]),
    "seed": (["--seed", "1"], ["seed = 0", "1"]),
    "steps": (["--steps", "4"], ["3 rows", "4 steps"]),
    "rounds": (["--rounds", "2"], ["3 rows", "6 steps"]),
    "data": (["--data", str(ROOT / "README.md")], ["data = "]),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_settings_that_differ_from_the_folders_are_refused_before_training(what, refused, experiment):
    arguments, words = DIFFERENT[what]
    _, line = refused("tensorFloat32.py", *settings(experiment), *arguments)
    assert all(word in line for word in [*words, "make reset", "PREFIX"]), line


@pytest.mark.parametrize("what, other", [("device_name", "NVIDIA RTX 3050 Ti"), ("torch", "1.13.1")])
def test_results_of_another_machine_are_not_added_to(what, other, refused, experiment):
    runs = Path(results.companion(experiment, "runs.csv"))
    with open(runs, newline="") as file:
        (row,) = csv.DictReader(file)
    runs.write_bytes(results._as_csv({name: [text] for name, text in (row | {what: other}).items()}))
    _, line = refused("tensorFloat32.py", *settings(experiment))
    assert what in line and other in line and "PREFIX" in line


DAMAGE = {
    "empty": b"",
    "blank lines": b"\n\n\n",
    "zeros, as a machine that lost its power leaves them": bytes(64),
    "cut in a line": b"step,no_optimization\n0,1.5\n1,1.5\n2",
    "cut in a number": b"step,no_optimization\n0,1.5\n1,1.5\n2,1.",
    "a field too many": b"step,no_optimization\n0,1.5\n1,1.5,7\n2,1.5\n",
    "a field too few": b"step,no_optimization\n0,1.5\n1\n2,1.5\n",
    "a column twice": b"step,no_optimization,no_optimization\n0,1,1\n1,1,1\n2,1,1\n",
    "a word in a number's place": b"step,no_optimization\n0,1.5\n1,fast\n2,1.5\n",
    "a word in a step's place": b"step,no_optimization\n0,1.5\none,1.5\n2,1.5\n",
    "no steps": b"no_optimization,TF32\n1,1\n1,1\n1,1\n",
    "steps in disorder": b"step,no_optimization\n0,1.5\n2,1.5\n1,1.5\n",
    "semicolons": b"step;no_optimization\n0;1,5\n1;1,5\n2;1,5\n",
    "UTF-16, as a spreadsheet may save it": "step,no_optimization\n0,1.5\n1,1.5\n2,1.5\n".encode("utf-16"),
    "a picture": b"\x89PNG\r\n\x1a\n\x00\x00\xff\xfe",
    "a merge conflict": b"<<<<<<< HEAD\nstep,no_optimization\n0,1.5\n=======\n>>>>>>> x\n",
    "a quote that never ends": b'step,no_optimization\n0,"1.5\n1,1.5\n2,1.5\n',
    "a page of a login": b"<!DOCTYPE html>\n<html><body>Please, log in</body></html>\n",
}


@pytest.mark.parametrize("name", ["results.csv", "losses.csv"])
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_table_is_refused_before_training_and_left_as_it_is(what, name, refused, experiment):
    table = Path(results.companion(experiment, name))
    table.write_bytes(DAMAGE[what])
    _, line = refused("tensorFloat32.py", *settings(experiment))
    assert str(table) in line and "PREFIX" in line


DRAWN = {"cut in a line", "cut in a number", "no steps", "steps in disorder", "a word in a step's place"}


@pytest.mark.parametrize("what", [what for what in DAMAGE if what not in DRAWN])  # the others have milliseconds
def test_a_damaged_table_is_not_drawn(what, refused, experiment):
    experiment.write_bytes(DAMAGE[what])
    assert str(experiment) in refused("plots.py", "--results_path", experiment)[1]


@pytest.mark.parametrize("what", ["empty", "blank lines", "a picture", "a quote that never ends", "a column twice",
                                  "a merge conflict", "cut in a line", "semicolons"])
def test_a_damaged_runs_csv_is_refused_before_training(what, refused, experiment):
    runs = Path(results.companion(experiment, "runs.csv"))
    runs.write_bytes(DAMAGE[what])
    _, line = refused("tensorFloat32.py", *settings(experiment))
    assert str(runs) in line and "PREFIX" in line


@pytest.mark.parametrize("name", results.TABLES)
def test_a_folder_in_the_place_of_a_table_is_refused_before_training(name, refused, experiment):
    table = Path(results.companion(experiment, name))
    table.unlink()
    table.mkdir()
    assert str(table) in refused("tensorFloat32.py", *settings(experiment))[1]


# plots.py, and what `make init_results`, `make reset` and `make clean` call


@pytest.mark.parametrize("arguments", [
    ["--results_path", "nowhere/results.csv"], ["--results_path"], ["--nonsense"], ["results.csv"],
    ["--results_path", str(ROOT / "Makefile")], ["--results_path", str(ROOT / "plots.py")]], ids=" ".join)
def test_plots_refuses_what_it_cannot_draw(arguments, refused):
    refused("plots.py", *arguments)


def test_plots_refuses_to_draw_below_a_file(refused, experiment, tmp_path):
    (tmp_path / "a file").touch()
    assert "a file" in refused("plots.py", "--results_path", experiment, "--prefix", tmp_path / "a file" / "x_")[1]


@pytest.mark.parametrize("arguments", [
    [], ["nonsense"], ["init"], ["init", "--results_path", "x.csv"],
    ["init", "--results_path", "x.csv", "--steps", "abc"], ["init", "--results_path", "x.csv", "--steps", "0"],
    ["init", "--results_path", "", "--steps", "3"],
    ["init", "--results_path", "/dev/null/x.csv", "--steps", "3"], ["reset"], ["reset", "--results_path", ""],
    ["reset", "--results_path", "/"], ["reset", "--results_path", "x.txt"], ["clean"], ["clean", "--prefix", ""],
    ["clean", "--prefix", " "]], ids=" ".join)
def test_making_and_deleting_results_refuses_what_it_does_not_understand(arguments, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("results.py", *arguments)


def test_a_complaint_is_one_line_whatever_is_in_it():
    parser = Parser()
    parser.add_argument("--n", type=int)
    with pytest.raises(errors.UserError) as caught:
        parser.parse_args(["--n", "1\n2"])
    assert len(str(caught.value).splitlines()) == 1


# What is not installed, or does not work


@pytest.mark.parametrize("package, name", [
    ("torch", "no_optimization.py"), ("torch", "8-bit_optimizer.py"), ("numpy", "torch_compile.py"),
    ("numpy", "plots.py"), ("matplotlib", "plots.py")])
def test_a_missing_package_is_named_with_the_way_to_get_it(package, name, path, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules['{package}'] = None\n")
    arguments = settings(path) if name != "plots.py" else ["--results_path", path]
    done = script(name, *arguments, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert package in line and sys.executable in line and "pip install -r requirements.txt" in line


def test_without_tiktoken_a_new_text_is_refused(refused, path, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(f"Words that nobody has cut into tokens yet: {random.random()}. " * 30)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setattr("Utils.data.embedded", __import__("Utils.data").data.embedded.__wrapped__)
    _, line = refused("no_optimization.py", *settings(path), "--data", text)
    assert "tiktoken" in line and "pip install" in line


@pytest.mark.parametrize("name, more", [("8-bit_optimizer.py", []), ("brainFloat16.py", ["--with", "8-bit_optimizer"])])
def test_without_bitsandbytes_its_script_cannot_run_here(name, more, refused, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    status, line = refused(name, *settings(path), *more)
    assert status == 77 and "bitsandbytes" in line and "pip install" in line


BROKEN = {
    "a library is missing": ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
    "it does not know the machine": ("raise RuntimeError('CUDA Setup failed\\n  despite CUDA')", "CUDA Setup failed"),
    "it does not fit another package": ("import triton.ops", "triton"),
    "it lacks a package": ("import package_of_packages", "package_of_packages"),
    "it does not fit torch": ("from torch import what_never_was", "what_never_was"),
    "anything else": ("1 / 0", "ZeroDivisionError"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_bitsandbytes_that_does_not_work_says_the_same_alone_and_stacked(what, refused, path, tmp_path, monkeypatch):
    code, words = BROKEN[what]
    (tmp_path / "bitsandbytes.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    said = [refused("8-bit_optimizer.py", *settings(path)),
            refused("brainFloat16.py", *settings(path), "--with", "8-bit_optimizer")]
    assert {status for status, _ in said} == {77}
    assert len({line.partition(": ")[2] for _, line in said}) == 1
    assert "bitsandbytes does not work" in said[0][1] and words in said[0][1] and "pip install" in said[0][1]


@pytest.mark.parametrize("package, code, name", [
    ("torch", "raise OSError('libcudnn.so.9: cannot open shared object file')", "no_optimization.py"),
    ("numpy", "raise ImportError('numpy.core.multiarray failed to import')", "no_optimization.py"),
    ("torch", "", "brainFloat16.py"),  # a file of the user's that is named like it
    ("matplotlib", "raise ValueError('no such backend')", "plots.py")])
def test_a_package_that_does_not_work_is_named_with_the_reason(package, code, name, path, tmp_path):
    (tmp_path / f"{package}.py").write_text(code)
    arguments = settings(path) if name != "plots.py" else ["--results_path", path]
    done = script(name, *arguments, PYTHONPATH=str(tmp_path))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and f"the package {package} does not work (" in line and "--force-reinstall" in line
    assert (code.partition("'")[2].rstrip("')") or "'torch' is not a package") in line


def test_a_python_that_is_too_old_is_told_before_it_reads_what_it_cannot(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match=r"Python 3.11 or newer is needed, .* is 3.10: "):
        runpy.run_path(str(ROOT / "Utils" / "__init__.py"))


def test_without_a_compiler_nothing_pretends_to_be_compiled(experiment, tmp_path):
    """A shell is there, no compiler, and nothing that was compiled before."""
    before = contents(experiment.parent)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    changes = {"PATH": str(tmp_path / "bin"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "CC": "", "CXX": ""}
    done = script("torch_compile.py", *settings(experiment), **changes)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("torch_compile.py: TC cannot be compiled here") and "g++" in line
    assert contents(experiment.parent) == before


# What the system refuses


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device"), PermissionError(13, "Permission denied", "/x/y"), MemoryError(),
    BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error"), OSError(24, "Too many open files", "/x")])
def test_what_the_system_refuses_is_no_bug_of_ours(error):
    line = str(errors.explained(error))
    assert "earlier results are as they were" in line
    assert all(words in line for words in (getattr(error, "strerror", None), getattr(error, "filename", None)) if words)


@pytest.mark.parametrize("error", [OSError("not of the system"), ValueError("x"), ImportError("x", name="Utils.x")])
def test_a_bug_of_ours_keeps_its_traceback(error):
    assert errors.explained(error) is None


@pytest.mark.parametrize("name", ["no_optimization.py", "plots.py"])
@pytest.mark.parametrize("full", [True, False], ids=["a full disk", "a pipe that nobody reads"])
def test_an_output_that_takes_nothing_ends_in_one_line(full, name, experiment):
    before = contents(experiment.parent)
    reading, writing = os.pipe()
    os.close(reading)
    arguments = settings(experiment) if name != "plots.py" else ["--results_path", experiment]
    with open("/dev/full" if full else writing, "w") as output:
        done = subprocess.run([sys.executable, ROOT / name, *map(str, arguments)], stdout=output,
                              stderr=subprocess.PIPE, text=True, timeout=120)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and ("No space left on device" if full else "Broken pipe") in line
    if name != "plots.py":
        assert contents(experiment.parent) == before


def test_a_run_needs_no_output(path):
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, ROOT / "no_optimization.py", *settings(path)]
    assert subprocess.run(command, timeout=120).returncode == 0 and path.exists()


def test_an_output_that_knows_only_ascii_gets_the_table_all_the_same(experiment):
    done = script("plots.py", "--results_path", experiment, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and "baseline" in done.stdout


def test_code_that_lies_read_only_keeps_compiled_graphs_in_a_temporary_folder(path, tmp_path):
    """Permissions do not keep root out; a file in the folder's place does. PyTorch makes the folder for any script."""
    code, here, temporary = (tmp_path / name for name in ("code", "here", "temporary"))
    shutil.copytree(ROOT / "Utils", code / "Utils")
    shutil.copy(ROOT / "no_optimization.py", code)
    (code / ".cache").touch()
    here.mkdir()
    temporary.mkdir()
    done = subprocess.run([sys.executable, code / "no_optimization.py", *settings(path)], cwd=here, timeout=120,
                          env=os.environ | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": ""})
    assert done.returncode == 0 and path.exists()
    assert list(here.iterdir()) == [] and (temporary / f"inductor_{os.getuid()}").is_dir()


def test_a_folder_for_compiled_graphs_that_cannot_be_made_is_named(path, tmp_path):
    (tmp_path / "file").touch()
    done = script("torch_compile.py", *settings(path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "file"))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and str(tmp_path / "file") in line


# Runs that are stopped

LONG = 40  # steps


@pytest.fixture(scope="module")
def long_experiment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long") / FOLDER
    results.record(folder / NAME, [1.0] * LONG, [8.0] * LONG, {"label": results.BASELINE})
    return folder


def started(folder):
    return subprocess.Popen([sys.executable, "-u", ROOT / "tensorFloat32.py", *settings(folder / NAME, LONG)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})  # several threads wait long on a busy machine


def after_lines(process, lines):
    """Wait until the run has said so many lines."""
    for _ in range(lines):
        assert process.stdout.readline(), process.stderr.read()


@pytest.mark.parametrize("number, words", [(signal.SIGINT, ["interrupted; earlier results are as they were"]),
                                           (signal.SIGTERM, [])])
def test_a_run_that_is_stopped_ends_at_once_and_changes_no_file(number, words, long_experiment, path):
    shutil.copytree(long_experiment, path.parent)
    before = contents(path.parent)
    with started(path.parent) as process:
        after_lines(process, 5)  # some tenths of the steps are done
        process.send_signal(number)
        began = time.monotonic()
        said = process.communicate(timeout=20)[1].splitlines()
    assert time.monotonic() - began < 10
    assert process.returncode not in (0, None)
    assert said == [f"tensorFloat32.py: {line}" for line in words]
    assert contents(path.parent) == before


def test_a_run_that_is_killed_at_any_moment_leaves_whole_tables(long_experiment, tmp_path):
    moments = [(0, 2.0), (4, 0.05), (12, 0.4), (12, 1.5)]  # lines that it has said, 12 when trained; seconds
    for number, (lines, most) in enumerate(moments):
        folder = tmp_path / str(number) / FOLDER
        shutil.copytree(long_experiment, folder)
        old = results.read_table(folder / NAME)
        with started(folder) as process:
            after_lines(process, lines)
            time.sleep(random.uniform(0, most))
            process.kill()
            process.communicate()
        for name in results.TABLES[:2]:
            table = results.read_table(results.companion(folder / NAME, name))
            assert set(table) <= {"step", results.BASELINE, "TF32"}
            assert all(len(column) == LONG and all(column) for column in table.values())
        assert results.read_table(folder / NAME).items() >= old.items()
        assert results.read_runs(folder / NAME)[0]["label"] == results.BASELINE
