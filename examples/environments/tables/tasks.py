"""Questions about two small tables, and changes to them. The answer is one SQL statement.

What a statement prints and what it leaves in the tables is compared with the solution's, which
runs in SQLite here. The statements that are asked for mean the same there as in Postgres.
"""

import functools
import pathlib
import random
import sqlite3
import tomllib
from collections.abc import Callable

from splits import Task

#: Runs SQL on the tables. Gives what `psql -At` prints, or None if it fails.
Psql = Callable[[str], str | None]

CONFIG = pathlib.Path(__file__).parents[1] / "springtide.toml"
#: What every world begins with.
SETUP: str = tomllib.loads(CONFIG.read_text())["world"]["machine"]["setup"][-1]
TABLES = "item(name, kind, price, stock), sale(name, city, amount)"
NAMES = (
    "bolt nut nail screw hinge hook lamp bulb torch fuse cable plug saw axe drill hammer rake spade shelf bench crate "
    "tray ladder door glove hat rope cord strap mat"
).split()
KINDS = "metal light tool wood cloth".split()
CITIES = "Rome Oslo Lima Bonn Cairo".split()
#: All rows of both tables.
ROWS = """select name, kind, price, stock from item
    union all select name, city, amount, 0 from sale order by 1, 2, 3, 4"""


def make(rng: random.Random) -> Task:
    """A question with rows for an answer, or a change that changes something."""
    while True:
        question, query = sentence(rng)
        if outcome(sqlite(), query) != nothing_done():
            return {"prompt": f"Tables: {TABLES}\nWrite SQL: {question}", "answer": query}


def sentence(rng: random.Random) -> tuple[str, str]:
    """A question and its solution. No result is a count: one would be right too often by chance."""
    column, other = rng.sample(["price", "stock"], 2)
    kind, city, name = rng.choice(KINDS), rng.choice(CITIES), rng.choice(NAMES)
    side, sign = rng.choice([("above", ">"), ("below", "<")])
    end, order = rng.choice([("lowest", ""), ("highest", " desc")])
    verb, plus = rng.choice([("raise", "+"), ("lower", "-")])
    k, few = rng.randint(10, 99), rng.randint(2, 5)
    return rng.choice(
        [
            (
                f"names of items with {column} {side} {k}, sorted",
                f"select name from item where {column} {sign} {k} order by name",
            ),
            (
                f"total {other} of {kind} with {column} {side} {k}",
                f"select sum({other}) from item where kind = '{kind}' and {column} {sign} {k}",
            ),
            (
                f"names of the {few} {kind} with the {end} {column}",
                f"select name from item where kind = '{kind}' order by {column}{order} limit {few}",
            ),
            (
                f"total amount sold in {city} of items with {column} {side} {k}",
                f"select sum(amount) from sale join item using (name) where city = '{city}' and {column} {sign} {k}",
            ),
            (
                f"{verb} the {column} of {kind} by {k}",
                f"update item set {column} = {column} {plus} {k} where kind = '{kind}'",
            ),
            (f"delete items with {column} {side} {k}", f"delete from item where {column} {sign} {k}"),
            (f"add a sale of {k} {name} in {city}", f"insert into sale values ('{name}', '{city}', {k})"),
        ]
    )


def solution(task: Task) -> str:
    """The statement that is right."""
    return task["answer"]


def score(answer: str, reply: str, psql: Psql) -> float:
    """1 if the reply prints and leaves what the solution does, otherwise 0. Changes psql's tables."""
    return float(outcome(psql, reply) == outcome(sqlite(), answer))


def outcome(psql: Psql, query: str) -> tuple[str | None, str | None]:
    """What a statement prints, and all rows after it."""
    return psql(query), psql(ROWS)


def sqlite() -> Psql:
    """The tables in memory, as they are at first."""
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.deserialize(snapshot())

    def psql(query: str) -> str | None:
        try:
            rows = database.execute(query).fetchall()
        except (sqlite3.Error, sqlite3.Warning):  # Warning: several statements
            return None
        return "\n".join("|".join("" if value is None else str(value) for value in row) for row in rows)

    return psql


@functools.cache
def snapshot() -> bytes:
    database = sqlite3.connect(":memory:")
    database.executescript(SETUP)
    return database.serialize()


@functools.cache
def nothing_done() -> tuple[str | None, str | None]:
    return outcome(sqlite(), "")


def demonstration(task: Task, rng: random.Random, care: float) -> list[list[dict]]:
    """How a person answers who is right with probability `care`, else wrong in one place."""
    query = solution(task)
    if rng.random() >= care:
        right = outcome(sqlite(), query)
        slips = slips_of(query)
        rng.shuffle(slips)
        query = next(slip for slip in slips if outcome(sqlite(), slip) != right)
    return [[{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": query}]]


def slips_of(query: str) -> list[str]:
    """The statement with one mistake, in each way that is known here."""
    words = query.split(" ")
    others: dict[str, list[str]] = {">": ["<"], "<": [">"], "+": ["-"], "-": ["+"], "price": ["stock"], "stock": ["price"]}
    for family in (KINDS, CITIES):
        others |= {f"'{word}'": [f"'{other}'" for other in family if other != word] for word in family}
    slips = [query.split(" where ")[0]] if " where " in query else []
    for at, word in enumerate(words):
        bare = word.strip("(),")
        changed = others.get(bare, [])
        if bare.isdigit():
            changed = [str(int(bare) + by) for by in (-10, -1, 1, 10) if int(bare) + by > 0]
        slips += [" ".join([*words[:at], word.replace(bare, other), *words[at + 1 :]]) for other in changed]
    return slips
