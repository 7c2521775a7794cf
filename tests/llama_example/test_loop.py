"""The loop over tokens in examples/llama: one program makes several, on the device."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from llama_example.llama_checkpoints import FAMILIES, write

from llama import load, serve
from llama.sampling import Sampling

FORMS = ("nnx", "functions")
DRAWN = Sampling(temperature=0.8, top_k=5, top_p=0.9)


@pytest.fixture(scope="module", params=FORMS)
def server(request, tmp_path_factory):
    """A Llama of two layers in FP8 with its head in 8 bits, which draws its tokens."""
    path = tmp_path_factory.mktemp("loop") / "model"
    write(path, FAMILIES["llama 3"], "channel")
    if request.param == "functions":
        return load.functions(path, how=DRAWN, head_in_8_bits=True)
    return serve.server(load.model(path, head_in_8_bits=True)[0], how=DRAWN)


def state(server):
    """Token, position, caches of 64 slots, and a key."""
    return jnp.zeros(1, jnp.int32), jnp.array([3]), server.empty(1, 64), jax.random.key(0)


def compiled(server):
    args = state(server)
    text = server.decode_chunk.lower(server.params, *args, number=4).compile().as_text()
    return text, jax.tree.leaves(args[2])


def test_position_and_caches_of_the_loop_are_updated_in_place(server):
    text, caches = compiled(server)
    aliases = re.search(r"input_output_alias=\{(.*?) \}, entry", text)[1]
    found = {int(out): int(into) for out, into in re.findall(r"\{(\d+)\}: \((\d+)", aliases)}
    # Results are tokens, the last token, its position and the caches. Token and
    # position have one shape, and either takes the place of the position.
    places = [found[3 + number] for number in range(len(caches))]
    assert places == [*range(places[0], places[0] + len(caches))]
    assert found.keys() - {*range(3, 3 + len(caches))} <= {1, 2} and len(found) == 1 + len(caches)


def test_the_loop_copies_no_cache(server):
    text, caches = compiled(server)
    names = {"uint8": "u8", "float32": "f32"}
    shapes = {f"{names[x.dtype.name]}[{','.join(map(str, x.shape))}]" for x in caches}
    assert all(f"{shape}{{" in text for shape in shapes)
    copied = re.findall(r"= (\S+?)\{\S* copy\(", text)
    assert not shapes & set(copied)


def test_the_loop_is_one_program_that_waits_for_no_host(server):
    text, _ = compiled(server)
    assert not re.search(r"\b(infeed|outfeed|send|recv|callback)\b|xla_(ffi_)?python", text)
    args = jax.block_until_ready(state(server))
    with jax.transfer_guard("disallow"):
        tokens, *_ = server.decode_chunk(server.params, *args, number=4)
    assert tokens.shape == (4, 1)


def test_the_host_calls_one_program_for_a_chunk(server):
    made = []

    def counting(*args, number):
        made.append(number)
        return server.decode_chunk(*args, number=number)

    counted = dataclasses.replace(server, decode_chunk=counting)
    texts = [*serve.generate(counted, [[1, 2, 3]], 9, chunk=4)]
    assert len(texts) == 9 and made == [4, 4]
