//! Requests that leave a real model in the middle and go on in another engine, token for token.

#![cfg(feature = "llama")]

#[path = "support/mod.rs"]
#[expect(dead_code, reason = "shared with the tests of everything else")]
mod support;

use std::os::unix::fs::FileExt;
use support::{Answer, Harness, chat, gemma, greedy, text};
use warmset_core::kv::TrustDomain;
use warmset_engine::{
    port::Engine,
    protocol::{
        FinishReason, FromEngine, Function, GenerateJob, Output, Sampling, TextFormat, ToEngine, TokensOrText,
        ToolChoice, Tools,
    },
};

const STORY: &str = "Once upon a time there was a small river that";

fn long(tokens: u32) -> GenerateJob {
    GenerateJob { ignore_end: true, ..greedy(text(STORY), tokens) }
}

/// Runs a job that leaves after so many steps each time, for an engine that is new each time.
fn in_pieces(job: &GenerateJob, steps: &[usize]) -> Answer {
    let mut harness = Harness::new(2048, 2);
    let request = harness.start(job.clone());
    for count in steps {
        for _ in 0..*count {
            harness.step();
        }
        assert!(!harness.answer(request).is_over(), "it ended before it was to leave");
        let parked = harness.park(request).expect("it can leave");
        assert!(!harness.engine.has_work());
        let answers = std::mem::take(&mut harness.answers);
        harness = Harness::new(2048, 2);
        harness.answers = answers;
        harness.resume(request, &parked);
    }
    harness.finish(&[request]);
    harness.answers[&request].clone()
}

fn assert_same(job: &GenerateJob, steps: &[usize]) -> Answer {
    let (alone, pieces) = (Harness::new(2048, 2).run(job.clone()), in_pieces(job, steps));
    assert_eq!(pieces.text(), alone.text());
    assert_eq!((pieces.usage(), &pieces.finishes), (alone.usage(), &alone.finishes));
    assert_eq!((&pieces.calls, &pieces.stop_texts), (&alone.calls, &alone.stop_texts));
    assert_eq!(pieces.logprobs, alone.logprobs);
    assert_eq!(pieces.deltas.len(), alone.deltas.len(), "nothing is told twice");
    pieces
}

#[test]
fn three_pieces_say_what_one_says() {
    let answer = assert_same(&long(200), &[20, 45, 71]);
    assert_eq!(answer.usage().completion_tokens, 200);
}

#[test]
fn random_numbers_and_penalties_go_on_where_they_stopped() {
    let sampling = Sampling { temperature: 0.9, seed: Some(7), ..Sampling::default() };
    let odd = Sampling {
        top_k: 40,
        min_p: 0.05,
        frequency_penalty: 0.4,
        repeat_penalty: 1.2,
        logit_bias: vec![(42, -5.0)],
        ..sampling.clone()
    };
    let one_candidate = Sampling { top_k: 1, ..sampling.clone() };
    for sampling in [sampling, odd, one_candidate] {
        assert_same(&GenerateJob { sampling, ..long(120) }, &[9, 30, 40]);
    }
    // A seed that nobody chose is drawn once.
    let drawn = GenerateJob { sampling: Sampling { temperature: 1.2, ..Sampling::default() }, ..long(60) };
    assert_eq!(in_pieces(&drawn, &[10, 20]).usage().completion_tokens, 60);
}

#[test]
fn what_is_held_back_and_what_was_told_is_known_again() {
    let output = Output { logprobs: Some(3), ..Output::default() };
    assert_same(&GenerateJob { output: output.clone(), ..long(80) }, &[5, 25]);
    // In one piece: all of it is held back until the end.
    assert_same(&GenerateJob { output, stream: false, ..long(80) }, &[5, 25]);
    let alone = Harness::new(2048, 2).run(long(80));
    let words: Vec<&str> = alone.text().split(' ').collect();
    let stop = vec![words[30..34].join(" ")];
    for stream in [true, false] {
        let answer = assert_same(&GenerateJob { stop: stop.clone(), stream, ..long(80) }, &[8, 15]);
        assert_eq!(answer.finish(), FinishReason::Stop);
    }
}

#[test]
fn grammars_and_calls_go_on_where_they_stopped() {
    let schema = r#"{"type":"object","properties":{"city":{"type":"string","minLength":12},"people":{"type":"integer"}},
        "required":["city","people"]}"#;
    let format = Some(TextFormat::JsonSchema { schema: schema.into() });
    let output = Output { format, ..Output::default() };
    assert_same(&GenerateJob { output, ..greedy(chat("Describe Paris as JSON."), 120) }, &[4, 5]);
    let parameters = r#"{"type":"object","properties":{"city":{"type":"string","minLength":6}},"required":["city"]}"#;
    let functions = vec![Function {
        name: "weather".into(),
        description: Some("Tells the weather.".into()),
        parameters: parameters.into(),
        strict: true,
    }];
    let tools = Some(Tools { functions, choice: ToolChoice::Required, parallel: false });
    let output = Output { tools, ..Output::default() };
    let answer = assert_same(&GenerateJob { output, ..greedy(chat("What is the weather in Paris?"), 120) }, &[4, 9]);
    assert_eq!((answer.calls[&0].len(), answer.finish()), (1, FinishReason::ToolCalls));
}

#[test]
fn a_prompt_that_is_half_computed_is_computed_on() {
    let words: String = (0..1200).map(|word| format!("w{} ", word % 97)).collect();
    let job = GenerateJob { ignore_end: true, ..greedy(text(&words[..1500]), 40) };
    let answer = assert_same(&job, &[1, 1, 10]);
    assert!(answer.usage().prompt_tokens > 1024, "{:?}", answer.usage());
}

#[test]
fn what_was_not_begun_begins_anew() {
    let mut harness = Harness::new(2048, 1);
    let (first, second) = (harness.start(long(40)), harness.start(long(40)));
    harness.step();
    let waiting = harness.prepare(long(40));
    for request in [second, waiting] {
        let parked = harness.park(request).expect("it can leave");
        assert!(parked.bytes < 4096, "nothing was computed");
        harness.resume(request, &parked);
        harness.grant(request);
    }
    harness.finish(&[first, second, waiting]);
    assert!([second, waiting].iter().all(|request| harness.answers[request].text() == harness.answers[&first].text()));
}

#[test]
fn a_stopped_request_computes_nothing_and_can_run_on_or_end() {
    let alone = Harness::new(2048, 2).run(long(60));
    let mut harness = Harness::new(2048, 2);
    let request = harness.start(long(60));
    (0..20).for_each(|_| harness.step());
    harness.send(ToEngine::Park { request });
    assert!(matches!(harness.kv.pop(), Some(FromEngine::ParkSized { bytes: 1.., .. })));
    assert!(!harness.engine.has_work());
    let told = harness.answer(request).text().len();
    (0..5).for_each(|_| harness.engine.step(&mut |_| panic!("it is stopped")));
    harness.send(ToEngine::ParkStop { request });
    harness.finish(&[request]);
    assert!(told < alone.text().len());
    assert_eq!(harness.answers[&request].text(), alone.text());

    let request = harness.start(long(60));
    (0..20).for_each(|_| harness.step());
    harness.send(ToEngine::Park { request });
    harness.send(ToEngine::Cancel { request });
    assert_eq!(harness.answers[&request].finish(), FinishReason::Cancelled);
    harness.kv.clear();
    assert!(harness.park(request).is_none(), "it is over");

    let request = harness.start(long(60));
    (0..20).for_each(|_| harness.step());
    let parked = harness.park(request).unwrap();
    harness.resume(request, &parked);
    harness.send(ToEngine::Cancel { request });
    assert!(harness.answers[&request].is_over());
    assert!(!harness.engine.has_work());
}

#[test]
fn others_compute_on_while_one_leaves_and_comes_back_beside_them() {
    let own = |name: &str| Some(TrustDomain::named(name));
    let other = GenerateJob { kv_domain: own("b"), ..long(100) };
    let job = GenerateJob { kv_domain: own("a"), ..long(50) };
    let mut harness = Harness::new(2048, 2);
    let (stays, leaves) = (harness.start(other), harness.start(job.clone()));
    (0..15).for_each(|_| harness.step());
    let parked = harness.park(leaves).unwrap();
    let third = harness.start(GenerateJob { kv_domain: own("a"), ..long(10) });
    harness.resume(leaves, &parked);
    harness.finish(&[stays, leaves, third]);
    assert_eq!(harness.answers[&stays].usage().completion_tokens, 100);
    assert_eq!(harness.answers[&leaves].usage().completion_tokens, 50);
}

#[test]
fn what_cannot_leave_says_so() {
    let mut harness = Harness::new(2048, 2);
    let several = harness.start(GenerateJob { choices: 2, ..long(20) });
    harness.step();
    assert!(harness.park(several).is_none());
    assert!(harness.park(999).is_none());
    let embedding = harness.embed(vec![TokensOrText::Text("a river".into())]);
    assert!(harness.park(embedding).is_none());
    harness.finish(&[several, embedding]);
    // Its states are not known to be all there is.
    let mut other = Harness::with_file(gemma(), 512, 1);
    let request = other.start(long(20));
    other.step();
    assert!(other.park(request).is_none());
    other.finish(&[request]);
}

#[test]
fn a_damaged_state_fails_its_request_alone() {
    let mut harness = Harness::new(2048, 2);
    let (stays, leaves) = (harness.start(long(60)), harness.start(long(60)));
    (0..15).for_each(|_| harness.step());
    let parked = harness.park(leaves).unwrap();
    let mut record = vec![0; 16];
    parked.file.read_exact_at(&mut record, 0).unwrap();
    let state_at = 16 + u64::from_le_bytes(record[..8].try_into().unwrap());
    parked.file.write_all_at(&[0xff; 4], state_at).unwrap();
    harness.resume(leaves, &parked);
    harness.finish(&[stays, leaves]);
    let failure = harness.answers[&leaves].failure.clone().expect("it cannot go on");
    assert!(failure.1.contains("cannot go on"), "{failure:?}");
    assert_eq!(harness.answers[&stays].usage().completion_tokens, 60);
}
