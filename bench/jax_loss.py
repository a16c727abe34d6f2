"""JAX against jit-compiled dense: times within one run, and XLA's own account of memory.

Loss and gradients, and log-prob with entropy, each beside its matrix products alone, in slices of the vocabulary of
several sizes, since no one of them is the fastest everywhere; a decoding step that keeps the best entries; a step that
draws from a nucleus and keeps its record, for rows whose nucleus ends early and for flat ones, whose end is looked for
in whole rows.

python -m bench.jax_loss [--tokens 2048 --hidden 512 --vocab 131072 --repeats 4 --out FILE]
"""

import argparse
import json
import math
import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from bench.harness import in_turns, least, results
from logitless.jax import LMHead, linear_cross_entropy, linear_topk, sample_tokens, token_stats

STEP = 8  # sequences in a decoding step
SLICES = (256, 512, 2048)  # entries at a time in the bare products, where they divide the vocabulary


def dense_loss(hidden, head, labels):
    logp = jax.nn.log_softmax(hidden @ head.weight.T)
    return -jnp.take_along_axis(logp, labels[:, None], 1).mean()


def dense_entropy(hidden, head, labels):
    logp = jax.nn.log_softmax(hidden @ head.weight.T)
    return jnp.take_along_axis(logp, labels[:, None], 1), -(jnp.exp(logp) * logp).sum(-1)


def slices_of(head, entries):
    """The head's rows, so many at a time."""
    return head.weight.reshape(-1, entries, head.weight.shape[1])


def in_slices(products, vocab):
    """The bare products by their slices' sizes, each the largest that divides both one of SLICES and the vocabulary."""
    sizes = {math.gcd(vocab, entries) for entries in SLICES}
    return {f"bare products, slices of {size:,}": partial(products, entries=size) for size in sorted(sizes)}


def bare_gradients(hidden, head, labels, entries):
    """The three products of a loss with its gradients."""

    def add(total, rows):
        z = hidden @ rows.T
        return total + z @ rows, z.T @ hidden

    return jax.lax.scan(add, jnp.zeros_like(hidden), slices_of(head, entries))


def bare_values(hidden, head, labels, entries):
    """The one product, each slice of which is read once, so that XLA makes it."""
    return jax.lax.scan(
        lambda most, rows: (jnp.maximum(most, (hidden @ rows.T).max(1)), None), hidden[:, 0], slices_of(head, entries)
    )


def dense_step(hidden, head, k):
    logits = hidden @ head.weight.T
    return jax.lax.top_k(logits, k), jax.nn.logsumexp(logits, -1)


def compare(functions, args, repeats):
    """Seconds and megabytes of temporaries of each compiled function."""
    compiled = {name: jax.jit(f).lower(*args).compile() for name, f in functions.items()}
    turns = in_turns({name: lambda c=c: jax.block_until_ready(c(*args)) for name, c in compiled.items()}, repeats)
    memory = {name: c.memory_analysis().temp_size_in_bytes / 1e6 for name, c in compiled.items()}
    return {name: {"seconds": least(turns[name], "wall"), "temporaries_mb": memory[name]} for name in functions}


def dense_draw(hidden, head, key, k):
    """Temperature, softmax over the vocabulary, top-k, a draw from all entries: less than the record holds."""
    logits = hidden @ head.weight.T / 0.8
    p = jax.nn.softmax(logits)
    return jax.lax.top_k(p, k), jax.random.categorical(key, jnp.log(p))


def dense_nucleus(hidden, head, key, k):
    """The same with the nucleus by a sort."""
    logits = hidden @ head.weight.T / 0.8
    p = jnp.sort(jax.nn.softmax(logits), axis=-1, descending=True)
    last = jnp.take_along_axis(p, (jnp.cumsum(p, -1) < 0.95).sum(-1, keepdims=True), -1)
    kept = jnp.where(jax.nn.softmax(logits) >= last, logits, -jnp.inf)
    return jax.lax.top_k(logits, k), jax.nn.logsumexp(logits, -1), jax.random.categorical(key, kept)


def drawn(hidden, head, key, k):
    return sample_tokens(hidden, head, key, temperature=0.8, top_p=0.95, keep=k)


def works(o):
    """(name, {method: function}, arguments) of what is compared."""
    hidden = jax.random.normal(jax.random.key(0), (o.tokens, o.hidden))
    head = LMHead(jax.random.normal(jax.random.key(1), (o.vocab, o.hidden)) * o.hidden**-0.5)
    labels = jax.random.randint(jax.random.key(2), (o.tokens,), 0, o.vocab)
    loss, dense = (jax.jit(f)(hidden, head, labels) for f in (linear_cross_entropy, dense_loss))
    if not jnp.allclose(loss, dense, rtol=2e-6):
        raise SystemExit(f"the losses differ: {loss} against {dense}")
    both = partial(jax.value_and_grad, argnums=(0, 1))
    training = {"logitless": both(linear_cross_entropy), "dense": both(dense_loss)}
    yield "loss and gradients", training | in_slices(bare_gradients, o.vocab), (hidden, head, labels)
    values = {"logitless": partial(token_stats, want=("logprob", "entropy")), "dense": dense_entropy}
    yield "log-prob and entropy", values | in_slices(bare_values, o.vocab), (hidden, head, labels)
    steps = {
        "logitless": partial(linear_topk, k=o.keep),
        "logitless, no best entries": partial(token_stats, want=("logsumexp",)),
        "dense": partial(dense_step, k=o.keep),
    }
    few, key = hidden[:STEP], jax.random.key(3)
    yield "best entries of a step", steps, (few, head)
    methods = {"logitless": drawn, "dense": dense_draw, "dense nucleus": dense_nucleus}
    methods = {name: partial(f, k=o.keep) for name, f in methods.items()}
    yield "a step drawn, early nuclei", methods, (8 * few, head, key)
    yield "a step drawn, flat rows", methods, (few, head, key)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 2048), ("hidden", 512), ("vocab", 131072), ("repeats", 4), ("keep", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    sizes = {name: x for name, x in vars(o).items() if name != "out"} | {"step": STEP}
    write = results(o.out, os.cpu_count(), sizes=sizes)  # JAX takes every core
    for work, functions, args in works(o):
        for method, numbers in compare(functions, args, o.repeats).items():
            row = {"kind": "jax", "work": work, "method": method} | numbers
            print(json.dumps(row), flush=True)
            write(row)


if __name__ == "__main__":
    main()
