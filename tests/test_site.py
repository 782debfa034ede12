"""The documentation site: every page builds without a warning, every link between pages holds, every code cell runs."""

import re
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from jaxtyping import config as shapes
from sphinx.cmd.build import main as sphinx

from fedgp_flower.run import api

ROOT = Path(__file__).resolve().parent.parent
PAGES = [path for pattern in ("*.md", "tutorials/*.md") for path in sorted((ROOT / "docs").glob(pattern))]
CELL = re.compile(r"^```{code-cell}\n(.*?)^```", re.DOTALL | re.MULTILINE)
CELLS = {path: cells for path in PAGES if (cells := CELL.findall(path.read_text(encoding="utf-8")))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("execution", ["off", pytest.param("force", marks=pytest.mark.long)])
def test_the_site_builds(execution, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    source = tmp_path / "project"
    for folder in ("docs", "simulations/results", "examples"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("_build", "gallery"))
    words = ["-W", "--keep-going", "-q", "-D", f"nb_execution_mode={execution}"]
    if execution == "off":  # a kernel says which language a cell is in
        words += ["-b", "dummy", "-D", "suppress_warnings=myst.xref_missing_external,myst-nb.lexer"]
    assert sphinx([*words, str(source / "docs"), str(tmp_path / "site")]) == 0, capsys.readouterr().err[-3000:]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", CELLS, ids=lambda page: page.stem)
def test_the_cells_of_a_page_run(page, tmp_path, monkeypatch):
    """In this process, of few rounds: `make docs` runs them whole, each page in a kernel."""
    monkeypatch.chdir(tmp_path)
    whole, few = api.complete_config, {"num-server-rounds": 3, "baselines.max-evaluations": 3}
    monkeypatch.setattr(api, "complete_config", lambda flat: whole(flat | few))
    monkeypatch.setattr(shapes, "jaxtyping_disable", True)  # a reader may write 365 where a number is meant
    names = {"__name__": "__main__"}
    for cell in CELLS[page]:
        exec(compile(cell, page.name, "exec"), names)
    assert "run" not in names or not names["run"].metrics.failures
    plt.close("all")
