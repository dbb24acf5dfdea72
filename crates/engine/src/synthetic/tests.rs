//! The synthetic engine, driven in this process as its process drives it.

use super::*;
use crate::protocol::{EngineKind, FinishReason, Function, KvGrant, Output, Sampling, TextFormat, ToolChoice, Tools};

fn engine(spec: &SyntheticSpec, parallel: u32) -> SyntheticEngine {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.json");
    std::fs::write(&path, serde_json::to_vec(spec).unwrap()).unwrap();
    let request = LoadRequest {
        engine: EngineKind::Synthetic,
        files: vec![path],
        context_tokens: 64,
        parallel,
        threads: 1,
        accelerators: (0..u32::try_from(spec.accelerator_bytes.len()).unwrap()).collect(),
        command: None,
    };
    let mut engine = SyntheticEngine::default();
    let info = engine.load(&request, &mut |_| {}).unwrap();
    assert_eq!(info.accelerator_bytes, spec.accelerator_bytes);
    assert_eq!(info.declared_host_bytes.is_some(), !spec.allocate);
    engine
}

fn job(text: &str) -> GenerateJob {
    GenerateJob {
        prompt: Prompt::Text { text: text.into() },
        choices: 1,
        max_tokens: Some(8),
        sampling: Sampling::default(),
        stop: Vec::new(),
        ignore_end: false,
        stream: true,
        output: Output::default(),
        kv_domain: None,
    }
}

/// Sends one job and steps until there is nothing left to do.
fn run(engine: &mut SyntheticEngine, request: u64, job: GenerateJob) -> Vec<FromEngine> {
    let mut all = Vec::new();
    engine.handle(ToEngine::Generate { request, job: Box::new(job) }, &mut |message| all.push(message));
    engine
        .handle(ToEngine::Grant { request, source: KvGrant::Recompute { known: 0 } }, &mut |message| all.push(message));
    while engine.has_work() {
        engine.step(&mut |message| all.push(message));
    }
    all.retain(|message| *message != FromEngine::Beat);
    all
}

fn text_of(messages: &[FromEngine], wanted: u32) -> String {
    let mut all = String::new();
    for message in messages {
        if let FromEngine::Delta { choice, text, .. } = message
            && *choice == wanted
        {
            all.push_str(text);
        }
    }
    all
}

#[test]
fn text_follows_from_prompt_and_seed() {
    let mut engine = engine(&SyntheticSpec::default(), 4);
    let seeded = |seed| GenerateJob { sampling: Sampling { seed: Some(seed), ..Sampling::default() }, ..job("a b c") };
    let first = text_of(&run(&mut engine, 1, seeded(1)), 0);
    assert_eq!(first.split_whitespace().count(), 8);
    assert_eq!(first, text_of(&run(&mut engine, 2, seeded(1)), 0));
    assert_ne!(first, text_of(&run(&mut engine, 3, seeded(2)), 0));
    assert_ne!(first, text_of(&run(&mut engine, 4, job("a b d")), 0));
}

#[test]
fn choices_limits_and_usage_are_exact() {
    let mut engine = engine(&SyntheticSpec::default(), 2);
    let messages = run(&mut engine, 9, GenerateJob { choices: 3, ..job("one two three") });
    assert_eq!(messages[0], FromEngine::Prepared { request: 9, prompt_tokens: 3, device_tokens: 0, keys: vec![] });
    let ends: Vec<_> = messages
        .iter()
        .filter_map(|message| match message {
            FromEngine::ChoiceDone { choice, finish, .. } => Some((*choice, *finish)),
            _ => None,
        })
        .collect();
    assert_eq!(ends, (0..3).map(|choice| (choice, FinishReason::Length)).collect::<Vec<_>>());
    let FromEngine::Done { usage, .. } = messages.last().unwrap() else { panic!("{messages:?}") };
    assert_eq!(*usage, Usage { prompt_tokens: 3, completion_tokens: 24, cached_tokens: 0 });
    assert_ne!(text_of(&messages, 0), text_of(&messages, 1));
}

#[test]
fn a_stop_text_ends_a_choice_and_is_not_shown() {
    let mut engine = engine(&SyntheticSpec::default(), 1);
    let whole = text_of(&run(&mut engine, 1, job("stop here")), 0);
    let stop = whole.split_whitespace().nth(3).unwrap().to_owned();
    let cut = GenerateJob { stop: vec![stop.clone()], stream: false, ..job("stop here") };
    let messages = run(&mut engine, 2, cut);
    assert_eq!(text_of(&messages, 0), whole[..whole.find(&stop).unwrap()]);
    let finish = FinishReason::Stop;
    assert!(messages.contains(&FromEngine::ChoiceDone { request: 2, choice: 0, finish }), "{messages:?}");
    let deltas = messages.iter().filter(|message| matches!(message, FromEngine::Delta { .. })).count();
    assert_eq!(deltas, 1, "without streaming there is one delta");
}

#[test]
fn a_prompt_over_the_context_fails_alone() {
    let mut engine = engine(&SyntheticSpec::default(), 1);
    let messages = run(&mut engine, 1, job(&"word ".repeat(64)));
    assert!(
        matches!(messages.as_slice(), [FromEngine::Failed { kind: FailureKind::ContextExceeded, .. }]),
        "{messages:?}"
    );
    let full = run(&mut engine, 2, GenerateJob { max_tokens: None, ignore_end: true, ..job(&"word ".repeat(60)) });
    assert_eq!(text_of(&full, 0).split_whitespace().count(), 4, "the context is full");
}

#[test]
fn a_cancelled_request_ends_with_what_it_used() {
    let mut engine = engine(&SyntheticSpec::default(), 1);
    let mut all = Vec::new();
    let endless = GenerateJob { max_tokens: None, ignore_end: true, ..job("go") };
    engine.handle(ToEngine::Generate { request: 5, job: Box::new(endless) }, &mut |message| all.push(message));
    engine.handle(ToEngine::Grant { request: 5, source: KvGrant::Recompute { known: 0 } }, &mut |message| {
        all.push(message)
    });
    for _ in 0..4 {
        engine.step(&mut |message| all.push(message));
    }
    all.clear();
    engine.handle(ToEngine::Cancel { request: 5 }, &mut |message| all.push(message));
    assert_eq!(all[0], FromEngine::ChoiceDone { request: 5, choice: 0, finish: FinishReason::Cancelled });
    let FromEngine::Done { usage, .. } = &all[1] else { panic!("{all:?}") };
    assert_eq!(usage.completion_tokens, 4);
    assert!(!engine.has_work());
}

#[test]
fn embeddings_follow_from_their_input() {
    let mut engine = engine(&SyntheticSpec::default(), 1);
    let inputs = vec![TokensOrText::Text("a b".into()), TokensOrText::Tokens(vec![1, 2, 3])];
    let mut all = Vec::new();
    engine.handle(ToEngine::Embed { request: 1, inputs }, &mut |message| all.push(message));
    engine.step(&mut |message| all.push(message));
    let Some(FromEngine::Embedded { vectors, prompt_tokens, .. }) = all.pop() else { panic!("{all:?}") };
    assert_eq!(prompt_tokens, 5);
    assert_eq!(vectors.len(), 2);
    assert_eq!(vectors[0].len(), EMBEDDING_LENGTH as usize);
    assert_ne!(vectors[0], vectors[1]);
}

#[test]
fn a_spec_with_unknown_keys_or_the_wrong_number_of_accelerators_is_refused_for_good() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.json");
    for text in ["{\"host_byte\": 1}", "not json", "{\"accelerator_bytes\": [1]}"] {
        std::fs::write(&path, text).unwrap();
        let request = LoadRequest {
            engine: EngineKind::Synthetic,
            files: vec![path.clone()],
            context_tokens: 0,
            parallel: 1,
            threads: 1,
            accelerators: Vec::new(),
            command: None,
        };
        let failure = SyntheticEngine::default().load(&request, &mut |_| {}).unwrap_err();
        assert_eq!(failure.fault, LoadFault::Artifact, "{failure:?}");
    }
}

fn held_to(output: Output) -> GenerateJob {
    GenerateJob { output, max_tokens: None, ..job("x") }
}

#[test]
fn formats_and_calls_are_kept_with_the_shortest_text() {
    let mut engine = engine(&SyntheticSpec::default(), 2);
    let schema = r#"{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}"#.to_owned();
    let format = Some(TextFormat::JsonSchema { schema });
    let messages = run(&mut engine, 1, held_to(Output { format, ..Output::default() }));
    assert_eq!(text_of(&messages, 0), "{\"a\": 0}");
    let parameters = r#"{"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}"#.to_owned();
    let functions = vec![Function { name: "f".into(), description: None, parameters, strict: true }];
    let tools = |choice| Some(Tools { functions: functions.clone(), choice, parallel: false });
    let messages = run(&mut engine, 2, held_to(Output { tools: tools(ToolChoice::Required), ..Output::default() }));
    assert!(
        messages.contains(&FromEngine::ToolCall { request: 2, choice: 0, call: 0, name: "f".into() }),
        "{messages:?}"
    );
    let arguments: String = messages
        .iter()
        .filter_map(|message| match message {
            FromEngine::ToolArguments { text, .. } => Some(text.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(arguments, "{\"b\": true}");
    let finish = FinishReason::ToolCalls;
    assert!(messages.contains(&FromEngine::ChoiceDone { request: 2, choice: 0, finish }), "{messages:?}");
    let messages = run(&mut engine, 3, held_to(Output { tools: tools(ToolChoice::Auto), ..Output::default() }));
    assert!(text_of(&messages, 0).split(' ').count() >= 16, "free text where no call must be made");
    let format = Some(TextFormat::Gbnf { grammar: "root ::= (".into() });
    let messages = run(&mut engine, 4, held_to(Output { format, ..Output::default() }));
    assert!(matches!(messages[0], FromEngine::Failed { kind: FailureKind::InvalidRequest, .. }), "{messages:?}");
}
