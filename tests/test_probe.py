"""`mlaforge probe`, against servers on this machine that misbehave, and the key that no output may hold."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge import endpoint as endpoint_module
from mlaforge.answers import compare
from mlaforge.endpoint import SettingsError, find_endpoint, find_second
from mlaforge.redaction import Redactor
from mlaforge_generator import cli

pytest.importorskip("openai", reason="the extra `probe` is not installed")

KEY = "xk-Qz7vXw9RkT3zYq5LhJ2dN8bG4fWcUe6s"
OTHER_KEY = "xk-Vb2nHj6KpWq8ZrXt4MfLd9SgCy3Aw7Eu"
SECRETS = [KEY, OTHER_KEY]


def encoded(data: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(data).encode()).decode().rstrip("=")


def token(expires: float) -> str:
    """Make an OAuth access token as identity providers do, a JWT."""
    claims = {"iss": "https://login.example", "exp": expires, "scope": "openid"}
    return f"{encoded({'alg': 'RS256', 'typ': 'JWT'})}.{encoded(claims)}.{'Zx8Qv3Wp' * 20}"


# ---- A server --------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def authorization(self) -> str:
        return self.headers.get("authorization", "")


Reply = tuple[int, dict[str, str], bytes]
Behaviour = Callable[[Request, "http.server.BaseHTTPRequestHandler"], Reply | None]


@dataclass
class Server:
    url: str
    behaviour: Behaviour
    requests: list[Request] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@contextlib.contextmanager
def serving(behaviour: Behaviour) -> Iterator[Server]:
    server = Server("", behaviour)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, headers, json.loads(data or b"{}"))
            server.requests.append(request)
            self.close_connection = True
            with contextlib.suppress(OSError):
                if (reply := server.behaviour(request, self)) is not None:
                    status, names, body = reply
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(body)), **names}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body)

        do_GET = do_POST = do_CONNECT = handle_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    server.url = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=lambda: listener.serve_forever(poll_interval=0.05), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()


def as_json(status: int, data: object, **headers: str) -> Reply:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, {"Content-Type": "application/json", **names}, json.dumps(data).encode()


def completion(text: str | None, reason: str = "stop", **message: object) -> dict[str, Any]:
    said = {"role": "assistant", "content": text, **message}
    return {
        "id": "c",
        "object": "chat.completion",
        "model": "m-1",
        "choices": [{"message": said, "finish_reason": reason}],
    }


def answers(text: str) -> Behaviour:
    return lambda request, handler: as_json(200, completion(text))


def replies(status: int, data: object, **headers: str) -> Behaviour:
    return lambda request, handler: as_json(status, data, **headers)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# ---- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("MLAFORGE_", "TAOTOKEN_", "OPENAI_")):
            monkeypatch.delenv(name)


def assert_no_secret(text: str, secrets: list[str]) -> None:
    """No part of a secret longer than four characters, in capitals or not, and not as base64 either."""
    for secret in secrets:
        for form in (secret, base64.b64encode(secret.encode()).decode()[:-4]):
            for i in range(len(form) - 4):
                assert form[i : i + 5].lower() not in text.lower(), form[i : i + 5]


def probe(*arguments: str, secrets: list[str] | None = None, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(cli.cli, ["probe", *arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert_no_secret(result.stdout + result.stderr, SECRETS if secrets is None else secrets)
    assert "\x1b" not in result.stdout + result.stderr and "\x07" not in result.stdout + result.stderr
    return result


def failed(url: str, *arguments: str, code: int = 1, key: str = KEY) -> dict[str, Any]:
    """Ask and fail, as text and as JSON; both say the same, and neither holds the key."""
    call = ("--model", "m-1", "--base-url", url, "--api-key", key, *arguments)
    text = probe(*call, secrets=[*SECRETS, key])
    data = probe(*call, "--json", secrets=[*SECRETS, key])
    assert (text.exit_code, data.exit_code) == (code, code)
    found = json.loads(data.stdout)
    assert found["ok"] is False
    problem: dict[str, Any] = found["problem"]
    assert problem["message"] and problem["fix"]
    for each in (text, data):
        assert problem["fix"] in each.stderr and "Traceback" not in each.stderr
    return problem


def test_an_answer() -> None:
    with serving(answers("The answer is 391.")) as server:
        result = probe("--model", "m-1", "--base-url", server.base_url, "--api-key", KEY)
        assert result.exit_code == 0 and "The answer is 391." in result.stdout and not result.stderr
        data = json.loads(probe("--model", "m-1", "--base-url", server.base_url, "--api-key", KEY, "--json").stdout)
    assert data["ok"] and data["problem"] is None
    (answer,) = data["answers"]
    assert answer["text"] == "The answer is 391." and answer["right"] and answer["model"] == "m-1"
    first, second = server.requests
    assert first.path == "/v1/chat/completions" and first.authorization == f"Bearer {KEY}"
    # The same question, word by word, with nothing left to chance.
    assert first.body == second.body and first.body["temperature"] == 0 and first.body["model"] == "m-1"


def test_a_wrong_answer() -> None:
    for text in ("392", "1391", "3910", "I can't say."):
        with serving(answers(text)) as server:
            assert failed(server.base_url)["kind"] == "wrong_answer"


def test_own_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("second\n\nthird\n")
    with serving(lambda request, _: as_json(200, completion(request.body["messages"][0]["content"][::-1]))) as server:
        call = ("--model", "m-1", "--base-url", server.base_url, "--api-key", KEY, "--prompt", "first")
        result = probe(*call, "--prompts", str(path), "--json")
        assert result.exit_code == 0
        assert [each["text"] for each in json.loads(result.stdout)["answers"]] == ["tsrif", "dnoces", "driht"]
        path.write_text('["a\\nb"]')
        assert json.loads(probe(*call[:-2], "--prompts", str(path), "--json").stdout)["answers"][0]["text"] == "b\na"
        for text in ("", "\n \n", "[1]", "[", "[]"):
            path.write_text(text)
            assert probe(*call, "--prompts", str(path)).exit_code == 2
        assert probe(*call, "--prompts", str(tmp_path / "none")).exit_code == 2


# ---- Settings: nothing is sent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [False, True])
def test_no_key(monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_ADMIN_KEY", KEY)
    with serving(answers("391")) as server:
        result = probe("--model", "m-1", "--base-url", server.base_url, *(("--api-key", "") if empty else ()))
        assert result.exit_code == 2 and "key is missing" in result.stderr
        assert "OPENAI_API_KEY is set" in result.stderr and "not read" in result.stderr
        assert server.requests == []


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (f" {KEY}", "padded with blanks"),
        (f"{KEY}\n", "padded with blanks"),
        (f"{KEY}\r\n", "padded with blanks"),
        (f"\t{KEY}\u00a0", "padded with blanks"),
        (f'"{KEY}"', "quotation marks"),
        (f"Bearer {KEY}", "begins with `Bearer`"),
        (f"{KEY[:9]} {KEY[9:]}", "a blank inside"),
        (f"{KEY[:9]}\n{KEY[9:]}", "a blank inside"),
        (f"{KEY[:9]}\u2014{KEY[9:]}", "a character that no key has"),
        (f"{KEY}\x07", "a character that no key has"),
        (f"{KEY[:9]}\u200b{KEY[9:]}", "a character that no key has"),
    ],
)
@pytest.mark.parametrize("by_option", [True, False], ids=["option", "variable"])
def test_a_key_that_can_not_be_one(monkeypatch: pytest.MonkeyPatch, key: str, words: str, by_option: bool) -> None:
    if not by_option:
        monkeypatch.setenv("MLAFORGE_API_KEY", key)
    where = "--api-key" if by_option else "MLAFORGE_API_KEY"
    with serving(answers("391")) as server:
        options = ("--api-key", key) if by_option else ()
        result = probe("--model", "m-1", "--base-url", server.base_url, *options, "--json")
        assert result.exit_code == 2 and f"{where} " in result.stderr and words in result.stderr
        assert json.loads(result.stdout)["problem"]["kind"] == "padded_key"
        assert server.requests == []


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("http://127.0.0.1:1/v1/v1", "doubled_v1", "/v1 twice"),
        ("http://127.0.0.1:1/api/V1/v1/", "doubled_v1", "/v1 twice"),
        ("http://127.0.0.1:1/v1//v1", "doubled_v1", "/v1 twice"),
        ("http://127.0.0.1:1/v1/chat/completions", "bad_base_url", "/chat/completions"),
        ("http://127.0.0.1:1/v1 ", "bad_base_url", "blanks"),
        ("http://127.0.0.1:1/v1\n", "bad_base_url", "blanks"),
        ("127.0.0.1:1/v1", "bad_base_url", "no URL"),
        ("ftp://127.0.0.1/v1", "bad_base_url", "no URL"),
        ("http:///v1", "bad_base_url", "no URL"),
        ("http://127.0.0.1:port/v1", "bad_base_url", "no URL"),
        ("http://[::1/v1", "bad_base_url", "no URL"),
        (f"http://user:{OTHER_KEY}@127.0.0.1:1/v1", "bad_base_url", "a password"),
        (f"http://127.0.0.1:1/v1?key={OTHER_KEY}", "bad_base_url", "?"),
        ("http://127.0.0.1:1/v1\x1b[31m", "bad_base_url", "no URL has"),
        # The two variables exchanged.
        (OTHER_KEY, "bad_base_url", "no URL"),
    ],
)
def test_a_base_url_that_can_not_be_one(url: str, kind: str, words: str) -> None:
    problem = failed(url, code=2)
    assert problem["kind"] == kind and words in problem["message"] and problem["status"] is None


def test_no_base_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    result = probe("--model", "m-1", "--api-key", KEY)
    assert result.exit_code == 2 and "no base URL" in result.stderr and "MLAFORGE_BASE_URL" in result.stderr


@pytest.mark.parametrize("model", ["", " m", "m\n", "m\x07"])
def test_a_model_that_can_not_be_one(model: str) -> None:
    result = probe("--model", model, "--base-url", "http://127.0.0.1:1/v1", "--api-key", KEY)
    assert result.exit_code == 2 and "--model" in result.stderr


def test_a_key_in_the_wrong_place() -> None:
    """Click repeats words that it does not know; one may be the key."""
    for words in ([KEY], ["--", KEY], [f"--apikey={KEY}"], [f"-k{KEY}"], ["--api-key", OTHER_KEY, KEY]):
        result = probe("--model", "m-1", "--base-url", "http://127.0.0.1:1/v1", *words)
        assert result.exit_code == 2 and result.stderr


def test_the_key_from_standard_input() -> None:
    with serving(answers("391")) as server:
        call = ("--model", "m-1", "--base-url", server.base_url, "--api-key", "-")
        assert probe(*call, stdin=f"{KEY}\n").exit_code == 0
        assert server.requests[0].authorization == f"Bearer {KEY}"
        assert probe(*call, stdin="").exit_code == 2


URL, OTHER_URL = "http://a.example/v1", "http://b.example/v1"


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ((None, None), {"MLAFORGE_BASE_URL": URL, "MLAFORGE_API_KEY": "k1"}, (URL, "k1")),
        ((None, None), {"TAOTOKEN_BASE_URL": URL, "TAOTOKEN_API_KEY": "k2"}, (URL, "k2")),
        (
            (None, None),
            {
                "MLAFORGE_BASE_URL": URL,
                "MLAFORGE_API_KEY": "k1",
                "TAOTOKEN_BASE_URL": OTHER_URL,
                "TAOTOKEN_API_KEY": "k2",
            },
            (URL, "k1"),
        ),
        ((OTHER_URL, "k3"), {"MLAFORGE_BASE_URL": URL, "MLAFORGE_API_KEY": "k1"}, (OTHER_URL, "k3")),
        ((OTHER_URL, None), {"MLAFORGE_API_KEY": "k1", "TAOTOKEN_API_KEY": "k2"}, (OTHER_URL, "k1")),
        ((OTHER_URL, None), {"TAOTOKEN_API_KEY": "k2"}, (OTHER_URL, "k2")),
        ((None, "k3"), {"TAOTOKEN_BASE_URL": URL}, (URL, "k3")),
        # One name's key is not for another name's address.
        ((None, None), {"MLAFORGE_BASE_URL": URL, "TAOTOKEN_API_KEY": "k2"}, "TAOTOKEN_API_KEY is set"),
        ((None, None), {"TAOTOKEN_BASE_URL": URL, "MLAFORGE_API_KEY": "k1"}, "MLAFORGE_API_KEY is set"),
        ((URL, None), {"OPENAI_API_KEY": "k4"}, "OPENAI_API_KEY is set"),
        ((None, None), {"OPENAI_BASE_URL": URL, "OPENAI_API_KEY": "k4"}, "no base URL"),
    ],
)
def test_where_settings_come_from(
    options: tuple[str | None, str | None], environment: dict[str, str], expected: tuple[str, str] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(SettingsError, match=expected):
            find_endpoint("m", *options, environment)
    else:
        found = find_endpoint("m", *options, environment)
        assert (found.base_url, found.api_key) == expected
        assert "k1" not in repr(found) and "k2" not in repr(found) and "k3" not in repr(found)


def test_the_clients_own_variables_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "OPENAI_API_KEY": OTHER_KEY,
        "OPENAI_ADMIN_KEY": OTHER_KEY,
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "OPENAI_ORG_ID": "org-of-somebody",
        "OPENAI_PROJECT_ID": "project-of-somebody",
        "OPENAI_CUSTOM_HEADERS": f"X-Other: {OTHER_KEY}\nAuthorization: Bearer {OTHER_KEY}",
        "OPENAI_LOG": "debug",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with serving(answers("391")) as server:
        monkeypatch.setenv("MLAFORGE_BASE_URL", server.base_url)
        monkeypatch.setenv("MLAFORGE_API_KEY", KEY)
        # Its log is set up as it is imported: in a process of its own.
        done = process("probe", "--model", "m-1")
    assert done.returncode == 0 and "391" in done.stdout and not done.stderr
    assert_no_secret(done.stdout + done.stderr, SECRETS)
    (request,) = server.requests
    assert request.authorization == f"Bearer {KEY}"
    sent = json.dumps(request.headers)
    assert OTHER_KEY not in sent and "somebody" not in sent
    assert {name: os.environ[name] for name in own} == own


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "mlaforge_generator.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    problem = failed("http://127.0.0.1:1/v1", code=3)
    assert problem["kind"] == "no_client" and "pip install 'mlaforge[probe]'" in problem["fix"]


# ---- Servers that say no ---------------------------------------------------------------------------------------------


def echo(status: int, **headers: str) -> Behaviour:
    """Repeat the key in all places where a server could."""

    def behaviour(request: Request, handler: http.server.BaseHTTPRequestHandler) -> Reply:
        key = request.authorization.removeprefix("Bearer ")
        disguised = base64.b64encode(f"user:{key}".encode()).decode()
        message = f"Incorrect key provided: {key}, {key.upper()}, {key[:8]}*****{key[-6:]}, Basic {disguised}"
        error = {"message": message, "type": key, "code": key, "param": key}
        shown = {"www_authenticate": f"Bearer realm={key}", "x_request_id": key, "location": f"http://x.example/{key}"}
        return as_json(status, {"error": error, key: key}, **{**shown, **headers})

    return behaviour


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (301, "redirect"),
        (307, "redirect"),
        (400, "refused"),
        (401, "rejected_key"),
        (403, "forbidden"),
        (404, "not_found"),
        (407, "no_proxy"),
        (408, "timeout"),
        (418, "refused"),
        (429, "rate_limit"),
        (500, "server_error"),
        (503, "server_error"),
        (504, "timeout"),
        (200, "no_choices"),
    ],
)
def test_a_server_that_repeats_the_key(status: int, kind: str) -> None:
    with serving(echo(status)) as server:
        problem = failed(server.base_url)
        assert problem["kind"] == kind and problem["status"] == status and "***" in problem["message"]
        # Once a call: nothing is tried again, and no redirect is followed.
        assert len(server.requests) == 2


def test_a_rejected_key() -> None:
    with serving(replies(401, {"error": {"message": "Incorrect API key", "code": "invalid_api_key"}})) as server:
        problem = failed(server.base_url)
    assert (
        problem["kind"] == "rejected_key" and "the key in --api-key (HTTP 401): Incorrect API key" in problem["message"]
    )


@pytest.mark.parametrize("status", [401, 403])
def test_an_expired_oauth_token(status: int) -> None:
    expired = token(time.mktime((2024, 5, 6, 7, 8, 9, 0, 0, 0)))
    with serving(echo(status)) as server:
        problem = failed(server.base_url, key=expired)
    assert problem["kind"] == "expired_token" and "OAuth access token" in problem["message"]
    assert "expired at 2024-05-0" in problem["message"] and "API key" in problem["fix"]


@pytest.mark.parametrize(
    "behaviour",
    [
        replies(401, {"error": {"message": "The access token expired"}}),
        replies(401, {"error": "invalid_token", "error_description": "The Access Token expired"}),
        replies(401, {}, WWW_Authenticate='Bearer error="invalid_token", error_description="token is expired"'),
        replies(403, {"detail": "token expired"}),
    ],
)
def test_an_oauth_token_of_which_the_server_says_that_it_expired(behaviour: Behaviour) -> None:
    with serving(behaviour) as server:
        assert failed(server.base_url)["kind"] == "expired_token"
        assert failed(server.base_url, key=token(time.time() + 3600))["kind"] == "expired_token"


@pytest.mark.parametrize(
    "key", ["a.b.c", "e30.e30.x", "..", f"{encoded([])}.{encoded({})}.x", token(time.time() + 3600)]
)
def test_what_is_no_expired_token(key: str) -> None:
    with serving(replies(401, {"error": {"message": "no"}})) as server:
        assert failed(server.base_url, key=key)["kind"] == "rejected_key"


MODEL_ERRORS = [
    (404, {"error": {"message": "The model `m-1` does not exist", "code": "model_not_found"}}),
    (404, {"object": "error", "message": "The model `m-1` does not exist.", "type": "NotFoundError"}),
    (404, {"error": {"message": "model 'm-1' not found", "type": "api_error"}}),
    (400, {"error": {"message": "m-1 is not a valid model ID: unknown"}}),
    (403, {"error": {"message": "Project has no access: no such model m-1"}}),
]


@pytest.mark.parametrize(("status", "body"), MODEL_ERRORS)
def test_no_such_model(status: int, body: object) -> None:
    names = ["zeta", "m-10", KEY, *(f"other-{i:02d}" for i in range(20))]

    def behaviour(request: Request, handler: object) -> Reply:
        if request.method == "GET" and request.path == "/v1/models":
            return as_json(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in names]})
        return as_json(status, body)

    with serving(behaviour) as server:
        problem = failed(server.base_url)
    assert problem["kind"] == "no_model" and problem["status"] == status
    # The one with a like name comes first.
    assert problem["fix"].startswith("it has m-10, ") and "others" in problem["fix"]


def refusal(field: str) -> Reply:
    words = f"Unsupported parameter: '{field}' is not supported with this model m-1."
    error = {"message": words, "type": "invalid_request_error", "param": field, "code": "unsupported_parameter"}
    return as_json(400, {"error": error})


def test_a_model_that_counts_tokens_under_another_name() -> None:
    def behaviour(request: Request, handler: object) -> Reply:
        return refusal("max_tokens") if "max_tokens" in request.body else as_json(200, completion("391"))

    with serving(behaviour) as server:
        call = ("--model", "m-1", "--base-url", server.base_url, "--api-key", KEY, "--max-tokens", "77")
        assert probe(*call).exit_code == 0
    first, second = (request.body for request in server.requests)
    assert first.pop("max_tokens") == second.pop("max_completion_tokens") == 77 and first == second


@pytest.mark.parametrize("field", ["temperature", "max_tokens"])
def test_a_field_that_is_not_taken(field: str) -> None:
    """It is none of the model's name, whatever words there are."""
    with serving(
        lambda request, handler: refusal(field if field in request.body else "max_completion_tokens")
    ) as server:
        problem = failed(server.base_url)
    assert (
        problem["kind"] == "refused_field"
        and problem["status"] == 400
        and "Unsupported parameter" in problem["message"]
    )
    assert len(server.requests) == (2 if field == "temperature" else 4)


@pytest.mark.parametrize("body", [{"error": {"param": ["max_tokens"]}}, {"error": "max_tokens"}, ["max_tokens"]])
def test_what_names_no_field(body: object) -> None:
    with serving(replies(400, body)) as server:
        assert failed(server.base_url)["kind"] == "refused"
    assert len(server.requests) == 2


def test_no_such_model_and_no_list_either() -> None:
    with serving(replies(*MODEL_ERRORS[0])) as server:
        assert "does not say" in failed(server.base_url)["fix"]


def test_a_base_url_without_v1() -> None:
    def behaviour(request: Request, handler: object) -> Reply:
        right = request.path == "/v1/chat/completions"
        return as_json(200, completion("391")) if right else as_json(404, {"detail": "Not Found"})

    with serving(behaviour) as server:
        problem = failed(server.url)
        assert problem["kind"] == "not_found" and "end in /v1" in problem["fix"]
        assert "path" in failed(f"{server.url}/other/v1")["fix"]


def test_v1_that_is_doubled_on_the_way() -> None:
    with serving(replies(404, {"error": {"message": "Invalid URL (POST /v1/v1/chat/completions)"}})) as server:
        problem = failed(server.base_url)
    assert problem["kind"] == "doubled_v1" and "remove it from --base-url" in problem["fix"]


def test_a_redirect_is_not_followed() -> None:
    with serving(answers("391")) as target:
        moved = replies(308, {}, Location=f"{target.base_url}/chat/completions")
        with serving(moved) as server:
            problem = failed(server.base_url)
        assert problem["kind"] == "redirect" and target.base_url in problem["message"] and target.requests == []


# ---- Bodies that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b"", "no_json", "empty"),
        (b"   ", "no_json", "empty"),
        (b"<!DOCTYPE html><title>Log in</title>", "no_json", "a web page"),
        (b"OK", "no_json", "no JSON: OK"),
        (b"\xff\xfe\x00\x1b[31m\x07", "no_json", "no JSON"),
        (b'{"choices": [', "no_json", "no JSON"),
        (b"[" * 100_000, "no_json", "no JSON"),
        (b"[1]", "no_json", "no JSON object"),
        (b"null", "no_json", "no JSON object"),
        (b"{}", "no_choices", "it has nothing"),
        (b'{"id": 1, "object": "x"}', "no_choices", "no `choices`; it has id, object"),
        (b'{"error": {"message": "no credit"}}', "no_choices", "an error in place of `choices`: no credit"),
        (b'{"error": "no credit"}', "no_choices", "an error in place of `choices`: no credit"),
        (b'{"choices": []}', "no_choices", "`choices` of the response are []"),
        (b'{"choices": null}', "no_choices", "`choices` of the response are null"),
        (b'{"choices": {"0": 1}}', "no_choices", "`choices`"),
        (b'{"choices": [null]}', "no_answer", "no text"),
        (b'{"choices": [{"text": "391"}]}', "no_answer", "no text"),
        (b'{"choices": [{"message": "391"}]}', "no_answer", "no text"),
        (json.dumps(completion(None)).encode(), "no_answer", "no text"),
        (json.dumps(completion(" \n")).encode(), "no_answer", "no text"),
        (json.dumps(completion(None, "length", reasoning="hm")).encode(), "no_answer", "all tokens"),
        (b'{"a": "' + b"x" * (5 << 20) + b'"}', "no_json", "longer than"),
    ],
    ids=lambda value: value[:24].decode(errors="replace") if isinstance(value, bytes) else None,
)
def test_a_body_without_an_answer(body: bytes, kind: str, words: str) -> None:
    with serving(lambda *_: (200, {"Content-Type": "application/json"}, body)) as server:
        problem = failed(server.base_url)
    assert problem["kind"] == kind and words in problem["message"] and len(problem["message"]) < 600


def test_an_answer_that_would_act_on_a_terminal() -> None:
    with serving(answers("391\x1b]0;title\x07\x1b[2J\r\n\u202eabc")) as server:
        result = probe("--model", "m-1", "--base-url", server.base_url, "--api-key", KEY)
    assert result.exit_code == 0 and "391]0;title" in result.stdout and "\u202e" not in result.stdout


# ---- Sockets ---------------------------------------------------------------------------------------------------------


def test_nobody_listens() -> None:
    problem = failed(f"http://127.0.0.1:{free_port()}/v1")
    assert problem["kind"] == "unreachable" and "refused" in problem["message"].lower()


def test_a_host_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert failed("http://no-such-host.invalid/v1")["kind"] == "unreachable"


def test_tls_where_there_is_none() -> None:
    with serving(answers("391")) as server:
        problem = failed(server.base_url.replace("http://", "https://"))
    assert problem["kind"] == "tls" and "http" in problem["fix"]


def hangs(request: Request, handler: http.server.BaseHTTPRequestHandler) -> None:
    time.sleep(30)


def drips(request: Request, handler: http.server.BaseHTTPRequestHandler) -> None:
    """Send a byte at a time, so that no wait for a byte is ever long."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n")
    for _ in range(600):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def drips_headers(request: Request, handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for i in range(600):
        handler.wfile.write(f"X-{i}: y\r\n".encode())
        time.sleep(0.05)


@pytest.mark.parametrize("behaviour", [hangs, drips, drips_headers])
def test_a_timeout(behaviour: Behaviour) -> None:
    with serving(behaviour) as server:
        start = time.monotonic()
        problem = failed(server.base_url, "--timeout", "0.4")
        assert time.monotonic() - start < 20
    assert problem["kind"] == "timeout" and "0.4 s" in problem["message"] and "--timeout" in problem["fix"]


def hangs_up(request: Request, handler: http.server.BaseHTTPRequestHandler) -> None:
    return


def stops_halfway(request: Request, handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"choices": [{"message"')


def stops_halfway_through_an_error(request: Request, handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 500 No\r\nContent-Length: 1000\r\n\r\n{")


def speaks_something_else(request: Request, handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.wfile.write(f"220 mail.example ESMTP {request.authorization}\r\n".encode())


def bad_gzip(request: Request, handler: object) -> Reply:
    return 200, {"Content-Encoding": "gzip", "Content-Type": "application/json"}, b"no gzip at all"


def floods(request: Request, handler: http.server.BaseHTTPRequestHandler) -> None:
    """Send without end."""
    handler.wfile.write(b"HTTP/1.1 500 No\r\nContent-Type: application/json\r\n\r\n")
    while True:
        handler.wfile.write(b"x" * 65536)


def test_an_error_without_end() -> None:
    with serving(floods) as server:
        problem = failed(server.base_url)
    assert problem["kind"] == "no_json" and "longer than" in problem["message"]


def test_a_compressed_response() -> None:
    """A few bytes can be gigabytes."""
    with serving(bad_gzip) as server:
        problem = failed(server.base_url)
        assert all(request.headers["accept-encoding"] == "identity" for request in server.requests)
    assert problem["kind"] == "no_json" and "compressed" in problem["message"]


@pytest.mark.parametrize("behaviour", [hangs_up, stops_halfway, stops_halfway_through_an_error, speaks_something_else])
def test_no_whole_response(behaviour: Behaviour) -> None:
    with serving(behaviour) as server:
        assert failed(server.base_url)["kind"] in ("no_http", "server_error")


# ---- Proxies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_that_is_not_there(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    port = free_port()
    monkeypatch.setenv(variable, f"http://user:{OTHER_KEY}@127.0.0.1:{port}")
    with serving(answers("391")) as server:
        problem = failed(server.base_url)
        assert problem["kind"] == "no_proxy" and f"127.0.0.1:{port} in {variable}" in problem["message"]
        assert f"unset {variable}" in problem["fix"] and "NO_PROXY" in problem["fix"]
        assert server.requests == []
        # As the advice says.
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert probe("--model", "m-1", "--base-url", server.base_url, "--api-key", KEY).exit_code == 0


def test_a_proxy_of_https_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{free_port()}")
    problem = failed("https://a.example/v1")
    assert problem["kind"] == "no_proxy" and "HTTPS_PROXY" in problem["message"]


def test_a_proxy_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(answers("391")) as server:
        monkeypatch.setenv("HTTP_PROXY", server.url)
        assert probe("--model", "m-1", "--base-url", "http://a.invalid/v1", "--api-key", KEY).exit_code == 0
        assert server.requests[0].path == "http://a.invalid/v1/chat/completions"


@pytest.mark.parametrize(("status", "kind"), [(407, "no_proxy"), (502, "server_error")])
def test_a_proxy_that_refuses(monkeypatch: pytest.MonkeyPatch, status: int, kind: str) -> None:
    with serving(echo(status)) as server:
        monkeypatch.setenv("HTTP_PROXY", server.url)
        problem = failed("http://a.invalid/v1")
        assert problem["kind"] == kind and "proxy" in problem["message"]
        monkeypatch.setenv("HTTPS_PROXY", server.url)
        problem = failed("https://a.invalid/v1")
        assert "proxy" in problem["message"] and "HTTPS_PROXY" in problem["message"]


@pytest.mark.parametrize("text", [f"http://user:{OTHER_KEY}@:port", f"gopher://{OTHER_KEY}", "http://"])
def test_a_proxy_that_can_not_be_one(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", text)
    problem = failed("http://127.0.0.1:1/v1")
    assert problem["kind"] == "no_proxy" and "HTTP_PROXY" in problem["message"]


# ---- Two endpoints ---------------------------------------------------------------------------------------------------


def test_compare(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("same\nlast word\nlonger\n")

    def says(words: dict[str, str]) -> Behaviour:
        return lambda request, _: as_json(200, completion(words[request.body["messages"][0]["content"]]))

    ours = says({"same": "one\ntwo", "last word": "the sky is blue", "longer": "a b"})
    theirs = says({"same": "one\ntwo", "last word": "the sky is grey", "longer": "a b c"})
    with serving(ours) as first, serving(theirs) as second:
        call = ("--model", "m-1", "--base-url", first.base_url, "--api-key", KEY, "--prompts", str(prompts))
        call = (*call, "--compare", second.base_url, "--compare-model", "m-2", "--compare-api-key", OTHER_KEY)
        result = probe(*call)
        assert result.exit_code == 1 and "2 of 3 answers differ" in result.stderr
        lines = [line.strip() for line in result.stdout.splitlines()]
        assert "first   the sky is [-blue-]" in lines and "second  the sky is {+grey+}" in lines
        assert "differ from character 12 on, 86% of words alike" in lines
        assert "second  a b{+ c+}" in lines and "1 of 3 answers are the same" in lines
        data = json.loads(probe(*call, "--json").stdout)
    assert [each["same"] for each in data["prompts"]] == [True, False, False] and not data["ok"]
    assert [each["differs_at"] for each in data["prompts"]] == [None, 11, 3]
    assert {request.authorization for request in first.requests} == {f"Bearer {KEY}"}
    assert {request.authorization for request in second.requests} == {f"Bearer {OTHER_KEY}"}
    assert {request.body["model"] for request in second.requests} == {"m-2"}


def test_compare_what_is_the_same() -> None:
    with serving(answers("yes")) as server:
        call = ("--model", "m-1", "--base-url", server.base_url, "--api-key", KEY, "--compare", server.base_url)
        result = probe(*call)
        assert result.exit_code == 0 and "4 of 4 answers are the same" in result.stdout
        # At the same host and port the key is the same.
        assert {request.authorization for request in server.requests} == {f"Bearer {KEY}"}


def test_one_endpoints_key_is_not_sent_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(answers("yes")) as first, serving(answers("yes")) as second:
        call = ("--model", "m-1", "--base-url", first.base_url, "--api-key", KEY, "--compare", second.base_url)
        result = probe(*call)
        assert result.exit_code == 2 and "not sent to another" in result.stderr
        assert first.requests == second.requests == []
        monkeypatch.setenv("MLAFORGE_COMPARE_API_KEY", OTHER_KEY)
        assert probe(*call).exit_code == 0
        assert {request.authorization for request in second.requests} == {f"Bearer {OTHER_KEY}"}
        assert probe(*call, "--compare-api-key", f"{OTHER_KEY} ").exit_code == 2


def test_the_second_endpoint_fails() -> None:
    with serving(answers("yes")) as first, serving(echo(401)) as second:
        problem = failed(first.base_url, "--compare", second.base_url, "--compare-api-key", OTHER_KEY)
    assert problem["kind"] == "rejected_key" and "--compare-api-key" in problem["message"]


def test_second_settings() -> None:
    first = find_endpoint("m", "https://a.example/v1", "k1", {})
    assert find_second(first, "https://A.example:443/v2", None, None, {}).api_key == "k1"
    for url in ("http://a.example/v1", "https://a.example:444/v1", "https://b.example/v1"):
        with pytest.raises(SettingsError, match="not sent"):
            find_second(first, url, None, None, {})
    assert probe("--model", "m", "--compare-model", "n").exit_code == 2


@given(first=st.text("ab \n", max_size=12), second=st.text("ab \n", max_size=12))
def test_pieces_of_a_difference_make_both_texts(first: str, second: str) -> None:
    found = compare(first, second)
    assert "".join(text for whose, text in found.pieces if whose != "second") == first
    assert "".join(text for whose, text in found.pieces if whose != "first") == second
    assert (found.at is None) == (first == second)
    if found.at is not None:
        assert first[: found.at] == second[: found.at] and first[found.at :][:1] != second[found.at :][:1]


# ---- Masking ---------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    secret=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=5, max_size=40),
    before=st.text(max_size=10),
    after=st.text(max_size=10),
    data=st.data(),
)
def test_no_part_of_a_secret_is_left(secret: str, before: str, after: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(secret) - 5))
    end = data.draw(st.integers(start + 5, len(secret)))
    redact = Redactor([f" {secret}\n", ""])
    for text in (before + secret[start:end] + after, before + secret[start:end].upper() + after):
        assert_no_secret(redact(text), [secret])
    assert redact.data({"a": [secret, 1, None, (secret,)]})["a"][1:3] == [1, None]


def test_what_is_no_secret_stays() -> None:
    redact = Redactor([KEY, "ab"])
    for text in ("", "nothing of it", KEY[:4], "cab abc", "\u0130stanbul"):
        assert redact(text) == text
    assert redact(f"a {KEY} b") == "a *** b" and redact("x ab y") == "x *** y"


def test_an_exception_without_a_name_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody thought of is a failure like the others: no traceback, and no key."""

    def surprise(seconds: float, call: object) -> object:
        raise RuntimeError(f"surprise: Bearer {KEY}")

    monkeypatch.setattr(endpoint_module, "_within", surprise)
    problem = failed("http://127.0.0.1:1/v1")
    assert "surprise" in problem["message"]
