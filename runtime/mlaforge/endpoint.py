"""One question to an OpenAI-compatible endpoint, and what went wrong if no answer comes.

The request is made by the openai client, an optional dependency. Its own environment variables (OPENAI_API_KEY and all
others) are hidden from it: what is sent, and where to, is what the caller named. No message of ours holds the key, but
a server may quote it, though: whoever prints a message or an answer masks it first, with `make_redactor`.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import itertools
import json
import math
import os
import queue
import re
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from mlaforge.redaction import Redactor

QUESTION = "What is 17 * 23? Answer with the number alone."
EXPECTED = "391"

NAMES = ("MLAFORGE", "TAOTOKEN")
"""Whose variables are read, the first that is set: NAME_BASE_URL and NAME_API_KEY."""

SECOND_KEY = "MLAFORGE_COMPARE_API_KEY"
"""The variable of the second endpoint's key."""

_LOOK_AT_URL = "look at the base URL: is it that of an OpenAI-compatible API, and does it end in /v1?"
_MAX_BYTES = 4 << 20
_MAX_QUOTED = 300
_MAX_MODELS = 10
_PROXY_SECONDS = 3.0

_T = TypeVar("_T")


class EndpointError(Exception):
    """There is no answer. The message says why, `fix` what to do."""

    def __init__(self, kind: str, message: str, fix: str, *, status: int | None = None) -> None:
        """Tell what happened.

        Args:
            kind: the same in a word, for programs.
            message: what went wrong.
            fix: what to do about it.
            status: of HTTP, if there was a response.
        """
        super().__init__(message)
        self.kind, self.message, self.fix, self.status = kind, message, fix, status


class SettingsError(EndpointError):
    """The settings are wrong, and nothing was sent."""


class ClientMissingError(EndpointError):
    """The openai client can't be imported."""


@dataclass(frozen=True)
class Endpoint:
    """Where questions go."""

    base_url: str
    api_key: str = field(repr=False)
    model: str
    base_url_from: str = "--base-url"
    """The option or the variable that names it."""
    api_key_from: str = "--api-key"


@dataclass(frozen=True)
class Answer:
    """What a model said."""

    text: str
    model: str
    """As the endpoint calls it."""
    finish_reason: str
    seconds: float


# ---- Settings --------------------------------------------------------------------------------------------------------


def make_redactor(environment: Mapping[str, str], *given: str | None) -> Redactor:
    """Make what masks keys, those given and those of variables, and the passwords of proxies."""
    variables = [environment.get(name, "") for name in (*(f"{name}_API_KEY" for name in NAMES), SECOND_KEY)]
    keys = [*filter(None, given), *variables]
    # A word that was copied along is no secret, and stands in our own messages.
    return Redactor([*(re.sub(r"(?i)^\s*bearer\s+", "", key) for key in keys), *_proxy_secrets()])


def find_endpoint(model: str, base_url: str | None, api_key: str | None, environment: Mapping[str, str]) -> Endpoint:
    """Settle where questions go: options first, then the variables of `NAMES`.

    A key is not sent to an address that another name's variable gives: both come from one pair, or from options.

    Args:
        model: the model's name at the endpoint.
        base_url: of the option; None if it is not given.
        api_key: of the option; None if it is not given.
        environment: variables.

    Raises:
        SettingsError: something is missing or can't be right.
    """
    url, url_from = base_url, "--base-url"
    key, key_from = api_key, "--api-key"
    pairs: tuple[str, ...] = NAMES
    if url is None:
        for name in NAMES:
            if environment.get(f"{name}_BASE_URL"):
                url, url_from, pairs = environment[f"{name}_BASE_URL"], f"{name}_BASE_URL", (name,)
                break
        else:
            raise SettingsError("no_base_url", "no base URL is given", "set MLAFORGE_BASE_URL, or give --base-url")
    if key is None:
        for name in pairs:
            if environment.get(f"{name}_API_KEY"):
                key, key_from = environment[f"{name}_API_KEY"], f"{name}_API_KEY"
                break
    _check_url(url, url_from)
    if not key:
        raise SettingsError("no_key", *_no_key(pairs, environment))
    _check_key(key, key_from)
    _check_model(model, "--model")
    return Endpoint(url, key, model, url_from, key_from)


def find_second(
    first: Endpoint, base_url: str, model: str | None, api_key: str | None, environment: Mapping[str, str]
) -> Endpoint:
    """Settle the endpoint to compare with. The first one's key goes to no other scheme, host and port than its own.

    Raises:
        SettingsError: something is missing or can't be right.
    """
    _check_url(base_url, "--compare")
    key, key_from = api_key, "--compare-api-key"
    if key is None:
        key, key_from = environment.get(SECOND_KEY) or "", SECOND_KEY
        if not key and _origin(base_url) == _origin(first.base_url):
            key, key_from = first.api_key, first.api_key_from
    if not key:
        raise SettingsError(
            "no_key",
            "the key of the endpoint to compare with is missing; the first one's is not sent to another address",
            f"set {SECOND_KEY}, or give --compare-api-key; a server that wants none takes any",
        )
    _check_key(key, key_from)
    if model is not None:
        _check_model(model, "--compare-model")
    return Endpoint(base_url, key, model or first.model, "--compare", key_from)


def _origin(url: str) -> tuple[str, str | None, int]:
    parts = urllib.parse.urlsplit(url)
    scheme = parts.scheme.lower()
    return scheme, parts.hostname, parts.port or (443 if scheme == "https" else 80)


def _check_model(model: str, where: str) -> None:
    if not model or model != model.strip() or not model.isprintable():
        raise SettingsError("bad_model", f"{where} is empty, or has blanks around it", "name a model")


def _no_key(pairs: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, str]:
    """Say that the key is missing, and name the variables that have one and are not read for this address."""
    variables = " or ".join(f"{name}_API_KEY" for name in pairs)
    fix = f"set {variables}, or give --api-key; a server that wants none takes any"
    others = [f"{name}_API_KEY" for name in NAMES if name not in pairs and environment.get(f"{name}_API_KEY")]
    if environment.get("OPENAI_API_KEY"):
        others.append("OPENAI_API_KEY")
    unread = f"; {' and '.join(others)} is set, but is not meant for this address, and was not read" if others else ""
    return f"the key is missing{unread}", fix


def _check_url(url: str, where: str) -> None:
    """Refuse what is no base URL. Its text is not repeated: it may be the key, in the wrong place."""

    def refuse(message: str, fix: str, kind: str = "bad_base_url") -> NoReturn:
        raise SettingsError(kind, f"{where} {message}", fix)

    example = "a base URL is like https://host/v1"
    if url != url.strip():
        refuse("has blanks around it", "remove them; look for a line break at its end")
    if any(not " " < character < "\x7f" for character in url):
        refuse("has a character that no URL has", example)
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        refuse("is no URL", example)
    if parts.scheme.lower() not in ("http", "https") or not host:
        refuse("is no URL of http or https", example)
    if parts.username is not None or parts.password is not None:
        refuse("holds a user name or a password", "remove them: the key is sent in a header")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        refuse("has a part behind ? or #", f"remove it; {example}")
    segments = [segment.lower() for segment in parts.path.split("/") if segment]
    if any(pair == ("v1", "v1") for pair in itertools.pairwise(segments)):
        refuse("has /v1 twice, one behind the other", "remove one: the base URL ends in a single /v1", "doubled_v1")
    if segments[-2:] == ["chat", "completions"]:
        refuse("ends in /chat/completions, which is added to it", "remove that")


def _check_key(key: str, where: str) -> None:
    def refuse(message: str, fix: str) -> NoReturn:
        raise SettingsError("padded_key", f"the key in {where} {message}", fix)

    if key != key.strip():
        refuse("is padded with blanks", "remove them; a line break at its end comes from a file, or from `echo`")
    if key[:1] in "\"'" or key[-1:] in "\"'":
        refuse("has quotation marks around it", "remove them: they were for a shell, or for a file's syntax")
    if key.lower().startswith("bearer"):
        refuse("begins with `Bearer`", "give the key alone: the word is added to it")
    if any(character.isspace() for character in key):
        refuse("has a blank inside", "look for a line break, or for a second value")
    if not (key.isascii() and key.isprintable()):
        refuse("has a character that no key has", "copy it again; look for typographic dashes and invisible characters")


def _oauth_expiry(key: str) -> float | None:
    """Say when an OAuth access token expires, in seconds since the epoch; None if the key is none.

    Infinity if it is one that does not say.
    """
    if key.startswith("ya29."):
        return math.inf
    parts = key.split(".")
    if len(parts) != 3 or not all(parts[:2]):
        return None
    try:
        header, claims = (json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))) for part in parts[:2])
    except (ValueError, RecursionError):
        return None
    if not (isinstance(header, dict) and "alg" in header and isinstance(claims, dict)):
        return None
    expiry = claims.get("exp")
    return float(expiry) if isinstance(expiry, int | float) and 0 < expiry < 1e11 else math.inf


# ---- Asking ----------------------------------------------------------------------------------------------------------


def ask(endpoint: Endpoint, prompt: str, *, timeout: float = 30.0, max_tokens: int = 256) -> Answer:
    """Ask once, at temperature 0, and wait no longer than `timeout` seconds, however slowly bytes come.

    Raises:
        EndpointError: there is no answer.
        ClientMissingError: the openai client is not installed.
    """
    request: dict[str, Any] = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    with _made_client(endpoint, timeout) as client:

        def send() -> tuple[int, bytes]:
            with client.chat.completions.with_streaming_response.create(**request) as response:
                return response.http_response.status_code, response.http_response.read()

        start = time.monotonic()
        try:
            try:
                status, body = _within(timeout, send)
            except Exception as error:
                if _refused_field(error) != "max_tokens":
                    raise
                # Models that reason know it by another name alone, which older servers do not know.
                request["max_completion_tokens"] = request.pop("max_tokens")
                status, body = _within(max(start + timeout - time.monotonic(), 0.0), send)
        except Exception as error:
            raise _explain(endpoint, client, error, timeout) from None
        seconds = time.monotonic() - start
    return _read(endpoint, status, body, seconds)


@contextlib.contextmanager
def _made_client(endpoint: Endpoint, timeout: float) -> Iterator[Any]:
    with _without_openai_variables():
        try:
            import openai
        except ImportError as error:
            raise ClientMissingError(
                "no_client", f"the openai client can't be imported: {error}", "run: pip install 'mlaforge[probe]'"
            ) from None
        try:
            # A redirected request is another request, of which the key is no part.
            http = openai.DefaultHttpxClient(follow_redirects=False, event_hooks={"response": [_bound]})
        except Exception as error:
            # Proxies are looked at here: their schemes, and what a SOCKS proxy needs.
            # Their errors may quote a proxy's whole URL.
            reason = _quoted(str(error)) if isinstance(error, ImportError) else "it is no URL of a proxy"
            proxy = _proxy(endpoint.base_url)
            variable = proxy.variable if proxy is not None else "a variable of the environment"
            raise EndpointError(
                "no_proxy",
                f"the proxy in {variable} can't be used: {reason}",
                f"correct or unset {variable}, or add {urllib.parse.urlsplit(endpoint.base_url).hostname} to NO_PROXY",
            ) from None
        client = openai.OpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            timeout=timeout,
            max_retries=0,
            http_client=http,
            # What is decompressed has no bound.
            default_headers={"Accept-Encoding": "identity"},
        )
    try:
        yield client
    finally:
        # Of a request that is still waited for, a thread may hold it.
        with contextlib.suppress(Exception):
            client.close()


class _BodyError(Exception):
    """A response's body is not read on."""


def _bound(response: Any) -> None:
    """Bound the length of a body before it is read, that of an error as well."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise _BodyError("the response is compressed, which was not asked for")
    # The client's HTTP library is httpx or httpx2, as its version has it.
    library = sys.modules[type(response).__module__.partition(".")[0]]
    inner = response.stream

    class Bounded(library.SyncByteStream):  # type: ignore[name-defined, misc]
        def __iter__(self) -> Iterator[bytes]:
            length = 0
            for piece in inner:
                length += len(piece)
                if length > _MAX_BYTES:
                    raise _BodyError(f"the response is longer than {_MAX_BYTES:,} bytes")
                yield piece

        def close(self) -> None:
            inner.close()

    response.stream = Bounded()


@contextlib.contextmanager
def _without_openai_variables() -> Iterator[None]:
    """Hide what the client takes from the environment: keys, addresses, organisations, headers, logs."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.upper().startswith("OPENAI_")}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """Call in a thread; TimeoutError if it takes longer, for the timeout of a socket begins anew with every byte."""
    results: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _read(endpoint: Endpoint, status: int, body: bytes, seconds: float) -> Answer:
    def refuse(message: str, fix: str, kind: str = "no_choices") -> NoReturn:
        raise EndpointError(kind, message, fix, status=status)

    api = _LOOK_AT_URL
    text = body.decode(errors="replace")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        if not text.strip():
            refuse("the response is empty", api, "no_json")
        what = "a web page" if text.lstrip()[:1] == "<" else "no JSON"
        refuse(f"the response is {what}: {_quoted(text)}", api, "no_json")
    if not isinstance(data, dict):
        refuse(f"the response is no JSON object: {_quoted(text)}", api, "no_json")
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices:
        if said := _said(data):
            refuse(f"the response has an error in place of `choices`: {said}", "see what the endpoint says")
        if "choices" in data:
            refuse(f"the `choices` of the response are {_quoted(json.dumps(choices))}", "see the endpoint's log")
        names = ", ".join(map(_quoted, list(data)[:8])) or "nothing"
        refuse(f"the response has no `choices`; it has {names}", api)
    choice = choices[0] if isinstance(choices[0], dict) else {}
    message = choice.get("message")
    message = message if isinstance(message, dict) else {}
    content, reason = message.get("content"), str(choice.get("finish_reason"))
    if not isinstance(content, str) or not content.strip():
        if reason == "length":
            refuse("all tokens were used before an answer came", "raise --max-tokens", "no_answer")
        names = ", ".join(map(_quoted, list(message)[:8])) or "nothing"
        refuse(f"the first of `choices` has no text; its message has {names}", "is it a chat model?", "no_answer")
    return Answer(content, str(data.get("model") or endpoint.model), reason, seconds)


# ---- What went wrong -------------------------------------------------------------------------------------------------


def _explain(endpoint: Endpoint, client: Any, error: Exception, timeout: float) -> EndpointError:
    """Say what an exception of the client means."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return _explain_status(endpoint, client, error, status, timeout)
    if body_error := next((link for link in _chain(error) if isinstance(link, _BodyError)), None):
        return EndpointError("no_json", str(body_error), _LOOK_AT_URL)
    names = {each.__name__ for link in _chain(error) for each in type(link).__mro__}
    proxy = _proxy(endpoint.base_url)
    if proxy is not None and (absent := _why_no_proxy(proxy)):
        return EndpointError(
            "no_proxy",
            f"the proxy {proxy.host}:{proxy.port} in {proxy.variable} can't be reached: {absent}",
            f"start it, unset {proxy.variable}, or add {proxy.endpoint} to NO_PROXY",
        )
    through = f" through the proxy {proxy.host}:{proxy.port} in {proxy.variable}" if proxy is not None else ""
    if names & {"TimeoutException", "TimeoutError", "APITimeoutError"}:
        return EndpointError(
            "timeout",
            f"no whole answer came within {timeout:g} s{through}",
            "raise --timeout, or look at whether the server is busy, or still loads the model",
        )
    root = _chain(error)[-1]
    reason = _quoted(str(root)) or type(root).__name__
    if "ssl" in {type(link).__module__.partition(".")[0] for link in _chain(error)} or "SSL" in reason:
        return EndpointError("tls", f"TLS fails{through}: {reason}", "is the server one of http, and not of https?")
    if "gaierror" in names:
        return EndpointError(
            "unreachable", f"the host's name is not known: {reason}", "look at the base URL's spelling"
        )
    if names & {"RemoteProtocolError", "ReadError", "DecodingError"}:
        return EndpointError(
            "no_http",
            f"the response is broken off, or is none of HTTP{through}: {reason}",
            "is the server one of https?",
        )
    return EndpointError(
        "unreachable", f"the endpoint can't be reached{through}: {reason}", "does the server run, at this port?"
    )


def _explain_status(endpoint: Endpoint, client: Any, error: Exception, status: int, timeout: float) -> EndpointError:
    response = error.response  # type: ignore[attr-defined]
    try:
        text = response.text
    except Exception:
        # Its body was broken off.
        text = ""
    challenge = str(response.headers.get("www-authenticate", ""))
    try:
        said = _said(json.loads(text)) or _quoted(text)
    except (ValueError, RecursionError):
        said = _quoted(text)
    quoted = f": {said}" if said else ""
    lower = f"{text} {challenge}".lower()

    def because(kind: str, message: str, fix: str) -> EndpointError:
        return EndpointError(kind, f"{message} (HTTP {status}){quoted}", fix, status=status)

    if status in (401, 403):
        expiry = _oauth_expiry(endpoint.api_key)
        if expiry is not None and expiry < time.time():
            when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(expiry))
            return because(
                "expired_token",
                f"what {endpoint.api_key_from} holds is no key but an OAuth access token, which expired at {when} UTC",
                "get an API key from the endpoint's provider: a token lasts for minutes or hours",
            )
        if "expired" in lower and (expiry is not None or "token" in lower):
            return because(
                "expired_token",
                f"the endpoint takes what {endpoint.api_key_from} holds for an OAuth token, and says that it expired",
                "get an API key from the endpoint's provider: a token lasts for minutes or hours",
            )
    if status == 401:
        return because(
            "rejected_key",
            f"the endpoint rejects the key in {endpoint.api_key_from}",
            f"is it a key for this address, whole and not withdrawn? {endpoint.base_url_from} must belong to it",
        )
    if (refused := _refused_field(error)) is not None:
        fix = "ask a model that takes it: without it an answer would be one of many" if refused == "temperature" else ""
        message = f"the endpoint does not take the request's {refused}"
        return because("refused_field", message, fix or "see what it says")
    if status in (400, 403, 404, 422) and _is_of_model(endpoint.model, lower):
        return because("no_model", "the endpoint has no such model", _models(endpoint, client, timeout))
    if status == 403:
        return because("forbidden", "the key may not do this", "ask the endpoint's provider for the right to it")
    if status == 404:
        if "/v1/v1" in lower:
            fix = f"something before the server adds /v1: remove it from {endpoint.base_url_from}"
            return because("doubled_v1", "the server is asked for a path with /v1 twice", fix)
        ends = endpoint.base_url.rstrip("/").lower().endswith("/v1")
        fix = "look at the base URL's path" if ends else "should the base URL end in /v1?"
        return because("not_found", "the base URL has no chat completions", fix)
    if status == 407:
        return because("no_proxy", "the proxy wants a user name and a password", "give them in the proxy's variable")
    if status == 408 or (status == 504):
        return because("timeout", "the server, or what is before it, gave up waiting", "try again, or ask for less")
    if status == 429:
        return because("rate_limit", "too many requests, or no credit is left", "wait, or look at the account")
    if 300 <= status < 400:
        where = _quoted(str(response.headers.get("location", "")))
        message = f"the endpoint sends us elsewhere{f', to {where}' if where else ''}; the key was not sent there"
        return because("redirect", message, "if you trust that address, make it the base URL")
    if status >= 500:
        proxy = _proxy(endpoint.base_url)
        who = f"the server, or the proxy in {proxy.variable}," if proxy is not None else "the server"
        return because("server_error", f"{who} fails", "see the server's log")
    return because("refused", "the endpoint refuses the request", "see what it says")


def _chain(error: BaseException) -> list[BaseException]:
    """Give an exception and those that caused it."""
    links = [error]
    while (cause := links[-1].__cause__ or links[-1].__context__) is not None and cause not in links:
        links.append(cause)
    return links


def _said(data: Any) -> str:
    """Give the message of an error as servers of this API word it; empty if there is none."""
    if not isinstance(data, dict):
        return ""
    for holder in (data.get("error"), data):
        if isinstance(holder, str):
            return _quoted(holder)
        if isinstance(holder, dict):
            for name in ("message", "detail", "error_description"):
                if holder.get(name):
                    value = holder[name]
                    return _quoted(value if isinstance(value, str) else json.dumps(value))
    return ""


def _quoted(text: str) -> str:
    """Give another's text in a line, without what a terminal would act on."""
    line = "".join(character for character in " ".join(text.split()) if character.isprintable())
    return line if len(line) <= _MAX_QUOTED else f"{line[:_MAX_QUOTED]}..."


def _refused_field(error: Exception) -> str | None:
    """Name the field of the request that a server says it does not take; None if it says nothing of the kind."""
    if getattr(error, "status_code", None) not in (400, 422):
        return None
    try:
        said = json.loads(error.response.text)  # type: ignore[attr-defined]
    except Exception:
        # No JSON, or a body that was broken off.
        return None
    said = said.get("error") if isinstance(said, dict) else None
    named = said.get("param") if isinstance(said, dict) else None
    return named if isinstance(named, str) and named in ("temperature", "max_tokens", "max_completion_tokens") else None


def _is_of_model(model: str, lower: str) -> bool:
    if "model_not_found" in lower or "model_not_exist" in lower:
        return True
    about = "model" in lower or model.lower() in lower
    return (
        about
        and re.search(r"not (be )?(found|exist|available|supported)|no such|unknown|invalid model", lower) is not None
    )


def _models(endpoint: Endpoint, client: Any, timeout: float) -> str:
    """Say which models there are, those with like names first, as far as the endpoint tells."""
    try:
        listed = _within(min(timeout, 10.0), lambda: [str(each.id) for each in client.models.list().data])
    except Exception:
        return "look at the model's name; the endpoint does not say which models it has"
    near = difflib.get_close_matches(endpoint.model, listed, n=3, cutoff=0.5)
    ordered = [*near, *(name for name in sorted(listed) if name not in near)]
    names = ", ".join(map(_quoted, ordered[:_MAX_MODELS])) or "none"
    return f"it has {names}{f' and {len(ordered) - _MAX_MODELS} others' if len(ordered) > _MAX_MODELS else ''}"


# ---- Proxies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Proxy:
    variable: str
    """Of the environment."""
    host: str
    port: int
    endpoint: str
    """The host that is asked through it."""


def _proxy(url: str) -> _Proxy | None:
    """Give the proxy that requests to a URL go through, as the environment says."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    proxies = urllib.request.getproxies_environment()
    if urllib.request.proxy_bypass(f"{host}:{parts.port}" if parts.port else host):
        return None
    for kind in (parts.scheme.lower(), "all"):
        if text := proxies.get(kind):
            names = (f"{kind}_proxy", f"{kind.upper()}_PROXY")
            variable = next((name for name in names if os.environ.get(name)), names[1])
            address, port = _address(text)
            return _Proxy(variable, address, port, host)
    return None


def _address(text: str) -> tuple[str, int]:
    """Give host and port of a proxy's URL, without the password that it may hold."""
    try:
        parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
        default = {"https": 443, "http": 80}.get(parts.scheme.lower(), 1080)
        return parts.hostname or "", parts.port or default
    except ValueError:
        return "", 0


def _why_no_proxy(proxy: _Proxy) -> str:
    """Say why a proxy can't be reached, nothing if it can."""
    if not proxy.host:
        return "its URL names no host"
    try:
        socket.create_connection((proxy.host, proxy.port), _PROXY_SECONDS).close()
    except (OSError, ValueError) as error:
        return _quoted(getattr(error, "strerror", None) or str(error)) or type(error).__name__
    return ""


def _proxy_secrets() -> Iterator[str]:
    for text in urllib.request.getproxies_environment().values():
        with contextlib.suppress(ValueError):
            parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
            for secret in (parts.password, parts.username):
                if secret:
                    yield secret
                    yield urllib.parse.unquote(secret)
