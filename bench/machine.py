"""Measures what this machine can do at most: memory reads and matrix products. `python -m bench.machine` prints it.

`bench/serve.py` runs it as a process of its own, while no server is busy, so that jax's threads and memory are gone
when the load begins. Reads and products are those of jax's default device.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from bench.roofline import MachineLimits

READ_BYTES = 256 << 20
MATMUL_SIZE = 2048
REPEATS = 8
PROCESS_TIMEOUT_SECS = 120


class MachineError(RuntimeError):
    """The micro benchmark failed."""


def measure_in_process_of_its_own(dtype: str) -> MachineLimits:
    """Run this file and read what it prints. Raises MachineError."""
    command = [sys.executable, "-m", "bench.machine", "--dtype", dtype]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_SECS, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MachineError(f"the machine could not be measured: {error}") from error
    return MachineLimits(**json.loads(done.stdout))


def measure(dtype: str) -> MachineLimits:
    """Measure here and now. Takes seconds, and all cores."""
    import jax

    device = jax.devices()[0]
    reads = _host_read_speed() if device.platform == "cpu" else _device_read_speed()
    return MachineLimits(device.device_kind, dtype, reads, _matmul_speed(dtype))


def _best_secs(action: Callable[[], object]) -> float:
    """The shortest of several runs, after one that does not count."""
    action()
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return best


def _host_read_speed() -> float:
    """Bytes a second, all cores reading; the faster of two loops, as compilers differ in how they vectorise them."""
    import numpy as np

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    values = np.ones(READ_BYTES // 8, np.int64)
    parts = np.array_split(values, threads * 4)
    with ThreadPoolExecutor(threads) as pool:

        def read_all(read: Callable[..., object]) -> None:
            list(pool.map(read, parts))

        loops = (np.maximum.reduce, np.bitwise_or.reduce)
        return READ_BYTES / min(_best_secs(lambda loop=loop: read_all(loop)) for loop in loops)  # type: ignore[misc]


def _device_read_speed() -> float:
    import jax
    import jax.numpy as jnp

    values = jnp.ones(READ_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.max)
    return READ_BYTES / _best_secs(lambda: total(values).block_until_ready())


def _matmul_speed(dtype: str) -> float:
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((MATMUL_SIZE, MATMUL_SIZE), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * MATMUL_SIZE**3 / _best_secs(lambda: product(matrix, matrix).block_until_ready())


def main(arguments: list[str] | None = None) -> int:
    """Print the limits as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.machine", description="Measure this machine's limits.")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    print(json.dumps(asdict(measure(parser.parse_args(arguments).dtype))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
