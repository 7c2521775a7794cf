"""Sentence embeddings with 8-bit weights; `python examples/minilm_demo.py --help` says the rest."""

import importlib.util
import sys

NEEDED = ("jaxfp8", "jax", "numpy", "scipy", "ml_dtypes", "safetensors", "tokenizers", "rich")

if __name__ == "__main__":
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"minilm_demo: missing {', '.join(missing)}; install: pip install '.[demo]'")

    from minilm.cli import main

    sys.exit(main())
