"""Hugging Face folders: every architecture's configuration in old and new spelling, and where each tensor goes."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from model.config import RopeScaling
from model.decoder import param_shapes
from model.errors import UnsupportedModelError
from model.weights.convert import convert
from model.weights.safetensors import open_safetensors, read_config

from .checkpoints import NAMES, tensors_of, tiny_checkpoint

LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_the_decoder_is_there(name, tmp_path):
    source = open_safetensors(tiny_checkpoint(name, tmp_path))
    params = dict(convert(source, "bfloat16"))
    wanted = param_shapes(source.config, jnp.dtype("bfloat16"))
    assert {path: (array.shape, array.dtype) for path, array in params.items()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in wanted.items()
    }
    assert params["layers/1/mlp_norm/scale"].dtype == np.float32


def test_heads_are_grouped_by_their_kv_head(tmp_path):
    folder = tiny_checkpoint("llama_untied", tmp_path)
    tensors = tensors_of(folder)
    params = dict(convert(open_safetensors(folder), "float32"))
    head_dim, group = 4, 2
    kernel = params["layers/1/attention/qkv/kernel"]
    out = params["layers/1/attention/out/kernel"]
    prefix = "model.layers.1.self_attn"
    for kv_head in range(4):
        rows = slice(kv_head * head_dim, (kv_head + 1) * head_dim)
        np.testing.assert_array_equal(kernel[:, kv_head, group], tensors[f"{prefix}.k_proj.weight"][rows].T)
        np.testing.assert_array_equal(kernel[:, kv_head, group + 1], tensors[f"{prefix}.v_proj.weight"][rows].T)
        for member in range(group):
            head = kv_head * group + member
            rows = slice(head * head_dim, (head + 1) * head_dim)
            np.testing.assert_array_equal(kernel[:, kv_head, member], tensors[f"{prefix}.q_proj.weight"][rows].T)
            np.testing.assert_array_equal(out[kv_head, member], tensors[f"{prefix}.o_proj.weight"][:, rows].T)
    gate_up = params["layers/0/mlp/gate_up/kernel"]
    np.testing.assert_array_equal(gate_up[:, 0], tensors["model.layers.0.mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(gate_up[:, 1], tensors["model.layers.0.mlp.up_proj.weight"].T)
    np.testing.assert_array_equal(params["head/kernel"], tensors["lm_head.weight"])


def test_biases_go_with_their_heads(tmp_path):
    folder = tiny_checkpoint("qwen2", tmp_path)
    tensors = tensors_of(folder)
    bias = dict(convert(open_safetensors(folder), "float32"))["layers/0/attention/qkv/bias"]
    prefix = "model.layers.0.self_attn"
    np.testing.assert_array_equal(bias[:, :2].reshape(-1), tensors[f"{prefix}.q_proj.bias"])
    np.testing.assert_array_equal(bias[:, 2].reshape(-1), tensors[f"{prefix}.k_proj.bias"])
    np.testing.assert_array_equal(bias[:, 3].reshape(-1), tensors[f"{prefix}.v_proj.bias"])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_files(dtype, tmp_path):
    folder = tiny_checkpoint("qwen3", tmp_path)
    tensors = {name: array.astype(dtype) for name, array in tensors_of(folder).items()}
    save_file(tensors, folder / "model.safetensors")
    params = dict(convert(open_safetensors(folder), "float32"))
    np.testing.assert_array_equal(params["embed/embedding"], tensors["model.embed_tokens.weight"].astype(np.float32))


def test_architectures(tmp_path):
    configs = {name: open_safetensors(tiny_checkpoint(name, tmp_path)).config for name in NAMES}
    assert configs["llama3_rope"].rope_scaling == RopeScaling("llama3", 4.0, 1.0, 4.0, 32)
    assert configs["llama3_rope"].rope_theta == 500.0
    assert configs["llama_linear_rope"].rope_scaling == RopeScaling("linear", 2.0)
    assert configs["llama_untied"].tie_word_embeddings is False
    assert configs["llama_untied"].group_size == 2
    assert configs["mistral"].sliding_window == 8
    assert configs["qwen2"].qkv_bias
    assert configs["qwen2"].sliding_window is None
    assert configs["qwen3"].qk_norm
    assert configs["qwen3"].head_dim == 16
    assert {name: config.architecture for name, config in configs.items()} == {
        "llama3_rope": "llama",
        "llama_linear_rope": "llama",
        "llama_untied": "llama",
        "mistral": "mistral",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
    }


def test_older_spelling_of_rotary_parameters(tmp_path):
    new = read_config(tiny_checkpoint("llama3_rope", tmp_path), has_head=False)
    old = tiny_checkpoint(
        "llama_linear_rope",
        tmp_path,
        rope_parameters=None,
        rope_theta=500.0,
        rope_scaling={"type": "llama3", **LLAMA3},
    )
    found = read_config(old, has_head=False)
    assert (found.rope_theta, found.rope_scaling) == (new.rope_theta, new.rope_scaling)


@pytest.mark.parametrize(("has_head", "tied"), [(True, False), (False, True)])
def test_tying_follows_the_files_where_the_configuration_is_silent(has_head, tied, tmp_path):
    folder = tiny_checkpoint("qwen2", tmp_path, tie_word_embeddings=None)
    assert read_config(folder, has_head=has_head).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 8}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "layer_types": None}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None}, 8),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, 8),
    ],
)
def test_sliding_window_of_qwen(changes, window, tmp_path):
    assert read_config(tiny_checkpoint("qwen2", tmp_path, **changes), has_head=True).sliding_window == window


def test_every_end_token_counts_and_the_tokenizers_own_comes_first(tmp_path):
    folder = tiny_checkpoint("llama_untied", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2]}))
    opened = open_safetensors(folder)
    assert opened.config.eos_token_ids == (2, 3)
    assert opened.tokenizer.eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": []}, "(none)"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer to layer"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": None}, "config.json"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(UnsupportedModelError, match=message):
        open_safetensors(tiny_checkpoint("llama_untied", tmp_path, **changes))


def test_a_mix_of_window_layers_is_refused(tmp_path):
    folder = tiny_checkpoint(
        "qwen2", tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=1, layer_types=[]
    )
    with pytest.raises(UnsupportedModelError, match="mix of sliding"):
        open_safetensors(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 32}, "mlp/gate_up/kernel has shape"),
        ({"num_key_value_heads": 1}, "holds"),
        ({"num_hidden_layers": 3}, "no tensor"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_refused(changes, message, tmp_path):
    source = open_safetensors(tiny_checkpoint("mistral", tmp_path, **changes))
    with pytest.raises(UnsupportedModelError, match=message):
        dict(convert(source, "float32"))


def test_a_bias_that_would_be_left_out_is_refused(tmp_path):
    folder = tiny_checkpoint("mistral", tmp_path)
    tensors = tensors_of(folder) | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="bias"):
        open_safetensors(folder)


def test_an_index_that_leaves_its_folder_is_refused(tmp_path):
    folder = tiny_checkpoint("llama_untied", tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(UnsupportedModelError, match="outside"):
        open_safetensors(folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(file, tmp_path):
    folder = tiny_checkpoint("mistral", tmp_path)
    (folder / file).unlink()
    with pytest.raises(UnsupportedModelError, match=file):
        open_safetensors(folder)
