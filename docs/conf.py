"""Settings of Sphinx: guides and reference are one site (`make docs`). No example is run here."""

import dataclasses
import importlib.metadata
import re
from pathlib import Path

project = "jaxfp8"
copyright = "the authors of jaxfp8, Apache License 2.0"
release = importlib.metadata.version(project)
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = project
html_show_sphinx = False
html_copy_source = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
# Docstrings write code in single backquotes, as Markdown has it.
default_role = "code"
# Links to headings are those that GitHub makes.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Examples of docstrings are copied without prompts and output.
copybutton_exclude = ".linenos, .gp, .go"

# The navigation: (caption, pages). A page that is not there has no entry.
NAVIGATION = (
    ("Begin", ("start", "troubleshooting", "faq", "coming_from")),
    (
        "Use",
        ("rewrite", "rewrite_rules", "precision", "quantize_dots", "quantization", "calibration"),
    ),
    ("Flax", ("flax", "nnx", "training", "experts", "qlora")),
    ("Serve", ("serving", "kv_cache", "checkpoint", "other_files", "export", "meshes")),
    ("Speed", ("performance_gpu", "performance_cpu", "benchmark", "limits")),
    (
        "Measured",
        (
            "measurements",
            "measured_amd",
            "measured_intel",
            "measured_h100",
            "measured_h100_products",
            "measured_h200",
        ),
    ),
    ("Know", ("hardware", "compare_with", "real_libraries", "api_stability")),
    ("Inside", ("design", "custom_call", "cpu_kernels", "profiling", "contributing", "changelog")),
    (
        "Reference",
        tuple(
            f"reference/{name}"
            for name in ("jaxfp8", "linen", "nnx", "checkpoint", "ffi", "testing", "typing")
        ),
    ),
)
# Pages of the site that are files beside docs/ on GitHub.
OUTSIDE = re.compile(r"(?<=\])\(\.\./(CONTRIBUTING|CHANGELOG)\.md")
# What autodoc makes of unions that have a name, and that name.
PUBLIC_TYPES = (
    (
        "~jax.jaxlib._jax.Array | ~numpy.ndarray | ~numpy.bool | ~numpy.number | bool | int | float"
        " | complex",
        "ArrayLike",
    ),
    ("str | type[~typing.Any] | ~numpy.dtype | ~jax._src.typing.SupportsDType", "DTypeLike"),
    (
        "tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]",
        "DimensionNumbers",
    ),
    ("~jax.jaxlib._jax.Array", "~jax.Array"),
    ("~jaxlib._jax.Sharding", "~jax.sharding.Sharding"),
    ("_NO_TILES", "{}"),
)
TAB = re.compile(r"^<!-- tab: (.+) -->$", re.MULTILINE)


def prepare_page(app, name, source):
    """Make of a page that GitHub shows as it is one for Sphinx: navigation and tabs."""
    source[0] = with_tabs(OUTSIDE.sub(lambda link: f"({link[1].lower()}.md", source[0]))
    if name == "index":
        source[0] += navigation(Path(app.srcdir))


def with_tabs(text):
    """`<!-- tab: NAME -->` begins a tab, `<!-- end of tabs -->` ends the last of a set.

    They are comments, since GitHub does not show them.
    """
    first = True
    lines = []
    for line in text.split("\n"):
        if tab := TAB.match(line):
            lines += ["::::{tab-set}", ":sync-group: flax", ""] if first else [":::"]
            lines += [f":::{{tab-item}} {tab[1]}", f":sync: {tab[1]}", ""]
            first = False
        elif line == "<!-- end of tabs -->":
            lines += [":::", "::::"]
            first = True
        else:
            lines.append(line)
    return "\n".join(lines)


def navigation(folder):
    """A hidden table of contents for each caption."""
    trees = []
    for caption, pages in NAVIGATION:
        there = [page for page in pages if list(folder.glob(f"{page}.*"))]
        trees.append(
            f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(there) + "\n```"
        )
    return "\n" + "\n\n".join(trees) + "\n"


def prepare_docstring(app, what, name, obj, options, lines):
    """Docstrings are plain text: plurals of code, stars and indented equations are no markup."""
    lines[:] = plain_text(lines)


def plain_text(lines):
    """What the lines of a docstring are in reStructuredText."""
    plain = []
    for i, line in enumerate(lines):
        begins_block = line.startswith("    ") and i >= 2 and not lines[i - 1]
        if begins_block and lines[i - 2] and not lines[i - 2].startswith(" "):
            plain += ["::", ""]
        if not line.lstrip().startswith((">>>", "...")):
            line = re.sub(r"`(?=[a-z])(?<=\w`|\)`)", r"`\\ ", line)  # `QArray`s
            line = re.sub(r"^  [\w*]+(, [\w*]+)+(?=: )", without_spaces, line)  # x, y: arrays
            line = re.sub(r"(?<![\w`*])\*(\*?)(?=[a-z])", r"\\*\1", line)  # *args
        plain.append(line)
    return plain


def without_spaces(names):
    """Names of arguments that share a description: Sphinx takes a space for the end of a type."""
    return "  " + names[0].replace(" ", "")


def skip_default(app, what, name, obj, skip, options):
    """A default of JAX, a dtype or an initialiser, is no member; `Attributes` has the field."""
    of_jax = getattr(obj, "__module__", None) or str(obj)
    return True if what == "class" and re.match(r"(<class ')?jax[._]", of_jax) else None


def plain_signature(app, what, name, obj, options, signature, returns):
    """Types have their public names; a dataclass shows its fields, `Attributes` what they are."""
    if what == "class" and dataclasses.is_dataclass(obj):
        return fields_of(obj), None
    for text, public in PUBLIC_TYPES:
        signature, returns = (s and s.replace(text, public) for s in (signature, returns))
    return signature, returns


def fields_of(cls):
    """The fields of a dataclass, with the defaults that are short."""
    shown = []
    for field in dataclasses.fields(cls):
        if not field.init or field.name in ("parent", "name"):  # those of each Flax module
            continue
        if field.default is dataclasses.MISSING is field.default_factory:
            shown.append(field.name)
        elif isinstance(field.default, (bool, int, str, tuple, type(None))):
            shown.append(f"{field.name}={field.default!r}")
        else:
            shown.append(f"{field.name}=...")
    return f"({', '.join(shown)})"


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", skip_default)
    app.connect("autodoc-process-signature", plain_signature)
