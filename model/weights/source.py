"""What every source of weights gives to the loader: an architecture, a tokenizer, and tensors under one naming.

`gguf.py` and `safetensors.py` build it; `convert.py` turns it into the decoder's parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig
from model.tokenizer import TokenizerSpec


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A model as found on disk, tensors still unread.

    Attributes:
        config: the architecture.
        tokenizer: everything needed to build the tokenizer.
        read: Hugging Face name (`model.layers.0.self_attn.q_proj.weight`) → float32 or bfloat16 array [out, in], with
            Hugging Face's order of rotary dimensions. Raises UnsupportedModelError for a name that is missing.
    """

    config: ModelConfig
    tokenizer: TokenizerSpec
    read: Callable[[str], np.ndarray]
