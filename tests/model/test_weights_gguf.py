"""GGUF files give the same weights as the safetensors that they were made from."""

import gguf
import numpy as np
import pytest

from model.config import RopeScaling
from model.errors import UnsupportedModelError
from model.rope import rope_frequencies
from model.weights.convert import convert
from model.weights.gguf import open_gguf
from model.weights.safetensors import open_safetensors

from .checkpoints import NAMES, tiny_checkpoint, write_gguf


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_architecture_equal_those_of_the_safetensors(name, tmp_path):
    folder = tiny_checkpoint(name, tmp_path)
    options = {}
    if name == "mistral":
        options = {"attention.sliding_window": 8}
    if name == "llama_linear_rope":
        options = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    expected = open_safetensors(folder)
    found = open_gguf(write_gguf(folder, tmp_path / "m.gguf", **options))
    for field in (
        "head_dim",
        "num_kv_heads",
        "qkv_bias",
        "qk_norm",
        "tie_word_embeddings",
        "sliding_window",
        "rms_norm_eps",
    ):
        assert getattr(found.config, field) == getattr(expected.config, field), field
    assert found.config.bos_token_id == 1
    assert found.config.eos_token_ids == (2,)
    if name != "llama3_rope":
        assert found.config.rope_scaling == expected.config.rope_scaling
    expected_params = dict(convert(expected, "float32"))
    found_params = dict(convert(found, "float32"))
    assert found_params.keys() == expected_params.keys()
    for path, array in expected_params.items():
        np.testing.assert_array_equal(found_params[path], array, err_msg=path)


def test_quantised_blocks_are_dequantised_row_by_row(tmp_path):
    folder = tiny_checkpoint("llama_untied", tmp_path)
    expected = dict(convert(open_safetensors(folder), "float32"))
    path = write_gguf(folder, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    found = dict(convert(open_gguf(path), "float32"))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=np.abs(array).max() / 120, err_msg=name)


def test_stored_rope_factors_equal_the_llama3_rule(tmp_path):
    """llama.cpp's converter writes what each frequency is divided by."""
    config = open_safetensors(tiny_checkpoint("llama3_rope", tmp_path)).config
    assert config.rope_scaling == RopeScaling("llama3", 4.0, 1.0, 4.0, 32)
    plain = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    factors = plain / rope_frequencies(config)
    assert factors.max() > 3.9
    assert factors.min() == pytest.approx(1.0)
    path = write_gguf(tmp_path / "llama3_rope", tmp_path / "m.gguf", rope_freqs=factors.astype(np.float32))
    found = open_gguf(path).config
    assert found.rope_scaling.kind == "factors"
    np.testing.assert_allclose(rope_frequencies(found), rope_frequencies(config), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope.scaling.type": "yarn"}, "yarn"),
        ({"attention.head_count_kv": [1, 2]}, "differs from layer to layer"),
        ({"attention.value_length": 16}, "value_length"),
        ({"rope.dimension_count": 4}, "dimension_count"),
        ({"block_count": None}, "llama.block_count"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(fields, message, tmp_path):
    path = write_gguf(tiny_checkpoint("mistral", tmp_path), tmp_path / "m.gguf", **fields)
    with pytest.raises(UnsupportedModelError, match=message):
        open_gguf(path)


def test_another_architecture_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "mamba")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="mamba"):
        open_gguf(path)


def test_a_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"not a model" * 10)
    with pytest.raises(UnsupportedModelError, match="not a readable GGUF file"):
        open_gguf(path)
