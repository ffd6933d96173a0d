"""The least time that a load can take on a machine, from what the machine can do and how large the model is.

Used by `bench/serve.py` to say what share of that limit a server reaches. Two bounds, the later of which holds
(Williams, Waterman and Patterson, "Roofline", 2009): every step reads all weights once, and every token needs two
floating-point operations a parameter. Attention and KV reads are left out, so the true limit is a little lower.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "q4_1": 0.625}


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What a machine did in a micro benchmark (`bench/machine.py`): bytes and floating-point operations a second."""

    device: str
    dtype: str
    read_bytes_per_sec: float
    matmul_flops_per_sec: float


class _Architecture(msgspec.Struct):
    """The part of `/server_info`'s `architecture` that says how many parameters there are."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def layer_parameters(self) -> int:
        """Of all layers' kernels; norms are left out."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


class _Weights(msgspec.Struct):
    dtype: str


class _ServerInfo(msgspec.Struct):
    architecture: _Architecture
    weights: _Weights


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters of the matrix products: the layers' for every token, the head's for sampled tokens only."""

    layer_parameters: float
    head_parameters: float
    dtype: str

    @classmethod
    def from_server_info(cls, info: Mapping[str, Any]) -> Self | None:
        """From Twinmesh's `/server_info`; None if it says too little."""
        try:
            known = msgspec.convert(info, _ServerInfo)
        except msgspec.ValidationError:
            return None
        if known.weights.dtype not in BYTES:
            return None
        architecture = known.architecture
        head = architecture.vocab_size * architecture.hidden_size
        return cls(architecture.layer_parameters(), head, known.weights.dtype)

    @property
    def bytes_per_step(self) -> float:
        """Read by a step, whatever its batch."""
        return (self.layer_parameters + self.head_parameters) * BYTES[self.dtype]


def least_seconds(
    machine: MachineLimits, model: ModelSize, prompt_tokens: float, output_tokens: float, concurrency: float
) -> float:
    """The least time for a load.

    Args:
        machine: measured with the model's dtype. model: its size.
        prompt_tokens: those that are computed, cached ones aside. output_tokens: sampled.
        concurrency: requests that are computed at once, at most.
    """
    flops = 2 * (prompt_tokens + output_tokens) * model.layer_parameters + 2 * output_tokens * model.head_parameters
    reads = output_tokens / concurrency * model.bytes_per_step
    return max(flops / machine.matmul_flops_per_sec, reads / machine.read_bytes_per_sec)
