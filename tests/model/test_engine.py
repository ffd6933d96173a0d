"""The engine on a tiny model: whatever the batch, chunk, cache, preemption or mesh, a request gets its tokens."""

import random
import time

import jax
import numpy as np
import pytest

from model.engine_types import EngineDeadError, EngineState
from model.mesh import make_mesh
from scheduler import FinishReason, NeverFitsError
from scheduler.simulation.records import StepShape
from tests.model.engines import TINY, Client, make_engine, random_params

# Programs may have to be compiled first.
pytestmark = pytest.mark.timeout(400)

RNG = random.Random(7)
PROMPTS = [[RNG.randrange(1, 128) for _ in range(length)] for length in (1, 2, 3, 4, 5, 8, 15, 16, 17, 30, 33, 40)]


@pytest.fixture(scope="module")
def client():
    with Client(make_engine()) as client:
        yield client
        client.check_at_rest()


@pytest.fixture(scope="module")
def reference(client):
    """Each prompt alone."""
    return [client.ask(prompt, max_tokens=12)[0].token_ids for prompt in PROMPTS]


def test_alone_twice_and_together(client, reference):
    assert len({token for tokens in reference for token in tokens}) > 20
    together = client.ask(*PROMPTS, max_tokens=12)
    assert [answer.token_ids for answer in together] == reference
    assert all(answer.finish_reason is FinishReason.LENGTH for answer in together)
    assert client.ask(PROMPTS[-1], max_tokens=12)[0].token_ids == reference[-1]
    again = client.ask(PROMPTS[-1], max_tokens=12)[0]
    assert again.token_ids == reference[-1]
    assert again.num_cached_tokens == 36


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"max_num_batched_tokens": 1, "max_num_seqs": 1}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 7, "max_num_seqs": 3}, marks=pytest.mark.slow),
        {"num_pages": 14, "enable_prefix_reuse": False},
        {"num_pages": 14, "waiting_queue_policy": "priority", "page_size": 4},
    ],
)
def test_chunks_and_preemption_change_nothing(reference, changes):
    with Client(make_engine(**changes)) as client:
        ids = client.submit(PROMPTS[:6], max_tokens=12, priority=0.0)
        ids += client.submit(PROMPTS[6:], max_tokens=12, priority=1.0)
        assert [answer.token_ids for answer in client.wait(ids)] == reference
        client.check_at_rest()
        if "num_pages" in changes:
            assert client.engine.stats().scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("tp", "dp"), [(2, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((4, 1), (1, 2), (2, 2)))]
)
def test_meshes_give_the_same_tokens(reference, tp, dp):
    mesh = make_mesh(tp=tp, dp=dp)
    with Client(make_engine(params=random_params(TINY, mesh=mesh), mesh=mesh)) as client:
        assert [answer.token_ids for answer in client.ask(*PROMPTS, max_tokens=12)] == reference


def test_seeded_draws_do_not_depend_on_neighbours_or_preemption(client):
    fields = {"max_tokens": 12, "temperature": 1.0, "seed": 2**40 + 3}
    alone = client.ask(PROMPTS[5], **fields)[0].token_ids
    assert client.ask(PROMPTS[5], **fields)[0].token_ids == alone
    assert client.ask(PROMPTS[5], **{**fields, "seed": 3})[0].token_ids != alone
    assert client.ask(PROMPTS[5], **fields, choice=1)[0].token_ids != alone
    ids = client.submit([PROMPTS[9]], max_tokens=20) + client.submit([PROMPTS[5]], **fields)
    assert client.wait(ids)[1].token_ids == alone
    with Client(make_engine(num_pages=14)) as small:
        ids = small.submit([PROMPTS[9], PROMPTS[8]], max_tokens=12) + small.submit([PROMPTS[5]], **fields)
        assert small.wait(ids)[2].token_ids == alone


def test_end_tokens_and_minimum(client, reference):
    stop = reference[5][3]
    first = reference[5].index(stop)
    answer = client.ask(PROMPTS[5], max_tokens=12, stop_token_ids=frozenset({stop}))[0]
    assert answer.token_ids == reference[5][: first + 1]
    assert answer.finish_reason is FinishReason.STOP
    held = client.ask(
        PROMPTS[5],
        max_tokens=12,
        stop_token_ids=frozenset({stop}),
        min_new_tokens=7,
        min_tokens=7,
        logit_bias=((stop, 100.0),),
    )[0]
    assert len(held.token_ids) == 7 + 1
    assert held.token_ids[7] == stop
    assert stop not in held.token_ids[:7]


def test_logprobs_of_outputs_and_prompts(client):
    prompt = PROMPTS[9]
    scored = client.ask(prompt, max_tokens=0, prompt_logprobs=3, read_prefix_cache=False)[0]
    assert scored.token_ids == []
    assert scored.finish_reason is FinishReason.LENGTH
    assert [entry.token_id for entry in scored.prompt_logprobs] == prompt[1:]
    for position in (1, 7, len(prompt) - 1):
        answer = client.ask(prompt[:position], max_tokens=1, logprobs=20)[0].logprobs[0]
        entry = scored.prompt_logprobs[position - 1]
        np.testing.assert_allclose(entry.top_logprobs, answer.top_logprobs[:3], atol=1e-4)
        assert entry.top_ids == answer.top_ids[:3]
    answer = client.ask(prompt, max_tokens=5, logprobs=2)[0]
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    assert all(entry.top_ids[0] == entry.token_id for entry in answer.logprobs)


def test_penalties_survive_preemption(client):
    fields = {"max_tokens": 12, "repetition_penalty": 1.8, "presence_penalty": 1.0, "frequency_penalty": 0.7}
    alone = client.ask(*PROMPTS[7:10], **fields)
    assert alone[0].token_ids != client.ask(PROMPTS[7], max_tokens=12)[0].token_ids
    with Client(make_engine(num_pages=11)) as small:
        crowded = small.ask(*PROMPTS[7:10], **fields)[:3]
        assert small.engine.stats().scheduler.num_preemptions > 0
    assert [answer.token_ids for answer in crowded] == [answer.token_ids for answer in alone]


def test_prompt_logprobs_are_complete_under_preemption():
    with Client(make_engine(num_pages=14)) as client:
        ids = client.submit(PROMPTS[6:10], max_tokens=12, prompt_logprobs=1, read_prefix_cache=False)
        for prompt, answer in zip(PROMPTS[6:10], client.wait(ids), strict=True):
            assert [entry.token_id for entry in answer.prompt_logprobs] == prompt[1:]


@pytest.mark.slow
def test_padded_vocabulary_is_never_drawn():
    with Client(make_engine(vocab_size=100)) as client:
        answers = client.ask(*PROMPTS[:4], max_tokens=40, temperature=2.0, seed=1, logprobs=20)
        for answer in answers:
            assert max(answer.token_ids) < 100
            assert all(max(entry.top_ids) < 100 for entry in answer.logprobs)


def test_nothing_compiles_after_warm_up(client):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    before = client.engine.stats().compilations
    rng = random.Random(3)
    ids = []
    for _ in range(40):
        prompts = [[rng.randrange(1, 128) for _ in range(rng.randint(1, 45))] for _ in range(rng.randint(1, 3))]
        wants = rng.choice([{}, {"logprobs": 5}, {"temperature": 0.8, "top_k": 70}, {"presence_penalty": 1.0}])
        if rng.random() < 0.2:
            wants = wants | {"prompt_logprobs": 2, "read_prefix_cache": False}
        ids += client.submit(prompts, max_tokens=rng.randint(0, 12), seed=rng.randrange(2**63), **wants)
    client.wait(ids)
    assert client.engine.stats().compilations == before
    assert compiled == []


def test_abort_frees_pages_at_once(client):
    ids = client.submit([PROMPTS[9]] * 6, max_tokens=30)
    time.sleep(0.02)
    for request_id in ids:
        client.engine.abort(request_id)
        client.engine.abort(request_id)
    assert all(answer.finish_reason for answer in client.wait(ids, timeout=1))
    client.check_at_rest()


def test_a_request_that_never_fits_is_refused(client):
    with pytest.raises(NeverFitsError):
        client.submit([[1] * 60], max_tokens=5)
    client.check_at_rest()


@pytest.mark.slow
def test_a_bad_row_fails_alone():
    params = random_params(TINY)
    table = np.asarray(params["embed/embedding"]).copy()
    table[99] = np.nan
    untied = random_params(TINY.__class__(**{**_fields(TINY), "tie_word_embeddings": False}))
    untied |= {"embed/embedding": jax.numpy.asarray(table)}
    config = TINY.__class__(**{**_fields(TINY), "tie_word_embeddings": False})
    with Client(make_engine(config, untied)) as client:
        good = [[1, 2, 3], [4, 5, 6, 7]]
        wanted = [answer.token_ids for answer in client.ask(*good, max_tokens=10)]
        if any(99 in tokens for tokens in wanted):
            pytest.skip("the random model draws the poisoned token")
        ids = client.submit([good[0], [7, 99, 7], good[1]], max_tokens=10)
        first, bad, second = client.wait(ids)
        assert bad.finish_reason is FinishReason.ERROR
        assert bad.token_ids == []
        assert [first.token_ids, second.token_ids] == wanted
        # The pages that held NaN are reused; nothing of it may reach later requests.
        for _ in range(4):
            assert [answer.token_ids for answer in client.ask(*good, max_tokens=10)] == wanted


def test_a_dead_engine_ends_every_request():
    calls = []

    def fail_later() -> None:
        calls.append(None)
        if len(calls) > 5:
            raise RuntimeError("injected")

    with Client(make_engine(before_step=fail_later)) as client:
        answers = client.wait(client.submit(PROMPTS, max_tokens=20), timeout=5)
        assert any(answer.finish_reason is FinishReason.ERROR for answer in answers)
        assert client.engine.state is EngineState.DEAD
        with pytest.raises(EngineDeadError):
            client.submit([[1]])


def _fields(config) -> dict:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_kv_is_updated_in_place(client):
    """Donated and aliased, and no copy of a layer's KV anywhere: an undonated scatter costs 30-60 ms."""
    runner = client.engine._runner
    kv_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in runner._kv)
    shape = "f32[" + ",".join(map(str, runner._kv[0].shape)) + "]"
    for program in runner._programs.values():
        assert program.memory_analysis().alias_size_in_bytes >= kv_bytes
        copies = [line for line in program.as_text().splitlines() if " copy(" in line and shape in line]
        assert copies == []


def test_every_step_is_reported_with_its_shape():
    records = []
    with Client(make_engine(enable_prefix_reuse=False)) as client:
        client.engine.add_step_listener(records.append)
        client.ask([1, 2, 3], max_tokens=4)
        client.ask(PROMPTS[-1], PROMPTS[5], max_tokens=6)
    assert [record.step_id for record in records] == list(range(1, client.engine.stats().steps + 1))
    assert records[0].shape == StepShape(1, 3, 3, 3, 9)
    assert [record.shape for record in records[1:4]] == [StepShape(1, 1, 0, kv, kv) for kv in (4, 5, 6)]
    assert sum(record.shape.num_prefill_tokens for record in records) == 3 + 40 + 8
    assert records[0].started_after_idle
    assert not all(record.started_after_idle for record in records)
    for record in records:
        assert record.num_padded_tokens >= record.shape.num_tokens
        assert record.num_padded_rows >= record.shape.num_rows
        assert record.duration_secs > 0
