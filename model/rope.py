"""Rotary position embedding (Su et al., arXiv:2104.09864) and its scalings. Called by `model/decoder.py`."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from model.config import ModelConfig


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position for each of D/2 pairs, [D/2] float32, scaling included.

    `llama3` follows Meta's Llama 3.1 reference: long wavelengths are slowed by `factor`, short ones kept, and those in
    between interpolated.
    """
    scaling = config.rope_scaling
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_position / wavelengths
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        frequencies = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    elif scaling.kind == "factors":
        frequencies = frequencies / np.asarray(scaling.factors)
    elif scaling.kind != "none":
        raise ValueError(f"unknown rope scaling {scaling.kind!r}")
    return frequencies.astype(np.float32)


def rotate(vectors: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotate pairs (i, i + D/2): vectors [..., D], cosine and sine broadcastable [..., D/2] → same shape, float32."""
    first, second = jnp.split(vectors.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
