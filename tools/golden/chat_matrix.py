"""Compares our prompts with those of `transformers`: every chat template of TRL's wheel with every
conversation below, as clients send them.

The reference renders what the conversation means: a content of parts as parts if the template
prints each of their texts, else as one text; arguments of calls as objects, else as texts; a
`developer` as `system` where the template does not know it. Where none of these brings every message
into the prompt, or where the template fails, the right answer is a refusal.

    chat_matrix.py RENDER_CHATS TRL_WHEEL [--save FILE]
"""

import argparse
import collections
import datetime
import itertools
import json
import re
import subprocess
import sys
import zipfile

import tokenizers
import transformers
from transformers.utils import chat_template_utils

NOW = datetime.datetime(2026, 7, 4, 9, 5, 3, tzinfo=datetime.timezone.utc)
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
# templates need a tokenizer for nothing but its special tokens
TOKENIZER = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")), **SPECIAL)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Current weather: \"now\" <b>&</b> here",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Ville, e.g. Zürich 東京"},
                "days": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}}}}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def call(name, arguments, identity="abcdefghi"):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, identity="abcdefghi", **more):
    return {"role": "tool", "tool_call_id": identity, "content": content, **more}


ASK, ANSWER = user("How warm is Bonn?"), assistant("It is 21 °C.")
SYSTEM = {"role": "system", "content": "Be terse."}
CALL = assistant(None, tool_calls=[call("weather", '{"city": "Bonn", "days": 2, "ok": true, "x": null}')])
TWO = assistant(None, tool_calls=[call("weather", '{"city": "Bonn"}', "aaaaaaaaa"), call("clock", "{}", "bbbbbbbbb")])
# name: (messages, what else)
CONVERSATIONS = {
    "one question": ([ASK], {}),
    "several turns": ([ASK, ANSWER, user("And tomorrow?")], {}),
    "no generation prompt": ([ASK, ANSWER], {"add_generation_prompt": False}),
    "system": ([SYSTEM, ASK], {}),
    "two system messages": ([SYSTEM, {"role": "system", "content": "Be kind."}, ASK], {}),
    "system in the middle": ([ASK, ANSWER, SYSTEM, user("And tomorrow?")], {}),
    "developer": ([{"role": "developer", "content": "Be terse."}, ASK], {}),
    "one part": ([user(parts("How warm is Bonn?"))], {}),
    "several parts": ([user(parts("How warm", "is Bonn?"))], {}),
    "parts everywhere": ([{"role": "system", "content": parts("Be terse.", "Be kind.")}, user(parts("Well?")), assistant(parts("Bonn:", "21 °C.")), user(parts("And tomorrow?"))], {}),
    "parts in a later turn": ([ASK, ANSWER, user(parts("And", "tomorrow?"))], {}),
    "unicode and spaces": ([user("  naïve 東京 👩‍👩‍👧‍👦 \u2028 é\n\n\ttab "), assistant(" ok "), user("“quotes” \"q\" 'q' <b>&amp;</b>")], {}),
    "an empty answer": ([ASK, assistant(""), user("Hello?")], {}),
    "a null answer": ([ASK, assistant(None), user("Hello?")], {}),
    "tools": ([SYSTEM, ASK], {"tools": [WEATHER, CLOCK]}),
    "tools without system": ([ASK], {"tools": [WEATHER]}),
    "a call": ([ASK, CALL, result('{"temp": 21}')], {"tools": [WEATHER]}),
    "a call with text": ([ASK, {**CALL, "content": "I look."}, result("21"), ANSWER, user("Thanks!")], {"tools": [WEATHER]}),
    "a call with an object": ([ASK, assistant("", tool_calls=[call("weather", {"city": "Zürich", "list": [1, 2.5, "a"], "o": {"k": None}})]), result("21")], {"tools": [WEATHER]}),
    "empty arguments": ([ASK, assistant(None, tool_calls=[call("clock", "")]), result("09:05")], {"tools": [CLOCK]}),
    "two calls": ([ASK, TWO, result("21", "aaaaaaaaa"), result("09:05", "bbbbbbbbb"), ANSWER, user("Thanks!")], {"tools": [WEATHER, CLOCK]}),
    "a call without tools": ([ASK, CALL, result("21"), ANSWER, user("Thanks!")], {}),
    "a result of parts": ([ASK, CALL, result(parts("21", "sunny"))], {"tools": [WEATHER]}),
    "a result with a name": ([ASK, CALL, result("21", name="weather")], {"tools": [WEATHER]}),
    "a result as JSON": ([ASK, CALL, result('{"a": "quote \\" é\\n"}')], {"tools": [WEATHER]}),
    "reasoning in a field": ([ASK, assistant("4", reasoning_content="Hm, easy."), user("And?")], {}),
    "reasoning before a call": ([ASK, {**CALL, "reasoning_content": "I look."}, result("21")], {"tools": [WEATHER]}),
    "reasoning in the text": ([ASK, assistant("<think>\nHm.\n</think>\n\n4"), user("And?")], {}),
    "no thinking": ([ASK], {"variables": {"enable_thinking": False}}),
    "low effort": ([ASK], {"variables": {"reasoning_effort": "low"}}),
    "a prefill": ([ASK, assistant('{"temp":')], {"continue": True}),
    "a prefill that ends in a space": ([ASK, assistant("It is ")], {"continue": True}),
    "a prefill of parts": ([ASK, assistant(parts("It", "is"))], {"continue": True}),
    "an unknown role": ([{"role": "critic", "content": "Zounds."}, ASK], {}),
    "assistant first": ([assistant("Welcome!"), ASK], {}),
    "two users in a row": ([ASK, user("Please.")], {}),
}


class Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def texts_of(message):
    content = message.get("content")
    if isinstance(content, list):
        return [part["text"] for part in content]
    return [content] if isinstance(content, str) and message["role"] != "assistant" else []


def left_out(messages, prompt):
    """How many texts are not in the prompt as they were written, and whether a message is not at all."""
    missing, gone = 0, False
    for message in messages:
        for text in texts_of(message):
            text = text.strip()
            part = {"type": "text", "text": text}
            misprinted = isinstance(message["content"], list) and any(
                form in prompt for form in (str(part), json.dumps(part, ensure_ascii=False))
            )
            there = text in prompt or json.dumps(text, ensure_ascii=False)[1:-1] in prompt
            missing += misprinted or not there
            some = there or any(word in prompt for word in text.split())
            gone |= bool(text) and message["role"] != "assistant" and (misprinted or not some)
    return missing, gone


def forms(messages, template):
    """The messages as the template may want them, the likeliest first."""

    def content(message, kind):
        value = message.get("content")
        if kind == "text" and isinstance(value, list):
            value = "\n".join(part["text"] for part in value)
        if kind == "parts" and isinstance(value, str):
            value = parts(value)
        return {**message, "content": value}

    def arguments(message, as_text):
        calls = message.get("tool_calls")
        if not calls or as_text:
            return message
        new = []
        for one in calls:
            given = one["function"]["arguments"]
            given = json.loads(given.strip() or "{}") if isinstance(given, str) else given
            new.append({**one, "function": {**one["function"], "arguments": given}})
        return {**message, "tool_calls": new}

    def role(message):
        known = message["role"] != "developer" or "developer" in template
        return message if known else {**message, "role": "system"}

    for kind in ("as given", "text", "parts"):
        tries = [(False, False), (True, False), (False, True), (True, True)]
        yield [([arguments(content(role(m), kind), as_text) for m in messages], keep) for as_text, keep in tries]


def render(template, messages, keep_none, more):
    options = dict(add_generation_prompt=more.get("add_generation_prompt", "continue" not in more), tools=more.get("tools"))
    if "continue" in more:
        options["continue_final_message"] = "content"
    options |= SPECIAL | more.get("variables", {})
    if keep_none and "continue" not in more:
        # as `transformers` did before version 5.24, which drops nulls
        return chat_template_utils._compile_jinja_template(template).render(messages=messages, documents=None, **options)
    prompt = TOKENIZER.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    last = texts_of({**messages[-1], "role": "prefill"})
    if "continue" in more and not prompt.rstrip().endswith(last[-1].strip()):
        raise ValueError("the prompt does not end in the prefill")
    return prompt


def reference(template, messages, more):
    best = None
    error = None
    for tries in forms(messages, template):
        for form, keep in tries:
            try:
                text = render(template, form, keep, more)
            except Exception as refused:  # whatever a template raises
                error = error or refused
                continue
            found = (*left_out(messages, text)[::-1], text)
            if best is None or found[:2] < best[:2]:
                best = found
            break
        if best and best[:2] == (False, 0):
            break
    if best is None:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "a message is left out"} if best[0] else {"text": best[2]}


def family(name):
    return re.sub(r"_training$", "", name)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("program")
    arguments.add_argument("wheel")
    arguments.add_argument("--show", type=int, default=10, help="differences to print")
    arguments.add_argument("--only", default="")
    given = arguments.parse_args()
    chat_template_utils.datetime = Frozen
    transformers.utils.logging.set_verbosity_error()
    with zipfile.ZipFile(given.wheel) as wheel:
        names = sorted(name for name in wheel.namelist() if name.endswith(".jinja") and given.only in name)
        templates = {name.rsplit("/", 1)[1][:-6]: wheel.read(name).decode() for name in names}
    cases, lines = [], []
    for (name, template), (conversation, (messages, more)) in itertools.product(templates.items(), CONVERSATIONS.items()):
        cases.append((name, conversation, reference(template, messages, more)))
        lines.append(json.dumps({
            "template": template, "special_tokens": SPECIAL, "messages": messages, "now": int(NOW.timestamp()), "tools": more.get("tools"),
            "variables": more.get("variables", {}), "add_generation_prompt": more.get("add_generation_prompt", "continue" not in more),
            "continue_final_message": "content" if "continue" in more else None,
        }))
    answers = subprocess.run([given.program], input="\n".join(lines), capture_output=True, text=True, check=True).stdout.strip().split("\n")
    assert len(answers) == len(cases), "the program stopped early"
    table = collections.defaultdict(collections.Counter)
    shown = 0
    for (name, conversation, theirs), ours in zip(cases, map(json.loads, answers)):
        if "text" in ours or "text" in theirs:
            kind = "equal" if ours.get("text") == theirs.get("text") else "different" if "text" in ours and "text" in theirs else "only ours" if "text" in ours else "only theirs"
        else:
            kind = "both refuse"
        table[family(name)][kind] += 1
        if kind not in ("equal", "both refuse") and shown < given.show:
            shown += 1
            print(f"--- {name}, {conversation}: {kind}\n  ours:   {ours}\n  theirs: {theirs}", file=sys.stderr)
    kinds = ["equal", "both refuse", "only theirs", "only ours", "different"]
    print("| template | " + " | ".join(kinds) + " |\n|---|" + "--:|" * len(kinds))
    for name, counts in sorted(table.items()):
        print(f"| {name} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |")
    total = sum(table.values(), collections.Counter())
    print(f"| {len(templates)} templates × {len(CONVERSATIONS)} conversations | " + " | ".join(str(total[kind]) for kind in kinds) + " |")
    sys.exit(total["equal"] + total["both refuse"] != len(cases))


if __name__ == "__main__":
    main()
