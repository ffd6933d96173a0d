"""Costs of steps that are not fitted, and all that is read or written: rooflines by hand, round trips, errors."""

import json
from dataclasses import replace

import pytest

from scheduler import ConfigError
from scheduler.costs import (
    ConstantCost,
    FittedCost,
    Machine,
    ModelShape,
    Program,
    RooflineCost,
    SecondsPer,
    format_cost,
    load_cost,
    parse_cost,
    parse_sample,
    preset_machines,
    preset_models,
    read_samples,
    sample_line,
    save_cost,
    write_samples,
)
from scheduler.simulation.records import StepSample, StepShape

FLAG_OF_ONE = {"num_tokens": 8, "num_rows": 8, "single_token_rows": 1}
MODELS = {model.name: model for model in preset_models()}
MACHINES = {machine.name: machine for machine in preset_machines()}
LLAMA = MODELS["llama-3-8b"]
# Easy numbers: one layer, every size small; 1000 FLOP/s and 100 bytes/s.
TOY = ModelShape("toy", 1, 4, 2, 1, 2, 8, 10)
SLOW = Machine("slow", 1000.0, 100.0)
DECODE = StepShape(1, 1, 0, 1000, 1000)
SAMPLE = StepSample(StepShape(4, 4, 0, 812, 812), 4, 4, 0.0123, False)
FITTED = FittedCost(
    SecondsPer(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (Program(8, 8, True, -0.5, 7), Program(16, 8, False)), 0.7, 0.8
)


def test_a_constant_cost_is_a_line():
    cost = ConstantCost(0.02, 0.001, 0.005)
    assert cost.step_seconds(StepShape(2, 30, 29, 100, 900)) == pytest.approx(0.05)
    assert cost.idle_start_seconds() == 0.005


# Roofline


def test_parameters_are_those_of_the_published_models():
    """Without norms, and with one matrix where input embedding and head are two."""
    assert MODELS["smollm2-135m"].matrix_parameters() == pytest.approx(134.5e6, rel=0.001)
    assert LLAMA.matrix_parameters() == pytest.approx(8.03e9 - 128256 * 4096, rel=0.001)
    assert MODELS["llama-3-70b"].matrix_parameters() == pytest.approx(70.55e9 - 128256 * 8192, rel=0.001)
    assert MODELS["mixtral-8x7b"].matrix_parameters() == pytest.approx(46.7e9 - 32000 * 4096, rel=0.001)


def test_kv_bytes_of_a_token():
    assert LLAMA.kv_bytes_per_token() == 2 * 32 * 8 * 128 * 2 == 131072
    assert RooflineCost(LLAMA, MACHINES["h200"], 8).kv_bytes_per_token() == 131072
    assert replace(LLAMA, bytes_per_kv_element=1).kv_bytes_per_token() == 65536


def test_a_step_by_hand():
    """Attention 4·2·2·(2+1) = 48 parameters, feed-forward 3·4·8 = 96, head 40; 8 bytes of KV a token."""
    cost = RooflineCost(TOY, SLOW)
    reading = ((48 + 96 + 40) * 2 + 8 * (5 + 1)) / 100
    assert cost.step_seconds(StepShape(1, 1, 0, 5, 5)) == pytest.approx(reading)
    computing = (2 * 144 * 100 + 2 * 40 * 1 + 4 * 2 * 2 * 10_000) / 1000
    assert cost.step_seconds(StepShape(1, 100, 100, 100, 10_000)) == pytest.approx(computing)
    late = RooflineCost(TOY, SLOW, overhead_seconds=0.5, idle_seconds=0.25)
    assert late.step_seconds(StepShape(1, 1, 0, 5, 5)) == pytest.approx(reading + 0.5)
    assert late.idle_start_seconds() == 0.25


def test_llama_3_8b_decodes_at_the_speed_of_memory():
    weights = LLAMA.matrix_parameters() * 2
    assert weights / 4.8e12 == pytest.approx(3.127e-3, rel=0.001)
    full = replace(MACHINES["h200"], bandwidth_efficiency=1.0)
    alone = RooflineCost(LLAMA, full).step_seconds(DECODE)
    assert alone == pytest.approx((weights + 131072 * 1001) / 4.8e12)
    assert RooflineCost(LLAMA, MACHINES["h200"]).step_seconds(DECODE) == pytest.approx(alone / 0.9)
    assert RooflineCost(LLAMA, MACHINES["h100"]).step_seconds(DECODE) == pytest.approx(alone / 0.9 * 4.8 / 3.35)


def test_a_long_prefill_is_bound_by_operations():
    shape = StepShape(1, 8192, 8192, 8192, 8192**2)
    layers = LLAMA.matrix_parameters() - LLAMA.head_parameters()
    operations = 2 * layers * 8192 + 2 * 128256 * 4096 + 4 * 32 * 32 * 128 * 8192**2
    assert RooflineCost(LLAMA, MACHINES["h200"]).step_seconds(shape) == pytest.approx(operations / (989.5e12 * 0.7))


def test_tensor_parallelism_divides_and_kv_heads_bound_it():
    large, h200 = MODELS["llama-3-70b"], MACHINES["h200"]
    prefill = StepShape(1, 4096, 4096, 4096, 4096**2)
    one, eight = RooflineCost(large, h200), RooflineCost(large, h200, 8)
    for shape in (DECODE, prefill):
        assert eight.step_seconds(shape) == pytest.approx(one.step_seconds(shape) / 8)
    sixteen = RooflineCost(large, h200, 16)
    more_kv = DECODE._replace(num_kv_tokens=10_001_000)
    difference = [cost.step_seconds(more_kv) - cost.step_seconds(DECODE) for cost in (eight, sixteen)]
    assert difference[0] == pytest.approx(difference[1])


def test_a_token_computes_two_experts_and_a_large_batch_reads_all():
    mixtral, wide = MODELS["mixtral-8x7b"], Machine("wide", 1.0, 1e30)
    active = mixtral.attention_parameters() + 2 * mixtral.expert_parameters()
    assert active == pytest.approx(12.9e9 - 2 * 32000 * 4096, rel=0.01)
    shape = StepShape(1, 1, 0, 0, 0)
    assert RooflineCost(mixtral, wide).step_seconds(shape) == pytest.approx(2 * active + 2 * 32000 * 4096)
    narrow = Machine("narrow", 1e30, 1.0)
    kv = mixtral.kv_bytes_per_token()
    assert RooflineCost(mixtral, narrow).step_seconds(shape) == pytest.approx(2 * (active + 32000 * 4096) + kv)
    many = RooflineCost(mixtral, narrow).step_seconds(StepShape(500, 500, 0, 0, 0))
    assert many == pytest.approx(2 * mixtral.matrix_parameters() + 500 * kv)


# Specs


@pytest.mark.parametrize(
    ("spec", "cost"),
    [
        ("constant:0.02", ConstantCost(0.02)),
        ("constant:0.02,0.0001", ConstantCost(0.02, 0.0001)),
        ("constant:0,1e-3,idle=0.5", ConstantCost(0.0, 0.001, 0.5)),
        ("roofline:llama-3-8b@h200", RooflineCost(LLAMA, MACHINES["h200"])),
        ("roofline:llama-3-70b@h200,tp=8", RooflineCost(MODELS["llama-3-70b"], MACHINES["h200"], 8)),
        (
            "roofline:smollm2-135m@cpu-2-core,overhead=0.001,idle=0.002,flops_efficiency=0.5,bandwidth_efficiency=0.25,"
            "weight_bytes=0.625,kv_bytes=4",
            RooflineCost(
                replace(MODELS["smollm2-135m"], bytes_per_weight=0.625, bytes_per_kv_element=4.0),
                replace(MACHINES["cpu-2-core"], flops_efficiency=0.5, bandwidth_efficiency=0.25),
                1,
                0.001,
                0.002,
            ),
        ),
    ],
)
def test_specs(spec, cost):
    assert load_cost(spec) == cost


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("constant:", r"cost 'constant:': a cost is ''; it must be a number"),
        ("constant:fast", "a cost is 'fast'; it must be a number"),
        ("constant:inf", "a cost is 'inf'; it must be finite"),
        ("constant:-1", "seconds_per_step is -1.0; it must be a finite number of 0 or more"),
        ("constant:0", "a step must take time"),
        ("constant:1,2,3", "at most two numbers are wanted"),
        ("constant:1,tp=2", "unknown option 'tp=2'; known are idle"),
        ("roofline:llama-3-8b", "a roofline is MODEL@MACHINE"),
        ("roofline:gpt@h200", "unknown model 'gpt'; known are smollm2-135m, llama-3-8b"),
        ("roofline:llama-3-8b@abacus", "unknown machine 'abacus'; known are h100, h200"),
        ("roofline:llama-3-8b@h200,8", "unknown option '8'; known are tp, overhead"),
        ("roofline:llama-3-8b@h200,tp=2,tp=4", "tp is given twice"),
        ("roofline:llama-3-8b@h200,tp=1.5", "tp is 1.5; it must be an integer"),
        ("roofline:llama-3-8b@h200,tp=0", "tensor_parallel is 0; it must be at least 1"),
        ("roofline:llama-3-8b@h200,overhead=-1", "overhead_seconds is -1.0"),
        ("roofline:llama-3-8b@h200,flops_efficiency=2", "flops_efficiency of machine h200 is 2.0; it must be greater"),
        ("roofline:llama-3-8b@h200,weight_bytes=0", "bytes_per_weight of model llama-3-8b is 0.0"),
        ("no/such/file.json", "No such file or directory; neither a file nor constant:SECONDS"),
    ],
)
def test_errors_of_specs(spec, message):
    with pytest.raises(ConfigError, match=message):
        load_cost(spec)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="num_layers of model toy is 0; it must be a finite number greater than 0"):
        replace(TOY, num_layers=0)
    for experts, active in ((8, 0), (2, 3), (0, 1)):
        with pytest.raises(ConfigError, match=f"model toy sends a token to {active} of {experts} experts"):
            replace(TOY, num_experts=experts, num_experts_per_token=active)
    with pytest.raises(ConfigError, match="bandwidth of machine slow is -1"):
        replace(SLOW, bandwidth=-1.0)


# Files of costs


@pytest.mark.parametrize(
    "cost",
    [ConstantCost(0.02, 0.001, 0.5), RooflineCost(MODELS["mixtral-8x7b"], MACHINES["b200"], 2, 0.1, 0.2), FITTED],
    ids=["constant", "roofline", "fitted"],
)
def test_costs_survive_a_file(tmp_path, cost):
    path = tmp_path / "cost.json"
    save_cost(path, cost)
    loaded = load_cost(path)
    assert loaded == cost
    assert load_cost(str(path)).step_seconds(DECODE) == cost.step_seconds(DECODE)
    assert json.loads(path.read_text())["version"] == 1


def changed(cost: ConstantCost | RooflineCost | FittedCost, **changes: object) -> str:
    return json.dumps({**json.loads(format_cost(cost)), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "^f: not JSON: "),
        ("[]", "^f: not a JSON object"),
        ("{}", "^f: kind is missing"),
        ('{"kind": 1}', "^f: kind is 1; it must be a string"),
        ('{"kind": "x", "version": 1}', "^f: kind is 'x'; it must be one of constant, roofline, fitted"),
        ('{"kind": "fitted", "version": true}', "^f: version is True; it must be an integer"),
        (changed(FITTED, version=2), "^f: version is 2; this program reads version 1"),
        (changed(FITTED, colour=1), "^f: unknown keys: colour"),
        (changed(FITTED, idle_seconds="1"), "^f: idle_seconds is '1'; it must be a number"),
        (changed(FITTED, idle_seconds=-1), "^f: idle_seconds is -1.0; it must be a finite number of 0 or more"),
        (changed(FITTED, programs=3), "^f: programs is 3; it must be a list"),
        (changed(FITTED, programs=[{}]), r"^f: programs\[0\]: num_tokens is missing"),
        (
            changed(FITTED, programs=[FLAG_OF_ONE]),
            "it must be true or false",
        ),
        (changed(FITTED, seconds_per=[]), "^f: seconds_per: not a JSON object"),
        (changed(FITTED, seconds_per={"step": 1}), "^f: seconds_per: padded_token is missing"),
        (changed(ConstantCost(1.0), seconds_per_step=0), "^f: a step must take time"),
        (changed(RooflineCost(TOY, SLOW), tensor_parallel=1.5), "^f: tensor_parallel is 1.5; it must be an integer"),
        (changed(RooflineCost(TOY, SLOW), machine={"name": "m"}), "^f: machine: flops is missing"),
    ],
)
def test_errors_of_cost_files(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_cost(text, "f")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "cost.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cost\.json: not UTF-8 text"):
        load_cost(path)
    with pytest.raises(ConfigError, match=r"cost\.json: not UTF-8 text"):
        list(read_samples(path))


# Files of samples


def test_samples_survive_a_file(tmp_path):
    path = tmp_path / "steps.jsonl"
    samples = [SAMPLE, StepSample(StepShape(2, 65, 64, 165, 4260), 96, 16, 0.1 + 0.2, True)]
    assert write_samples(path, iter(samples)) == 2
    path.write_text(path.read_text() + "\n")
    read = list(read_samples(path))
    assert read == samples
    assert all(isinstance(sample.shape, StepShape) for sample in read)


def test_a_line_is_short_and_readable():
    assert sample_line(SAMPLE) == (
        '{"rows": 4, "tokens": 4, "prefill": 0, "kv": 812, "attended": 812, "padded_tokens": 4, "padded_rows": 4, '
        '"seconds": 0.0123, "idle": false}'
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": -1}, "rows is -1; it must be an integer of 0 or more"),
        ({"kv": True}, "kv is True; it must be an integer"),
        ({"tokens": 4.0}, "tokens is 4.0; it must be an integer"),
        ({"seconds": 0}, "seconds is 0; it must be a finite number greater than 0"),
        ({"seconds": float("nan")}, "seconds is nan; it must be a finite number"),
        ({"seconds": "1"}, "seconds is '1'; it must be"),
        ({"idle": 0}, "idle is 0; it must be true or false"),
        ({"extra": 1}, "extra is unknown"),
        ({"rows": 0}, "rows is 0, less than 1"),
        ({"tokens": 3}, "tokens is 3, less than rows, 4"),
        ({"prefill": 5}, "tokens is 4, less than prefill, 5"),
        ({"padded_rows": 3}, "padded_rows is 3, less than rows, 4"),
        ({"padded_tokens": 3}, "padded_tokens is 3, less than tokens, 4"),
    ],
)
def test_errors_of_samples(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_sample(json.dumps({**json.loads(sample_line(SAMPLE)), **changes}))


def test_errors_name_the_file_and_the_line(tmp_path):
    path = tmp_path / "steps.jsonl"
    for bad, message in (
        ("{", r"steps\.jsonl:2: not JSON: "),
        ("3", r"steps\.jsonl:2: not a JSON object"),
        ('{"rows": 1}', r"steps\.jsonl:2: tokens is missing; prefill is missing"),
    ):
        path.write_text(f"{sample_line(SAMPLE)}\n{bad}\n")
        with pytest.raises(ConfigError, match=message):
            list(read_samples(path))
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file or directory"):
        list(read_samples(tmp_path / "none.jsonl"))
