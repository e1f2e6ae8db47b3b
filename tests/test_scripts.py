"""Each script is the baseline plus one statement, and what makes it fast is spelled in it and nowhere else."""

import ast
import difflib
import graphlib
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from Utils import scripts
from Utils.errors import CannotRunHere, UserError

import pytest

ROOT = Path(__file__).resolve().parent.parent
LABELS = {
    "no_optimization": "no_optimization",
    "tensorFloat32": "TF32",
    "brainFloat16": "BF16",
    "torch_compile": "TC",
    "flash_attention": "FA",
    "fused_optimizer": "FuOp",
    "8-bit_optimizer": "8bOp",
}
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in
           [*(ROOT / f"{name}.py" for name in LABELS), *sorted((ROOT / "Utils").glob("*.py")), ROOT / "plots.py"]}
TREES = {name: ast.parse(source, name) for name, source in SOURCES.items()}
BASELINE = "no_optimization.py"
OTHERS = [f"{name}.py" for name in LABELS if name != "no_optimization"]
each_script = pytest.mark.parametrize("file", [f"{name}.py" for name in LABELS])


def parts(file):
    """A script's docstring, imports, label, function and main guard: it may have nothing else."""
    docstring, *imports, label, function, guard = TREES[file].body
    assert all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in imports)
    return docstring, imports, label, function, guard


# The form of a script


@each_script
def test_docstring_says_what_changes_what_stays_what_it_costs_and_needs(file):
    title, _, rest = ast.get_docstring(TREES[file]).partition("\n")
    assert re.fullmatch(r"\S.*\.", title)
    fields = re.findall(r"^(Changes|Keeps|Costs|Needs|Sources) {2,}\S", rest, flags=re.MULTILINE)
    assert fields == ["Changes", "Keeps", "Costs", "Needs", "Sources"]
    assert "https://" in rest.partition("\nSources")[2]


def test_labels_are_those_that_results_are_known_by():
    labels = {}
    for file in SOURCES:
        for node in ast.walk(TREES[file]):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LABEL":
                labels[file] = ast.literal_eval(node.value)
    assert labels == {f"{name}.py": label for name, label in LABELS.items()}


@each_script
def test_optimize_is_a_docstring_and_one_statement(file):
    function = parts(file)[3]
    assert (function.name, ast.unparse(function.args), function.decorator_list) == ("optimize", "run", [])
    assert ast.get_docstring(function)
    _, statement = function.body
    assert isinstance(statement, (ast.Assign, ast.Expr, ast.Pass))  # no if, with or for, which hold further ones


@each_script
def test_every_script_has_the_skeleton_of_the_baseline(file):
    _, imports, label, function, guard = parts(file)
    assert ast.unparse(imports[0]) == "from Utils.train import main"
    assert len(imports) <= 2  # the one library that it needs
    assert ast.unparse(label).startswith("LABEL = ")
    assert ast.unparse(guard) == "if __name__ == '__main__':\n    main(optimize, LABEL)"


def code_lines(file):
    """The lines of a script without its docstring, and optimize's."""
    lines = SOURCES[file].splitlines()
    for node in [TREES[file], parts(file)[3]]:
        first = node.body[0]
        lines[first.lineno - 1:first.end_lineno] = [None] * (first.end_lineno - first.lineno + 1)
    return [line for line in lines if line is not None]


@pytest.mark.parametrize("file", OTHERS)
def test_a_diff_to_the_baseline_shows_import_label_and_that_statement(file):
    diff = list(difflib.unified_diff(code_lines(BASELINE), code_lines(file), lineterm="", n=0))[2:]
    gone = [line[1:] for line in diff if line.startswith("-")]
    assert gone == ['LABEL = "no_optimization"', "    pass"]

    statement = parts(file)[3].body[1]
    body = SOURCES[file].splitlines()[statement.lineno - 1:statement.end_lineno]
    new = [line[1:] for line in diff if line.startswith("+") and line != "+"]
    imports = [line for line in new if re.match(r"import \w+", line)]
    assert new == [*imports, f'LABEL = "{LABELS[Path(file).stem]}"', *body]
    assert len(imports) == 1


# Where an optimization is spelled


def spellings(tree):
    """What the code (not its texts and comments) says: dotted names, names that are imported, `keyword=value`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.keyword):
            yield f"{node.arg}={ast.unparse(node.value)}"
        elif isinstance(node, ast.Dict):
            yield from (f"{ast.literal_eval(key)}=" for key in node.keys if isinstance(key, ast.Constant))


SPELLED = {
    "tensorFloat32.py": r"(\w+\.)*set_float32_matmul_precision|.*\.(allow_tf32|fp32_precision)",
    "brainFloat16.py": r"(\w+\.)*autocast",
    "torch_compile.py": r"(torch\.|torch\._dynamo\.|.*model\.|.*forward\.)(compile|optimize)|compile",
    "flash_attention.py": r"(\w+\.)*(scaled_dot_product_attention|sdpa_kernel|flash_attn\w*|flex_attention)",
    "fused_optimizer.py": r"fused=.*",
    "8-bit_optimizer.py": r"(\w+\.)*\w+8bit|bitsandbytes(\.\w+)*",
}


@pytest.mark.parametrize("file", SPELLED)
def test_an_optimization_is_spelled_in_one_file_only(file):
    found = {name for name, tree in TREES.items() if any(re.fullmatch(SPELLED[file], text) for text in spellings(tree))}
    assert found == {file}


def test_no_keyword_hides_an_optimization_in_utils():
    """`if args.bf16:` in Utils would make one script with flags of seven."""
    for file in SOURCES:
        if file.startswith("Utils/"):
            names = {text.rpartition(".")[2] for text in spellings(TREES[file])}
            assert not names & {"tf32", "bf16", "use_amp", "use_compile", "use_flash", "foreach", "GradScaler"}, file


# Who imports whom


def imported(tree):
    """The modules that code imports: `from Utils import data` imports Utils.data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "Utils":
                yield from (f"Utils.{alias.name}" for alias in node.names)
            else:
                yield node.module


def module(file):
    return file.removesuffix(".py").replace("/", ".")


IMPORTS = {module(file): set(imported(tree)) for file, tree in TREES.items()}


def ours(name):
    return {other for other in IMPORTS[name] if other in IMPORTS}


@each_script
def test_a_script_imports_nothing_of_the_house_but_main(file):
    assert ours(module(file)) == {"Utils.train"}


def test_arrows_run_one_way():
    order = list(graphlib.TopologicalSorter({name: ours(name) for name in IMPORTS}).static_order())  # or CycleError
    assert order.index("Utils.train") > max(order.index(f"Utils.{name}") for name in ("model", "data", "results"))
    assert ours("Utils.model") == set()  # it can be read, and copied, on its own
    assert ours("Utils.data") <= {"Utils.errors"}


def test_nothing_in_utils_imports_a_script_by_name():
    for name in IMPORTS:
        if name.startswith("Utils"):
            assert not IMPORTS[name] & {*LABELS, "plots", "tests"}, name
    loaders = {file for file, tree in TREES.items()
               if any(re.search(r"\b(importlib|runpy|__import__|exec)\b", text) for text in spellings(tree))}
    assert loaders <= {"Utils/scripts.py", "Utils/hardware.py"}  # importlib.metadata knows versions
    assert "importlib.util" not in IMPORTS["Utils.hardware"]


def test_plots_needs_no_torch_however_far_its_imports_go():
    reached, new = set(), {"plots"}
    while new:
        reached |= new
        new = {other for name in new for other in ours(name)} - reached
    assert len(reached) > 2
    packages = {name.split(".")[0] for file in reached for name in IMPORTS[file]}
    assert "matplotlib" in packages and not packages & {"torch", "bitsandbytes", "tiktoken"}


# Loading scripts


def test_the_seven_scripts_are_in_teaching_order():
    assert tuple(LABELS) == scripts.NAMES


@pytest.mark.parametrize("name", LABELS)
def test_a_script_is_loaded_by_its_name_and_runs_nothing(name, capsys):
    by_name, by_file = scripts.load(name), scripts.load(f"{name}.py")
    assert by_name.LABEL == by_file.LABEL == LABELS[name]
    assert Path(by_name.__file__) == ROOT / f"{name}.py"
    assert callable(by_name.optimize)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ("nothing", "plots", "../plots", "Utils/train", "", "tensorfloat32"))
def test_what_is_no_script_is_refused_with_the_names_of_those_there_are(name):
    with pytest.raises(UserError, match="8-bit_optimizer") as caught:
        scripts.load(name)
    assert "\n" not in str(caught.value)


def test_a_script_whose_library_is_missing_cannot_run_here(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(CannotRunHere, match="the package bitsandbytes is not installed"):
        scripts.load("8-bit_optimizer")


# The command line


@each_script
def test_help_is_the_docstring_and_names_every_setting(file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [file, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / file), run_name="__main__")
    out = capsys.readouterr().out
    assert not ended.value.code
    assert inspect.cleandoc(ast.get_docstring(TREES[file])) in out
    for setting in ("steps", "batch_size", "results_path", "model", "data", "device", "seed", "with"):
        assert f"--{setting}" in out


def run(file, *arguments, **variables):
    return subprocess.run([sys.executable, str(ROOT / file), *arguments], capture_output=True, text=True, timeout=120,
                          env=os.environ | variables)


def test_a_missing_setting_ends_in_one_line_that_names_it(tmp_path):
    done = run("tensorFloat32.py", "--steps", "3", "--results_path", str(tmp_path / "x" / "results.csv"))
    assert done.returncode not in (0, 77)
    assert "tensorFloat32.py" in done.stderr and "--batch_size" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", (
    ["--steps", "0"], ["--steps", "2.5"], ["--steps", "-1"], ["--batch_size", "0"], ["--batch_size", "many"],
    ["--seed", "-1"], ["--model", "huge"], ["--device", "tpu"], ["--stepz", "3"], ["--rounds", "0"]))
def test_a_wrong_setting_is_refused_before_anything_is_written(wrong, tmp_path, monkeypatch):
    right = ["--steps", "3", "--batch_size", "2", "--results_path", str(tmp_path / "x" / "results.csv")]
    monkeypatch.setattr(sys, "argv", ["no_optimization.py", *right, *wrong])
    with pytest.raises((UserError, SystemExit)) as ended:
        runpy.run_path(str(ROOT / BASELINE), run_name="__main__")
    assert getattr(ended.value, "code", 1) != 0
    assert list(tmp_path.iterdir()) == []


def test_without_bitsandbytes_the_8_bit_script_says_so_and_ends_with_77(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['bitsandbytes'] = None\n")
    done = run("8-bit_optimizer.py", "--steps", "3", "--batch_size", "2", "--model", "tiny", "--device", "cpu",
               "--results_path", str(tmp_path / "x" / "results.csv"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 77
    assert len(done.stderr.splitlines()) == 1
    assert "bitsandbytes" in done.stderr and "pip install" in done.stderr
    assert not (tmp_path / "x").exists()
