"""The documentation site: `make docs` builds it from these pages, without network; its code cells are run."""

import shutil
from importlib import metadata
from pathlib import Path

from fedgp_flower.run.user_config import table_of

HERE = Path(__file__).parent
GALLERY = HERE / "gallery"
shutil.rmtree(GALLERY, ignore_errors=True)
shutil.copytree(HERE.parent / "simulations" / "results", GALLERY, ignore=shutil.ignore_patterns("*.json"))

project = "fedgp-flower"
version = release = metadata.version("fedgp-flower")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
templates_path: list[str] = []
exclude_patterns = ["_build", "jupyter_execute"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing_external"]

nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 240
nb_merge_streams = True
nb_output_stderr = "remove"  # warnings of libraries, with paths of the machine that built the page

autodoc_typehints = "signature"
autodoc_member_order = "bysource"


def setup(app) -> None:
    """Pages of experiments lie in the gallery here; in the source tree they lie beside their scripts."""

    def relinked(app, name, source) -> None:
        source[0] = source[0].replace("](../simulations/results/", "](gallery/")
        if name == "keys":
            source[0] += "\n" + "\n".join(table_of(basic=False))

    app.connect("source-read", relinked)
