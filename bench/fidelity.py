"""How true is the simulator? Record real runs, learn step times from some, and predict the others.

`python -m bench.fidelity FOLDER` starts the server once for each policy and load, with its recording on, and sends it
Poisson arrivals of varied lengths. Then each run is simulated: same arrivals, same policy, and a cost model that was
fitted to the steps of the *other* loads alone. The table shows what was measured, what was predicted, and the error;
the last columns are errors with a cost model of the run's own steps, which are the simulator's alone.
With recordings that are there already nothing is started. Nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.http_client import Endpoint, ExchangeError, HttpClient
from scheduler.cli.policies import PolicyChoice
from scheduler.cli.replay import recorded_config, recorded_run
from scheduler.cli.setup import Setup
from scheduler.costs import fit_cost, read_samples
from scheduler.reports import Summary, summarise
from scheduler.simulation.records import Arrival
from scheduler.workloads import TraceWorkload, make_workload

LENGTHS = {"input_lengths": "lognormal:64,0.6,512", "output_lengths": "lognormal:48,0.6,200"}
READY_TIMEOUT_SECS = 600
VOCABULARY = range(1000, 40000)


@dataclass(frozen=True)
class Run:
    """One recording: `folder/POLICY-LOAD`."""

    folder: Path
    policy: str
    load: float

    @property
    def path(self) -> Path:
        """Where the server writes it."""
        return self.folder / f"{self.policy}-{self.load:g}"


class _Ignored:
    """A sink for bodies that nobody reads."""

    def feed(self, data: bytes, now: float) -> None:
        """Drop them."""


class _Body:
    """A sink that keeps the body."""

    def __init__(self) -> None:
        self.data = bytearray()

    def feed(self, data: bytes, now: float) -> None:
        """Keep them."""
        self.data += data


def record(run: Run, num_requests: int, seed: int, settings: Sequence[str]) -> None:
    """Start a server, send it the arrivals, stop it. Raises RuntimeError if it does not become ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    chosen = [f"recording.path={run.path}", f"scheduler_config.waiting_queue_policy={run.policy}", *settings]
    command = [sys.executable, "-m", "api.serve", "--port", str(port)]
    for setting in chosen:
        command += ["--set", setting]
    with open(os.devnull, "wb") as nowhere:
        server = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    try:
        endpoint = Endpoint.parse(f"http://127.0.0.1:{port}")
        model = asyncio.run(_wait_until_warm(endpoint, server))
        workload = make_workload("poisson", rate=run.load, num_requests=num_requests, seed=seed, **LENGTHS)
        asyncio.run(_send(endpoint, model, list(workload.arrivals()), seed))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


async def _wait_until_warm(endpoint: Endpoint, server: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + READY_TIMEOUT_SECS
    async with HttpClient(endpoint) as client:
        while time.monotonic() < deadline and server.poll() is None:
            body = _Body()
            try:
                if (await client.get("/server_info", body)).status == 200:
                    info = json.loads(body.data)
                    if info.get("engine", {}).get("warm_up_is_complete"):
                        return str(info["model"] if isinstance(info["model"], str) else info["model"]["name"])
            except (ExchangeError, OSError):
                pass  # not listening yet
            await asyncio.sleep(0.5)
    raise RuntimeError("the server did not become ready")


async def _send(endpoint: Endpoint, model: str, arrivals: Sequence[Arrival], seed: int) -> None:
    rng = random.Random(seed)
    started = time.monotonic()
    failures = 0

    async def one(client: HttpClient, arrival: Arrival, body: bytes) -> None:
        nonlocal failures
        await asyncio.sleep(max(0.0, started + arrival.time - time.monotonic()))
        response = await client.post("/v1/completions", body, _Ignored())
        failures += response.status != 200

    async with HttpClient(endpoint) as client, asyncio.TaskGroup() as tasks:
        for arrival in arrivals:
            fields = {
                "model": model,
                "prompt": rng.choices(VOCABULARY, k=arrival.input_length),
                "max_tokens": arrival.output_length,
                "ignore_eos": True,
                "priority": arrival.priority,
            }
            tasks.create_task(one(client, arrival, json.dumps(fields).encode()))
    if failures:
        raise RuntimeError(f"{failures} requests failed")


def predict(run: Run, others: Sequence[Run]) -> Summary:
    """Simulate a run with step times learnt from others."""
    samples = [sample for other in others for sample in read_samples(other.path / "steps.jsonl")]
    config, policy = recorded_config(run.path)
    setup = Setup(config=config, cost=fit_cost(samples).model)
    result = setup.run(PolicyChoice(policy.name, policy.name, policy.options), _arrivals(run), seed=0)
    return summarise(result)


def _arrivals(run: Run) -> TraceWorkload:
    return TraceWorkload(run.path / "arrivals.jsonl")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.fidelity", description=__doc__)
    parser.add_argument("folder", type=Path, help="where recordings are, or will be written")
    parser.add_argument("--policies", default="fcfs,priority", help="(%(default)s)")
    parser.add_argument("--loads", default="0.7,1.1,1.5", help="requests a second (%(default)s)")
    parser.add_argument("--requests", type=int, default=150, help="requests of a run (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (%(default)s)")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting of the server")
    options = parser.parse_args(arguments)
    loads = [float(load) for load in options.loads.split(",")]
    runs = [Run(options.folder, policy, load) for policy in options.policies.split(",") for load in loads]
    for run in runs:
        if not run.path.exists():
            print(f"recording {run.policy} at {run.load:g} requests/s", flush=True)
            record(run, options.requests, options.seed, options.settings)
    Console().print(_table(runs))


def _table(runs: Sequence[Run]) -> Table:
    table = Table(title="measured, predicted with step times of the other loads, and error; errors with its own steps")
    own = ("TTFT mean, own steps", "requests/s, own steps")
    for column in ("policy", "load", "TTFT mean, ms", "TTFT p95, ms", "ITL mean, ms", "requests/s", *own):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for run in runs:
        real = summarise(recorded_run(run.path))
        guess = predict(run, [other for other in runs if other.load != run.load])
        own_guess = predict(run, [run])
        cells = (
            _cell(real.overall.ttft.mean, guess.overall.ttft.mean, 1000),
            _cell(real.overall.ttft.p95, guess.overall.ttft.p95, 1000),
            _cell(real.overall.itl.mean, guess.overall.itl.mean, 1000),
            _cell(real.requests_per_sec, guess.requests_per_sec, 1),
            _error(real.overall.ttft.mean, own_guess.overall.ttft.mean),
            _error(real.requests_per_sec, own_guess.requests_per_sec),
        )
        table.add_row(run.policy, f"{run.load:g}", *cells)
    return table


def _cell(real: float | None, guess: float | None, scale: float) -> str:
    if not real or guess is None:
        return "-"
    return f"{real * scale:.4g}  {guess * scale:.4g}  {_error(real, guess)}"


def _error(real: float | None, guess: float | None) -> str:
    return "-" if not real or guess is None else f"{100 * (guess / real - 1):+.1f} %"


if __name__ == "__main__":
    main()
