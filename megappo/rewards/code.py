"""Reward for programs: the last fenced Python block of the response must pass every test case, run in a sandbox.

`ground_truth` holds the tests, in one of the forms of published data sets:

- JSON `{"inputs": [...], "outputs": [...]}`: what the program reads and must print (PrimeIntellect, APPS, verl);
- the same with `"fn_name"`: the arguments of a function, or of a method of `class Solution`, and what it returns;
- JSON `["assert f(1) == 2", ...]`: tests in Python, each a case (MBPP's `test_list`);
- JSON `{"test": "def check(candidate): ...", "entry_point": "f"}`: one case (HumanEval);
- any other text: Python that raises where the code is wrong, one case.

Expected outputs never enter the sandbox. Tests in Python run beside the code that they test: a program that ends early
does not pass, but one that is out to deceive them can.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from megappo.rewards.sandbox import Sandbox

FENCE = re.compile(r" {0,3}(`{3,})[ \t]*([^\s`]*)[^`]*")
PYTHON = ("python", "python3", "py", "py3")

LOAD = """
import json, os, sys, types
solution = sys.modules["solution"] = types.ModuleType("solution")
exec(compile({code!r}, "solution.py", "exec"), vars(solution))
"""
CALL = """
function = getattr(solution, {name!r}, None) or getattr(solution.Solution(), {name!r})
print({mark!r} + json.dumps(function(*json.loads({arguments!r}))), flush=True)
os._exit(0)
"""
TEST = """
exec(compile({test!r}, "test.py", "exec"), vars(solution))
print({mark!r}, flush=True)
os._exit(0)
"""


class Returned(NamedTuple):
    """The value that a function must return."""

    value: Any


class Case(NamedTuple):
    """One test: what is run on `stdin`, and what must come out: text, or `mark` and, if any, the value in JSON."""

    program: str
    expected: str | Returned | None
    stdin: str = ""
    mark: str = ""

    def passes(self, stdout: str) -> bool:
        if isinstance(self.expected, str):
            return _lines(stdout) == _lines(self.expected)
        _, marked, result = stdout.rpartition(self.mark)
        if self.expected is None or not marked:
            return bool(marked)
        try:
            value = json.loads(result)
        except (ValueError, RecursionError):
            return False
        return value == self.expected.value or [value] == self.expected.value  # APPS wraps the value into a list


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    sandbox: Sandbox,
) -> dict[str, float]:
    """1 where the code passes every case, else 0.

    `passed` is the fraction of cases passed, `format` says if there was a code block at all. After a case that ran into
    the time limit the rest count as failed, so that endless loops cost one limit, not one a case.

    Raises:
        ValueError: tests in none of the forms above.
        SandboxError: the sandbox failed; nothing is known about the code.
    """
    code = extract_code(solution_str)
    passed, count = 0, 0
    timed_out = False
    for case in parse_cases(code or "", ground_truth):
        count += 1
        if code is None or timed_out:
            continue
        run = sandbox.run(case.program, case.stdin)
        timed_out = run.timed_out
        passed += not run.failure and case.passes(run.stdout)
    correct = float(passed == count)
    return {"score": correct, "acc": correct, "passed": passed / count, "format": float(code is not None)}


def compute_score_partial(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    sandbox: Sandbox,
) -> dict[str, float]:
    """As `compute_score`, but the score is the fraction of cases passed."""
    result = compute_score(data_source, solution_str, ground_truth, extra_info, sandbox=sandbox)
    return result | {"score": result["passed"]}


def extract_code(text: str) -> str | None:
    """The last fenced block marked as Python; else the last one without a mark; None without either.

    A block must be closed: one that is not was cut off.
    """
    marked = bare = None
    fence, language, block = "", "", list[str]()
    for line in text.splitlines():
        if fence:
            if line.strip().startswith(fence) and not line.strip().strip("`"):
                if language in PYTHON:
                    marked = "\n".join(block) + "\n"
                elif not language:
                    bare = "\n".join(block) + "\n"
                fence = ""
            else:
                block.append(line)
        elif opening := FENCE.fullmatch(line):
            fence, language, block = opening[1], opening[2].lower(), []
    return bare if marked is None else marked


def parse_cases(code: str, ground_truth: str) -> list[Case]:
    """The cases of `ground_truth` for `code`; ValueError where there are none or they have another form."""
    try:
        tests = json.loads(ground_truth)
    except ValueError:
        tests = [ground_truth]
    if isinstance(tests, dict) and "inputs" in tests and "outputs" in tests:
        cases = list(_input_output(code, tests))
    elif isinstance(tests, dict) and "test" in tests and "entry_point" in tests:
        cases = [_python_test(code, f"{tests['test']}\ncheck({tests['entry_point']})")]
    elif isinstance(tests, list) and all(isinstance(test, str) and test.strip() for test in tests):
        cases = [_python_test(code, test) for test in tests]
    else:
        raise ValueError(
            f"the ground truth {ground_truth[:80]!r} is no test: give JSON with inputs and outputs, with test and "
            "entry_point, or a list of Python tests; or one Python test as text"
        )
    if not cases:
        raise ValueError(f"the ground truth {ground_truth[:80]!r} has no test: give one, or leave the prompt out")
    return cases


def _input_output(code: str, tests: dict[str, Any]) -> Iterator[Case]:
    inputs, outputs, name = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(
            "the ground truth's inputs and outputs are no lists of one length, so that no test is known: mend the data"
        )
    for given, expected in zip(inputs, outputs, strict=True):
        if name is None:
            yield Case(code, _text(expected), _text(given))
            continue
        # A string holds one JSON value a line; anything else is the values themselves.
        arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
        value = json.loads(expected) if isinstance(expected, str) and isinstance(given, str) else expected
        mark = secrets.token_hex(16)
        call = CALL.format(name=str(name), arguments=json.dumps(arguments), mark=mark)
        yield Case(LOAD.format(code=code) + call, Returned(value), mark=mark)


def _python_test(code: str, test: str) -> Case:
    mark = secrets.token_hex(16)  # the program does not know it, so cannot print it and leave
    return Case(LOAD.format(code=code) + TEST.format(test=test, mark=mark), None, mark=mark)


def _text(value: Any) -> str:
    """Some data sets give lines as a list."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    """Lines as they are compared: white space at their ends, and empty ones at the text's end, do not matter."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
