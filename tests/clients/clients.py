"""Well-known clients against a running Springtide: completions and chats, whole and streamed, and errors.

    clients.py URL MODEL

MODEL needs a chat template. Prints one line per client and check; exits with 1 if one failed.
"""

import importlib.metadata
import os
import sys

URL, MODEL = sys.argv[1:]
PROMPT = "def add(a, b):"
MESSAGES = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Which color has the sky?"}]

TOOL = {
    "name": "color_of",
    "description": "The color of a thing.",
    "parameters": {
        "type": "object",
        "properties": {"of": {"type": "string"}},
        "required": ["of"],
        "additionalProperties": False,
    },
}


def openai_python():
    import openai

    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)

    def completion():
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, logprobs=1, user="u1")
        choice = answer.choices[0]
        assert len(choice.logprobs.tokens) == answer.usage.completion_tokens <= 8
        assert choice.finish_reason in ("stop", "length") and choice.generation_id

    def completion_stream():
        chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, stream=True))
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")

    def chat():
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, n=2)
        assert [choice.message.role for choice in answer.choices] == ["assistant"] * 2

    def chat_stream():
        with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=8) as stream:
            try:
                assert "chunk" in {event.type for event in stream}
                assert stream.get_final_completion().choices[0].finish_reason == "stop"
            except openai.LengthFinishReasonError as error:  # this helper's own answer to "length"
                assert error.completion.choices[0].finish_reason == "length"

    def usage_in_stream():
        options = {"include_usage": True}
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=4, stream=True, stream_options=options
        )
        assert list(stream)[-1].usage.completion_tokens <= 4

    def unknown_model():
        try:
            client.completions.create(model="nobody", prompt=PROMPT)
        except openai.NotFoundError as error:
            assert error.type and "nobody" in error.message
        else:
            raise AssertionError("it was answered")

    def refused_field():
        try:
            client.completions.create(model=MODEL, prompt=PROMPT, suffix="!")
        except openai.BadRequestError as error:
            assert "suffix" in error.message
        else:
            raise AssertionError("it was answered")

    def models():
        assert MODEL in [model.id for model in client.models.list()]

    def chat_tools():
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, tools=[{"type": "function", "function": TOOL}]
        )
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")

    def response():
        answer = client.responses.create(
            model=MODEL, instructions="Answer in one word.", input="Which color has the sky?", max_output_tokens=16
        )
        assert answer.status in ("completed", "incomplete") and answer.usage.output_tokens <= 16
        assert answer.output[0].type == "message" and answer.generation_id

    def response_stream():
        with client.responses.stream(model=MODEL, input=MESSAGES, max_output_tokens=16) as stream:
            kinds = [event.type for event in stream]
        # an empty answer has an item and no delta
        assert kinds[0] == "response.created" and "response.output_item.done" in kinds, kinds
        assert kinds[-1] in ("response.completed", "response.incomplete"), kinds

    def response_tools():
        answer = client.responses.create(
            model=MODEL, input=MESSAGES, max_output_tokens=16, store=False, tools=[{"type": "function", **TOOL}]
        )
        assert answer.status in ("completed", "incomplete")
        assert all(item.type in ("message", "function_call") for item in answer.output)

    def response_after_a_tool():
        history = [
            *MESSAGES,
            {"type": "function_call", "call_id": "call_1", "name": TOOL["name"], "arguments": '{"of": "sky"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "blue"},
        ]
        answer = client.responses.create(
            model=MODEL, input=history, max_output_tokens=16, store=False, tools=[{"type": "function", **TOOL}]
        )
        assert answer.status in ("completed", "incomplete")

    answers = [completion, completion_stream, chat, chat_stream, chat_tools, usage_in_stream]
    responses = [response, response_stream, response_tools, response_after_a_tool]
    return [*answers, *responses, unknown_model, refused_field, models]


def anthropic_python():
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    to = {"model": MODEL, "max_tokens": 8, "messages": MESSAGES[1:]}

    def message():
        answer = client.messages.create(system="Answer in one word.", **to)
        assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens <= 8
        assert answer.generation_id

    def message_stream():
        with client.messages.stream(**to) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert final.stop_reason in ("end_turn", "max_tokens")
        assert text == "".join(block.text for block in final.content)

    def unknown_model():
        try:
            client.messages.create(**{**to, "model": "nobody"})
        except anthropic.NotFoundError as error:
            assert "nobody" in str(error)
        else:
            raise AssertionError("it was answered")

    def message_tools():
        tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
        answer = client.messages.create(tools=[tool], **to)
        assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use")
        history = [
            *to["messages"],
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": TOOL["name"], "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "blue"}]},
        ]
        answer = client.messages.create(tools=[tool], **{**to, "messages": history})
        assert answer.generation_id

    def count_tokens():
        counted = client.messages.count_tokens(model=MODEL, messages=to["messages"])
        assert counted.input_tokens == client.messages.create(**to).usage.input_tokens

    return [message, message_stream, message_tools, count_tokens, unknown_model]


def litellm_python():
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # fetches prices otherwise
    import litellm

    litellm.telemetry = False
    to = {"api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 8}

    def chat():
        answer = litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, **to)
        assert answer.choices[0].finish_reason in ("stop", "length")

    def chat_stream():
        chunks = list(litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, stream=True, **to))
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")

    def completion():
        answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=PROMPT, **to)
        assert answer.choices[0].finish_reason in ("stop", "length")

    def unknown_model():
        try:
            litellm.completion(model="openai/nobody", messages=MESSAGES, **to)
        except litellm.NotFoundError as error:
            assert "nobody" in str(error)
        else:
            raise AssertionError("it was answered")

    def anthropic_message():
        answer = litellm.completion(
            model=f"anthropic/{MODEL}", messages=MESSAGES, max_tokens=8, api_base=URL, api_key="none"
        )
        assert answer.choices[0].finish_reason in ("stop", "length")

    return [chat, chat_stream, completion, unknown_model, anthropic_message]


def langchain_python():
    from langchain_openai import ChatOpenAI, OpenAI

    to = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_tokens": 8, "max_retries": 0}

    def chat():
        answer = ChatOpenAI(**to).invoke("Which color has the sky?")
        assert answer.response_metadata["finish_reason"] in ("stop", "length")
        assert answer.usage_metadata["output_tokens"] <= 8

    def chat_stream():
        chunks = list(ChatOpenAI(**to).stream("Which color has the sky?"))
        assert any(chunk.response_metadata.get("finish_reason") for chunk in chunks)

    def completion():
        assert isinstance(OpenAI(**to).invoke(PROMPT), str)

    def batch():
        assert len(ChatOpenAI(**to).batch(["one", "two", "three"])) == 3

    return [chat, chat_stream, completion, batch]


def main():
    failed = False
    clients = {
        "openai": openai_python,
        "anthropic": anthropic_python,
        "litellm": litellm_python,
        "langchain-openai": langchain_python,
    }
    for package, checks in clients.items():
        version = importlib.metadata.version(package)
        for check in checks():
            try:
                check()
                outcome = "ok"
            except Exception as error:  # every client has its own
                failed = True
                outcome = f"FAILED: {type(error).__name__}: {error}"
            print(f"{package} {version} {check.__name__}: {outcome}", flush=True)
    sys.exit(failed)


main()
