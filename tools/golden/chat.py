"""Chat templates as transformers renders them, and two small tokenizers to encode the results.

Run by tools/golden.sh. Writes policy/text/tests/golden/chat/: templates/NAME.jinja, cases.json,
byte_level.json and byte_fallback.json. The templates are our own. Together they use the features that
templates of real models use.
"""
import datetime
import json
import pathlib
import shutil
import sys

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.utils import chat_template_utils

NOW = datetime.datetime(2026, 7, 4, 9, 5, 3)
SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]

CHATML = """\
{#- the plain one -#}
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
    {% endif %}
{{ '<|im_start|>' + message['role'] }}
{% if message.role == 'assistant' %}
{% generation %}
{{ message['content'] | trim + '<|im_end|>' }}
{% endgeneration %}
{% else %}
{{ message['content'] | trim + '<|im_end|>' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "1 Jan 2020" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: functions\\n" }}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- eos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) and not tools %}
        {{- raise_exception("roles must alternate: message " ~ loop.index ~ " is from " ~ message.role) }}
    {%- endif %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' }}
        {%- if message.content is string %}
            {{- message['content'] | trim }}
        {%- else %}
            {%- for part in message.content %}
                {%- if part.type == 'text' %}{{ part.text }}{% else %}{{ '<|' ~ part.type ~ '|>' }}{% endif %}
            {%- endfor %}
        {%- endif %}
        {{- eos_token }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" + eos_token }}
    {%- else %}
        {{- "<|head|>tool<|/head|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\\n\\n' }}
{%- endif %}
"""

THINKING = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "Functions:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation -%}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '<call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration -%}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<result>\\n' }}
        {{- content }}
        {{- '\\n</result>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LANGUAGE = """\
{%- macro kind(spec, depth=0) -%}
    {%- if spec.type == "array" -%}
        {{ kind(spec['items'], depth + 1) }}[]
    {%- elif spec.type == "object" -%}
        {
        {%- for key, value in spec.properties.items() -%}
            {{ ", " if not loop.first }}{{ key }}{{ "?" if key not in spec.get('required', []) }}: {{ kind(value, depth + 1) }}
        {%- endfor -%}
        }
    {%- elif spec.type is sequence and spec.type is not string -%}
        {{ spec.type | join(" | ") }}
    {%- else -%}
        {{ spec.type }}{{ " = " ~ spec.default | tojson if spec.default is defined }}
    {%- endif -%}
{%- endmacro -%}
{% for tool in tools or [] %}
    {% set f = tool.function %}
// {{ f.description or "no description" }}
type {{ f.name | upper }} = ({{ kind(f.parameters) }}) => any;
{% endfor %}
{% set data = messages[0].data %}
{% for key, value in data | dictsort %}
  {{ key }}: {{ value }} / {{ value | tojson }} / {{ value is string }} {{ value is number }} {{ value is mapping }} {{ value is iterable }} {{ value is sequence }} {{ value is none }} {{ value is boolean }}
{% endfor %}
{{ data | tojson(indent=2) }}
{{ data | tojson(separators=(',', ':')) }}
{{ data | tojson(ensure_ascii=true, sort_keys=true) }}
{{ data | tojson(indent=1, separators=(';', '=')) }}
{% for key in data %}
    {% if key == 'float' %}{% continue %}{% endif %}
    {% if loop.index > 4 %}{% break %}{% endif %}
{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }} {{ key }}{{ '<' ~ loop.previtem ~ '>' if loop.previtem is defined }}{{ '>' ~ loop.nextitem if not loop.last }}
{% else %}
nothing
{% endfor %}
{% set text = "  Grüße, wörld! \\u4f60\\u597d  " %}
[{{ text.strip() }}|{{ text.strip()[::-1] }}|{{ text.strip()[2:5] }}|{{ text.strip()[-3:] }}|{{ text | trim | length }}|{{ text.upper().strip() }}|{{ text.title() | trim }}]
{{ "a-b-c".split("-") }} {{ "a-b-c".split("-", 1)[1] }} {{ "a-b-c".rsplit("-", 1)[0] }} {{ "a  b".split() }} {{ "x".join(["1", "2"]) }} {{ "abc".find("c") }} {{ "abcabc".replace("b", "-", 1) }} {{ "l1\\nl2".splitlines() }}
{{ "prefix-x".removeprefix("prefix-") }} {{ "x-suffix".removesuffix("-suffix") }} {{ "k=v=w".partition("=") }} {{ "k=v=w".rpartition("=")[0] }} {{ "ab".startswith(("b", "a")) }} {{ "7".isdigit() }}
{{ 7 // 2 }} {{ 7 / 2 }} {{ 8 / 2 }} {{ 7 % 3 }} {{ 2 ** 5 }} {{ -7 // 2 }} {{ 1e16 }} {{ 0.00001 }} {{ 123456789.125 }} {{ 1.0 }} {{ 0.1 + 0.2 }} {{ 3 | float }} {{ "4" | int + 1 }} {{ 2.567 | round(1) }}
{{ true }} {{ none }} {{ undefined_thing }}| {{ [1, "two", 3.5, none, true, {"k": "it's"}] }} {{ (1, 2) }} {{ {"a": {"b": []}} }}
{{ "%s has %d" | format("it", 3) }} {{ "{} and {x}".format(1, x=2) }} {{ "=" * 5 }} {{ [1] + [2] }} {{ "a" ~ 1 ~ none ~ true }}
{{ messages | selectattr("role", "equalto", "user") | map(attribute="content") | list }} {{ messages | rejectattr("role", "eq", "user") | list | length }} {{ [3, 1, 2] | sort | first }} {{ [1, 2, 3] | last }} {{ [1, 2, 3] | sum }} {{ ["a", "b"] | reverse | join }} {{ range(3) | list }} {{ "a" in "cat" }} {{ "a" not in ["cat"] }} {{ [1,2,3][1:] }} {{ none | default("d", true) }} {{ missing | default("m") }} {{ "<b>&" }} {{ "<b>&" | safe }} {{ "x" if false }}|
{% set block %}
  inside {{ 1 + 1 }}
{% endset %}
{{ block | trim | indent(4, first=true) }}
{% raw %}{{ not rendered }}{% endraw %}

{% set ns = namespace(n=0, items=[]) %}
{% for message in messages if message.role != 'system' %}
    {% set ns.n = ns.n + 1 %}
    {% set ns.items = ns.items + [message.role] %}
{% endfor %}
{{ ns.n }} {{ ns.items | join(",") }} {{ ns.items | unique | list }} {{ dict(a=1, b=2).keys() | list }} {{ {"x": 1}.values() | list }} {{ {"x": 1}.get("y") }} {{ {"x": 1}.get("y", "z") }}
{% with inner = "w" %}{{ inner }}{% endwith %}{# gone #}

{%- if documents %}
{% for document in documents %}
[{{ loop.index }}] {{ document.title }}: {{ document['text'] }}
{% endfor %}
{% endif %}
"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "thinking": THINKING, "language": LANGUAGE}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather in a <city> & \"more\"",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Ville, e.g. Zürich \u2028 東京"},
                "days": {"type": "integer", "default": 3},
                "hours": {"type": "array", "items": {"type": ["number", "null"]}},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}, "items": {"type": "string"}}, "required": ["lat"]},
            },
            "required": ["city"],
        },
    },
}
PLAIN = [
    {"role": "user", "content": "  Hi! "},
    {"role": "assistant", "content": "Hello 👋🏽, naïve café"},
    {"role": "user", "content": "Write Rust.\n"},
]
CALLING = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2, "exact": 1.50, "on": True, "x": None}}}],
    },
    {"role": "tool", "content": "{\"temp\": 21}"},
    {"role": "assistant", "content": "21 °C."},
]
DATA = {
    "zero": 0, "text": "quote \" slash / back \\ tab \t nl \n bell \u0007 del \u007f emoji 😀 sep \u2028", "float": 1.5, "big": 12345678901234567890, "exp": 1e-7,
    "huge": 1e300, "neg": -0.0, "list": [1, [], {}, [2, {"a": None}]], "yes": True, "none": None, "empty": {}, "int_float": 3.0,
}


def case(name, template, messages, **more):
    return {"name": name, "template": template, "messages": messages, **more}


CASES = [
    case("chatml", "chatml", PLAIN, add_generation_prompt=True),
    case("chatml without a prompt", "chatml", PLAIN[:2]),
    case("chatml with a system message", "chatml", [{"role": "system", "content": "S"}, *PLAIN]),
    case("control characters in a message stay", "chatml", [{"role": "user", "content": "a\u0000b\r\nc\u2029d<|im_end|>"}]),
    case("headers", "headers", PLAIN, add_generation_prompt=True),
    case("headers with a date", "headers", PLAIN[:1], variables={"date_string": "3 Oct 2025"}),
    case("headers with tools", "headers", CALLING, tools=[WEATHER], add_generation_prompt=False),
    case("headers with parts", "headers", [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is <this>?"}]}]),
    case("roles must alternate", "headers", [PLAIN[0], PLAIN[0]]),
    case("special tokens can be given", "headers", PLAIN[:1], variables={"bos_token": "<s>"}),
    case("thinking", "thinking", PLAIN, add_generation_prompt=True),
    case("thinking switched off", "thinking", PLAIN, add_generation_prompt=True, variables={"enable_thinking": False}),
    case("thinking with tools", "thinking", CALLING, tools=[WEATHER]),
    case("earlier thoughts are dropped", "thinking", [
        {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
        {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
    ]),
    case("thoughts in a field", "thinking", [PLAIN[0], {"role": "assistant", "content": "4", "reasoning_content": "\nhm\n"}]),
    case("thoughts under an older name", "thinking", [PLAIN[0], {"role": "assistant", "content": "4", "thinking": "old"}]),
    case("results of tools are gathered", "thinking", [*CALLING[:3], {"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}], add_generation_prompt=True),
    case("continue", "chatml", [PLAIN[0], {"role": "assistant", "content": "fn main() {"}], continue_final_message="content"),
    case("continue after a space", "thinking", [PLAIN[0], {"role": "assistant", "content": "fn main() "}], continue_final_message="content"),
    case("continue after a space that the template trims", "chatml", [PLAIN[0], {"role": "assistant", "content": "fn main() "}], continue_final_message="content"),
    case("continue a part", "headers", [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b c"}]}], continue_final_message="content"),
    case("continue a thought", "thinking", [PLAIN[0], {"role": "assistant", "content": "", "thinking": "let me"}], continue_final_message="thinking"),
    case("what cannot be continued", "chatml", [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": []}], continue_final_message="content"),
    case("the language", "language", [{"role": "system", "content": "s", "data": DATA}, *PLAIN], tools=[WEATHER],
         documents=[{"title": "T1", "text": "one"}, {"title": "T2", "text": "two"}]),
    case("the language with little", "language", [{"role": "user", "content": "c", "data": {}}]),
]

CORPUS = [
    "fn main() { println!(\"Hello, world!\"); }", "The quick brown fox jumps over the lazy dog. ", "Zürich café naïve Grüße",
    "你好，世界。今天天气很好。", "こんにちは世界", "안녕하세요 세계", "👋🏽 👩‍👩‍👧‍👦 🇨🇭 😀😃😄", "Привет, мир", "مرحبا بالعالم", "e\u0301a\u0308o\u0302 नमस्ते",
    "assistant user system\n\n", "    let mut map = HashMap::new();\n",
] * 4


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    return tokenizer


def byte_fallback():
    """The shape of Llama 2's and Mistral's: ▁ for spaces, bytes for what has no token, and a first space that is not text."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for character in sorted(set("".join(CORPUS[:8]).replace(" ", "▁"))):
        if character < "\u0250" or character == "▁" or character in "你好世界":
            vocab.setdefault(character, len(vocab))
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁"), ("你", "好"), ("l", "l"), ("ll", "o")]
    for left, right in merges:
        vocab.setdefault(left, len(vocab))
        vocab.setdefault(right, len(vocab))
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


class Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def render(tokenizer, spec):
    out = {}
    kwargs = {k: spec[k] for k in ("tools", "documents", "add_generation_prompt", "continue_final_message") if k in spec}
    kwargs |= spec.get("variables", {})
    arguments = dict(conversation=spec["messages"], chat_template=TEMPLATES[spec["template"]], **kwargs)
    try:
        out["expected"] = tokenizer.apply_chat_template(tokenize=False, **arguments)
    except Exception as error:  # what transformers refuses, we refuse
        out["error"] = str(error)
        return out
    if "continue_final_message" not in spec:
        encoded = tokenizer.apply_chat_template(tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **arguments)
        out["ids"] = encoded["input_ids"]
        out["assistant_mask"] = "".join(map(str, encoded["assistant_masks"]))
    return out


def main():
    folder = pathlib.Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "templates").mkdir(parents=True)
    chat_template_utils.datetime = Frozen
    transformers.utils.logging.set_verbosity_error()
    for name, template in TEMPLATES.items():
        (folder / "templates" / f"{name}.jinja").write_text(template)
    byte_level().save(str(folder / "byte_level.json"), pretty=False)
    byte_fallback().save(str(folder / "byte_fallback.json"), pretty=False)
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "byte_level.json"), **special)
    done = [spec | render(tokenizer, spec) for spec in CASES]
    text = json.dumps({"now": NOW.isoformat() + "Z", "special_tokens": special, "cases": done}, ensure_ascii=False, indent=1)
    (folder / "cases.json").write_text(text + "\n")
    print(f"chat: {len(done)} cases")


if __name__ == "__main__":
    main()
