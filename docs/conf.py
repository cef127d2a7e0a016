"""How Sphinx builds these pages: `sh scripts/docs`."""

import monarch

project = "monarch"
copyright = "the monarch-mesh authors"
version = release = monarch.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"monarch {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_custom_sections = [("Cost", "notes"), ("Optional methods", "params_style")]
