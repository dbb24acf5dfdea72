"""OpenAI's Responses and Anthropic's Messages through their official packages, on a real small model. Both go the way
of a chat completion: what is checked here is how they are read and written."""

import json

import anthropic
import openai
import pytest
from warmset import synthetic_model, wait_for

MODEL = "smollm2"


@pytest.fixture(scope="module")
def server(module_pool, models):
    return module_pool(memory="1GiB", models=[{"name": MODEL, "source": models["q4_1"], "context_tokens": 1024}])


@pytest.fixture(scope="module")
def chat(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=120, max_retries=0)


def claude_of(server, **options):
    return anthropic.Anthropic(base_url=server.url, api_key="unused", timeout=120, **{"max_retries": 0, **options})


@pytest.fixture(scope="module")
def claude(server):
    return claude_of(server)


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
QUESTION = "What is the weather in Paris?"

# ---- Anthropic's Messages ----

TOOL = {"name": "weather", "description": "The weather in a city.", "input_schema": PARAMETERS}


def message(claude, content=QUESTION, **options):
    messages = options.pop("messages", [{"role": "user", "content": content}])
    # This version of the package has no parameter for it; older ones send it.
    extra_body = {"temperature": 0, **options.pop("extra_body", {})}
    options = {"max_tokens": 16, **options}
    return claude.messages.create(model=MODEL, messages=messages, extra_body=extra_body, **options)


def test_a_message_is_answered(claude, chat, server):
    raw = claude.messages.with_raw_response.create(
        model=MODEL, max_tokens=12, system="Be brief.", messages=[{"role": "user", "content": "Name a colour."}],
        extra_body={"temperature": 0},
    )
    answer = raw.parse()
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert answer.id.startswith("msg_")
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.stop_sequence is None
    assert raw.headers["warmset-model-digest"] == server.digest(MODEL)
    assert raw.headers["request-id"] == raw.headers["warmset-request-id"]
    same = chat.chat.completions.create(
        model=MODEL, max_tokens=12, temperature=0,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}],
    )
    assert answer.content[0].text == same.choices[0].message.content, "one path behind both dialects"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == same.usage.prompt_tokens
    assert answer.usage.output_tokens == same.usage.completion_tokens


def test_blocks_and_stop_sequences(claude):
    blocks = [{"type": "text", "text": "Count:"}, {"type": "text", "text": "1, 2, 3, 4,"}]
    whole = message(claude, blocks, max_tokens=24, system=[{"type": "text", "text": "Be brief."}])
    stop = whole.content[0].text.strip()[2:5]
    cut = message(claude, blocks, max_tokens=24, system="Be brief.", stop_sequences=[stop, "never written"])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert stop not in "".join(block.text for block in cut.content)
    assert message(claude, "Tell a long story.", max_tokens=3).stop_reason == "max_tokens"


def test_a_message_is_streamed_event_by_event(claude):
    whole = message(claude, "Say hello.", max_tokens=12)
    events = list(message(claude, "Say hello.", max_tokens=12, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(event.delta.text for event in events[2:-3]) == whole.content[0].text
    with claude.messages.stream(
        model=MODEL, max_tokens=12, messages=[{"role": "user", "content": "Say hello."}], extra_body={"temperature": 0}
    ) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens > 0


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=["any", "tool"])
def test_tools_are_used(claude, choice):
    options = {"tools": [TOOL], "tool_choice": {**choice, "disable_parallel_tool_use": True}, "max_tokens": 200}
    answer = message(claude, **options)
    assert answer.stop_reason == "tool_use"
    [block] = answer.content
    assert (block.type, block.name) == ("tool_use", "weather") and block.id
    assert set(block.input) == {"city", "unit"}
    with claude.messages.stream(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], extra_body={"temperature": 0}, **options
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert final.content[0].input == block.input and final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "21 degrees, sunny."}]}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": [block.model_dump()]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    final = message(claude, messages=messages, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=30)
    assert final.content[0].text.strip()


def test_tokens_are_counted_as_they_are_charged(claude):
    messages = [{"role": "user", "content": "How many tokens are these?"}]
    counted = claude.messages.count_tokens(model=MODEL, messages=messages, system="Be brief.").input_tokens
    used = message(claude, messages=messages, system="Be brief.", max_tokens=1).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens


def test_a_schema_is_kept_by_messages_too(claude):
    config = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    answer = message(claude, max_tokens=200, extra_body={"output_config": config})
    assert set(json.loads(answer.content[0].text)) == {"city", "unit"}


MESSAGE_ERRORS = [
    ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
    ({"temperature": 9}, anthropic.BadRequestError, "temperature"),
    ({"messages": []}, anthropic.BadRequestError, "messages"),
    ({"messages": [{"role": "assistant", "content": "I"}]}, anthropic.BadRequestError, "messages"),
    ({"messages": [{"role": "robot", "content": "I"}]}, anthropic.BadRequestError, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, anthropic.BadRequestError, "image"),
    ({"stop_sequences": "x" * 300}, anthropic.BadRequestError, "stop_sequences"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError, "tools[0]"),
    ({"tool_choice": {"type": "tool", "name": "missing"}}, anthropic.BadRequestError, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, anthropic.BadRequestError, "thinking"),
    ({"model": "claude"}, anthropic.NotFoundError, "claude"),
]


@pytest.mark.parametrize("fields,kind,words", MESSAGE_ERRORS, ids=[str(fields)[:40] for fields, *_ in MESSAGE_ERRORS])
def test_errors_have_anthropic_s_shape(claude, fields, kind, words):
    with pytest.raises(kind) as failure:
        message(claude, extra_body=fields)
    body = failure.value.body
    assert body["type"] == "error" and words in body["error"]["message"], body
    assert body["error"]["type"] in ("invalid_request_error", "not_found_error")


def test_a_message_that_is_cut_off_raises_E21(pool, tmp_path):
    model = synthetic_model(tmp_path, "crash", failure="generate_crashes")
    server = pool(models=[{"name": "crash", "source": model, "engine": "synthetic"}])
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(anthropic.APIError):
        for _ in claude_of(server).messages.create(model="crash", max_tokens=30, messages=messages, stream=True):
            pass
    with pytest.raises(openai.APIError):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=120, max_retries=0)
        for _ in client.responses.create(model="crash", input="x", stream=True):
            pass


def test_a_message_to_a_cold_model_is_retried_until_it_is_warm(pool, tmp_path):
    model = synthetic_model(tmp_path, "cold", load_seconds=1.0)
    server = pool(models=[{"name": "cold", "source": model, "engine": "synthetic", "cold": "reject"}])
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(anthropic.InternalServerError) as failure:
        claude_of(server).messages.create(model="cold", max_tokens=1, messages=messages)
    assert failure.value.status_code == 529
    assert failure.value.body["error"]["type"] == "overloaded_error"
    answer = claude_of(server, max_retries=10).messages.create(model="cold", max_tokens=1, messages=messages)
    assert answer.stop_reason == "max_tokens"


# ---- OpenAI's Responses ----

FUNCTION = {"type": "function", "name": "weather", "description": "The weather in a city.", "parameters": PARAMETERS, "strict": True}


def respond(chat, input=QUESTION, **options):
    return chat.responses.create(model=MODEL, input=input, **{"max_output_tokens": 16, "temperature": 0, **options})


def test_a_response_is_answered(chat):
    answer = respond(chat, "Name a colour.", instructions="Be brief.", metadata={"a": "b"}, store=False)
    same = chat.chat.completions.create(
        model=MODEL, max_tokens=16, temperature=0,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}],
    )
    assert answer.object == "response" and answer.id.startswith("resp_")
    assert answer.output_text == same.choices[0].message.content, "one path behind both dialects"
    assert (answer.instructions, answer.metadata, answer.store) == ("Be brief.", {"a": "b"}, False)
    assert answer.status == ("completed" if same.choices[0].finish_reason == "stop" else "incomplete")
    assert answer.usage.input_tokens == same.usage.prompt_tokens
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.output[0].type == "message" and answer.output[0].role == "assistant"


def test_a_response_that_is_too_long_is_incomplete(chat):
    answer = respond(chat, "Tell a long story.", max_output_tokens=4)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"


def test_a_response_is_streamed_event_by_event(chat):
    whole = respond(chat, "Say hello.")
    events = list(respond(chat, "Say hello.", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] == f"response.{whole.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    with chat.responses.stream(model=MODEL, input="Say hello.", max_output_tokens=16, temperature=0) as stream:
        for _ in stream:
            pass
        if whole.status == "completed":
            assert stream.get_final_response().output_text == whole.output_text


def test_functions_are_called_and_their_answers_go_back_in(chat):
    options = {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    answer = respond(chat, **options)
    [call] = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    events = list(respond(chat, stream=True, **options))
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added" and events[2].item.type == "function_call"
    assert set(kinds[3:-3]) == {"response.function_call_arguments.delta"}
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    assert "".join(event.delta for event in events[3:-3]) == call.arguments
    conversation = [
        {"role": "user", "content": QUESTION},
        call.model_dump(include={"type", "call_id", "name", "arguments"}),
        {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees, sunny."},
    ]
    final = respond(chat, conversation, tools=[FUNCTION], tool_choice="none", max_output_tokens=30)
    assert final.output_text.strip()


def test_a_response_keeps_to_a_schema(chat):
    text = {"format": {"type": "json_schema", "name": "place", "schema": PARAMETERS, "strict": True}}
    answer = respond(chat, text=text, max_output_tokens=200)
    assert set(json.loads(answer.output_text)) == {"city", "unit"}
    assert answer.text.format.type == "json_schema"


RESPONSE_ERRORS = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"input": []}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, "response_format"),
    ({"metadata": {"a": 1}}, "metadata"),
]


@pytest.mark.parametrize("fields,param", RESPONSE_ERRORS, ids=[str(fields)[:40] for fields, _ in RESPONSE_ERRORS])
def test_what_responses_cannot_do_is_refused_by_name(chat, fields, param):
    with pytest.raises(openai.BadRequestError) as failure:
        respond(chat, extra_body=fields)
    assert failure.value.param == param, failure.value


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_client_that_leaves_frees_its_slot(server, path):
    import socket

    # A long answer, each time: one that ends by itself soon might be over before anybody looks.
    question = "Write the numbers from one to one thousand in words, each on a line of its own."
    body = {"model": MODEL, "stream": True, "max_tokens": 900, "temperature": 0, "input": question,
            "messages": [{"role": "user", "content": question}]}
    text = json.dumps(body)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        connection.sendall((head + text).encode())
        wait_for(lambda: server.metric("warmset_running_requests", model=MODEL) == 1, "the request runs")
    wait_for(lambda: server.metric("warmset_running_requests", model=MODEL) == 0, "its slot is free")
