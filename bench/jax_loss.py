"""Loss and gradients in JAX against jit-compiled dense: times within one run, and XLA's own account of memory.

python -m bench.jax_loss [--tokens 2048 --hidden 512 --vocab 131072 --repeats 5]
"""

import argparse
import json
import platform
import time
from functools import partial

import jax
import jax.numpy as jnp

from logitless.jax import LMHead, linear_cross_entropy, linear_topk


def dense_loss(hidden, head, labels):
    logp = jax.nn.log_softmax(hidden @ head.weight.T)
    return -jnp.take_along_axis(logp, labels[:, None], 1).mean()


def dense_step(hidden, head, k):
    logits = hidden @ head.weight.T
    return jax.lax.top_k(logits, k), jax.nn.logsumexp(logits, -1)


def best_times(functions, args, repeats):
    """The fastest of `repeats` runs of each, taken in turns; seconds."""
    times = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, run in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            if turn:  # the first touches memory for the first time
                times[name].append(time.perf_counter() - start)
    return {name: min(taken) for name, taken in times.items()}


def compare(functions, args, repeats):
    """Seconds and megabytes of temporaries of each compiled function."""
    compiled = {name: jax.jit(f).lower(*args).compile() for name, f in functions.items()}
    seconds = best_times(compiled, args, repeats)
    memory = {name: c.memory_analysis().temp_size_in_bytes / 1e6 for name, c in compiled.items()}
    return {name: {"seconds": seconds[name], "temporaries_mb": memory[name]} for name in functions}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 2048), ("hidden", 512), ("vocab", 131072), ("repeats", 5), ("keep", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    hidden = jax.random.normal(jax.random.key(0), (o.tokens, o.hidden))
    head = LMHead(jax.random.normal(jax.random.key(1), (o.vocab, o.hidden)) * o.hidden**-0.5)
    labels = jax.random.randint(jax.random.key(2), (o.tokens,), 0, o.vocab)
    both = partial(jax.value_and_grad, argnums=(0, 1))

    loss, dense = (jax.jit(f)(hidden, head, labels) for f in (linear_cross_entropy, dense_loss))
    if not jnp.allclose(loss, dense, rtol=2e-6):
        raise SystemExit(f"the losses differ: {loss} against {dense}")
    training = {"ours": both(linear_cross_entropy), "dense": both(dense_loss)}
    steps = {"ours": partial(linear_topk, k=o.keep), "dense": partial(dense_step, k=o.keep)}
    print(
        json.dumps(
            {
                "kind": "jax",
                "machine": platform.processor() or platform.machine(),
                "versions": {"jax": jax.__version__, "python": platform.python_version()},
                "sizes": vars(o),
                "loss and gradients": compare(training, (hidden, head, labels), o.repeats),
                "decode step of 8": compare(steps, (hidden[:8], head), o.repeats),
            }
        )
    )


if __name__ == "__main__":
    main()
