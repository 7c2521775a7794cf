"""Lists of modules: each entry means what it meant alone, and long lists take no time."""

import fnmatch
import random
import re
import time

import numpy as np
import pytest
from checkpoint.files import codes, folder, scales

from jaxfp8 import checkpoint
from jaxfp8.checkpoint._patterns import Patterns

PARTS = ["model", "layers", "0", "1", "10", "mlp", "gate", "gate_proj", "lm_head", "a-b", "experts"]
ENTRIES = [
    "lm_head",
    "mlp.gate",
    "model.layers.0",
    "experts.0",
    "lm_*",
    "*.mlp*",
    "layers.?",
    "[ab]*",
    "",
    "lm_head$",
    "re:.*gate",
    "re:lm.*",
    r"re:model\.layers\.0\.mlp$",
    "re:^lm_head$",
    "re:lm_head$",
    "re:model.layers.1.mlp.gate$",
    r"re:.*\.(gate|mlp)$",
    "re:(",
    r"re:(l)m.\1",
    "re:(?i)MODEL.*10$",
    r"re:(?P<x>m)odel\.(?P<y>l).*",
]


def means(entry, module):
    """Whether an entry names a module, one entry at a time."""
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], module) is not None
        except re.error:
            return False
    if any(sign in entry for sign in "*?["):
        return fnmatch.fnmatchcase(module, entry)
    return bool(entry) and f".{entry}." in f".{module}."


def test_a_list_names_what_its_entries_name():
    draw = random.Random(0)
    for _ in range(3000):
        module = ".".join(draw.choice(PARTS) for _ in range(draw.randint(1, 6)))
        entries = draw.sample(ENTRIES, draw.randint(0, 8))
        found = Patterns(entries).first(module)
        assert (found is not None) == any(means(entry, module) for entry in entries)
        assert found is None or means(found, module)


NAMES = ("input_layernorm", "linear_attn.conv1d", "mlp.gate", "mlp.shared_expert_gate", "norm")
KINDS = {"names": "{}", "expressions": "re:{}$", "patterns": "{}*"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_long_list_takes_little_time(tmp_path, kind):
    w, s = codes((8, 8)), scales((1, 1))
    tensors = {}
    for layer, expert in np.ndindex(24, 128):
        name = f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
        tensors |= {name: w, f"{name}_scale_inv": s}
    modules = [f"model.layers.{layer}.{name}" for layer in range(86) for name in NAMES]
    entries = [kind.format(re.escape(m) if "re:" in kind else m) for m in modules]

    def opened(place, skipped):
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        path = folder(tmp_path / place, tensors, config | {"modules_to_not_convert": skipped})
        took = []
        for _ in range(3):
            start = time.process_time()
            assert len(checkpoint.inspect(path).rows) == len(tensors) // 2
            took.append(time.process_time() - start)
        return min(took)

    assert opened("with", entries) < 2 * opened("without", [])
