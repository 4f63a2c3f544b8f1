"""Sphinx configuration of the site. `make docs` builds it, offline, with every warning an error."""

import sys
from pathlib import Path

import laconic

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "laconic"
author = "The laconic authors"
copyright = "The laconic authors, Apache-2.0"
version = release = laconic.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_llms_txt",
    "laconic_site",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
highlight_language = "text"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

intersphinx_mapping = {  # docs/_inventories/make.py makes the files: nothing is fetched
    "python": ("https://docs.python.org/3/", str(HERE / "_inventories" / "python.inv")),
    "torch": ("https://docs.pytorch.org/docs/stable/", str(HERE / "_inventories" / "torch.inv")),
}

html_theme = "furo"
html_title = "laconic"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = True  # sphinx_llms_txt reads the copies

default_role = "code-link"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["torchft", "lightning", "accelerate", "transformers", "ray", "schedulefree"]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
