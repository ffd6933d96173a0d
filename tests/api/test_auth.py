"""Who gets in: every route of the server with no key, wrong keys, odd keys and odd methods (B56), and CORS."""

import re
from collections.abc import Iterator

import httpx
import pytest

from api.app import create_app
from api.auth import OPEN_ROUTES, Authenticator, Verdict
from api.config_loading import resolve
from api.server_state import ServerState
from tests.api.serving import Served, served

KEY, ADMIN = "sk-clé-0123456789", "admin-0123456789"
ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    config = resolve({"api_keys": [KEY, "second"], "admin_keys": [ADMIN], "cors_origins": [ORIGIN]})
    with served(config=config) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + key.encode()}


@pytest.fixture(scope="module")
def full_client() -> Iterator[httpx.Client]:
    """A server with every route, and keys. There is no model, but nobody gets as far as that."""
    config = resolve({"api_keys": [KEY], "cors_origins": [ORIGIN]})
    with served(config=config, routes=None, attach=False) as running, running.client() as client:
        yield client


def paths() -> list[str]:
    """Every route of the server, with something in place of its variable parts."""
    app = create_app(ServerState(resolve({})))
    return sorted({re.sub("<[^>]*>", "x", rule.rule) for rule in app.url_map.iter_rules()})


def test_every_route_is_looked_at() -> None:
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"} <= set(paths())


@pytest.mark.parametrize(
    "path", [*paths(), "/", "/nowhere", "/docs", "/v1", "/v1/completions/", "//health", "/health/", "/static/x"]
)
def test_default_deny(full_client: httpx.Client, path: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"):
        for headers in ({}, bearer("wrong"), {b"x-api-key": b"wrong"}, {b"Authorization": KEY.encode()}):
            response = full_client.request(method, path, headers=headers)
            if path in OPEN_ROUTES:
                assert response.status_code in (200, 405, 503)
                continue
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        bearer("second"),
        {b"x-api-key": KEY.encode()},
        {b"Authorization": b"bearer   second"},
        {**bearer("wrong"), b"x-api-key": b"second"},
    ],
)
def test_a_right_key_in_either_header(client: httpx.Client, headers: dict[bytes, bytes]) -> None:
    assert client.get("/version", headers=headers).status_code == 200
    assert client.post("/v1/completions", headers=headers, json={}).status_code == 200
    assert client.get("/nowhere", headers=headers).status_code == 404


def test_odd_credentials_are_wrong_and_harmless(client: httpx.Client) -> None:
    for value in (b"", b"Bearer", b"Bearer \xff\xfe", b"Basic c2Vjb25k", b"Bearer second second", b"second"):
        assert client.get("/version", headers={b"Authorization": value}).status_code == 401
    doubled = httpx.Headers([("Authorization", "Bearer second"), ("Authorization", "Bearer wrong")])
    assert client.get("/version", headers=doubled).status_code == 401
    assert client.get("/version?api_key=second").status_code == 401


def test_an_admin_key_opens_operations_and_nothing_else(client: httpx.Client) -> None:
    for path in ("/metrics", "/version", "/server_info"):
        assert client.get(path, headers=bearer(ADMIN)).status_code == 200
    assert client.post("/v1/completions", headers=bearer(ADMIN), json={}).status_code == 401
    assert client.get("/v1/models/x", headers=bearer(ADMIN)).status_code == 401


def test_admin_routes_need_an_admin_key(client: httpx.Client) -> None:
    path = "/admin/scheduler/requests/x"
    assert client.get(path, headers=bearer(KEY)).status_code == 401
    assert client.get(path, headers=bearer(ADMIN)).status_code == 404
    only_clients = Authenticator([KEY])
    assert only_clients.check(path, [(b"x-api-key", KEY.encode())]) is Verdict.WRONG


def test_a_key_names_a_tenant_and_tells_nothing_of_itself() -> None:
    keys = Authenticator([KEY, "second"], [ADMIN])
    names = [keys.tenant([(b"x-api-key", key.encode())]) for key in (KEY, "second", "wrong", ADMIN)]
    assert names[0] != names[1]
    assert names[2:] == [None, None]
    assert KEY not in str(names[0])
    assert Authenticator().tenant([(b"x-api-key", b"second")]) is None


def test_a_refused_caller_is_not_read(server: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\nConnection: close\r\n\r\n"
    answer = server.exchange(head, wait_secs=2)
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_no_keys_no_questions() -> None:
    assert Authenticator().check("/metrics", []) is Verdict.ALLOWED


def test_keys_are_whole(client: httpx.Client) -> None:
    for key in (KEY[:-1], KEY + "x", KEY.upper(), KEY.encode().decode("latin-1")):
        assert client.get("/version", headers=bearer(key)).status_code == 401


def test_preflight_of_a_known_page(client: httpx.Client) -> None:
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    answer = client.options("/v1/completions", headers=asked)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
    stranger = client.options("/v1/completions", headers={**asked, "Origin": "https://other.example"})
    assert stranger.status_code == 401
    assert "access-control-allow-origin" not in stranger.headers


def test_answers_to_pages(client: httpx.Client) -> None:
    known = client.post("/v1/completions", headers={**bearer("second"), b"Origin": ORIGIN.encode()}, json={})
    assert known.headers["access-control-allow-origin"] == ORIGIN
    assert known.headers["vary"] == "Origin"
    error = client.post("/v1/completions", headers={"Origin": ORIGIN}, json={})
    assert (error.status_code, error.headers["access-control-allow-origin"]) == (401, ORIGIN)
    other = client.post("/v1/completions", headers={**bearer("second"), b"Origin": b"https://other.example"}, json={})
    assert "access-control-allow-origin" not in other.headers


def test_without_origins_no_page_is_let_in() -> None:
    with served() as running, running.client() as client:
        answer = client.get("/health", headers={"Origin": ORIGIN})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        # What a page can send without a preflight is not JSON, and is refused.
        simple = client.post("/v1/completions", headers={"Origin": ORIGIN, "Content-Type": "text/plain"}, content=b"{}")
        assert simple.status_code == 415
