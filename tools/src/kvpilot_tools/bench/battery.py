"""The battery: requests, good and bad, sent to the real vLLM and to us, and every difference accounted for.

    python -m kvpilot_tools.bench.battery record [--url URL]   vLLM's answers into the fixture (starts it without URL)
    python -m kvpilot_tools.bench.battery compare [--url URL]  ours against the fixture; writes the document

A difference is either mended or has a rule in `battery_rules` that says why it stays; `compare` fails on a difference
without a rule and on a rule without a difference. The fixture holds status, structure and counts, no texts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import aiohttp

from kvpilot_tools.bench.answer_shape import AnswerShape, describe_answer
from kvpilot_tools.bench.battery_requests import BatteryRequest, build_battery
from kvpilot_tools.bench.battery_rules import RULES, Rule
from kvpilot_tools.bench.peer_layout import VLLM_VERSION, benchmark_model, peer_layout
from kvpilot_tools.bench.server_process import start_server
from kvpilot_tools.bench.server_specs import kvpilot_spec, vllm_spec
from kvpilot_tools.bench.streaming_client import base_url
from kvpilot_tools.cluster.progress import Progress
from kvpilot_tools.repository import BUILD, ROOT

FIXTURE = ROOT / "tests" / "tools" / "fixtures" / "vllm_answers.json"
DOCUMENT = ROOT / "docs" / "contracts" / "vllm-differences.md"
_CONCURRENCY = 4
_TIMEOUT_S = 60.0
_NAMES_SHOWN = 6
_LINE = 120

Answers = Mapping[str, AnswerShape]


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """One way in which one answer differs."""

    kind: str
    """`status`, `kind`, `missing` (we lack a path), `extra` (only we have it), `type`, `counts`."""
    place: str
    """A path of the structure, the name of a count, or `status`."""
    theirs: str
    ours: str
    case: str


async def ask_all(
    url: str, requests: Iterable[BatteryRequest], progress: Progress | None = None
) -> dict[str, AnswerShape]:
    """Send every request, a few at a time; a request without an answer has status 0."""
    places = asyncio.Semaphore(_CONCURRENCY)
    answers: dict[str, AnswerShape] = {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    # a connection a request: one that a server closes after an error is not to fail the next request
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def ask(request: BatteryRequest) -> None:
            async with places:
                try:
                    async with session.request(
                        request.method, url + request.path, data=request.body or None, headers=dict(request.headers)
                    ) as response:
                        answers[request.name] = describe_answer(
                            request.path,
                            response.status,
                            response.headers.get("Content-Type", ""),
                            await response.read(),
                        )
                except (aiohttp.ClientError, TimeoutError) as error:
                    kind = f"no answer: {type(error).__name__}"
                    answers[request.name] = AnswerShape(status=0, kind=kind, paths={}, counts={})
                if progress is not None:
                    progress.beat(f"{len(answers)} answers")

        asked = list(requests)
        await asyncio.gather(*(ask(request) for request in asked))
    return {request.name: answers[request.name] for request in asked}


def find_differences(theirs: Answers, ours: Answers) -> list[Difference]:
    """Every difference; where the statuses differ, that alone."""
    found: list[Difference] = []
    for case, their in theirs.items():
        our = ours[case]
        if their.status != our.status:
            found.append(Difference("status", "status", str(their.status), str(our.status), case))
            continue
        if their.kind != our.kind:
            found.append(Difference("kind", "kind", their.kind, our.kind, case))
            continue
        for place in sorted(their.paths.keys() | our.paths.keys()):
            their_kind, our_kind = their.paths.get(place), our.paths.get(place)
            if their_kind == our_kind or _parent_differs(place, their, our):
                continue
            kind = "missing" if our_kind is None else "extra" if their_kind is None else "type"
            found.append(Difference(kind, place, their_kind or "", our_kind or "", case))
        found += [
            Difference("counts", name, str(their.counts.get(name)), str(our.counts.get(name)), case)
            for name in sorted(their.counts.keys() | our.counts.keys())
            if their.counts.get(name) != our.counts.get(name)
        ]
    return found


def _parent_differs(place: str, their: AnswerShape, our: AnswerShape) -> bool:
    """What is below a path that only one has is not told again."""
    parent = place[:-2] if place.endswith(("[]", "{}")) else place.rpartition(".")[0] or "."
    return place != "." and (parent in their.paths) != (parent in our.paths)


def match_rules(differences: Iterable[Difference], rules: Iterable[Rule]) -> dict[Rule | None, list[Difference]]:
    """Differences by the first rule that covers them; None holds those without one."""
    matched: dict[Rule | None, list[Difference]] = {rule: [] for rule in rules}
    for difference in differences:
        rule = next((rule for rule in matched if rule is not None and covers(rule, difference)), None)
        matched.setdefault(rule, []).append(difference)
    return matched


def covers(rule: Rule, difference: Difference) -> bool:
    """Whether a rule is about this difference; `*` stands for anything, brackets for themselves."""
    return (
        difference.kind in rule.kinds
        and any(_matches(difference.place, pattern) for pattern in rule.places)
        and any(_matches(difference.case, pattern) for pattern in rule.cases)
        and (rule.theirs is None or rule.theirs == difference.theirs)
        and (rule.ours is None or rule.ours == difference.ours)
    )


def _matches(text: str, pattern: str) -> bool:
    return fnmatchcase(text, pattern.replace("[", "[[]"))


def unused_rules(matched: Mapping[Rule | None, list[Difference]]) -> list[str]:
    """Titles of rules that nothing needs any more."""
    return [rule.title for rule, found in matched.items() if rule is not None and not found and not rule.is_occasional]


def write_fixture(answers: Answers, path: Path) -> None:
    """One line a case; equal structures are kept once."""
    structures: dict[str, int] = {}
    lines = []
    for case, answer in answers.items():
        key = json.dumps(answer.paths, sort_keys=True)
        number = structures.setdefault(key, len(structures))
        lines.append(json.dumps([case, answer.status, answer.kind, number, answer.counts]))
    path.parent.mkdir(parents=True, exist_ok=True)
    body, kept = ",\n".join(lines), ",\n".join(structures)
    text = f'{{"server": "vLLM {VLLM_VERSION}",\n"structures": [\n{kept}\n],\n"answers": [\n{body}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def read_fixture(path: Path = FIXTURE) -> dict[str, AnswerShape]:
    document: Any = json.loads(path.read_text(encoding="utf-8"))
    structures = document["structures"]
    return {
        case: AnswerShape(status=status, kind=kind, paths=structures[number], counts=counts)
        for case, status, kind, number, counts in document["answers"]
    }


def render_document(matched: Mapping[Rule | None, list[Difference]], num_requests: int) -> str:
    """The list of differences for people."""
    refused = {difference.case for found in matched.values() for difference in found if difference.kind == "status"}
    lines = [
        "# Differences from vLLM's API",
        "",
        textwrap.fill(
            f"Made by `python -m kvpilot_tools.bench.battery compare`: {num_requests} requests, good and bad, were "
            f"sent to vLLM {VLLM_VERSION} (recorded in `tests/tools/fixtures/vllm_answers.json`) and to kvpilot; "
            "status, structure of the JSON, finish reasons and counts of tokens were compared. "
            f"{num_requests - len(refused)} answers have vLLM's status; the others, and what differs in structure and "
            "counts, are below. A test fails on a difference that is not listed here, and on an entry that is no more "
            "true.",
            _LINE,
        ),
        "",
    ]
    for rule, found in matched.items():
        if rule is None or not (found or rule.is_occasional):
            continue
        lines += [f"## {rule.title}", "", textwrap.fill(rule.reason, _LINE), ""]
        if rule.is_occasional:  # which requests these are hangs on the texts of the day
            continue
        cases = sorted({difference.case for difference in found})
        shown = "; ".join(f"`{case}`" for case in cases[:_NAMES_SHOWN])
        more = f"; and {len(cases) - _NAMES_SHOWN} more" if len(cases) > _NAMES_SHOWN else ""
        seen = textwrap.fill(f"{_values(found)} Requests: {shown}{more}.", _LINE, break_long_words=False)
        lines += [seen, ""]
    return "\n".join(lines).rstrip() + "\n"


def _values(found: list[Difference]) -> str:
    kinds = {"missing": "not in ours", "extra": "only in ours", "type": "another type", "counts": "another value"}
    if all(difference.kind == "status" for difference in found):
        pairs = sorted({(difference.theirs, difference.ours) for difference in found})
        return "Status: " + ", ".join(f"vLLM {theirs}, ours {ours}" for theirs, ours in pairs) + "."
    places = sorted({(difference.place, kinds.get(difference.kind, difference.kind)) for difference in found})
    return "Where: " + ", ".join(f"`{place}` ({kind})" for place, kind in places[:12]) + "."


@contextlib.contextmanager
def _server(url: str | None, *, is_vllm: bool, progress: Progress) -> Iterator[str]:
    if url is not None:
        yield base_url(url)
        return
    model = benchmark_model()
    spec = vllm_spec(peer_layout(), model, num_threads=2) if is_vllm else kvpilot_spec(model, num_threads=2)
    with start_server(spec, log=BUILD / "logs" / f"battery-{spec.name}.log", on_wait=progress.beat) as server:
        yield server.url


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("--url", help="a running server with --max-model-len 4096, serving the model as `bench`")
    parser.add_argument("--verbose", action="store_true", help="print every difference without a rule, not only groups")
    options = parser.parse_args(argv)
    progress, requests = Progress(), build_battery()
    with _server(options.url, is_vllm=options.action == "record", progress=progress) as url:
        answers = asyncio.run(ask_all(url, requests, progress))
    if options.action == "record":
        write_fixture(answers, FIXTURE)
        print(f"{len(answers)} answers in {FIXTURE}")
        return 0
    matched = match_rules(find_differences(read_fixture(), answers), RULES)
    unexplained = matched.pop(None, [])
    unused = unused_rules(matched)
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for difference in unexplained:
        key = (difference.kind, difference.place, difference.theirs, difference.ours)
        groups.setdefault(key, []).append(difference.case)
    for (kind, place, theirs, ours), cases in sorted(groups.items(), key=lambda item: -len(item[1])):
        shown = cases if options.verbose else cases[:3]
        print(f"{len(cases):4d}  {kind} {place}: vLLM {theirs or '–'}, ours {ours or '–'}: {'; '.join(shown)}")
    for title in unused:
        print(f"no difference any more: {title}")
    DOCUMENT.write_text(render_document(matched, len(requests)), encoding="utf-8")
    print(json.dumps({"requests": len(requests), "without_rule": len(unexplained), "unused_rules": unused}))
    return 1 if unexplained or unused else 0


if __name__ == "__main__":
    sys.exit(main())
