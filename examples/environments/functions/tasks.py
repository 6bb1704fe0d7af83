"""Small functions to write in Python. The tests are the task's answer, and running them is the grade."""

import random
import re

from splits import Task


def make(rng: random.Random) -> Task:
    """A function of numbers or of a list, with tests that its solution passes."""
    k, m = rng.randint(1, 20), rng.randint(2, 20)
    sign, name = rng.choice([("+", "plus"), ("-", "minus")])
    text, solution = rng.choice(
        [
            (f"f(a, b): {m} times a {name} b", f"{m} * a {sign} b"),
            (f"f(a, b): a {name} {m} times b", f"a {sign} {m} * b"),
            (f"f(a, b): {m} times a {name} {k} times b", f"{m} * a {sign} {k} * b"),
            (f"f(a, b): the larger of a and b, {name} {k}", f"max(a, b) {sign} {k}"),
            (f"f(a, b): the smaller of a and {m} times b", f"min(a, {m} * b)"),
            (f"f(xs): the first {k} of xs", f"xs[:{k}]"),
            (f"f(xs): the last {k} of xs", f"xs[-{k}:]"),
            (f"f(xs): xs without the first {k}", f"xs[{k}:]"),
            (f"f(xs): the sum of the first {k} of xs", f"sum(xs[:{k}])"),
            (f"f(xs): how many of xs are above {m + k}", f"sum(x > {m + k} for x in xs)"),
            (f"f(xs): each of xs times {m} {name} {k}", f"[{m} * x {sign} {k} for x in xs]"),
            (f"f(xs): the length of xs {name} {k + m}", f"len(xs) {sign} {k + m}"),
        ]
    )
    return {"prompt": f"Write {text}", "answer": tests(text, solution, rng)}


def tests(text: str, solution: str, rng: random.Random) -> str:
    """Assertions with the results of the solution."""
    head = text.split(":")[0]
    function = eval(f"lambda {head[2:-1]}: {solution}")  # our own text from above
    lines = []
    for _ in range(4):
        if head == "f(xs)":
            arguments = repr([rng.randint(0, 99) for _ in range(rng.randint(18, 24))])
        else:
            arguments = f"{rng.randint(-20, 20)}, {rng.randint(-20, 20)}"
        lines.append(f"assert f({arguments}) == {eval(f'function({arguments})', {'function': function})!r}")
    return "\n".join([*lines, f"# solution: {solution}"])


def solution(task: Task) -> str:
    """The function that passes the tests."""
    head = re.match(r"Write (f\(.*?\))", task["prompt"])[1]
    return f"def {head}:\n    return {task['answer'].rsplit('# solution: ', 1)[1]}"


def demonstration(task: Task, rng: random.Random, care: float) -> list[list[dict]]:
    """How a person writes it who is right with probability `care`, else slips in one place."""
    text = solution(task)
    if rng.random() >= care:
        head, body = text.split("return ")
        places = [at for at, letter in enumerate(body) if letter in "0123456789+-"]
        at = rng.choice(places)
        other = rng.choice("123456789") if body[at].isdigit() else {"+": "-", "-": "+"}[body[at]]
        text = f"{head}return {body[:at]}{other}{body[at + 1:]}"
    return [[{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": text}]]
