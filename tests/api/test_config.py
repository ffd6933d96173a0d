"""The configuration: sources and their precedence, unknown keys, what is refused, and what operators get to read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from api.config import REDACTED, ServerConfig, is_loopback
from api.config_loading import Launch, load, resolve, to_yaml
from api.config_sources import ConfigError, from_file, leaves, variable_name

ROOT = Path(__file__).parents[2]


def refused(arguments: list[str], environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(arguments, environment or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "api.serve", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def written(folder: Path, text: str) -> list[str]:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return ["--config", str(path)]


def test_each_source_goes_before_the_next(tmp_path: Path) -> None:
    file = written(
        tmp_path, "port: 1\nmax_model_len: 1\nseed: 1\nscheduler_config: {max_num_seqs: 1, max_queue_size: 1}\n"
    )
    environment = {
        "TWINMESH_PORT": "2",
        "TWINMESH_SEED": "2",
        "TWINMESH_SCHEDULER_CONFIG__MAX_NUM_SEQS": "2",
        "TWINMESH_MODEL": "of-the-environment",
    }
    config = load([*file, "--set", "port=3", "--set", "seed=3", "--port", "4"], environment).config
    assert (config.port, config.seed, config.max_model_len, config.model) == (4, 3, 1, "of-the-environment")
    section = config.scheduler_config
    assert (section.max_num_seqs, section.max_queue_size, section.max_num_batched_tokens) == (2, 1, 512)


def test_later_assignments_win() -> None:
    launch = load(["--set", "mesh.tp=2", "--set", "mesh={tp: 4}", "--set", "mesh.dp=2"], {})
    assert (launch.config.mesh.tp, launch.config.mesh.dp) == (4, 2)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("mdoel: x", "model"),
        ("max_num_seqs: 3", "scheduler_config.max_num_seqs"),
        ("scheduler_config: {max_num_seq: 3}", "scheduler_config.max_num_seqs"),
        ("scheduler_config: {service_tiers: {flexx: 1.0}}", "scheduler_config.service_tiers.flex"),
        ("kv_cache: {}", "kv_cache_config"),
        ("faults: [{pont: engine.step}]", "faults.0.point"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, text: str, nearest: str) -> None:
    message = refused(written(tmp_path, text))
    assert "unknown key" in message
    assert f"did you mean {nearest!r}?" in message


def test_unknown_keys_of_other_sources() -> None:
    assert "'scheduler_config.aging_per_second'" in refused(["--set", "scheduler_config.ageing_per_second=1"])
    assert "'TWINMESH_API_KEYS'" in refused([], {"TWINMESH_API_KEY": "x"})
    assert "'TWINMESH_MESH__TP'" in refused([], {"TWINMESH_TP": "2"})
    assert "did you mean" not in refused(["--set", "zzzz=1"])


def test_variables_of_kubernetes_and_of_ours_are_no_keys() -> None:
    environment = {
        "TWINMESH_PORT": "tcp://10.0.0.7:8000",
        "TWINMESH_SERVICE_HOST": "10.0.0.7",
        "TWINMESH_SERVICE_PORT": "8000",
        "TWINMESH_SERVICE_PORT_HTTP": "8000",
        "TWINMESH_PORT_8000_TCP_ADDR": "10.0.0.7",
        "TWINMESH_CACHE": "/nowhere",
    }
    assert load([], environment).config == ServerConfig()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("port: 1\nport: 2", "line 2: the key 'port' is given twice"),
        ("mesh: {tp: 1, tp: 2}", "given twice"),
        ("1: x", "a key must be text"),
        ("model: [", "not valid YAML"),
        ("- model", "must be a mapping"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, part: str) -> None:
    assert part in refused(written(tmp_path, text))


def test_a_file_may_be_empty_or_have_empty_sections(tmp_path: Path) -> None:
    assert load(written(tmp_path, "# nothing\n"), {}).config == ServerConfig()
    assert load(written(tmp_path, "scheduler_config:\n  # max_num_seqs: 3\n"), {}).config == ServerConfig()
    assert "No such file" in refused(["--config", str(tmp_path / "missing.yaml")])


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    config = load(written(tmp_path, "scheduler_config: {aging_per_second: 1e-3}"), {}).config
    assert config.scheduler_config.aging_per_second == 0.001


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("scheduler_config.max_num_seqs=0", "greater than or equal to 1, not 0"),
        ("scheduler_config.max_num_seqs=many", "valid integer, not 'many'"),
        ("scheduler_config.max_num_seqs=1.5", "valid integer, not 1.5"),
        ("scheduler_config.service_tiers.flex=1.5", "less than or equal to 1"),
        ("engine_stall_secs=.nan", "finite"),
        ("drain_timeout_secs=true", "valid number"),
        ("kv_cache_config.memory_fraction=0", "greater than 0"),
        ("seed=9223372036854775808", "seed"),
        ("port=70000", "65535"),
        ("cors_origins=example.org", "an origin looks like"),
        ("log_level=loud", "'debug', 'info'"),
    ],
)
def test_values_that_make_no_sense(setting: str, part: str) -> None:
    message = refused(["--set", setting])
    assert message.startswith(setting.partition("=")[0])
    assert part in message


@pytest.mark.parametrize(
    "setting",
    [
        "role=context",
        "quantization=int8",
        "mesh.ep=2",
        "kv_transfer.port=7000",
        "disagg={context: {tp: 4}}",
        "context_servers={num_instances: 1}",
        "schedule_style=context_first",
    ],
)
def test_what_this_version_cannot_do_is_said(setting: str) -> None:
    assert "not supported yet" in refused(["--set", setting])


def test_the_values_of_the_contract_are_accepted_for_what_is_not_supported_yet() -> None:
    resolve({"role": "unified", "quantization": None, "kv_transfer": {"transport": "zmq", "port": 0}, "disagg": None})


def test_faults_need_permission() -> None:
    faults = ["--set", "faults=[{point: engine.step, action: raise, after: 2}]"]
    assert "TWINMESH_ALLOW_FAULTS=1" in refused(faults)
    assert "TWINMESH_ALLOW_FAULTS=1" in refused(faults, {"TWINMESH_ALLOW_FAULTS": "true"})
    allowed = {"TWINMESH_ALLOW_FAULTS": "1"}
    assert load(faults, allowed).config.faults[0].after == 2
    for spec in ("{point: transfer.send, action: drop}", "{point: engine.step, action: 'delay:-1'}", "{action: raise}"):
        refused(["--set", f"faults=[{spec}]"], allowed)


def test_without_keys_only_loopback(tmp_path: Path) -> None:
    assert "there are no api_keys" in refused(["--host", "0.0.0.0"])
    assert load(["--host", "0.0.0.0"], {"TWINMESH_API_KEYS": "one,two"}).client_keys == ("one", "two")
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n", encoding="utf-8")
    launch = load(["--host", "0.0.0.0", "--set", f"api_key_file={file}"], {"TWINMESH_API_KEYS": "three"})
    assert launch.client_keys == ("three", "one", "two")
    file.write_text("# nothing\n", encoding="utf-8")
    assert "holds no key" in refused(["--set", f"api_key_file={file}"])
    assert "cannot be read" in refused(["--set", "api_key_file=/nowhere/keys"])
    assert "admin_keys need api_keys" in refused([], {"TWINMESH_ADMIN_KEYS": "x"})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("LocalHost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
        ("127.0.0.1.example.org", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_no_message_quotes_a_key(tmp_path: Path) -> None:
    secret = "sk-marker-0123456789"
    messages = [
        refused(["--set", f"api_keys={secret}"]),
        refused([f"--api-key={secret}"]),
        refused([secret]),
        refused([], {"TWINMESH_API_KEYS": f"{secret} x"}),
        refused([], {"TWINMESH_API_KEYS": f"[{secret}"}),
        refused([], {"TWINMESH_API_KEYS": f"[{{{secret}: 1}}]"}),
        refused(written(tmp_path, f"api_keys: {secret}")),
        refused(written(tmp_path, f"api_keys: ['{secret} ']")),
    ]
    assert not [message for message in messages if "marker" in message]


def test_a_printed_configuration_holds_no_key_and_is_not_one() -> None:
    config = load([], {"TWINMESH_API_KEYS": "sk-marker", "TWINMESH_ADMIN_KEYS": "sk-marker"}).config
    text = to_yaml(config)
    assert "marker" not in text
    assert "marker" not in repr(config)
    values = yaml.safe_load(text)
    assert values["api_keys"] == [REDACTED]
    with pytest.raises(ConfigError, match="not a key"):
        resolve(values)


def test_a_printed_configuration_can_be_read_back(tmp_path: Path) -> None:
    first = load(["--set", "mesh.tp=2", "--set", "mesh.devices=0-1", "--port", "0"], {})
    assert load(written(tmp_path, to_yaml(first.config)), {}).config == first.config


def test_the_shipped_file_is_the_defaults_and_names_every_key() -> None:
    path = ROOT / "configs" / "default.yaml"
    assert load(["--config", str(path)], {}).config == ServerConfig()
    named = set(re.findall(r"^\s*(?:# )?([a-z_]+):", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert {path.rpartition(".")[2] for path, _ in leaves()} <= named


def test_the_documentation_names_every_key() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    missing = [path for path, _ in leaves() if f"`{path}`" not in text]
    assert not missing


def test_every_key_has_a_variable() -> None:
    texts = {"api_keys": "a", "admin_keys": "a", "cors_origins": "https://a.example"}
    for path, field in leaves():
        default = field.get_default(call_default_factory=True, validated_data={})
        if path in texts or default in (None, []):
            continue
        name = variable_name(path)
        assert isinstance(load([], {name: str(default).lower() if isinstance(default, bool) else str(default)}), Launch)


def test_duplicate_detection_allows_merge_keys(tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text("scheduler_config:\n  <<: {max_num_seqs: 3}\n  max_queue_size: 5\n", encoding="utf-8")
    assert from_file(path) == {"scheduler_config": {"max_num_seqs": 3, "max_queue_size": 5}}


def test_help_lists_every_key_with_its_default() -> None:
    result = run("--help")
    assert result.returncode == 0
    for path, _ in leaves():
        assert re.search(rf"^  {re.escape(path)} = ", result.stdout, re.MULTILINE), path
    assert "scheduler_config.max_num_seqs = 32" in result.stdout


def test_print_config_and_exit_codes(tmp_path: Path) -> None:
    printed = run("--print-config", "--port", "9", TWINMESH_API_KEYS="sk-marker")
    assert printed.returncode == 0
    assert yaml.safe_load(printed.stdout)["port"] == 9
    assert "marker" not in printed.stdout + printed.stderr
    bad = run(*written(tmp_path, "modle: x"))
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1
    assert "did you mean 'model'?" in bad.stderr
    assert run("--port", "many").returncode == 2


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["waiting_queue_policy=lifo"], "unknown waiting_queue_policy 'lifo'; known: fcfs, priority, sjf"),
        (["waiting_queue_policy=fare"], "did you mean 'fair'?"),
        (["shadow_policy=lifo"], "unknown waiting_queue_policy 'lifo'"),
        (["policy_options={speed: 2}"], "policy 'fcfs' has no option 'speed'; it has none"),
        (["waiting_queue_policy=sjf", "policy_options={aging: 1}"], "it has aging_tokens_per_second, prefill_weight"),
        (["waiting_queue_policy=sjf", "policy_options={prefill_weight: -1}"], "prefill_weight must not be negative"),
    ],
)
def test_policies_are_checked_before_anything_is_loaded(settings: list[str], part: str) -> None:
    arguments = [word for setting in settings for word in ("--set", f"scheduler_config.{setting}")]
    assert part in refused(arguments)
