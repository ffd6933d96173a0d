"""`GET /admin/scheduler/requests/{id}`: why a request waits, by the ids that its client sees; and who pays for it."""

import threading
from dataclasses import replace

from tests.api.tiny import SMALL, serving, wait_until

ONE_SLOT = replace(SMALL, max_num_seqs=1)


def test_a_waiting_request_is_explained_by_its_request_id_and_then_remembered() -> None:
    with (
        serving(scheduler=ONE_SLOT, settings={"scheduler_config": {"max_num_seqs": 1}}) as server,
        server.client() as client,
    ):
        server.engine.pause()
        statuses: list[int] = []

        def ask(name: str) -> None:
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
            with server.client() as own:
                statuses.append(own.post("/v1/completions", json=body, headers={"X-Request-Id": name}).status_code)

        threads = []
        for name in ("first", "second"):
            threads.append(threading.Thread(target=ask, args=(name,)))
            threads[-1].start()
            wait_until(lambda: len(server.engine.submitted) == len(threads))
        told = client.get("/admin/scheduler/requests/second").json()
        assert (told["num_waiting"], told["policy"]) == (2, "fcfs")
        (choice,) = told["choices"]
        assert (choice["status"], choice["position"], choice["num_ahead"]) == ("waiting", 2, 1)
        assert "1 go before it" in choice["summary"]
        assert choice["decisions"][0]["decision"] == "queued"
        assert not {"request_id", "ahead"} & set(choice)
        server.engine.resume()
        for thread in threads:
            thread.join(5)
        assert statuses == [200, 200]
        (ended,) = client.get("/admin/scheduler/requests/second").json()["choices"]
        assert (ended["status"], ended["position"]) == ("finished", None)
        assert [entry["decision"] for entry in ended["decisions"]] == ["queued", "started", "ended"]


def test_the_id_of_the_answer_serves_too_and_unknown_ones_are_404() -> None:
    with serving() as server, server.client() as client:
        answer = client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "hello", "n": 2, "max_tokens": 1}
        ).json()
        told = client.get(f"/admin/scheduler/requests/{answer['id']}").json()
        assert [choice["index"] for choice in told["choices"]] == [0, 1]
        unknown = client.get("/admin/scheduler/requests/nobody")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_request")


def test_a_request_is_charged_to_its_key_else_to_its_user() -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1, "user": "alice"}
    with serving() as server, server.client() as client:
        client.post("/v1/completions", json=body)
        assert server.engine.submitted[-1].tenant == "alice"
    with serving(keys=["sk-one", "sk-two"]) as server, server.client() as client:
        for key in ("sk-one", "sk-two"):
            client.post("/v1/completions", json=body, headers={"x-api-key": key})
        first, second = (request.tenant for request in server.engine.submitted)
        assert None not in (first, second)
        assert first != second
        assert "sk-" not in first
