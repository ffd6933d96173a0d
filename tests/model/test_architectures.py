"""Every architecture's logits and greedy ids against Hugging Face transformers, on `tests/fixtures/tiny`.

`tests/fixtures/make_tiny_references.py` made both. Each prompt is computed in one chunk, in chunks of five and token by
token, since a sliding window or a rotary scaling can be right in one and wrong in another.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import RaggedBatch
from kernels.attention_xla import XLA
from model.decoder import abstract_decoder, bind, param_shapes
from model.kv_cache import abstract_kv, allocate
from model.weights.convert import convert
from model.weights.safetensors import open_safetensors
from tests.model.checkpoints import NAMES, TINY, tiny_checkpoint

PAGE, PAGES = 4, 20
# Between them: scaled rotary, tied and untied heads, q/k norms, a head_dim of its own.
FAST = ("llama3_rope", "qwen3")
FLOAT32 = jnp.dtype("float32")


def load(name, folder):
    """(step function over one row, reference arrays): (ids, kv, start) → (logits [T, V], kv)."""
    source = open_safetensors(tiny_checkpoint(name, folder))
    params = dict(convert(source, "float32"))
    graph, leaves = abstract_decoder(source.config, FLOAT32)
    weights = tuple(jnp.asarray(params[path]) for path in param_shapes(source.config, FLOAT32))
    table = jnp.arange(1, PAGES, dtype=jnp.int32)[None]

    @jax.jit
    def step(ids, kv, start):
        count = ids.shape[0]
        zero = jnp.zeros((1,), jnp.int32)
        batch = RaggedBatch(
            positions=start + jnp.arange(count, dtype=jnp.int32),
            token_rows=jnp.zeros((count,), jnp.int32),
            row_starts=zero,
            row_lengths=zero + count,
            kv_lengths=zero + start + count,
            page_table=table,
            num_tokens=jnp.int32(count),
            num_single_rows=jnp.int32(count == 1),
        )
        model = bind(graph, leaves, weights)
        hidden, kv = model(ids, batch, kv, kernels=XLA, single_token_rows=count == 1)
        return model.logits(hidden), kv

    kv = allocate(abstract_kv(source.config, PAGES, PAGE, FLOAT32, None))
    return step, kv, np.load(TINY / name / "reference.npz")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_logits_and_greedy_ids(name, tmp_path):
    step, empty, reference = load(name, tmp_path)
    ids = jnp.asarray(reference["input_ids"])
    for chunk in (len(ids), 5):
        kv, pieces = empty, []
        for start in range(0, len(ids), chunk):
            logits, kv = step(ids[start : start + chunk], kv, jnp.int32(start))
            pieces.append(np.asarray(logits))
        np.testing.assert_allclose(np.concatenate(pieces), reference["logits"], atol=3e-4, rtol=1e-4)
    token, greedy = int(pieces[-1][-1].argmax()), []
    for position in range(len(ids), len(ids) + len(reference["greedy_ids"])):
        greedy.append(token)
        logits, kv = step(jnp.asarray([token], jnp.int32), kv, jnp.int32(position))
        token = int(np.asarray(logits)[-1].argmax())
    assert greedy == reference["greedy_ids"].tolist()
