"""The documentation site: every page builds without a warning, every link between pages holds, every code cell runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_site_builds_and_its_cells_run(tmp_path):
    source = tmp_path / "project"
    for folder in ("docs", "simulations/results", "examples"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("_build", "gallery"))
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", source / "docs", tmp_path / "site"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site" / "tutorials" / "posterior.html").read_text(encoding="utf-8")
    assert "image/png" in page or "_images" in page
