"""Text from an 8-bit checkpoint of a Llama, Mistral or Qwen; `--help` for more."""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

if not __package__:  # run as a script: the folder above has the package
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp

from llama import load, tokens
from llama import options as shared
from llama.measure import measure, table
from llama.sampling import Sampling
from llama.serve import Server, generate, server

DESCRIPTION = """\
Generates text from a folder as it was downloaded: config.json, safetensors in 8 bits or in floats,
and tokenizer.json. A GGUF file in Q8_0 will do too, with its tokenizer.json beside it. Weights go
from the disk to the device in their 8 bits. Decoding multiplies floats by them, prefill 8 bits by 8
bits; keys and values are kept in FP8.

    python examples/llama/generate.py FOLDER "The first law of robotics"
    python examples/llama/generate.py FOLDER --ids 1,450,937 --ids 1,306 --compare
    python examples/llama/generate.py MODEL.gguf --ids 1,450,937
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Generates; returns the exit code."""
    options = _parse(arguments)
    try:
        coder = None if options.ids else tokens.tokenizer(options.folder)
        prompts = (
            [tokens.parse(text) for text in options.ids]
            if coder is None
            else [coder.encode(text).ids for text in options.prompt]
        )
        _print_texts(options, prompts, coder)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("prompt", nargs="*", help="a text; several are generated together")
    parser.add_argument("--ids", action="append", default=[], help="a prompt as token ids: 1,15043")
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate at most")
    parser.add_argument("--chunk", type=int, help="tokens that one program makes")
    shared.add_decoding(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--head",
        choices=load.HEADS,
        default="bf16",
        help="the product to the vocabulary, with a scale for each token in 8 bits",
    )
    parser.add_argument("--prefill", choices=("W8A8", "W8A16"), default="W8A8")
    parser.add_argument("--devices", type=int, default=1, help="split the model over so many")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="speed of loading, and tokens per second beside bfloat16",
    )
    parser.add_argument("--report", action="store_true", help="what became of each weight")
    options = parser.parse_args(arguments)
    if bool(options.prompt) == bool(options.ids):
        parser.error("give prompts, or token ids with --ids")
    if options.report and options.functions:
        parser.error("--report is about the layers of nnx; leave out --functions")
    return options


def _print_texts(options: argparse.Namespace, prompts: list[list[int]], coder: Any) -> None:
    how = shared.sampling(options)
    over = load.mesh(options.devices) if options.devices > 1 else None
    start = time.perf_counter()
    made = _server(options, over, how)
    if options.compare:
        jax.block_until_ready(made.params)
        seconds = time.perf_counter() - start
        print(f"loaded in {seconds:.1f} s, {made.nbytes / 1e9 / seconds:.2f} GB/s")
    columns = [*generate(made, prompts, options.tokens, seed=options.seed, chunk=options.chunk)]
    for row, prompt in enumerate(prompts):
        ids = _until_end([int(column[row]) for column in columns], made.config.end)
        print(tokens.joined(ids) if coder is None else coder.decode([*prompt, *ids]))
    if options.compare:
        # As functions: XLA on a CPU is slow with rows of bfloat16 times a kernel of nnx, [K, N].
        wide = load.functions(options.folder, over=over, cache="bf16", wide=True)
        servers = {"8 bits": made, "bfloat16": wide}
        print(table(measure(servers, prompts, options.tokens, repeat=3)))


def _server(options: argparse.Namespace, over: Any, how: Sampling) -> Server:
    held: dict[str, Any] = {"over": over, "head_in_8_bits": options.head == "W8A16"}
    run: dict[str, Any] = {"cache": options.cache, "how": how}
    run["prefill_in_8_bits"] = options.prefill == "W8A8"
    if options.functions:
        return load.functions(options.folder, **held, **run)
    model, changes = load.model(options.folder, dtype=jnp.bfloat16, **held)
    if options.report:
        print(changes)
    return server(model, **run)


def _until_end(ids: list[int], end: Sequence[int]) -> list[int]:
    """Ids up to the first that ends a text."""
    places = [i for i, token in enumerate(ids) if token in end]
    return ids[: places[0]] if places else ids


if __name__ == "__main__":
    sys.exit(main())
