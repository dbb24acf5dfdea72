"""Functions, schemas, grammars and log probabilities through the official `openai` package, on a real small model."""

import json

import openai
import pydantic
import pytest
from concurrent.futures import ThreadPoolExecutor

MODEL = "smollm2"


@pytest.fixture(scope="module")
def server(module_pool, models):
    return module_pool(memory="1GiB", models=[{"name": MODEL, "source": models["q4_1"], "context_tokens": 1024}])


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=120, max_retries=0)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 24},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def ask(client, content="What is the weather in Paris?", **options):
    messages = options.pop("messages", [{"role": "user", "content": content}])
    return client.chat.completions.create(model=MODEL, messages=messages, **{"max_tokens": 200, "seed": 1, **options})


def assert_weather(call):
    assert call.type == "function" and call.id
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_call_that_must_be_made_is_made(client, choice, temperature):
    tools = [WEATHER] if choice == "required" else [WEATHER, CLOCK]
    options = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "temperature": temperature}
    answer = ask(client, **options).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert len(answer.message.tool_calls) == 1
    assert_weather(answer.message.tool_calls[0])


def test_calls_are_streamed_as_the_client_puts_them_together(client):
    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(client, temperature=0, **options).choices[0].message.tool_calls[0]
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "What is the weather in Paris?"}], max_tokens=200,
        temperature=0, **options,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert final.finish_reason == "tool_calls"
    assert_weather(final.message.tool_calls[0])
    assert final.message.tool_calls[0].function.arguments == whole.function.arguments
    chunks = list(ask(client, stream=True, temperature=0, **options))
    deltas = [call for chunk in chunks for call in (chunk.choices[0].delta.tool_calls or [])]
    assert deltas[0].id and deltas[0].function.name == "weather" and deltas[0].function.arguments == ""
    assert len(deltas) > 3, "arguments come piece by piece"
    assert all(delta.id is None and delta.index == 0 for delta in deltas[1:])


def test_a_conversation_goes_on_after_a_call(client):
    call = {"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": "Paris", "unit": "celsius"})}}
    messages = [
        {"role": "system", "content": "Answer from what the tools said."},
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is 21 degrees and sunny in Paris."},
    ]
    answer = ask(client, messages=messages, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=40)
    assert answer.choices[0].message.content.strip()
    assert answer.choices[0].message.tool_calls is None
    longer = ask(client, messages=messages, temperature=0, max_tokens=4)
    assert longer.usage.prompt_tokens < answer.usage.prompt_tokens + 400


def test_a_model_that_may_call_does_one_or_the_other(client):
    for seed in range(3):
        answer = ask(client, tools=[WEATHER, CLOCK], seed=seed, max_tokens=120).choices[0]
        for call in answer.message.tool_calls or []:
            assert call.function.name in ("weather", "clock")
            if answer.finish_reason == "tool_calls":
                assert isinstance(json.loads(call.function.arguments), dict)
        assert (answer.finish_reason == "tool_calls") <= bool(answer.message.tool_calls)
        assert "<tool_call>" not in (answer.message.content or "")


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)
    likes: list[str] = pydantic.Field(max_length=2)


def test_the_client_parses_what_a_schema_describes(client):
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "Invent a person."}], response_format=Person,
            max_tokens=300, seed=seed,
        ).choices[0]
        if answer.finish_reason == "stop":
            assert 0 <= answer.message.parsed.age <= 120
        else:
            assert answer.finish_reason == "length"


def test_json_objects_and_grammars(client):
    answer = ask(client, "Give me JSON.", response_format={"type": "json_object"}, temperature=0, max_tokens=300)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    assert answer.choices[0].message.content.startswith("{")
    grammar = 'root ::= ("yes" | "no") "," [0-9]{2}'
    answer = ask(client, "Well?", extra_body={"grammar": grammar})
    assert answer.choices[0].message.content[-3:-2] == "," and answer.choices[0].finish_reason == "stop"
    text = client.completions.create(model=MODEL, prompt="Well?", extra_body={"grammar": grammar}).choices[0].text
    assert text.split(",")[0] in ("yes", "no")


def test_hostile_grammars_and_schemas_leave_the_engine_alone(client, server):
    before = set(server.engines())
    nested = "(" * 3000 + '"a"' + ")" * 3000
    deep = {"type": "string"}
    for _ in range(8):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}}
    bodies = [
        {"grammar": f"root ::= {nested}"},
        {"grammar": "root ::= root"},
        {"grammar": 'root ::= "a" root "b" | "a" root "c" | "a"'},
        {"grammar": 'root ::= (("a"?){2000}){2000}'},
        {"grammar": "root ::= [\\x00-\\x01]*"},
        {"grammar": "root ::= <think>"},
        {"grammar": 'root ::= "' + "x" * 70000 + '"'},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "(a*)*b" * 500, "type": "string"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "minLength": 10**9}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}},
    ]

    def send(body):
        try:
            return ask(client, "x", max_tokens=8, extra_body=body).choices[0].finish_reason
        except openai.BadRequestError as error:
            assert error.param in ("grammar", "response_format") or error.param is None, error
            assert len(error.message) < 600, error.message
            return "refused"

    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(send, bodies))
    assert set(outcomes) <= {"refused", "stop", "length"}, outcomes
    assert outcomes.count("refused") >= 4, outcomes
    assert ask(client, "Say hello.", max_tokens=4).choices[0].message.content
    # A spare may have begun meanwhile.
    assert before and before <= set(server.engines()), "no engine was lost"


def test_log_probabilities(client):
    answer = ask(client, "Name a colour.", logprobs=True, top_logprobs=3, temperature=0, max_tokens=8).choices[0]
    tokens = answer.logprobs.content
    assert bytes(byte for token in tokens for byte in token.bytes).decode() == answer.message.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in tokens)
    assert all(token.top_logprobs[0].token == token.token for token in tokens), "greedy takes the likeliest"
    chunks = list(ask(client, "Name a colour.", logprobs=True, temperature=0, max_tokens=8, stream=True))
    streamed = [token for chunk in chunks for token in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])]
    assert [token.token for token in streamed] == [token.token for token in tokens]
    text = client.completions.create(model=MODEL, prompt="One, two,", logprobs=2, temperature=0, max_tokens=6).choices[0]
    assert "".join(text.logprobs.tokens) == text.text
    assert all(len(top) == 2 for top in text.logprobs.top_logprobs)
    assert text.logprobs.text_offset[0] == 0 and text.logprobs.text_offset == sorted(text.logprobs.text_offset)


def test_log_probabilities_of_calls(client):
    """Every token counts, those of a call too; a stream tells them with the pieces of the call that they stand for."""
    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    answer = ask(client, **options, logprobs=True, top_logprobs=2)
    assert_weather(answer.choices[0].message.tool_calls[0])
    tokens = answer.choices[0].logprobs.content
    text = bytes(byte for token in tokens for byte in token.bytes).decode()
    assert answer.choices[0].message.tool_calls[0].function.arguments in text
    assert all(token.logprob <= 0 for token in tokens)
    chunks = list(ask(client, **options, logprobs=True, stream=True))
    told = [token.token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert told == [token.token for token in tokens]
    with_pieces = [chunk for chunk in chunks if chunk.choices[0].logprobs and chunk.choices[0].delta.tool_calls]
    assert with_pieces, "log probabilities come while the call is made"


WORDS = [
    ({"$ref": "#"}, "no way to end"),
    ({"type": "integer", "minimum": -2**63, "maximum": 2**63 - 1}, "bounds must lie from -10^18 to 10^18"),
    ({"type": "string", "pattern": "(ab"}, "unclosed group"),
    ({"$ref": "https://example.org/x.json"}, "#/"),
]


@pytest.mark.parametrize("schema,words", WORDS, ids=[words for _, words in WORDS])
def test_what_is_wrong_with_a_schema_is_said_so_that_its_author_can_mend_it(client, schema, words):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as failure:
        ask(client, response_format=format, max_tokens=8)
    assert failure.value.param == "response_format"
    assert words in failure.value.message, failure.value.message
    for raw in ("NoExtensionBias", "overflow", "regex parse error"):
        assert raw not in failure.value.message


COMBINATIONS = [
    ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [WEATHER], "grammar": 'root ::= "a"'}, "grammar"),
    ({"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}}, "grammar"),
]


@pytest.mark.parametrize("fields,param", COMBINATIONS, ids=[param for _, param in COMBINATIONS])
def test_what_does_not_go_together_is_refused(client, fields, param):
    with pytest.raises(openai.BadRequestError) as failure:
        ask(client, extra_body=fields)
    assert failure.value.param == param
