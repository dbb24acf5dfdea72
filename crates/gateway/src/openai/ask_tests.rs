//! What is accepted, and that every refusal names its parameter.

use super::*;
use serde_json::{Value, json};
use warmset_core::inference::{TextFormat, ToolChoice, Tools};

fn chat(extra: Value) -> Result<Generation, ApiError> {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    generation(Route::Chat, body.to_string().as_bytes())
}

fn text(extra: Value) -> Result<Generation, ApiError> {
    let mut body = json!({"model": "m", "prompt": "hi"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    generation(Route::Text, body.to_string().as_bytes())
}

fn job(generation: &Generation) -> &GenerateJob {
    let Work::Generate(job) = &generation.jobs[0] else { panic!("not a generation") };
    job
}

#[track_caller]
fn refused(result: Result<Generation, ApiError>, param: &str) {
    let error = result.unwrap_err();
    let body: Value = serde_json::from_str(&error.json()).unwrap();
    assert_eq!((error.status.as_u16(), &body["error"]["param"]), (400, &json!(param)), "{body}");
}

#[test]
fn everything_a_caller_may_set_arrives() {
    let asked = chat(json!({
        "n": 3, "max_tokens": 7, "max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.25, "top_k": 40,
        "min_p": 0.125, "repeat_penalty": 1.5, "frequency_penalty": -1, "presence_penalty": 2, "seed": -1,
        "logit_bias": {"5": -100, "7": 2.5}, "stop": ["a", "b"], "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true}, "service_tier": "flex", "user": "u", "metadata": {"a": "b"},
    }))
    .unwrap();
    let job = job(&asked);
    let expected = Sampling {
        temperature: 0.5,
        top_p: 0.25,
        top_k: 40,
        min_p: 0.125,
        frequency_penalty: -1.0,
        presence_penalty: 2.0,
        repeat_penalty: 1.5,
        logit_bias: vec![(5, -100.0), (7, 2.5)],
        seed: Some(u64::MAX),
    };
    assert_eq!(job.sampling, expected);
    assert_eq!((job.choices, job.max_tokens, job.stream, job.ignore_end), (3, Some(9), true, true));
    assert_eq!(job.stop, ["a", "b"]);
    assert!(asked.stream && asked.include_usage);
    assert_eq!(asked.tier.map(Tier::class), Some(Priority::Batch));
    assert_eq!(job.prompt, Prompt::Chat { messages: r#"[{"role":"user","content":"hi"}]"#.to_owned() });
}

#[test]
fn nothing_set_means_openai_s_defaults() {
    let asked = chat(json!({"stop": null, "n": null, "logprobs": false, "tools": [], "tool_choice": "auto"})).unwrap();
    assert_eq!(job(&asked).sampling, Sampling::default());
    assert_eq!((job(&asked).choices, job(&asked).max_tokens, asked.stream), (1, None, false));
    assert_eq!(asked.tier, None);
    let asked = chat(json!({"stop": "x", "response_format": {"type": "text"}, "modalities": ["text"]})).unwrap();
    assert_eq!(job(&asked).stop, ["x"]);
}

#[test]
fn values_out_of_range_name_their_parameter() {
    let many: Vec<&str> = vec!["x"; 1_000_000];
    for (name, value) in [
        ("n", json!(0)),
        ("n", json!(17)),
        ("n", json!(1e9)),
        ("n", json!(1.5)),
        ("n", json!("1")),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(1_u64 << 63)),
        ("max_completion_tokens", json!(-1)),
        ("temperature", json!(2.1)),
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(1.1)),
        ("top_k", json!(-1)),
        ("min_p", json!(2)),
        ("frequency_penalty", json!(2.5)),
        ("presence_penalty", json!(-2.5)),
        ("repeat_penalty", json!(0)),
        ("logit_bias", json!({"x": 1})),
        ("logit_bias", json!({"1": 101})),
        ("logit_bias", json!([1])),
        ("stop", json!(many)),
        ("stop", json!([1])),
        ("stop", json!("")),
        ("stop", json!("x".repeat(STOP_BYTES_MAX + 1))),
        ("seed", json!(1.5)),
        ("stream", json!("yes")),
        ("stream_options", json!({"include_usage": 1})),
        ("service_tier", json!("gold")),
        ("logprobs", json!(3)),
        ("top_logprobs", json!(21)),
    ] {
        refused(chat(json!({ name: value })), name);
    }
}

#[test]
fn what_is_not_built_is_refused_and_not_passed_over() {
    for (name, value) in [
        ("top_logprobs", json!(3)),
        ("prompt_logprobs", json!(1)),
        ("tool_choice", json!("required")),
        ("tool_choice", json!({"type": "allowed_tools"})),
        ("functions", json!([{}])),
        ("function_call", json!({"name": "f"})),
        ("response_format", json!({"type": "json_schema", "json_schema": {}})),
        ("response_format", json!({"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}})),
        ("response_format", json!({"type": "xml"})),
        ("grammar", json!("root = 1")),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({})),
        ("chat_template", json!("x")),
    ] {
        refused(chat(json!({ name: value })), name);
    }
    for (name, value) in [("echo", json!(true)), ("suffix", json!("x")), ("best_of", json!(2))] {
        refused(text(json!({ name: value })), name);
    }
    refused(chat(json!({"tools": [{"type": "function"}]})), "tools[0]");
    refused(chat(json!({"tools": [{"type": "web_search"}]})), "tools[0]");
    refused(chat(json!({"chat_template_kwargs": {"chat_template": "x"}})), "chat_template");
}

#[test]
fn conversations_are_checked_message_by_message() {
    let with = |messages: Value| chat(json!({ "messages": messages }));
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]);
    assert!(with(parts).is_ok());
    let tools = json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ]);
    assert!(with(tools).is_ok());
    for (messages, param) in [
        (json!([]), "messages"),
        (json!("hi"), "messages"),
        (json!([1]), "messages[0]"),
        (json!([{"content": "x"}]), "messages[0]"),
        (json!([{"role": "user", "content": "x"}, {"role": "king", "content": "x"}]), "messages[1].role"),
        (json!([{"role": "user"}]), "messages[0].content"),
        (json!([{"role": "user", "content": 5}]), "messages[0].content"),
        (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content"),
        (json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), "messages[0].content"),
        (json!(vec![json!({"role": "user", "content": ""}); MESSAGES_MAX + 1]), "messages"),
    ] {
        refused(with(messages), param);
    }
    refused(generation(Route::Chat, br#"{"model":"m"}"#), "messages");
    refused(generation(Route::Chat, br#"{"messages":[]}"#), "model");
    refused(generation(Route::Chat, br#"{"model":5,"messages":[]}"#), "model");
}

#[test]
fn prompts_come_as_texts_or_tokens() {
    let prompts = |value: Value| {
        let asked = text(json!({ "prompt": value }))?;
        let prompts = asked.jobs.into_iter().map(|work| match work {
            Work::Generate(job) => job.prompt,
            Work::Embed { .. } => panic!("not a generation"),
        });
        Ok::<Vec<Prompt>, ApiError>(prompts.collect())
    };
    let of_text = |text: &str| Prompt::Text { text: text.to_owned() };
    assert_eq!(prompts(json!("a")).unwrap(), [of_text("a")]);
    assert_eq!(prompts(json!(["a", "b"])).unwrap(), [of_text("a"), of_text("b")]);
    assert_eq!(prompts(json!([1, 2])).unwrap(), [Prompt::Tokens { tokens: vec![1, 2] }]);
    let lists = [Prompt::Tokens { tokens: vec![1] }, Prompt::Tokens { tokens: vec![2, 3] }];
    assert_eq!(prompts(json!([[1], [2, 3]])).unwrap(), lists);
    for wrong in [json!([]), json!([[]]), json!(5), json!({}), json!([1, "a"]), json!([-1]), json!(vec!["x"; 17])] {
        refused(text(json!({ "prompt": wrong })), "prompt");
    }
    refused(text(json!({"prompt": ["a", "b"], "n": 9})), "n");
    refused(generation(Route::Text, br#"{"model":"m"}"#), "prompt");
}

#[test]
fn embeddings_take_the_same_inputs() {
    let ask = |extra: Value| {
        let mut body = json!({"model": "m", "input": ["a", "b"]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        embedding(body.to_string().as_bytes())
    };
    let asked = ask(json!({"encoding_format": "base64", "dimensions": 8})).unwrap();
    assert_eq!((asked.encoding, asked.dimensions), (Encoding::Base64, Some(8)));
    let inputs = vec![TokensOrText::Text("a".into()), TokensOrText::Text("b".into())];
    assert_eq!(asked.work, Work::Embed { inputs });
    let tokens = ask(json!({"input": [1, 2]})).unwrap().work;
    assert_eq!(tokens, Work::Embed { inputs: vec![TokensOrText::Tokens(vec![1, 2])] });
    for extra in [
        json!({"input": ""}),
        json!({"input": []}),
        json!({"input": vec!["x"; EMBEDDING_INPUTS_MAX + 1]}),
        json!({"encoding_format": "int8"}),
        json!({"dimensions": 0}),
    ] {
        assert_eq!(ask(extra.clone()).unwrap_err().status.as_u16(), 400, "{extra}");
    }
}

#[test]
fn log_probabilities_are_asked_for_in_the_way_of_each_route() {
    let logprobs = |asked: Generation| match &asked.jobs[0] {
        Work::Generate(job) => job.output.logprobs,
        other => panic!("{other:?}"),
    };
    assert_eq!(logprobs(chat(json!({"logprobs": true})).unwrap()), Some(0));
    assert_eq!(logprobs(chat(json!({"logprobs": true, "top_logprobs": 20})).unwrap()), Some(20));
    assert_eq!(logprobs(chat(json!({"logprobs": false, "top_logprobs": 0})).unwrap()), None);
    assert_eq!(logprobs(text(json!({"logprobs": 5})).unwrap()), Some(5));
    assert_eq!(logprobs(text(json!({"logprobs": null})).unwrap()), None);
}

fn with_tools(extra: Value) -> Result<Generation, ApiError> {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let function = json!({"name": "f", "description": "does it", "parameters": schema, "strict": true});
    let mut body = json!({"tools": [{"type": "function", "function": function}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    chat(body)
}

fn tools_of(asked: &Generation) -> Option<&Tools> {
    match &asked.jobs[0] {
        Work::Generate(job) => job.output.tools.as_ref(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn functions_arrive_with_the_choice_between_them() {
    let asked = with_tools(json!({})).unwrap();
    let tools = tools_of(&asked).unwrap();
    assert_eq!((tools.functions[0].name.as_str(), &tools.choice, tools.parallel), ("f", &ToolChoice::Auto, true));
    assert!(tools.functions[0].strict && tools.functions[0].parameters.contains("integer"));
    for (choice, expected) in [
        (json!("none"), ToolChoice::None),
        (json!("required"), ToolChoice::Required),
        (json!({"type": "function", "function": {"name": "f"}}), ToolChoice::Function { name: "f".into() }),
    ] {
        let asked = with_tools(json!({"tool_choice": choice, "parallel_tool_calls": false})).unwrap();
        let tools = tools_of(&asked).unwrap();
        assert_eq!((&tools.choice, tools.parallel), (&expected, false));
    }
    assert!(tools_of(&chat(json!({"tool_choice": "auto"})).unwrap()).is_none());
}

#[test]
fn functions_that_cannot_be_called_are_refused_with_their_place() {
    let function = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    for (fields, param) in [
        (function(json!({"name": "a b"})), "tools[0].function.name"),
        (function(json!({"name": "x".repeat(65)})), "tools[0].function.name"),
        (function(json!({"name": "f", "parameters": []})), "tools[0].function.parameters"),
        (
            function(json!({"name": "f", "strict": true, "parameters": {"type": "nonsense"}})),
            "tools[0].function.parameters",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}]}),
            "tools",
        ),
        (json!({"tools": vec![json!({"type": "function", "function": {"name": "f"}}); 129]}), "tools"),
    ] {
        refused(chat(fields), param);
    }
    refused(with_tools(json!({"tool_choice": {"type": "function", "function": {"name": "g"}}})), "tool_choice");
    refused(with_tools(json!({"response_format": {"type": "json_object"}})), "response_format");
    refused(with_tools(json!({"grammar": "root ::= \"a\""})), "grammar");
    let both = json!({"grammar": "root ::= \"a\"", "response_format": {"type": "json_object"}});
    refused(chat(both), "grammar");
    assert!(with_tools(json!({"logprobs": true})).is_ok());
}

#[test]
fn formats_arrive() {
    let format = |asked: Generation| match asked.jobs.into_iter().next() {
        Some(Work::Generate(job)) => job.output.format.clone(),
        other => panic!("{other:?}"),
    };
    let asked = chat(json!({"response_format": {"type": "json_object"}})).unwrap();
    assert_eq!(format(asked), Some(TextFormat::JsonObject));
    let schema = json!({"name": "x", "strict": true, "schema": {"type": "object", "properties": {}}});
    let asked = chat(json!({"response_format": {"type": "json_schema", "json_schema": schema}})).unwrap();
    assert!(matches!(format(asked), Some(TextFormat::JsonSchema { schema }) if schema.contains("properties")));
    let asked = text(json!({"grammar": "root ::= [a-z]+"})).unwrap();
    assert!(matches!(format(asked), Some(TextFormat::Gbnf { .. })));
    assert_eq!(format(chat(json!({"response_format": {"type": "text"}})).unwrap()), None);
}
