//! What llama.cpp's engine tells beside text, and what it can be held to, on the real model.

use crate::support::{Harness, chat, greedy, text};
use serde_json::{Value, json};
use warmset_engine::protocol::{
    FailureKind, FinishReason, Function, GenerateJob, Output, Sampling, TextFormat, ToolChoice, Tools,
};

const DAYS: &str = "Monday, Tuesday, Wednesday, Thursday,";

fn with(output: Output, words: &str, tokens: u32) -> GenerateJob {
    GenerateJob { output, ..greedy(text(words), tokens) }
}

#[test]
fn log_probabilities_spell_the_text_and_the_greedy_token_is_the_likeliest() {
    let mut harness = Harness::new(256, 1);
    let told = Output { logprobs: Some(3), ..Output::default() };
    let answer = harness.run(GenerateJob { choices: 2, ..with(told.clone(), DAYS, 12) });
    for choice in 0..2 {
        let tokens = &answer.logprobs[&choice];
        assert_eq!(tokens.len(), 12);
        let spelled: Vec<u8> = tokens.iter().flat_map(|token| token.bytes.clone()).collect();
        assert_eq!(String::from_utf8_lossy(&spelled), answer.texts[&choice]);
        for token in tokens {
            assert_eq!(token.top.len(), 3);
            assert_eq!(token.top[0], (token.bytes.clone(), token.logprob), "greedy takes the likeliest");
            let share: f32 = token.top.iter().map(|(_, logprob)| logprob.exp()).sum();
            assert!(share > 0.0 && share <= 1.001, "{share}");
            assert!(token.top.is_sorted_by(|one, other| one.1 >= other.1));
        }
    }
    let plain = harness.run(with(Output::default(), DAYS, 12));
    assert!(plain.logprobs.is_empty());
    let stop = vec![" Saturday".to_owned()];
    let stopped = harness.run(GenerateJob { stop, ..with(told, DAYS, 12) });
    let spelled: Vec<u8> = stopped.logprobs[&0].iter().flat_map(|token| token.bytes.clone()).collect();
    assert!(String::from_utf8_lossy(&spelled).starts_with(stopped.text()));
    assert!(!String::from_utf8_lossy(&spelled).contains("Saturday"), "tokens of the stop text are not told");
    assert_eq!(stopped.stop_texts[&0], " Saturday");
}

fn held_to(format: TextFormat) -> Output {
    Output { format: Some(format), ..Output::default() }
}

/// Three seeds at full temperature, and no seed at all: a small model left to itself keeps to nothing.
fn jobs(output: &Output, words: &str, tokens: u32) -> Vec<GenerateJob> {
    let job = |sampling| GenerateJob { sampling, output: output.clone(), ..greedy(chat(words), tokens) };
    let mut jobs: Vec<GenerateJob> =
        (1..4).map(|seed| job(Sampling { seed: Some(seed), ..Sampling::default() })).collect();
    jobs.push(job(Sampling { temperature: 0.0, ..Sampling::default() }));
    jobs
}

#[test]
fn json_keeps_to_its_schema_whatever_the_model_would_say() {
    let mut harness = Harness::new(512, 2);
    let schema = json!({
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green", "blue"]},
            "size": {"type": "integer", "minimum": 1, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
        },
        "required": ["colour", "size", "tags"],
    });
    let output = held_to(TextFormat::JsonSchema { schema: schema.to_string() });
    for job in jobs(&output, "Describe a ball.", 200) {
        let answer = harness.run(job);
        assert_eq!(answer.finish(), FinishReason::Stop, "{:?}", answer.text());
        let value: Value = serde_json::from_str(answer.text()).unwrap();
        assert!(["red", "green", "blue"].contains(&value["colour"].as_str().unwrap()), "{value}");
        assert!((1..100).contains(&value["size"].as_i64().unwrap()), "{value}");
        assert!(value["tags"].as_array().unwrap().len() <= 2, "{value}");
    }
}

#[test]
fn several_choices_are_each_held_to_the_grammar() {
    let mut harness = Harness::new(256, 2);
    let grammar = "root ::= \"yes\" | \"no\" | [0-9]{3} \"!\"".to_owned();
    let output = held_to(TextFormat::Gbnf { grammar });
    let job = GenerateJob { choices: 4, ..jobs(&output, "Is water wet?", 20).remove(0) };
    let answer = harness.run(job);
    for choice in 0..4 {
        let text = answer.texts[&choice].as_str();
        let number = text.len() == 4 && text.ends_with('!') && text[..3].bytes().all(|byte| byte.is_ascii_digit());
        assert!(text == "yes" || text == "no" || number, "{text:?}");
        assert_eq!(answer.finishes[&choice], FinishReason::Stop);
    }
}

#[test]
fn what_cannot_be_kept_fails_the_request_and_nothing_else() {
    let mut harness = Harness::new(256, 1);
    for (format, param) in [
        (TextFormat::Gbnf { grammar: "root ::= (".into() }, "grammar"),
        (TextFormat::Gbnf { grammar: "root ::= root".into() }, "grammar"),
        (TextFormat::JsonSchema { schema: "{\"type\": 1}".into() }, "response_format"),
        (TextFormat::JsonSchema { schema: "nothing".into() }, "response_format"),
    ] {
        let answer = harness.run(with(held_to(format.clone()), DAYS, 8));
        let (kind, message, found) = answer.failure.unwrap_or_else(|| panic!("{format:?}"));
        assert_eq!((kind, found.as_deref()), (FailureKind::InvalidRequest, Some(param)), "{message}");
        assert!(!message.is_empty() && !message.contains("backtrace"), "{message}");
    }
    assert!(harness.run(with(Output::default(), DAYS, 8)).failure.is_none(), "the engine goes on");
}

fn weather(choice: ToolChoice, parallel: bool) -> Output {
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
    });
    let function = |name: &str, parameters: &Value| Function {
        name: name.into(),
        description: Some("looks something up".into()),
        parameters: parameters.to_string(),
        strict: true,
    };
    let functions = vec![function("weather", &parameters), function("time", &json!({"type": "object"}))];
    Output { tools: Some(Tools { functions, choice, parallel }), ..Output::default() }
}

#[test]
fn a_call_that_must_be_made_is_made_and_keeps_to_its_schema() {
    let mut harness = Harness::new(1024, 2);
    let named = weather(ToolChoice::Function { name: "weather".into() }, false);
    for job in jobs(&named, "What is the weather in Paris?", 200) {
        let answer = harness.run(job);
        assert_eq!(answer.finish(), FinishReason::ToolCalls);
        assert_eq!(answer.text(), "");
        let [(name, arguments)] = answer.calls[&0].as_slice() else { panic!("{:?}", answer.calls) };
        assert_eq!(name, "weather");
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        assert!(arguments["city"].is_string() && arguments["unit"].is_string(), "{arguments}");
    }
    let whole = harness.run(GenerateJob { stream: false, ..jobs(&named, "Weather in Rome?", 200).remove(3) });
    assert_eq!(whole.calls[&0].len(), 1);
    let required = harness.run(jobs(&weather(ToolChoice::Required, false), "What is the time?", 200).remove(3));
    assert_eq!((required.finish(), required.calls[&0].len()), (FinishReason::ToolCalls, 1));
}

#[test]
fn a_model_that_may_call_says_text_or_calls_and_never_half_of_either() {
    let mut harness = Harness::new(1024, 1);
    for job in jobs(&weather(ToolChoice::Auto, true), "What is the weather in Paris?", 300) {
        let answer = harness.run(job);
        for (name, arguments) in answer.calls.get(&0).into_iter().flatten() {
            assert!(name == "weather" || name == "time", "{name}");
            if answer.finish() != FinishReason::Length {
                assert!(serde_json::from_str::<Value>(arguments).unwrap().is_object(), "{arguments}");
            }
        }
        assert!(!answer.text().contains("<tool_call>"), "{:?}", answer.text());
        let called = !answer.calls.get(&0).map_or(&[][..], Vec::as_slice).is_empty();
        assert!(called || answer.finish() != FinishReason::ToolCalls);
    }
    let none = harness.run(jobs(&weather(ToolChoice::None, true), "Say hello.", 16).remove(3));
    assert!(none.calls.is_empty() && !none.text().is_empty());
}
