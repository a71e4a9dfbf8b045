"""Train a small GPT in plain JAX, once with flashgen's attention and once with JAX's own, from one seed; on a
GPU also with cuDNN's.

    python examples/train_gpt_jax.py                  # on a GPU in bfloat16, else in host memory in fp32
    python examples/train_gpt_jax.py --steps 200

The text is made on the spot: who gives what to whom, and who has it then, which takes attention to foretell.
Prints the loss and the tokens per second of each. The whole step is one program: layers are a scan, each is
computed anew in the backward pass, and the parameters are donated.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flashgen

NAMES = ["Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jo", "Kim", "Lee"]
THINGS = ["key", "book", "cup", "coin", "map", "lamp", "rope"]
LEARNING_RATE, DECAY, BETAS, CLIP = 3e-3, 0.1, (0.9, 0.999), 1.0
WARMUP = 20  # steps until the learning rate is reached


class Size(NamedTuple):
    """Of the model and its batches: ``width`` in channels, ``context`` in tokens, ``batch`` in sequences."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    context: int
    batch: int


def story(sentences: int, seed: int) -> np.ndarray:
    """The characters of a text, as bytes."""
    rng = random.Random(seed)
    lines = []
    for _ in range(sentences):
        giver, taker = rng.sample(NAMES, 2)
        things = rng.sample(THINGS, 2)
        gift = rng.choice(things)
        lines.append(
            f"{giver} has the {things[0]} and the {things[1]}. {giver} gives {taker} the {gift}. "
            f"Now {taker} has the {gift}.\n"
        )
    return np.frombuffer("".join(lines).encode("ascii"), np.uint8)


def by_flashgen(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of (batch, seqlen, heads, head_dim)."""
    return flashgen.attention(q, k, v, causal=True)


def by_jax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same by JAX."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def by_cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same by cuDNN."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


ATTENTIONS = {"flashgen": by_flashgen, "jax": by_jax, "cudnn": by_cudnn}


def parameters(size: Size, seed: int) -> dict:
    """The parameters of a model; those of its layers have a first dimension over the layers."""
    rng = np.random.default_rng(seed)
    width, head_dim = size.width, size.width // size.heads
    heads = size.heads + 2 * size.kv_heads

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

    return {
        "tokens": normal(128, width),
        "positions": normal(size.context, width),
        "head": normal(width, 128),
        "layers": {
            "qkv": normal(size.layers, width, heads * head_dim),
            "out": normal(size.layers, width, width),
            "up": normal(size.layers, width, 4 * width),
            "down": normal(size.layers, 4 * width, width),
        },
    }


def normalised(x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def logits(size: Size, attention: str, params: dict, tokens: jax.Array) -> jax.Array:
    """(batch, context, 128), in fp32."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    cuts = (size.heads, size.heads + size.kv_heads)

    @jax.checkpoint
    def layer(x: jax.Array, weights: dict) -> tuple[jax.Array, None]:
        weights = jax.tree.map(lambda w: w.astype(dtype), weights)
        qkv = (normalised(x) @ weights["qkv"]).reshape(*x.shape[:2], -1, size.width // size.heads)
        seen = ATTENTIONS[attention](*jnp.split(qkv, cuts, axis=2))
        x = x + seen.reshape(x.shape) @ weights["out"]
        return x + jax.nn.gelu(normalised(x) @ weights["up"]) @ weights["down"], None

    x = (params["tokens"][tokens] + params["positions"][: tokens.shape[1]]).astype(dtype)
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return (normalised(x) @ params["head"].astype(dtype)).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def step(
    size: Size, attention: str, params: dict, moments: dict, text: jax.Array, number: jax.Array
) -> tuple:
    """Parameters and moments after a step of AdamW on a batch, and the loss before it."""
    key = jax.random.fold_in(jax.random.key(0), number)
    starts = jax.random.randint(key, (size.batch, 1), 0, len(text) - size.context - 1)
    tokens = text[starts + jnp.arange(size.context + 1)]

    def loss_of(params: dict) -> jax.Array:
        log_odds = jax.nn.log_softmax(logits(size, attention, params, tokens[:, :-1]))
        return -jnp.take_along_axis(log_odds, tokens[:, 1:, None].astype(jnp.int32), -1).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    norm = jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(gradients)))
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / norm), gradients)
    first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, moments["first"], gradients)
    second = jax.tree.map(lambda m, g: BETAS[1] * m + (1 - BETAS[1]) * g * g, moments["second"], gradients)
    rate = LEARNING_RATE * jnp.minimum(1, (number + 1.0) / WARMUP)
    corrections = [1 - beta ** (number + 1.0) for beta in BETAS]

    def updated(p: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        direction = (m / corrections[0]) / (jnp.sqrt(s / corrections[1]) + 1e-8)
        return p - rate * (direction + DECAY * p)

    params = jax.tree.map(updated, params, first, second)
    return params, {"first": first, "second": second}, loss


def train(size: Size, attention: str, steps: int, seed: int = 0) -> tuple[list[float], float]:
    """The loss of each step, and tokens per second without the first step, which compiles."""
    params = parameters(size, seed)
    moments = {name: jax.tree.map(jnp.zeros_like, params) for name in ("first", "second")}
    text, losses, begin = jnp.asarray(story(20_000, seed)), [], 0.0
    for number in range(steps):
        if number == 1:
            jax.block_until_ready(params)
            begin = time.perf_counter()
        params, moments, loss = step(size, attention, params, moments, text, jnp.asarray(number))
        losses.append(loss)
    losses = [float(loss) for loss in losses]  # waits for the last step
    return losses, (steps - 1) * size.batch * size.context / (time.perf_counter() - begin)


def main() -> None:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300 if gpu else 60)
    parser.add_argument("--layers", type=int, default=6 if gpu else 2)
    parser.add_argument("--width", type=int, default=768 if gpu else 64)
    parser.add_argument("--heads", type=int, default=12 if gpu else 4)
    parser.add_argument("--kv-heads", type=int, default=4 if gpu else 2)
    parser.add_argument("--context", type=int, default=2048 if gpu else 128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.width % (8 * options.heads):
        parser.error(
            f"--width is {options.width}; {options.heads} heads need a multiple of {8 * options.heads}"
        )
    if options.heads % options.kv_heads:
        parser.error(f"--kv-heads is {options.kv_heads}; it has to divide the {options.heads} heads")
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}; expected 2 or more")
    names = ("layers", "width", "heads", "kv_heads", "context", "batch")
    size = Size(*(getattr(options, name) for name in names))
    curves = {}
    for name in ATTENTIONS if gpu else ("flashgen", "jax"):
        curves[name], rate = train(size, name, options.steps, options.seed)
        print(f"{name:9} loss {curves[name][0]:.3f} -> {curves[name][-1]:.3f}, {rate:,.0f} tokens/s")
    apart = [max(losses) - min(losses) for losses in zip(*curves.values(), strict=True)]
    # Rounding differs, and training makes a difference grow: the first steps show an error of attention.
    print(f"the curves are at most {max(apart):.3g} apart, in the first 5 steps {max(apart[:5]):.2g}")


if __name__ == "__main__":
    main()
