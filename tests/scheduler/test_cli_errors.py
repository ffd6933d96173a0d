"""What goes wrong on the command line ends with one line on stderr and an exit code."""

import pytest

from scheduler.cli import simulate
from scheduler.simulation.records import Arrival
from scheduler.workloads import write_trace
from tests.scheduler.command_line import Cli, record


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--policy", "fcsf"], "did you mean 'fcfs'"),
        (["simulate", "--policy", "fcfs(x=1)"], "has no option 'x'"),
        (["simulate", "--policy", "sjf(prefill_weight)"], "write key=value"),
        (["simulate", "--policy", "sjf(prefill_weight=1,prefill_weight=2)"], "given twice"),
        (["simulate", "--policy", "fair(weights.a=1,weights.a=2)"], "given twice"),
        (["simulate", "--policy", "fair(weights.a=1,weights=2)"], "given twice"),
        (["simulate", "--policy", "fair(weights=2,weights.a=1)"], "both a value and a table"),
        (["simulate", "--policy", "fcfs,sjf"], "compare runs several"),
        (["simulate", "--policy", ""], "no policy"),
        (["simulate", "--policy", "fcfs("], "cannot read from"),
        (["simulate", "--workload", "poison"], "did you mean 'poisson'"),
        (["simulate", "--workload-option", "tenant=a"], "did you mean 'tenants'"),
        (["simulate", "--workload-option", "tenants"], "write key=value"),
        (["simulate", "--workload-option", "slack=2", "--workload-option", "slack=3"], "given twice"),
        (["simulate", "--workload-option", "input_lengths=uniform:9-2"], "cannot be read"),
        (["simulate", "--router", "ruond_robin"], "round_robin"),
        (["simulate", "--trace", "/absent/trace"], "No such file"),
        (["simulate", "--cost", "/absent/cost"], "neither a file nor"),
        (["simulate", "--cost", "roofline:gpt@h200"], "unknown model 'gpt'"),
        (["simulate", "--csv", "/absent/a.csv"], "there is no folder /absent"),
        (["simulate", "--csv", ""], "not the name of a file"),
        (["simulate", "--html", "/tmp"], "not the name of a file"),
        (["simulate", "--csv", "/tmp/same", "--html", "/tmp/same"], "the same file"),
        (["simulate", "--requests", "0"], "--requests must be at least 1"),
        (["simulate", "--requests", "many"], "invalid int value"),
        (["simulate", "--rate", "0"], "must be greater than 0"),
        (["simulate", "--rate", "nan"], "must be greater than 0"),
        (["simulate", "--load", "-1"], "must be greater than 0"),
        (["simulate", "--load", "1", "--rate", "2"], "not allowed with"),
        (["simulate", "--context", "1"], "--context and --generation go together"),
        (["simulate", "--generation", "1"], "--context and --generation go together"),
        (["simulate", "--context", "-1", "--generation", "1"], "at least one engine"),
        (["simulate", "--context", "1", "--generation", "1", "--replicas", "2"], "--replicas is of unified"),
        (["simulate", "--replicas", "0"], "at least one engine"),
        (["simulate", "--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["simulate", "--predictor", "good"], "noisy:SIGMA"),
        (["simulate", "--predictor", "noisy:-1"], "noisy:SIGMA"),
        (["simulate", "--capacity-policy", "none"], "invalid choice"),
        (["simulate", "--max-model-len", "1"], "cannot be found out"),
        (["simulate", "--workload", "closed", "--rate", "3"], "closed loop has no rate"),
        (["simulate", "--nonsense"], "unrecognized arguments"),
        (["compare", "--workload", "closed", "--loads", "1"], "closed loop has no rate"),
        (["compare", "--seeds", "0"], "must be at least 1"),
        (["compare", "--jobs", "0"], "must be at least 1"),
        (["compare", "--loads", "a,b"], "numbers with commas"),
        (["compare", "--loads", ""], "numbers with commas"),
        (["compare", "--loads", "1,1.0"], "named twice"),
        (["compare", "--rates", "0"], "must be greater than 0"),
        (["compare", "--policies", "fcfs,fcfs"], "named twice"),
        (["compare", "--policies", "fcfs,fiar"], "did you mean 'fair'"),
        (["fit", "/absent"], "No such file"),
        (["fit", "/absent", "--holdout", "1"], "between 0 and 1"),
        (["replay", "/absent"], "No such file"),
        (["simulat"], "invalid choice"),
        ([], "required"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_one_line_and_exit_code_2(cli, arguments, message):
    code, out, err = cli.attempt(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_a_load_is_not_of_a_trace(cli, tmp_path):
    write_trace(tmp_path / "trace", [Arrival("", 0.0, 8, 1)])
    for arguments in (["simulate", "--load", "1"], ["compare", "--loads", "1"]):
        code, _, err = cli.attempt(*arguments, "--trace", tmp_path / "trace")
        assert (code, "a trace has no load" in err) == (2, True)
    code, _, err = cli.attempt("simulate", "--trace", tmp_path / "trace", "--workload-option", "slack=2")
    assert (code, "does not go with --trace" in err) == (2, True)
    (tmp_path / "trace").write_text("\n{}\n")
    code, _, err = cli.attempt("simulate", "--trace", tmp_path / "trace")
    assert (code, "trace, line 2: 'output_length'" in err) == (2, True)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("{", "not what a server records"),
        ("[]", "not what a server records"),
        ("{}", "not what a server records (KeyError: 'scheduler_config')"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_seqs": "x"}, "not what a server records"),
        ({"policy_options": "x"}, "not what a server records"),
        ({"waiting_queue_policy": "gone"}, "unknown waiting_queue_policy 'gone'"),
    ],
)
def test_recordings_that_cannot_be_replayed(cli, tmp_path, about, message):
    folder = record(tmp_path / "run", **(about if isinstance(about, dict) else {}))
    if isinstance(about, str):
        (folder / "about.json").write_text(about)
    code, _, err = cli.attempt("replay", folder)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_a_recording_with_too_few_steps_says_so(cli, tmp_path):
    folder = record(tmp_path / "run")
    (folder / "steps.jsonl").write_text("")
    for command in ("fit", "replay"):
        code, _, err = cli.attempt(command, folder)
        assert (code, "too few" in err) == (2, True)
    assert "recorded" in cli("replay", folder, "--cost", "constant:0.02")


def test_control_c_exits_with_130(cli, monkeypatch):
    def stop(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "run", stop)
    assert cli.attempt("simulate") == (130, "", "stopped\n")
