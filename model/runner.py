"""Turns a `StepPlan` into device work and its outputs into a `StepResult`. Owns weights, KV, slot state and programs.

Called by `model/engine.py`, from one thread only: `dispatch` starts a step and returns at once, `collect` waits for it.
Steps run on the device in the order of dispatch, so a step may use what the one before it will have written.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention import AttentionKernels
from kernels.attention_xla import XLA
from model.buckets import BucketLattice
from model.config import ModelConfig
from model.decoder import param_shapes
from model.kv_cache import abstract_kv, allocate
from model.mesh import param_sharding
from model.results import Fetched, row_results
from model.sampler import SlotState
from model.slot_rules import BIAS_ENTRIES, SlotRules
from model.staging import RowField, Scalar, StepLayout, TokenField
from model.step import StepOutputs, build_step
from scheduler.plan import StepPlan, StepResult

WARM_UP_THREAD = "warm-up"


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Shapes of a runner.

    Attributes:
        max_num_seqs, max_num_batched_tokens, max_model_len: as in `SchedulerConfig`.
        num_pages: usable pages, the sink aside. page_size: tokens per page.
        kv_dtype: dtype of the KV arrays. dtype: dtype of the weights and of the matrix products.
        vocab_size: the tokenizer's; ids beyond it are never drawn.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size: int
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    vocab_size: int


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step under way: its plan, layout, start (seconds of `time.monotonic`) and outputs to come."""

    plan: StepPlan
    layout: StepLayout
    started_at: float
    outputs: StepOutputs

    def is_done(self) -> bool:
        """Whether the device has finished the step; does not block."""
        return bool(self.outputs.token_ids.is_ready())  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _WarmUp:
    """What was begun: the first program, the one that resets a slot, and the KV arrays."""

    program: "Future[jax.stages.Compiled]"
    start_slot: "Future[jax.stages.Compiled]"
    kv: "Future[tuple[jax.Array, ...]]"


class Runner:
    """Executes plans. Not thread-safe; `dispatch` mutates device state, `collect` blocks."""

    def __init__(
        self,
        config: RunnerConfig,
        model: ModelConfig,
        mesh: jax.sharding.Mesh | None = None,
        kernels: AttentionKernels = XLA,
    ):
        """Needs no weights yet: programs can be compiled while these are read. `load` must come before a step."""
        self.config = config
        self.kernels = kernels
        self.compilations = 0
        self._model = model
        self._mesh = mesh
        self._weights: tuple[jax.Array, ...] = ()
        self.lattice = BucketLattice(
            config.max_num_seqs, config.max_num_batched_tokens, -(-config.max_model_len // config.page_size)
        )
        self._layouts = self.lattice.layouts()
        self._programs: dict[StepLayout, jax.stages.Compiled] = {}
        self._max_step_tokens = 0
        self._start_slot: jax.stages.Compiled | None = None
        self._rules = SlotRules(config.max_num_seqs, self.lattice.max_pages, model.vocab_size)
        self._kv: tuple[jax.Array, ...] = ()
        self._state = self._empty_state()
        kv = abstract_kv(model, config.num_pages, config.page_size, config.kv_dtype, mesh)
        weights = tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=mesh and param_sharding(path, leaf.shape, mesh))
            for path, leaf in param_shapes(model, config.dtype).items()
        )
        self._abstract = (weights, kv, jax.tree.map(self._describe, self._state))
        self._begun: _WarmUp | None = None

    def load(self, params: Mapping[str, jax.Array]) -> None:
        """Take the weights, by path, each where `model.mesh.param_sharding` puts it."""
        self._weights = tuple(params[path] for path in param_shapes(self._model, self.config.dtype))

    @property
    def warm_up_is_complete(self) -> bool:
        """Whether every program of the lattice is compiled."""
        return len(self._programs) == len(self._layouts)

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest step that can run now; grows to `max_num_batched_tokens` as programs are compiled."""
        return self._max_step_tokens

    def begin_warm_up(self) -> None:
        """Start in other threads what `warm_up` waits for. Returns at once; once."""
        self._begun = self._begin()

    def _begin(self) -> _WarmUp:
        pool = ThreadPoolExecutor(3, thread_name_prefix=WARM_UP_THREAD)
        begun = _WarmUp(
            program=pool.submit(self._compile, self.lattice.by_need()[0]),
            start_slot=pool.submit(self._compile_start_slot),
            kv=pool.submit(allocate, self._abstract[1]),
        )
        pool.shutdown(wait=False)
        return begun

    def warm_up(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile the program that a server can start with and run it once on padding. `on_progress(done, total)`."""
        layout = self.lattice.by_need()[0]
        total = 3
        on_progress(0, total)
        begun, self._begun = self._begun or self._begin(), None
        self._add(layout, begun.program.result())
        on_progress(1, total)
        self._start_slot, self._kv = begun.start_slot.result(), begun.kv.result()
        on_progress(2, total)
        # One run on padding, to find out before the first request whether the device works at all.
        self._execute(layout, np.zeros(layout.size, np.int32))
        jax.block_until_ready(self._kv)
        on_progress(total, total)

    def compile_next(self) -> bool:
        """Compile one more program of the lattice; False if none is missing. May run in another thread beside steps."""
        layout = next((layout for layout in self.lattice.by_need() if layout not in self._programs), None)
        if layout is None:
            return False
        self._add(layout, self._compile(layout))
        return True

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Start a step that has rows; returns without waiting for the device."""
        started_at = time.monotonic()
        for row in plan.rows:
            if row.starts:
                adjusted = self._rules.start(row)
                if adjusted is not None:
                    self._rebuild_slot(row.slot, adjusted)
        wants_prompt = any(self._rules.wants_prompt_logprobs(row) for row in plan.rows)
        single = not wants_prompt and all(len(row.token_ids) == 1 for row in plan.rows)
        num_tokens, num_rows = plan.num_tokens, len(plan.rows)
        layout = next(x for x in self._layouts if x in self._programs and x.holds(num_tokens, num_rows, single))
        buffer = np.zeros(layout.size, np.int32)
        self._fill(plan, layout, buffer)
        return StepHandle(plan, layout, started_at, self._execute(layout, buffer))

    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step and return its results. Raises what the device raised."""
        outputs = handle.outputs
        wants = any(self._rules.wants_logprobs(row) for row in handle.plan.rows)
        wants_prompt = any(self._rules.wants_prompt_logprobs(row) for row in handle.plan.rows)
        fetched = Fetched(
            token_ids=np.asarray(outputs.token_ids).tolist(),
            finite=np.asarray(outputs.finite).tolist(),
            output_logprobs=jax.device_get(outputs.output_logprobs) if wants else None,
            prompt_logprobs=jax.device_get(outputs.prompt_logprobs) if wants_prompt else None,
        )
        return StepResult(handle.plan.step_id, row_results(handle.plan, fetched, self.config.vocab_size))

    def _fill(self, plan: StepPlan, layout: StepLayout, buffer: np.ndarray) -> None:
        """Write a plan into its zeroed buffer."""
        fields = layout.views(buffer)
        ids: list[int] = []
        starts: list[int] = []
        for row in plan.rows:
            starts.append(len(ids))
            ids.extend(row.token_ids)
        count, rows = len(ids), len(plan.rows)
        slots = np.fromiter((row.slot for row in plan.rows), np.int32, rows)
        first = np.fromiter((row.token_start for row in plan.rows), np.int32, rows)
        lengths = np.fromiter((len(row.token_ids) for row in plan.rows), np.int32, rows)
        row_of = np.repeat(np.arange(rows, dtype=np.int32), lengths)
        tokens = fields.tokens[:, :count]
        tokens[TokenField.TOKEN_ID] = ids
        tokens[TokenField.ROW] = row_of
        tokens[TokenField.POSITION] = np.arange(count, dtype=np.int32) - np.take(starts, row_of) + first[row_of]
        table = fields.rows[:, :rows]
        table[RowField.SLOT] = slots
        table[RowField.START] = starts
        table[RowField.LENGTH] = lengths
        table[RowField.KV_LENGTH] = table[RowField.POSITION] = first + lengths
        table[RowField.DRAWS] = [row.samples for row in plan.rows]
        tokens[TokenField.FEEDS_SAMPLED] = np.repeat([row.feeds_sampled for row in plan.rows], lengths)
        self._rules.fill(plan, slots, fields)
        for start, row in zip(starts, plan.rows, strict=True):
            if row.next_token_ids and self._rules.wants_prompt_logprobs(row):
                tokens[TokenField.NEXT_TOKEN_ID, start : start + len(row.next_token_ids)] = row.next_token_ids
        fields.scalars[Scalar.NUM_TOKENS] = count
        fields.scalars[Scalar.NUM_SINGLE_ROWS] = int(np.argmax(np.append(lengths, 0) != 1))

    def _execute(self, layout: StepLayout, buffer: np.ndarray) -> StepOutputs:
        self._kv, self._state, outputs = self._programs[layout](self._weights, self._kv, self._state, buffer)
        return outputs

    def _describe(self, leaf: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=None if self._mesh is None else leaf.sharding)

    def _replicated(self) -> jax.sharding.NamedSharding | None:
        return None if self._mesh is None else jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec())

    def _empty_state(self) -> SlotState:
        slots, vocab, where = self.config.max_num_seqs, self._model.vocab_size, self._replicated()
        return SlotState(
            last_tokens=jnp.zeros((slots,), jnp.int32, device=where),
            output_counts=jnp.zeros((slots, vocab), jnp.int32, device=where),
            prompt_seen=jnp.zeros((slots, vocab), bool, device=where),
            bias=jnp.zeros((slots, vocab), jnp.float32, device=where),
        )

    def _add(self, layout: StepLayout, program: jax.stages.Compiled) -> None:
        self._programs[layout] = program
        self._max_step_tokens = self.lattice.limit_of(tuple(self._programs))

    def _compile(self, layout: StepLayout) -> jax.stages.Compiled:
        step = build_step(
            self._model,
            self.config.dtype,
            layout,
            vocab_size=self.config.vocab_size,
            kernels=self.kernels,
            mesh=self._mesh,
        )
        where = self._replicated()
        buffer = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=where)
        shardings = None if where is None else (self._abstract[1][0].sharding, where, where)
        jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=shardings)
        self.compilations += 1
        return jitted.lower(*self._abstract, buffer).compile()

    def _compile_start_slot(self) -> jax.stages.Compiled:
        where = self._replicated()
        length = self.config.max_model_len

        def start_slot(
            state: SlotState,
            slot: jax.Array,
            prompt_ids: jax.Array,
            output_ids: jax.Array,
            bias_ids: jax.Array,
            biases: jax.Array,
        ) -> SlotState:
            return state._replace(
                output_counts=state.output_counts.at[slot].set(0).at[slot, output_ids].add(1, mode="drop"),
                prompt_seen=state.prompt_seen.at[slot].set(False).at[slot, prompt_ids].set(True, mode="drop"),
                bias=state.bias.at[slot].set(0.0).at[slot, bias_ids].add(biases, mode="drop"),
            )

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)

        biases = jax.ShapeDtypeStruct((BIAS_ENTRIES,), jnp.float32, sharding=where)
        self.compilations += 1
        jitted = jax.jit(start_slot, donate_argnums=0, out_shardings=where)
        return jitted.lower(self._abstract[2], ints(), ints(length), ints(length), ints(BIAS_ENTRIES), biases).compile()

    def _rebuild_slot(self, slot: int, arrays: tuple[np.ndarray, ...]) -> None:
        if self._start_slot is None:
            raise RuntimeError("warm_up must come before the first step")
        self._state = self._start_slot(
            self._state, np.int32(slot), *self._rules.padded(arrays, self.config.max_model_len)
        )
