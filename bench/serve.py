"""`python -m bench.serve`: throughput and latency of one OpenAI-compatible server, or of several side by side.

Reads the command line, drives the servers (`bench/load.py`, `bench/comparison.py`) and prints what came of it
(`bench/report.py`). bench/README.md shows how it is used.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from bench import report
from bench.comparison import Level, LevelResult, roofline_share, run_level
from bench.http_client import HttpClient
from bench.load import Limits, closed_loop, open_loop
from bench.machine import MachineError, measure_in_process_of_its_own
from bench.options import add_load_options, numbers, positive_int, run_bounded
from bench.roofline import BYTES, MachineLimits, ModelSize
from bench.summary import Summary, summarise
from bench.targets import Target, TargetError, authorization, model_size, with_model
from bench.workload import Workload

DESCRIPTION = "Throughput and latency of one OpenAI-compatible server, or of several side by side."
REQUESTS_PER_CLIENT = 4
LEAST_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A server that answered. `size` is None if nothing is known of its model, or it runs elsewhere."""

    target: Target
    client: HttpClient
    size: ModelSize | None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m bench.serve", description=DESCRIPTION)
    which = result.add_mutually_exclusive_group()
    which.add_argument("--url", default="http://127.0.0.1:8000", help="the one server to measure (%(default)s)")
    which.add_argument(
        "--target", action="append", metavar="NAME=URL[,MODEL[,DTYPE]]", help="a server; several alternate in rounds"
    )
    how = result.add_mutually_exclusive_group()
    how.add_argument("--concurrency", type=numbers, default=None, help="closed loop: clients, as 1,8,32 (1)")
    how.add_argument("--rate", type=numbers, default=None, help="open loop: Poisson arrivals a second, as 2,4")
    result.add_argument("--requests", type=positive_int, help=f"a level ({REQUESTS_PER_CLIENT} for each client)")
    result.add_argument("--rounds", type=positive_int, default=1, help="how often each level is measured (%(default)s)")
    result.add_argument("--warmup", type=int, default=4, help="requests before a level, not counted (%(default)s)")
    result.add_argument("--no-roofline", action="store_true", help="do not measure this machine's limits")
    result.add_argument("--parameters", type=float, help="of the model, if the server has no /server_info")
    result.add_argument("--dtype", choices=list(BYTES), default="bfloat16", help="of the weights then (%(default)s)")
    add_load_options(result, duration=60.0)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every server answered something at every level, 1 otherwise."""
    options = parser().parse_args(arguments)
    return run_bounded(_measure(options))


async def _measure(options: argparse.Namespace) -> int:
    console = Console()
    headers = authorization(options.api_key_env)
    targets = [Target.parse(text) for text in options.target or ()] or [
        replace(Target.parse(f"server={options.url}"), model=options.model or "")
    ]
    if len({target.name for target in targets}) < len(targets):
        raise TargetError("two servers have the same name")
    async with AsyncExitStack() as stack:
        servers = {}
        for target in targets:
            client = await stack.enter_async_context(target.client(headers))
            servers[target.name] = MeasuredServer(
                await with_model(target, client), client, await _size(options, target, client)
            )
        servers = _with_equal_models(servers)
        machine = await asyncio.to_thread(_machine_limits, options, servers, console)
        results = await _run_levels(options, servers, machine, console)
    if options.json:
        document = _document(options, servers, machine, results)
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(any(s.requests for s in rounds) for r in results for rounds in r.rounds.values()) else 1


async def _size(options: argparse.Namespace, target: Target, client: HttpClient) -> ModelSize | None:
    if not target.is_local:
        return None
    if options.parameters:
        return ModelSize(options.parameters, 0.0, target.dtype or options.dtype)
    return await model_size(client)


def _with_equal_models(servers: dict[str, MeasuredServer]) -> dict[str, MeasuredServer]:
    """A local server whose dtype was named is taken to hold the model of the first server that told its size."""
    known = next((server.size for server in servers.values() if server.size), None)
    return {
        name: replace(server, size=replace(known, dtype=server.target.dtype))
        if known and server.size is None and server.target.is_local and server.target.dtype
        else server
        for name, server in servers.items()
    }


def _machine_limits(
    options: argparse.Namespace, servers: dict[str, MeasuredServer], console: Console
) -> dict[str, MachineLimits]:
    """This machine's limits by dtype of the products; weights of fewer bits are multiplied in bfloat16."""
    wanted = {_product_dtype(server.size) for server in servers.values() if server.size}
    if options.no_roofline:
        return {}
    limits = {}
    for dtype in sorted(wanted):
        try:
            limits[dtype] = measure_in_process_of_its_own(dtype)
        except MachineError as error:
            console.print(str(error), markup=False, style="yellow")
            continue
        console.print(
            f"this machine ({limits[dtype].device}): reads {limits[dtype].read_bytes_per_sec / 1e9:.1f} GB/s, "
            f"{dtype} products {limits[dtype].matmul_flops_per_sec / 1e9:.0f} GFLOP/s",
            markup=False,
        )
    return limits


def _product_dtype(size: ModelSize) -> str:
    return size.dtype if size.dtype in ("float32", "float16") else "bfloat16"


async def _run_levels(
    options: argparse.Namespace,
    servers: dict[str, MeasuredServer],
    machine: dict[str, MachineLimits],
    console: Console,
) -> list[LevelResult]:
    rng = Random(options.seed)
    kind = "rate" if options.rate else "concurrency"
    results = []
    for value in options.rate or options.concurrency or [1.0]:
        level = Level(kind, value)  # type: ignore[arg-type]
        for server in servers.values():
            await _warm_up(options, server, level, rng)
        result = await run_level(list(servers), level, options.rounds, partial(_run_once, options, servers, rng))
        report.print_level(console, result, partial(_share, servers, machine, level))
        results.append(result)
    return results


async def _warm_up(options: argparse.Namespace, server: MeasuredServer, level: Level, rng: Random) -> None:
    if options.warmup <= 0:
        return
    clients = min(options.warmup, int(level.value)) if level.kind == "concurrency" else 1
    limits = Limits(options.warmup, options.duration, options.drain)
    workload = _workload(options, server)
    await closed_loop(server.client, lambda: workload.request(rng), max(clients, 1), limits)


async def _run_once(
    options: argparse.Namespace, servers: dict[str, MeasuredServer], rng: Random, name: str, level: Level
) -> Summary:
    server = servers[name]
    workload = _workload(options, server)

    def next_request() -> Any:
        return workload.request(rng)

    if level.kind == "rate":
        requests = options.requests or max(LEAST_REQUESTS, int(level.value * options.duration) + 1)
        limits = Limits(requests, options.duration, options.drain)
        return summarise(await open_loop(server.client, next_request, level.value, limits, rng))
    requests = options.requests or max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * int(level.value))
    limits = Limits(requests, options.duration, options.drain)
    return summarise(await closed_loop(server.client, next_request, int(level.value), limits))


def _workload(options: argparse.Namespace, server: MeasuredServer) -> Workload:
    return Workload(
        model=server.target.model,
        prompt_len=options.prompt_len,
        max_tokens=options.max_tokens,
        route=options.route,
        temperature=options.temperature,
        ignore_eos=not options.no_ignore_eos,
        extra=options.extra,
    )


def _share(
    servers: dict[str, MeasuredServer], machine: dict[str, MachineLimits], level: Level, name: str, summary: Summary
) -> float | None:
    size = servers[name].size
    limits = machine.get(_product_dtype(size)) if size else None
    return roofline_share(summary, level, limits, size) if size and limits else None


def _document(
    options: argparse.Namespace,
    servers: dict[str, MeasuredServer],
    machine: dict[str, MachineLimits],
    results: Sequence[LevelResult],
) -> dict[str, Any]:
    """The JSON report."""
    return {
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "machine": {dtype: asdict(limits) for dtype, limits in machine.items()},
        "models": {name: server.target.model for name, server in servers.items()},
        "levels": [report.level_as_json(result, partial(_share, servers, machine, result.level)) for result in results],
    }


if __name__ == "__main__":
    sys.exit(main())
