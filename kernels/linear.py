"""The linear contract: one activation matrix times one weight, accumulated in float32. Called by `model/decoder.py`.

Today there is the XLA implementation alone; a packed or quantised one keeps this signature.
"""

import math

import jax
import jax.numpy as jnp


def linear(inputs: jax.Array, kernel: jax.Array, num_input_axes: int = 1) -> jax.Array:
    """Contract the last `num_input_axes` axes of `inputs` with the first ones of `kernel`.

    Args:
        inputs: [T, *inputs], any float dtype; rounded to the kernel's dtype before the product.
        kernel: [*inputs, *outputs], float32 or bfloat16.
        num_input_axes: how many leading axes of `kernel` are contracted.

    Returns:
        [T, *outputs] float32.
    """
    rows = inputs.shape[0]
    width = math.prod(kernel.shape[:num_input_axes])
    outputs = kernel.shape[num_input_axes:]
    product = jax.lax.dot_general(
        inputs.astype(kernel.dtype).reshape(rows, width),
        kernel.reshape(width, math.prod(outputs)),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return product.reshape(rows, *outputs)


def transposed_linear(inputs: jax.Array, table: jax.Array) -> jax.Array:
    """Rows times a table stored output-first (the embedding table used as the head).

    Args:
        inputs: [R, E]. table: [V, E].

    Returns:
        [R, V] float32.
    """
    return jax.lax.dot_general(
        inputs.astype(table.dtype), table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
