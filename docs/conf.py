"""Settings of Sphinx: the API reference is made from the docstrings (`make docs`)."""

import importlib.metadata

project = "jaxfp8"
release = importlib.metadata.version(project)
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "alabaster"
html_theme_options = {"page_width": "72rem"}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_rtype = False
# Docstrings write code in single backquotes, as Markdown has it.
default_role = "code"
