"""The architecture of a decoder, as numbers. Built by `model/weights/` from a GGUF header, a `config.json` or an Orbax
checkpoint's metadata; read by the decoder, the sharding rules and the KV arrays.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling.

    `kind` is `none`, `linear` (positions divided by `factor`), `llama3` (frequency bands, Meta's Llama 3.1 reference)
    or `factors` (each frequency divided by its own factor: how a GGUF file stores what `llama3` computes).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer of the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3).

    Attributes:
        architecture: `llama`, `mistral`, `qwen2` or `qwen3`.
        vocab_size: rows of the embedding table (padding rows included).
        num_kv_heads: K; `num_heads` = K × G query heads. head_dim: D, not always hidden_size / num_heads.
        sliding_window: positions that a token may look back, itself included; None for all.
        qkv_bias: Qwen2. qk_norm: RMS norm of each query and key head before RoPE, Qwen3.
        tie_word_embeddings: the head is the embedding table.
        max_position_embeddings: the longest context that the model was made for.
        bos_token_id: None if the tokenizer adds no start token. eos_token_ids: ids that end a turn.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    sliding_window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads per KV head, G."""
        return self.num_heads // self.num_kv_heads
