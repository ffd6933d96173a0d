"""The time of a step from what a model must compute and read, and what a machine can. Nothing is measured here.

A step takes the longer of two times (Williams, Waterman and Patterson, "Roofline", CACM 2009): its floating-point
operations at the machine's rate, and its bytes at the memory's. Counted are the matrix products of the layers (2
operations a parameter and token), those of the head (2 a parameter and row: only a row's last token is drawn from),
attention (4 · heads · head_dim operations a layer, token and position: scores and weighted sum), the weights once, and
KV read and written. Left out are norms, activations, the embedding lookup and what tensor parallelism sends.
"""

from dataclasses import dataclass, field

from scheduler.costs.checks import above_zero, at_least_zero, share
from scheduler.errors import ConfigError
from scheduler.simulation.records import StepShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder-only transformer with gated feed-forward layers (three matrices each).

    Raises ConfigError for sizes that cannot be.

    Attributes:
        num_layers, hidden_size, num_heads, num_kv_heads, head_dim, vocab_size: as in a Hugging Face `config.json`.
        ffn_size: `intermediate_size`; of one expert, if there are experts.
        bytes_per_weight, bytes_per_kv_element: 2 for bfloat16, 1 for 8 bits, less for smaller ones.
        num_experts, num_experts_per_token: of every layer's feed-forward part; both 0 in a dense model.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    bytes_per_weight: float = 2.0
    bytes_per_kv_element: float = 2.0
    num_experts: int = 0
    num_experts_per_token: int = 0

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size")
        for name in (*sizes, "bytes_per_weight", "bytes_per_kv_element"):
            above_zero(f"{name} of model {self.name}", getattr(self, name))
        if not 0 <= self.num_experts_per_token <= self.num_experts or (self.num_experts and not self.is_moe):
            raise ConfigError(
                f"model {self.name} sends a token to {self.num_experts_per_token} of {self.num_experts} experts"
            )

    @property
    def is_moe(self) -> bool:
        """Whether a token passes through some of many experts."""
        return self.num_experts_per_token > 0

    def attention_parameters(self) -> int:
        """Of all layers' query, key, value and output projections."""
        return self.num_layers * self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    def expert_parameters(self) -> int:
        """Of one expert in all layers; in a dense model, of the whole feed-forward part."""
        return self.num_layers * 3 * self.hidden_size * self.ffn_size

    def head_parameters(self) -> int:
        """Of the matrix that turns a hidden state into logits."""
        return self.vocab_size * self.hidden_size

    def matrix_parameters(self) -> int:
        """Of all matrices that a large step reads: layers, every expert, and head."""
        return (
            self.attention_parameters() + max(1, self.num_experts) * self.expert_parameters() + self.head_parameters()
        )

    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one position in all layers: what a disaggregated server sends for it."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv_element


@dataclass(frozen=True, slots=True)
class Machine:
    """What one device can do. Raises ConfigError for rates that cannot be.

    Attributes:
        flops: dense bfloat16 floating-point operations a second. bandwidth: bytes a second from its memory.
        flops_efficiency, bandwidth_efficiency: shares of these that real kernels reach.
    """

    name: str
    flops: float
    bandwidth: float
    flops_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0

    def __post_init__(self) -> None:
        above_zero(f"flops of machine {self.name}", self.flops)
        above_zero(f"bandwidth of machine {self.name}", self.bandwidth)
        share(f"flops_efficiency of machine {self.name}", self.flops_efficiency)
        share(f"bandwidth_efficiency of machine {self.name}", self.bandwidth_efficiency)


def preset_models() -> tuple[ModelShape, ...]:
    """Well-known models in bfloat16; sizes from each one's `config.json` on Hugging Face.

    HuggingFaceTB/SmolLM2-135M, meta-llama/Meta-Llama-3-8B, meta-llama/Meta-Llama-3-70B, mistralai/Mixtral-8x7B-v0.1.
    """
    return (
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152),
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, num_experts=8, num_experts_per_token=2),
    )


def preset_machines() -> tuple[Machine, ...]:
    """Well-known machines; NVIDIA's numbers without sparsity (half of what a datasheet prints with it).

    Sources: NVIDIA H100 datasheet (SXM: 1979 TFLOPS with sparsity, 3.35 TB/s), NVIDIA H200 datasheet (SXM: 1979 with
    sparsity, 4.8 TB/s), NVIDIA DGX B200 datasheet (8 GPUs: 72 PFLOPS FP8 with sparsity, hence 2.25 PFLOPS dense
    bfloat16 each, and 64 TB/s), NVIDIA A100 datasheet (SXM 80 GB: 312 TFLOPS, 2039 GB/s). Their efficiencies, 0.7 and
    0.9, are assumptions: roughly what large matrix products and long reads reach. `cpu-2-core` is what
    `bench/machine.py` measured on this project's own machine, so nothing is taken off.
    """
    return (
        Machine("h100", 989.5e12, 3.35e12, 0.7, 0.9),
        Machine("h200", 989.5e12, 4.8e12, 0.7, 0.9),
        Machine("b200", 2250e12, 8e12, 0.7, 0.9),
        Machine("a100-80g", 312e12, 2.039e12, 0.7, 0.9),
        Machine("cpu-2-core", 889e9, 82e9),
    )


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The longer of computing and reading, plus a fixed overhead. A `CostModel`.

    `num_attended` counts all positions that a row reads for each of its tokens, those that causality hides too: the
    time of a long prefill's attention is up to twice what a kernel that skips them takes.

    Raises ConfigError if the degree or an overhead cannot be.

    Attributes:
        model, machine: what runs on what.
        tensor_parallel: devices that share every matrix; KV is divided among at most `num_kv_heads` of them.
        overhead_seconds: of every step. idle_seconds: what a step takes longer after the device was idle.
    """

    model: ModelShape
    machine: Machine
    tensor_parallel: int = 1
    overhead_seconds: float = 0.0
    idle_seconds: float = 0.0
    _rates: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ConfigError(f"tensor_parallel is {self.tensor_parallel}; it must be at least 1")
        at_least_zero("overhead_seconds", self.overhead_seconds)
        at_least_zero("idle_seconds", self.idle_seconds)
        object.__setattr__(self, "_rates", self._seconds_per_unit())

    def step_seconds(self, shape: StepShape) -> float:
        """Seconds of a step of this shape, nothing padded."""
        num_rows, num_tokens, _, num_kv_tokens, num_attended = shape
        per_token, per_row, per_attended, weights, expert, per_kv_token = self._rates
        computing = per_token * num_tokens + per_row * num_rows + per_attended * num_attended
        reading = weights + expert * self._experts_read(num_tokens) + per_kv_token * (num_kv_tokens + num_tokens)
        return (computing if computing > reading else reading) + self.overhead_seconds

    def idle_start_seconds(self) -> float:
        """What a step takes longer after the device was idle."""
        return self.idle_seconds

    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one position, on all devices together."""
        return self.model.kv_bytes_per_token()

    def _experts_read(self, num_tokens: int) -> float:
        """Experts of a layer that `num_tokens` tokens are expected to reach, if each goes to any with equal chance."""
        model = self.model
        if not model.is_moe:
            return 1.0
        missed: float = (1 - model.num_experts_per_token / model.num_experts) ** num_tokens
        return model.num_experts * (1 - missed)

    def _seconds_per_unit(self) -> tuple[float, ...]:
        """Seconds to compute for a token, a row, an attended position; to read the weights, an expert, a KV token."""
        model, machine, degree = self.model, self.machine, self.tensor_parallel
        flops = machine.flops * machine.flops_efficiency * degree
        bandwidth = machine.bandwidth * machine.bandwidth_efficiency
        reading = model.bytes_per_weight / (bandwidth * degree)
        active = model.attention_parameters() + max(1, model.num_experts_per_token) * model.expert_parameters()
        return (
            2 * active / flops,
            2 * model.head_parameters() / flops,
            4 * model.num_layers * model.num_heads * model.head_dim / flops,
            (model.attention_parameters() + model.head_parameters()) * reading,
            model.expert_parameters() * reading,
            model.kv_bytes_per_token() / (bandwidth * min(degree, model.num_kv_heads)),
        )
