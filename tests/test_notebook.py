"""The walkthrough imports what it teaches, carries nothing it should not, and runs from top to bottom."""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "Optimizing_GPU_Utilization.ipynb"
NOTEBOOK = json.loads(FILE.read_text(encoding="utf-8"))
CELLS = {cell["id"]: cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"}
TREES = {name: ast.parse("".join(cell["source"]), name) for name, cell in CELLS.items()}  # every code cell parses
# An absolute path of two or more folders, or a drive: true on one machine only. Addresses on the web are none.
MACHINE = re.compile(r"(?<![\w.:/])/(?:[\w.-]+/)+[\w.-]+|\b[A-Z]:\\\w|site-packages")


def calls(tree):
    """The names of everything called in `tree`: `loss.backward()` is "backward"."""
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in functions}


def text_of(cell):
    """All the text in a cell's outputs, without pictures."""
    for output in cell["outputs"]:
        yield "".join(output.get("text", ""))
        yield "\n".join(output.get("traceback", ()))
        for kind, content in output.get("data", {}).items():
            if not kind.startswith("image/"):
                yield "".join(content)


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_defines_no_model(name):
    classes = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.ClassDef)]
    bases = [ast.unparse(base) for node in classes for base in node.bases]
    assert not [base for base in bases if "Module" in base or "GPT2" in base]


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_holds_no_training_loop_of_its_own(name):
    assert "backward" not in calls(TREES[name])


def test_the_notebook_imports_the_loop_and_the_scripts():
    source = "\n".join("".join(cell["source"]) for cell in CELLS.values())
    assert "from Utils.train import Run, stack, train" in source
    assert "print(getsource(train))" in source
    sys.path.insert(0, str(ROOT))
    from Utils.scripts import NAMES

    for name in NAMES:
        assert f'trial("{name}"' in source
        if name != "no_optimization":
            assert f'show_change("{name}")' in source


def test_cells_have_ids_that_stay_the_same():
    names = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(names)) == len(names)
    assert not [name for name in names if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f-]+)?", name)]  # a machine's choice


def test_the_file_is_small():
    assert FILE.stat().st_size < 3_000_000


def test_stored_outputs_are_text_and_pictures():
    kinds = {kind for cell in CELLS.values() for output in cell["outputs"] for kind in output.get("data", {})}
    assert kinds <= {"text/plain", "image/png"}
    assert "widgets" not in NOTEBOOK["metadata"]


def test_stored_outputs_hold_no_error():
    assert not [name for name, cell in CELLS.items() if any(o["output_type"] == "error" for o in cell["outputs"])]


@pytest.mark.parametrize("name", CELLS)
def test_stored_outputs_name_no_path_of_a_machine(name):
    for text in text_of(CELLS[name]):
        assert not MACHINE.search(text)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom_on_a_cpu(monkeypatch, capsys):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install nbformat")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install ipykernel")
    from jupyter_client import KernelManager
    from jupyter_client.kernelspec import KernelSpec

    class ThisInterpreter(KernelManager):
        """A kernel of the Python that runs the tests, whatever "python3" means to Jupyter."""

        kernel_spec = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # a display-less backend of the caller's would draw no pictures
    notebook = nbformat.read(FILE, as_version=4)
    client = nbclient.NotebookClient(
        notebook, km=ThisInterpreter(), timeout=600, resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()  # raises if a cell does

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    texts = {cell.id: "".join(text_of(cell)) for cell in code}
    pictures = sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    assert pictures >= 15
    assert "claims agree on this machine" in texts["scoreboard"]
    assert "exact again" in texts["tf32-checks"]
    assert len(nbformat.writes(notebook)) < 3_000_000
    assert not [name for name, text in texts.items() if MACHINE.search(text)]
    left_out = [line for text in texts.values() for line in text.splitlines() if "did not run here" in line]
    allowed = [] if importlib.util.find_spec("bitsandbytes") else ["8-bit_optimizer"]
    assert [line.split()[0] for line in left_out] == allowed
