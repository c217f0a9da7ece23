"""`probe`: whether an endpoint answers, and what two endpoints answer."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .group import COUNT, Failure, ToolchainFailure, UsageFailure, cli
from .output import make_console, print_json, progress

if TYPE_CHECKING:
    from mlaforge.answers import Difference
    from mlaforge.endpoint import Answer, Endpoint, EndpointError
    from mlaforge.redaction import Redactor

_MAX_PROMPTS_BYTES = 1 << 20


# Words that are no options are refused here, and not by click, which would repeat them: one may be the key.
@cli.command(context_settings={"allow_extra_args": True})
@click.option("--model", metavar="ID", required=True, help="The model, as the endpoint calls it.")
@click.option("--base-url", metavar="URL", help="As in https://host/v1.  [default: $MLAFORGE_BASE_URL]")
@click.option(
    "--api-key",
    metavar="KEY",
    help="The key; - reads a line of standard input, which nobody else on this machine can see.  "
    "[default: $MLAFORGE_API_KEY]",
)
@click.option("--compare", "second_url", metavar="URL", help="Ask this endpoint, too, and show the differences.")
@click.option("--compare-model", metavar="ID", help="The model there.  [default: that of --model]")
@click.option(
    "--compare-api-key",
    metavar="KEY",
    help="The key there.  [default: $MLAFORGE_COMPARE_API_KEY; at the same host and port the first key]",
)
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Ask this; may be repeated.")
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask the lines of a file, or the strings of a JSON list.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1, max=3600),
    default=30.0,
    show_default=True,
    help="Seconds for one answer.",
)
@click.option("--max-tokens", type=COUNT, default=256, show_default=True, help="Tokens of an answer at most.")
@click.option("--json", "as_json", is_flag=True, help="Print what came of it as JSON.")
@click.pass_context
def probe(
    context: click.Context,
    model: str,
    base_url: str | None,
    api_key: str | None,
    second_url: str | None,
    compare_model: str | None,
    compare_api_key: str | None,
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    timeout: float,
    max_tokens: int,
    as_json: bool,
) -> None:
    """Ask an OpenAI-compatible endpoint a question, and explain what is wrong if it does not answer.

    The base URL and the key are those of the options, else of MLAFORGE_BASE_URL and MLAFORGE_API_KEY, else of
    TAOTOKEN_BASE_URL and TAOTOKEN_API_KEY; OPENAI_API_KEY is never read. No part of a key is printed. With --compare
    two endpoints answer a list of prompts, such as an engine with these kernels and a reference.

    The exit code is 1 if there is no answer, or a wrong one, or if two endpoints differ; 2 if nothing was sent because
    the key, the base URL or another setting can't be right; 3 if the openai client is not installed.
    """
    if context.args:
        raise click.UsageError("probe takes options alone, and there is a word that belongs to none")
    if second_url is None and (compare_model is not None or compare_api_key is not None):
        raise click.UsageError("--compare-model and --compare-api-key need --compare")
    wanted = [*prompts, *_read_prompts(prompts_file)]
    api_key, compare_api_key = _from_input(api_key), _from_input(compare_api_key)
    from mlaforge.endpoint import EndpointError, find_endpoint, find_second, make_redactor

    run = _Run(timeout, max_tokens, as_json, make_redactor(os.environ, api_key, compare_api_key))
    endpoints: list[Endpoint] = []
    try:
        endpoints.append(find_endpoint(model, base_url, api_key, os.environ))
        if second_url is not None:
            endpoints.append(find_second(endpoints[0], second_url, compare_model, compare_api_key, os.environ))
    except EndpointError as error:
        run.fail(error, {"endpoints": [_about(each) for each in endpoints]})
    if len(endpoints) == 2:
        _compare(endpoints, wanted, run)
    else:
        _ask(endpoints[0], wanted, run)


@dataclasses.dataclass(frozen=True)
class _Run:
    """How to ask, and how to print; all that is printed is masked."""

    timeout: float
    max_tokens: int
    as_json: bool
    redactor: Redactor

    def ask(self, endpoint: Endpoint, prompt: str) -> Answer:
        """Ask once."""
        from mlaforge.endpoint import ask

        return ask(endpoint, prompt, timeout=self.timeout, max_tokens=self.max_tokens)

    def tell(self, *line: tuple[str, str]) -> None:
        """Print a line, given in pieces with their styles, unless JSON is wanted."""
        from rich.text import Text

        if self.as_json:
            return
        # Masked as a whole: a key may lie across pieces. Then there are no styles.
        whole = "".join(piece for piece, _ in line)
        if self.redactor(whole) != whole:
            line = ((self.redactor(whole), ""),)
        make_console().print(Text.assemble(*line), soft_wrap=True)

    def result(self, data: dict[str, Any]) -> None:
        """Print the whole as JSON, if that is wanted."""
        if self.as_json:
            print_json(self.redactor.data(data))

    def fail(self, error: EndpointError, data: dict[str, Any], where: str = "") -> NoReturn:
        """Print what went wrong, and end."""
        from mlaforge.endpoint import ClientMissingError, SettingsError

        problem = {"kind": error.kind, "status": error.status, "message": error.message, "fix": error.fix}
        self.result({"ok": False, **data, "problem": problem})
        kind: type[Failure] = Failure
        if isinstance(error, SettingsError):
            kind = UsageFailure
        elif isinstance(error, ClientMissingError):
            kind = ToolchainFailure
        raise kind(self.redactor(f"{where}{error.message}\n  -> {error.fix}")) from None


def _ask(endpoint: Endpoint, prompts: Sequence[str], run: _Run) -> None:
    """Ask one endpoint, by default what has one right answer."""
    from mlaforge.endpoint import EXPECTED, QUESTION, EndpointError

    checked = not prompts
    data: dict[str, Any] = {"endpoints": [_about(endpoint)], "answers": []}
    _show(endpoint, run, "endpoint")
    wrong = False
    with progress("asking", len(prompts) or 1) as advance:
        for prompt in prompts or [QUESTION]:
            try:
                answer = run.ask(endpoint, prompt)
            except EndpointError as error:
                run.fail(error, data, f"{endpoint.base_url}: ")
            advance()
            wrong = checked and re.search(rf"(?<![0-9]){EXPECTED}(?![0-9])", answer.text) is None
            expected = {"expected": EXPECTED, "right": not wrong} if checked else {}
            data["answers"].append({"prompt": prompt, **dataclasses.asdict(answer), **expected})
            run.tell((f"question  {_line(prompt)}", ""))
            run.tell((f"answer    {_plain(answer.text)}", ""))
            run.tell((f"          in {answer.seconds:.2f} s, by {_line(answer.model)}", ""))
    if wrong:
        problem = {"kind": "wrong_answer", "status": None, "message": f"the answer is not {EXPECTED}"}
        run.result({"ok": False, **data, "problem": {**problem, "fix": _WRONG}})
        raise Failure(run.redactor(f"{endpoint.base_url}: the answer is not {EXPECTED}\n  -> {_WRONG}"))
    run.result({"ok": True, **data, "problem": None})


_WRONG = "is it the model that was meant, with its own chat template, and is its numerics right?"


def _compare(endpoints: Sequence[Endpoint], prompts: Sequence[str], run: _Run) -> None:
    """Ask two endpoints the same, and show where their answers part."""
    from mlaforge.answers import PROMPTS, compare
    from mlaforge.endpoint import EndpointError

    prompts = prompts or PROMPTS
    data: dict[str, Any] = {"endpoints": [_about(each) for each in endpoints], "prompts": []}
    for each, name in zip(endpoints, ("first", "second"), strict=True):
        _show(each, run, name)
    same = 0
    with progress("asking", len(prompts)) as advance:
        for number, prompt in enumerate(prompts, 1):
            answers = []
            for endpoint in endpoints:
                try:
                    answers.append(run.ask(endpoint, prompt))
                except EndpointError as error:
                    run.fail(error, data, f"{endpoint.base_url}: prompt {number} of {len(prompts)}: ")
            advance()
            difference = compare(*(answer.text for answer in answers))
            same += difference.at is None
            data["prompts"].append(
                {
                    "prompt": prompt,
                    "same": difference.at is None,
                    "differs_at": difference.at,
                    "alike": difference.alike,
                    "answers": [dataclasses.asdict(answer) for answer in answers],
                }
            )
            run.tell((f"prompt {number} of {len(prompts)}: {_line(prompt)}", "bold"))
            _show_difference(difference, run)
    data["same"] = same
    run.tell((f"{same} of {len(prompts)} answers are the same", ""))
    run.result({"ok": same == len(prompts), **data, "problem": None})
    if same < len(prompts):
        raise Failure(f"{len(prompts) - same} of {len(prompts)} answers differ")


def _show_difference(difference: Difference, run: _Run) -> None:
    if difference.at is None:
        run.tell(("  both    ", ""), *((_plain(text), "") for _, text in difference.pieces))
        return
    marks = {"first": ("[-", "-]", "red"), "second": ("{+", "+}", "green")}
    for side, (begin, end, style) in marks.items():
        line = [(f"  {side:<8}", "")]
        for whose, text in difference.pieces:
            if whose == "both":
                line.append((_plain(text), ""))
            elif whose == side:
                line.append((f"{begin}{_plain(text)}{end}", style))
        run.tell(*line)
    run.tell((f"  differ from character {difference.at + 1} on, {difference.alike:.0%} of words alike", ""))


def _show(endpoint: Endpoint, run: _Run, name: str) -> None:
    about = f"{endpoint.base_url}, model {endpoint.model}, key of {endpoint.api_key_from}"
    run.tell((f"{name:<10}{about}", ""))


def _about(endpoint: Endpoint) -> dict[str, str]:
    return {
        "base_url": endpoint.base_url,
        "base_url_from": endpoint.base_url_from,
        "api_key_from": endpoint.api_key_from,
        "model": endpoint.model,
    }


def _plain(text: str) -> str:
    """Give a model's words without what a terminal would act on; lines after the first are indented."""
    kept = "".join(character for character in text if character.isprintable() or character in "\n\t")
    return kept.strip("\n").replace("\n", f"\n{'':<10}")


def _line(text: str) -> str:
    return " ".join(_plain(text).split())


def _from_input(key: str | None) -> str | None:
    """Read a key that is given as `-` from standard input, without the line's end."""
    if key != "-":
        return key
    return sys.stdin.readline().rstrip("\r\n")


def _read_prompts(path: Path | None) -> list[str]:
    """Read prompts: a JSON list of strings, or lines, of which empty ones are none."""
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_PROMPTS_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageFailure(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageFailure(f"{path}: not UTF-8") from None
    if len(data) > _MAX_PROMPTS_BYTES:
        raise UsageFailure(f"{path}: larger than {_MAX_PROMPTS_BYTES:,} bytes")
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except (ValueError, RecursionError):
            raise UsageFailure(f"{path}: begins with [ but is no JSON") from None
        if not all(isinstance(each, str) for each in listed):
            raise UsageFailure(f"{path}: must be a list of strings")
        found = listed
    else:
        found = text.splitlines()
    prompts = [each for each in found if each.strip()]
    if not prompts:
        raise UsageFailure(f"{path}: holds no prompt")
    return prompts
