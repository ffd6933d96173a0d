"""Where the time of one step goes: the whole program, and the same program without attention, without KV writes.

`python -m bench.step` loads a model as the server does and times steps on made-up batches: decode at several numbers of
rows, and a prompt. What a part costs is what the step is faster without it; the rest is products of weights, norms and
the draw. No server, so nothing else is in the figures. Beside them stands the least time that this machine needs, from
its own memory bandwidth and product speed.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import measure
from bench.roofline import ModelSize, least_seconds
from kernels.attention import AttentionKernels
from kernels.attention_xla import XLA
from model.default_model import default_cache_dir
from model.kv_cache import abstract_kv, allocate
from model.runner import Runner, RunnerConfig
from model.staging import RowField, Scalar, StepLayout, TokenField
from model.step import build_step
from model.weights import LoadedModel, resolve_and_load

PAGE_SIZE = 16
MAX_PAGES = 128
REPEATS = 9


@dataclass(frozen=True)
class Batch:
    """`rows` requests that compute `tokens` each, the last at position `context` − 1."""

    rows: int
    tokens: int
    context: int

    @property
    def layout(self) -> StepLayout:
        """The padded program: none of it is padding."""
        return StepLayout(self.rows * self.tokens, self.rows, MAX_PAGES, self.tokens == 1)

    def buffer(self, num_pages: int) -> np.ndarray:
        """What the runner would stage for it: [layout.size] int32."""
        layout = self.layout
        buffer = np.zeros(layout.size, np.int32)
        fields = layout.views(buffer)
        count = self.rows * self.tokens
        fields.scalars[Scalar.NUM_TOKENS] = count
        fields.scalars[Scalar.NUM_SINGLE_ROWS] = self.rows if self.tokens == 1 else 0
        row_of = np.repeat(np.arange(self.rows), self.tokens)
        fields.tokens[TokenField.ROW] = row_of
        fields.tokens[TokenField.POSITION] = self.context - self.tokens + np.tile(np.arange(self.tokens), self.rows)
        fields.tokens[TokenField.TOKEN_ID] = 5 + np.arange(count) % 1000
        fields.rows[RowField.SLOT] = np.arange(self.rows)
        fields.rows[RowField.START] = np.arange(self.rows) * self.tokens
        fields.rows[RowField.LENGTH] = self.tokens
        fields.rows[RowField.KV_LENGTH] = self.context
        fields.rows[RowField.DRAWS] = 1
        pages = -(-self.context // PAGE_SIZE)
        table = 1 + np.arange(self.rows * pages).reshape(self.rows, pages) % (num_pages - 1)
        fields.page_table[:, :pages] = table
        return buffer


class StepBench:
    """A model on the device, and its step with any attention kernels. Not for use beside a server."""

    def __init__(self, loaded: LoadedModel, dtype: str, num_pages: int):
        self._loaded = loaded
        self._dtype = jnp.dtype(dtype)
        self._num_pages = num_pages
        shapes = RunnerConfig(256, 2048, PAGE_SIZE * MAX_PAGES, num_pages, PAGE_SIZE, self._dtype, self._dtype, 1)
        runner = Runner(shapes, loaded.config)
        runner.load(loaded.params)
        self._weights, self._state = runner._weights, runner._state
        self._kv = allocate(abstract_kv(loaded.config, num_pages, PAGE_SIZE, self._dtype, None))

    def seconds(self, batch: Batch, kernels: AttentionKernels) -> float:
        """The median of several steps, each waited for."""
        config = self._loaded.config
        step = build_step(config, self._dtype, batch.layout, vocab_size=config.vocab_size, kernels=kernels, mesh=None)
        buffer = batch.buffer(self._num_pages)
        program = jax.jit(step, donate_argnums=(1, 2)).lower(self._weights, self._kv, self._state, buffer).compile()
        times = []
        for _ in range(REPEATS + 2):
            started = time.perf_counter()
            self._kv, self._state, outputs = program(self._weights, self._kv, self._state, buffer.copy())
            np.asarray(outputs.token_ids)
            times.append(time.perf_counter() - started)
        return sorted(times[2:])[REPEATS // 2]


def _keep_kv(kv: Any, keys: Any, values: Any, batch: Any) -> Any:
    return kv


def _queries_as_answers(queries: Any, kv: Any, batch: Any, options: Any) -> Any:
    return queries.astype(jnp.float32)


NO_ATTENTION = AttentionKernels("no attention", XLA.write, _queries_as_answers)
NO_WRITE = AttentionKernels("no write", _keep_kv, XLA.attend)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as the server's (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", default="4,8,32", help="decode batches (%(default)s)")
    parser.add_argument("--context", type=int, default=96, help="positions of each row (%(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt step, 0 for none (%(default)s)")
    options = parser.parse_args(arguments)
    loaded = resolve_and_load(options.model, dtype=options.dtype, cache_dir=default_cache_dir())
    bench = StepBench(loaded, options.dtype, 2049)
    batches = [Batch(int(rows), 1, options.context) for rows in options.rows.split(",")]
    if options.prompt:
        batches.append(Batch(1, options.prompt, options.prompt))
    limits = measure(options.dtype)
    size = ModelSize.from_server_info({"architecture": asdict(loaded.config), "weights": {"dtype": options.dtype}})
    if size is None:
        raise SystemExit(f"the size of {loaded.name} cannot be worked out")
    table = Table(title=f"milliseconds a step, {loaded.name}, {options.dtype}, context {options.context}")
    for column in ("step", "whole", "attention", "KV write", "the rest", "least", "% of it"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for batch in batches:
        whole, bare, unwritten = (bench.seconds(batch, kernels) for kernels in (XLA, NO_ATTENTION, NO_WRITE))
        count = batch.rows * batch.tokens
        least = least_seconds(limits, size, count - batch.rows, batch.rows, batch.rows)
        name = f"decode, {batch.rows} rows" if batch.tokens == 1 else f"prompt of {batch.tokens}"
        parts = (whole, whole - bare, whole - unwritten, whole - (whole - bare) - (whole - unwritten), least)
        table.add_row(name, *(f"{1000 * part:.1f}" for part in parts), f"{100 * least / whole:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
