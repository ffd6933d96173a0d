"""SmolLM2-135M-Instruct in float32 against Hugging Face transformers, through every way a token can be computed.

The expected ids are in `tests/fixtures/smollm2_greedy.json`, with the script that made them beside it. A difference is
allowed only where the two greatest logits are closer than 1e-3, and the comparison ends there.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from model.default_model import default_cache_dir
from model.mesh import make_mesh
from model.weights import resolve_and_load
from scheduler import Scheduler, SchedulerConfig
from tests.model.engines import Client, make_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "smollm2_greedy.json").read_text(encoding="utf-8"))
SHAPES = {"max_num_seqs": 17, "max_num_batched_tokens": 64, "max_model_len": 512, "page_size": 16, "num_pages": 400}


def load(mesh=None):
    return resolve_and_load("smollm2-135m-instruct", dtype="float32", cache_dir=default_cache_dir(), mesh=mesh)


def engine_for(loaded, mesh=None):
    engine = make_engine(
        loaded.config, loaded.params, mesh=mesh, vocab_size=loaded.tokenizer.vocab_size, device_pages=400, **SHAPES
    )
    # Padding a little more is cheaper here than compiling every bucket.
    engine._runner.compile_next = lambda: False
    return engine


@pytest.fixture(scope="module")
def client():
    with Client(engine_for(load()), wait_for_rest=False) as client:
        yield client
        client.check_at_rest()


def limit(client, **changes):
    """Swap the scheduler's limits under the same programs; only while nothing is running."""
    client.check_at_rest()
    client.engine._scheduler = Scheduler(SchedulerConfig(**SHAPES | changes))


def expect(answers, entries, count=64):
    for answer, entry in zip(answers, entries, strict=True):
        for index, (mine, theirs) in enumerate(zip(answer.token_ids, entry["output_ids"][:count], strict=True)):
            if mine != theirs:
                assert entry["gaps"][index] < 1e-3, f"{entry['prompt'][:30]!r} differs at token {index}"
                break


def test_all_prompts_together_then_with_a_warm_prefix_cache(client):
    prompts = [entry["prompt_ids"] for entry in FIXTURE]
    expect(client.ask(*prompts, max_tokens=64), FIXTURE)
    warm = client.ask(*prompts, max_tokens=64)
    assert max(answer.num_cached_tokens for answer in warm) >= 192
    expect(warm, FIXTURE)


def test_tokenizer_gives_the_same_ids():
    tokenizer = load().tokenizer
    for entry in FIXTURE:
        assert tokenizer.encode(entry["prompt"], parse_special=True) == entry["prompt_ids"]
        assert tokenizer.decode(entry["prompt_ids"]) == entry["prompt"]


@pytest.mark.parametrize(("chunk", "which"), [(1, (0, 13)), (7, (0, 5, 7, 11, 18)), (64, (3, 18, 19))])
def test_chunk_sizes(client, chunk, which):
    limit(client, max_num_batched_tokens=chunk, enable_prefix_reuse=False)
    entries = [FIXTURE[i] for i in which]
    count = 24 if chunk == 1 else 64
    expect(client.ask(*(entry["prompt_ids"] for entry in entries), max_tokens=count), entries, count)


def test_after_preemption(client):
    limit(client, num_pages=24)
    entries = FIXTURE[:8] + FIXTURE[18:20]
    expect(client.ask(*(entry["prompt_ids"] for entry in entries), max_tokens=64), entries)
    assert client.engine.stats().scheduler.num_preemptions > 0


@pytest.mark.parametrize("size", [1, 2, 5, 9, 17])
def test_batches_with_mixed_neighbours(client, size):
    limit(client)
    entries = [FIXTURE[i % 20] for i in range(size)]
    ids, count = [], 16
    for index, entry in enumerate(entries):
        neighbour = index % 3 == 1
        fields = {"temperature": 1.0, "seed": index, "top_p": 0.9, "presence_penalty": 1.0} if neighbour else {}
        ids += client.submit([entry["prompt_ids"]], max_tokens=count, **fields)
    answers = client.wait(ids)
    greedy = [index for index in range(size) if index % 3 != 1]
    expect([answers[i] for i in greedy], [entries[i] for i in greedy], count)


def test_penalties(client):
    limit(client)
    for entry in FIXTURE:
        for case in entry.get("penalised", ()):
            expect(client.ask(entry["prompt_ids"], max_tokens=32, **case["rules"]), [case], 32)


def test_prompt_logprobs(client):
    limit(client)
    for entry in FIXTURE:
        if "prompt_logprobs" in entry:
            answer = client.ask(entry["prompt_ids"], max_tokens=0, prompt_logprobs=1, read_prefix_cache=False)[0]
            mine = [piece.logprob for piece in answer.prompt_logprobs]
            np.testing.assert_allclose(mine, entry["prompt_logprobs"], atol=2e-3)


def test_two_devices():
    mesh = make_mesh(tp=2)
    with Client(engine_for(load(mesh), mesh), wait_for_rest=False) as client:
        expect(client.ask(*(entry["prompt_ids"] for entry in FIXTURE), max_tokens=64, timeout=1200), FIXTURE)
