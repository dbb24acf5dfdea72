//! The llama engine on a real model, through the port.

#![cfg(feature = "llama")]

#[path = "shapes/mod.rs"]
mod shapes;
#[path = "support/mod.rs"]
#[expect(dead_code, reason = "shared with the tests of everything else")]
mod support;

use std::collections::BTreeSet;
use support::{Answer, Harness, chat, gemma, greedy, load_failure, model, text};
use warmset_engine::{
    gguf, llama,
    port::{Engine, LoadFault},
    protocol::{FailureKind, FinishReason, GenerateJob, Prompt, Sampling, ToEngine, TokensOrText},
};

/// What the model continues without hesitation, whatever the rounding: a week has gone before.
const DAYS: &str =
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday, Thursday,";
const LETTERS: &str = "a b c d e f g h i j k l m n o p\na b c d e f g h";

fn words_of(count: usize) -> String {
    (0..count).map(|index| format!("item{} ", index % 10)).collect()
}

#[test]
fn a_load_says_what_it_loaded_and_the_model_answers() {
    let mut harness = Harness::new(1000, 2);
    let info = harness.info.clone();
    assert_eq!((info.architecture.as_str(), info.context_tokens, info.parallel), ("llama", 1000, 2));
    assert_eq!((info.embedding_length, info.has_chat_template, info.generates), (576, true, true));
    assert_eq!(info.kv_bytes_per_token, 23_040);
    assert!(info.load_seconds > 0.0 && info.warm_up_seconds > 0.0);
    assert!(harness.load_progress.windows(2).all(|pair| pair[0] < pair[1]), "{:?}", harness.load_progress);
    assert!(harness.load_progress.iter().all(|fraction| (0.0..=1.0).contains(fraction)));

    let answer = harness.run(greedy(chat("What is the capital of France? Answer in one word."), 16));
    assert!(answer.text().contains("Paris"), "{:?}", answer.text());
    assert_eq!(answer.finish(), FinishReason::Stop);
    let (usage, timings) = answer.done.unwrap();
    assert_eq!(usage.prompt_tokens, answer.prompt_tokens.unwrap());
    assert!(usage.completion_tokens > 0 && usage.completion_tokens <= 16 && usage.cached_tokens == 0);
    assert!(timings.first_token_seconds >= timings.prefill_seconds && timings.prefill_seconds > 0.0);
    assert!(!harness.engine.has_work());
}

#[test]
fn the_context_is_the_models_own_unless_less_is_asked_for() {
    assert_eq!(Harness::new(0, 1).info.context_tokens, 4096);
    assert_eq!(Harness::new(100, 1).info.context_tokens, 100);
}

#[test]
fn greedy_text_is_the_same_every_time() {
    let job = || greedy(text(DAYS), 24);
    let mut harness = Harness::new(256, 1);
    let first = harness.run(job());
    assert!(first.text().starts_with(" Friday, Saturday"), "{:?}", first.text());
    assert_eq!(first.text(), harness.run(job()).text(), "in the same engine");
    assert_eq!(first.text(), Harness::new(256, 1).run(job()).text(), "in another one");
    let whole = harness.run(GenerateJob { stream: false, ..job() });
    assert_eq!(whole.deltas, [(0, first.text().to_owned())], "not streamed: one piece");
    assert!(first.deltas.len() > 4, "streamed: piece by piece");
}

#[test]
fn stop_texts_end_a_choice_and_are_never_shown() {
    let mut harness = Harness::new(256, 1);
    let plain = harness.run(greedy(text(DAYS), 24)).text().to_owned();
    // Parts of tokens, several tokens, the earliest of several, and one that never comes.
    for (stops, expected) in [
        (vec!["Saturday"], plain.split("Saturday").next().unwrap()),
        (vec!["ay, Su"], plain.split("ay, Su").next().unwrap()),
        (vec!["Monday", "Sunday,"], plain.split("Sunday,").next().unwrap()),
        (vec!["a hundred and one"], plain.as_str()),
    ] {
        let stop = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let answer = harness.run(GenerateJob { stop, ..greedy(text(DAYS), 24) });
        assert_eq!(answer.text(), expected, "{stops:?}");
        let finish = if expected == plain { FinishReason::Length } else { FinishReason::Stop };
        assert_eq!(answer.finish(), finish, "{stops:?}");
    }
    // Held back while it could still become the stop, given out when it cannot.
    let stop = vec![" Friday, Saturday, Tuesday".to_owned()];
    let answer = harness.run(GenerateJob { stop, ..greedy(text(DAYS), 24) });
    assert_eq!(answer.text(), plain);
    assert!(answer.deltas[0].1.starts_with(" Friday, Sat"), "{:?}", answer.deltas);
}

#[test]
fn characters_are_never_cut() {
    let mut harness = Harness::new(256, 1);
    let prompt = "\u{1f642}\u{1f680}".repeat(12);
    let answer = harness.run(GenerateJob { ignore_end: true, ..greedy(text(&prompt), 40) });
    assert!(answer.text().chars().any(|letter| letter.len_utf8() == 4), "it goes on with emoji: {:?}", answer.text());
    assert!(!answer.text().contains('\u{fffd}'), "{:?}", answer.deltas);
}

fn warm(seed: u64, choices: u32) -> GenerateJob {
    let sampling = Sampling { temperature: 1.2, top_p: 0.95, seed: Some(seed), ..Sampling::default() };
    GenerateJob { sampling, choices, ..greedy(chat("Tell me a short story."), 20) }
}

#[test]
fn a_seed_gives_the_same_text_and_each_choice_has_its_own() {
    let mut harness = Harness::new(512, 1);
    let one = harness.run(warm(7, 1));
    assert_eq!(one.text(), harness.run(warm(7, 1)).text());
    assert_ne!(one.text(), harness.run(warm(8, 1)).text());
    let three = harness.run(warm(7, 3));
    assert_eq!(three.texts[&0], one.text());
    assert_eq!(three.texts[&1], harness.run(warm(8, 1)).text(), "choice i uses seed + i");
    assert_eq!(three.texts[&2], harness.run(warm(9, 1)).text());
    let drawn: BTreeSet<String> = (0..4)
        .map(|_| {
            let mut job = warm(0, 1);
            job.sampling.seed = None;
            harness.run(job).text().to_owned()
        })
        .collect();
    assert!(drawn.len() > 1, "without a seed, texts differ");
}

#[test]
fn several_choices_share_a_prompt_whatever_the_number_of_sequences() {
    for parallel in [1, 2, 4] {
        let mut harness = Harness::new(256, parallel);
        let job = GenerateJob { choices: 3, ..greedy(text(DAYS), 12) };
        let answer = harness.run(job);
        assert_eq!(answer.texts.len(), 3, "{parallel}");
        for text in answer.texts.values() {
            assert!(text.starts_with(" Friday, Saturday, Sunday"), "{parallel}: {:?}", answer.texts);
        }
        assert_eq!(answer.usage().completion_tokens, 36);
        assert_eq!(answer.usage().prompt_tokens, answer.prompt_tokens.unwrap(), "the prompt counts once");
        assert_eq!(answer.finishes.values().filter(|finish| **finish == FinishReason::Length).count(), 3);
        // The prompt is computed once: 12 tokens for each choice, one of which comes with the prompt.
        let steps = [36, 24, 12][(parallel / 2) as usize];
        assert!(harness.steps <= steps + 3, "{parallel}: {} steps", harness.steps);
    }
}

#[test]
fn requests_at_the_same_time_do_not_disturb_each_other() {
    let prompts = [
        (DAYS, " Friday"),
        (LETTERS, " i j k"),
        ("2, 4, 6, 8, 10, 12,", " 14"),
        ("a b c d e f g h i j k", " l"),
        ("x, y, z, x, y, z, x, y, z,", " x"),
    ];
    let mut harness = Harness::new(256, 4);
    let alone: Vec<Answer> = prompts.iter().map(|(prompt, _)| harness.run(greedy(text(prompt), 8))).collect();
    let requests: Vec<u64> = prompts.iter().map(|(prompt, _)| harness.start(greedy(text(prompt), 8))).collect();
    harness.finish(&requests);
    for (index, request) in requests.iter().enumerate() {
        let answer = harness.answers[request].clone();
        assert!(answer.text().starts_with(prompts[index].1), "{:?}", answer.text());
        assert!(alone[index].text().starts_with(prompts[index].1), "{:?}", alone[index].text());
        assert_eq!(answer.usage(), alone[index].usage());
    }
    // Sequences with gaps between them: the middle ones end first.
    let requests: Vec<u64> = [20, 2, 3, 20]
        .iter()
        .enumerate()
        .map(|(index, tokens)| harness.start(greedy(text(prompts[index].0), *tokens)))
        .collect();
    harness.finish(&requests);
    assert!(harness.answers[&requests[0]].text().starts_with(" Friday, Saturday, Sunday"));
    assert!(harness.answers[&requests[3]].text().starts_with(" l m n"), "{:?}", harness.answers[&requests[3]].text());
}

#[test]
fn a_long_prompt_never_stops_those_who_are_decoding() {
    let mut harness = Harness::new(1024, 2);
    let running = harness.start(GenerateJob { ignore_end: true, ..greedy(text(DAYS), 60) });
    harness.step();
    let long = harness.start(greedy(text(&words_of(300)), 4));
    let prompt_tokens = harness.answers[&long].prompt_tokens.unwrap();
    assert!(prompt_tokens > 600);
    let mut steps = 0;
    while harness.answer(long).deltas.is_empty() {
        let before = harness.answer(running).deltas.len();
        harness.step();
        steps += 1;
        assert_eq!(harness.answer(running).deltas.len(), before + 1, "a token in every step");
    }
    assert!(steps > 3, "the prompt came in pieces: {steps}");
    harness.finish(&[running, long]);
}

#[test]
fn nothing_is_computed_before_the_grant() {
    let mut harness = Harness::new(256, 1);
    let request = harness.prepare(greedy(text(DAYS), 4));
    assert!(harness.answer(request).prompt_tokens.is_some());
    assert!(!harness.engine.has_work());
    harness.step();
    assert!(harness.answer(request).deltas.is_empty());
    harness.grant(request);
    assert!(harness.engine.has_work());
    harness.finish(&[request]);
}

#[test]
fn cancelling_frees_a_sequence_at_once() {
    let mut harness = Harness::new(512, 1);
    let first = harness.start(GenerateJob { ignore_end: true, max_tokens: None, choices: 2, ..greedy(text(DAYS), 0) });
    let second = harness.start(greedy(text(LETTERS), 4));
    let never_granted = harness.prepare(greedy(text("x"), 4));
    for _ in 0..5 {
        harness.step();
    }
    assert!(harness.answer(second).deltas.is_empty(), "one sequence, and it is taken");
    harness.send(ToEngine::Cancel { request: first });
    let answer = harness.answers[&first].clone();
    assert_eq!(answer.finishes.values().collect::<Vec<_>>(), [&FinishReason::Cancelled; 2]);
    assert!(answer.usage().completion_tokens >= 4);
    harness.send(ToEngine::Cancel { request: never_granted });
    assert_eq!(harness.answers[&never_granted].finish(), FinishReason::Cancelled);
    harness.send(ToEngine::Cancel { request: first });
    harness.send(ToEngine::Cancel { request: 999 });
    harness.finish(&[second]);
    assert!(harness.answers[&second].text().starts_with(" i j k"));
    assert!(!harness.engine.has_work() && !harness.answers.contains_key(&999));
}

#[test]
fn a_prompt_beyond_the_context_is_refused_with_numbers() {
    let mut harness = Harness::new(256, 1);
    let request = harness.prepare(greedy(text(&words_of(300)), 4));
    let (kind, message, _) = harness.answers[&request].failure.clone().unwrap();
    assert_eq!(kind, FailureKind::ContextExceeded);
    assert!(message.contains("256") && message.contains("prompt has"), "{message}");
    assert_eq!(harness.answers[&request].prompt_tokens, None);
    let huge = harness.prepare(greedy(text(&words_of(20_000)), 4));
    let (kind, message, _) = harness.answers[&huge].failure.clone().unwrap();
    assert!(kind == FailureKind::ContextExceeded && message.contains("120000 bytes"), "{message}");
    let exact = |tokens: u32| Prompt::Tokens { tokens: vec![1000; tokens as usize] };
    let at_limit = harness.prepare(greedy(exact(256), 4));
    assert!(harness.answers[&at_limit].failure.is_some());
    let last = harness.run(GenerateJob { max_tokens: None, ignore_end: true, ..greedy(exact(255), 0) });
    assert_eq!((last.finish(), last.usage().completion_tokens), (FinishReason::Length, 1));
    let rest = harness.run(GenerateJob { max_tokens: None, ignore_end: true, ..greedy(exact(200), 0) });
    assert_eq!((rest.finish(), rest.usage().completion_tokens), (FinishReason::Length, 56));
    let beyond = harness.run(GenerateJob { max_tokens: Some(u32::MAX), ignore_end: true, ..greedy(exact(250), 0) });
    assert_eq!((beyond.finish(), beyond.usage().completion_tokens), (FinishReason::Length, 6));
}

#[test]
fn the_end_token_ends_a_text_unless_it_is_ignored() {
    let mut harness = Harness::new(256, 1);
    let ended = harness.run(greedy(chat("Say only: yes"), 100));
    assert_eq!(ended.finish(), FinishReason::Stop);
    let count = ended.usage().completion_tokens;
    assert!(count < 100 && !ended.text().contains("<|im_end|>"));
    let on = harness.run(GenerateJob { ignore_end: true, ..greedy(chat("Say only: yes"), count + 5) });
    assert_eq!((on.finish(), on.usage().completion_tokens), (FinishReason::Length, count + 5));
    let nothing = harness.run(GenerateJob { choices: 2, ..greedy(text(DAYS), 0) });
    assert_eq!((nothing.usage().completion_tokens, nothing.finishes.len(), nothing.deltas.len()), (0, 2, 0));
    let empty = harness.run(greedy(text(""), 2));
    assert_eq!(empty.usage().prompt_tokens, 1, "an empty text begins with the begin token");
}

fn with(change: impl FnOnce(&mut GenerateJob)) -> GenerateJob {
    let mut job = greedy(text(DAYS), 16);
    change(&mut job);
    job
}

#[test]
fn wrong_values_are_refused_by_name() {
    let mut harness = Harness::new(256, 1);
    let cases: [(&str, GenerateJob); 14] = [
        ("n", with(|job| job.choices = 0)),
        ("n", with(|job| job.choices = 17)),
        ("stop", with(|job| job.stop = vec!["x".into(); 65])),
        ("stop", with(|job| job.stop = vec!["x".repeat(5000)])),
        ("temperature", with(|job| job.sampling.temperature = f32::NAN)),
        ("temperature", with(|job| job.sampling.temperature = -1.0)),
        ("top_p", with(|job| job.sampling.top_p = 1.5)),
        ("min_p", with(|job| job.sampling.min_p = -0.1)),
        ("frequency_penalty", with(|job| job.sampling.frequency_penalty = 3.0)),
        ("presence_penalty", with(|job| job.sampling.presence_penalty = f32::INFINITY)),
        ("repeat_penalty", with(|job| job.sampling.repeat_penalty = 0.0)),
        ("logit_bias", with(|job| job.sampling.logit_bias = vec![(49_152, 1.0)])),
        ("logit_bias", with(|job| job.sampling.logit_bias = vec![(1, 1.0); 2000])),
        ("prompt", with(|job| job.prompt = Prompt::Tokens { tokens: vec![u32::MAX] })),
    ];
    for (param, job) in cases {
        let request = harness.prepare(job);
        let (kind, message, named) = harness.answers[&request].failure.clone().unwrap();
        assert_eq!((kind, named.as_deref()), (FailureKind::InvalidRequest, Some(param)), "{message}");
    }
    let messages = harness.prepare(greedy(Prompt::Chat { messages: "[]".into() }, 4));
    assert_eq!(harness.answers[&messages].failure.clone().unwrap().2.as_deref(), Some("messages"));
    assert!(harness.run(greedy(text(DAYS), 2)).done.is_some(), "others are unaffected");
}

#[test]
fn sampling_parameters_do_what_they_say() {
    let mut harness = Harness::new(256, 1);
    let plain = harness.run(with(|_| {})).text().to_owned();
    let tiny = |sampling: Sampling| with(|job| job.sampling = Sampling { seed: Some(1), ..sampling });
    let top_one = harness.run(tiny(Sampling { top_k: 1, ..Sampling::default() }));
    assert_eq!(top_one.text(), plain, "the best of one is the greedy choice");
    assert_eq!(harness.run(tiny(Sampling { top_p: 0.0, ..Sampling::default() })).text(), plain);
    assert_eq!(harness.run(tiny(Sampling { min_p: 1.0, ..Sampling::default() })).text(), plain);
    let cold = harness.run(tiny(Sampling { temperature: 0.001, ..Sampling::default() }));
    assert_eq!(cold.text(), plain, "nearly no temperature is nearly greedy");

    let forced = harness.run(with(|job| job.sampling.logit_bias = vec![(1000, 100.0)]));
    let first_word = forced.deltas[0].1.clone();
    assert_eq!(forced.text(), first_word.repeat(16), "one token forced again and again");
    let penalised = harness.run(with(|job| {
        job.sampling.logit_bias = vec![(1000, 15.0)];
        job.sampling.frequency_penalty = 2.0;
        job.sampling.presence_penalty = 2.0;
    }));
    let repeats = |text: &str| text.matches(first_word.as_str()).count();
    let biased = harness.run(with(|job| job.sampling.logit_bias = vec![(1000, 15.0)]));
    assert!(repeats(penalised.text()) < repeats(biased.text()), "{:?} {:?}", penalised.text(), biased.text());
    let repeating = harness.run(with(|job| job.sampling.repeat_penalty = 1.8));
    assert_ne!(repeating.text(), plain, "the prompt's own words are penalised");
}

#[test]
fn threads_change_between_steps_and_none_pauses() {
    let mut harness = Harness::new(256, 1);
    let plain = harness.run(greedy(text(DAYS), 12)).text().to_owned();
    let request = harness.start(greedy(text(DAYS), 12));
    harness.step();
    harness.step();
    harness.send(ToEngine::SetThreads { threads: 0 });
    assert!(!harness.engine.has_work());
    let before = harness.answer(request).deltas.len();
    harness.step();
    assert_eq!(harness.answer(request).deltas.len(), before, "paused");
    harness.send(ToEngine::SetThreads { threads: 2 });
    assert!(harness.engine.has_work());
    harness.step();
    harness.send(ToEngine::SetThreads { threads: 1 });
    harness.finish(&[request]);
    assert_eq!(harness.threads_held, [0, 2, 1]);
    assert_eq!(harness.answers[&request].text(), plain, "threads do not change the text");
}

#[test]
fn beats_are_few() {
    let mut harness = Harness::new(256, 1);
    let begin = std::time::Instant::now();
    harness.run(GenerateJob { ignore_end: true, ..greedy(text(DAYS), 40) });
    let most = begin.elapsed().as_secs_f64() * 4.0 + 1.0;
    assert!(harness.beats >= 1 && harness.beats as f64 <= most, "{} beats", harness.beats);
}

fn cosine(left: &[f32], right: &[f32]) -> f32 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[test]
fn generating_models_embed_by_the_mean_over_tokens() {
    let mut harness = Harness::new(512, 2);
    let texts = [
        "The cat sleeps on the sofa.",
        "A kitten is sleeping on the couch.",
        "Quarterly tax returns are due in April.",
    ];
    let (vectors, prompt_tokens) = harness.vectors(&texts);
    assert_eq!(vectors.len(), 3);
    for vector in &vectors {
        assert_eq!(vector.len(), 576);
        assert!((cosine(vector, vector) - 1.0).abs() < 1e-4, "length one");
    }
    assert!(cosine(&vectors[0], &vectors[1]) > cosine(&vectors[0], &vectors[2]), "like things are closer");
    let single: u32 = texts.iter().map(|text| harness.vectors(&[text]).1).sum();
    assert_eq!(prompt_tokens, single);
    // In pieces, alone and beside a generation that holds a sequence: the same vector.
    let long = words_of(100);
    let (alone, tokens) = harness.vectors(&[&long]);
    assert!(tokens > 150);
    let running = harness.start(GenerateJob { ignore_end: true, ..greedy(text(DAYS), 30) });
    harness.step();
    let embedding = harness.embed(vec![TokensOrText::Text(long)]);
    harness.finish(&[running, embedding]);
    let beside = harness.answers[&embedding].vectors.clone().unwrap().0;
    assert!(cosine(&alone[0], &beside[0]) > 0.999);
    assert!(harness.answers[&running].text().starts_with(" Friday, Saturday"));
}

#[test]
fn embeddings_and_generations_take_turns_on_one_sequence() {
    let mut harness = Harness::new(256, 1);
    let first = harness.start(greedy(text(DAYS), 10));
    harness.step();
    let embedding = harness.embed(vec![TokensOrText::Text("hello".into()), TokensOrText::Tokens(vec![1000, 1001])]);
    let second = harness.start(greedy(text(LETTERS), 3));
    let cancelled = harness.embed(vec![TokensOrText::Text("never".into())]);
    harness.send(ToEngine::Cancel { request: cancelled });
    harness.finish(&[first, embedding, second]);
    assert!(harness.answers[&cancelled].failure.is_some());
    assert_eq!(harness.answers[&embedding].vectors.as_ref().unwrap().0.len(), 2);
    assert!(harness.answers[&second].text().starts_with(" i j k"));
    for (inputs, kind) in [
        (vec![], FailureKind::InvalidRequest),
        (vec![TokensOrText::Text(String::new())], FailureKind::InvalidRequest),
        (vec![TokensOrText::Tokens(vec![99_999_999])], FailureKind::InvalidRequest),
        (vec![TokensOrText::Text(words_of(300))], FailureKind::ContextExceeded),
    ] {
        let request = harness.embed(inputs);
        assert_eq!(harness.answers[&request].failure.clone().unwrap().0, kind);
    }
}

/// The real model with `llama.pooling_type = last` in its header, which makes it an embedding model.
fn pooled_model(folder: &std::path::Path) -> std::path::PathBuf {
    let original = std::fs::read(model()).expect("the model is readable");
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    // Together 64 bytes, so that the alignment of everything behind them stays.
    let pooling = [text("llama.pooling_type"), 4u32.to_le_bytes().to_vec(), 3u32.to_le_bytes().to_vec()].concat();
    let padding = [text("filler"), 8u32.to_le_bytes().to_vec(), text("xxxx")].concat();
    assert_eq!(pooling.len() + padding.len(), 64);
    let keys = u64::from_le_bytes(original[16..24].try_into().expect("eight bytes")) + 2;
    let path = folder.join("pooled.gguf");
    let whole = [&original[..16], &keys.to_le_bytes(), &pooling, &padding, &original[24..]].concat();
    std::fs::write(&path, whole).expect("room for a model");
    path
}

#[test]
fn embedding_models_pool_by_themselves_and_do_not_generate() {
    let folder = tempfile::tempdir().unwrap();
    let mut harness = Harness::with_file(pooled_model(folder.path()), 128, 2);
    assert!(!harness.info.generates);
    let texts = ["The cat sleeps.", "The cat sleeps.", "Tax law", "A kitten naps.", "x"];
    let (vectors, _) = harness.vectors(&texts);
    assert_eq!(vectors.len(), 5);
    assert!(vectors.iter().all(|vector| (cosine(vector, vector) - 1.0).abs() < 1e-4));
    assert!(cosine(&vectors[0], &vectors[1]) > 0.999, "the same text in any place of a batch");
    assert!(cosine(&vectors[0], &vectors[2]) < 0.99);
    let refused = harness.prepare(greedy(text(DAYS), 4));
    assert_eq!(harness.answers[&refused].failure.clone().unwrap().0, FailureKind::InvalidRequest);
}

#[test]
fn what_is_not_a_sound_model_is_refused_for_good() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let original = std::fs::read(model()).unwrap();
    let truncated = load_failure(file("truncated.gguf", &original[..original.len() / 2]));
    assert!(
        truncated.fault == LoadFault::Artifact && truncated.message.contains("outside of the file"),
        "{}",
        truncated.message
    );
    let pickle = load_failure(file("pickle.gguf", b"\x80\x04\x95rest"));
    assert!(pickle.fault == LoadFault::Artifact && pickle.message.contains("pickle"), "{}", pickle.message);
    // A header that reads well for an architecture that llama.cpp does not know.
    let mut unknown = original.clone();
    let place = unknown.windows(5).position(|window| window == b"llama").unwrap();
    unknown[place..place + 5].copy_from_slice(b"lxama");
    let mut begin = 0;
    while let Some(next) = unknown[begin..2000].windows(6).position(|window| window == b"llama.") {
        begin += next;
        unknown[begin..begin + 5].copy_from_slice(b"lxama");
    }
    let unknown = load_failure(file("unknown.gguf", &unknown));
    assert!(unknown.fault == LoadFault::Artifact && unknown.message.contains("lxama"), "{}", unknown.message);
    let missing = load_failure(folder.path().join("missing.gguf"));
    assert!(missing.fault == LoadFault::Passing, "a missing file may come: {}", missing.message);
}

#[test]
fn a_requantised_model_is_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("q8.gguf");
    llama::requantise(&model(), &output, "Q8_0", 2).unwrap();
    let (before, after) = (gguf::read_header_of_file(&model()).unwrap(), gguf::read_header_of_file(&output).unwrap());
    assert_eq!((before.file_type, after.file_type), (Some(3), Some(7)));
    assert!(after.tensor_bytes > before.tensor_bytes * 13 / 10);
    assert_eq!(before.kv_bytes_per_token(), after.kv_bytes_per_token());
    let mut harness = Harness::with_file(output.clone(), 256, 1);
    assert!(harness.run(greedy(text(DAYS), 8)).text().starts_with(" Friday, Saturday"));
    assert!(llama::requantise(&model(), &output, "Q9_9", 1).unwrap_err().contains("Q4_0"));
    assert!(llama::requantise(folder.path(), &output, "Q8_0", 1).is_err());
}

fn anonymous_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("RssAnon")).expect("RssAnon");
    line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok()).expect("a number") * 1024
}

#[test]
fn memory_is_estimated_well_before_the_first_load() {
    let folder = tempfile::tempdir().unwrap();
    let repacked = folder.path().join("q4_0.gguf");
    llama::requantise(&model(), &repacked, "Q4_0", 1).unwrap();
    // What one has had must not be what the next one takes.
    let mut kept = Vec::new();
    for (path, context_tokens, parallel) in [(model(), 1024, 2), (repacked, 1024, 1)] {
        let header = gguf::read_header_of_file(&path).unwrap();
        let estimate = gguf::estimate(&header, context_tokens, parallel);
        let before = anonymous_bytes();
        let mut harness = Harness::with_file(path.clone(), context_tokens, parallel);
        let words = words_of(240);
        harness.run(greedy(text(&words[..words.len().min(context_tokens as usize * 2)]), 2));
        let measured = anonymous_bytes() - before;
        let expected = estimate.steady.private_host_bytes;
        assert_eq!(estimate.steady.shared_host_bytes, std::fs::metadata(&path).unwrap().len());
        assert!(measured < expected, "{measured} bytes were taken, {expected} expected");
        assert!(expected < measured * 8 / 5, "{measured} bytes were taken, {expected} expected: too careful");
        kept.push(harness);
    }
}

#[test]
fn a_model_with_a_sliding_window_shares_prompts_without_cutting_back() {
    let header = gguf::read_header_of_file(&gemma()).unwrap();
    assert_eq!((header.architecture.as_str(), header.sliding_window), ("gemma3", Some(512)));
    for parallel in [1, 2] {
        let mut harness = Harness::with_file(gemma(), 1024, parallel);
        let job = GenerateJob { choices: 3, ..greedy(text(DAYS), 8) };
        let answer = harness.run(job);
        for text in answer.texts.values() {
            assert!(text.starts_with(" Friday, Saturday, Sunday"), "{parallel}: {:?}", answer.texts);
        }
        assert_eq!((answer.texts.len(), answer.usage().completion_tokens), (3, 24));
    }
}

#[test]
fn weights_that_give_no_finite_numbers_are_refused_before_anybody_asks() {
    // The matrix that makes the logits; its blocks begin with their scale.
    const NAME: &[u8] = b"token_embd.weight";
    let mut bytes = std::fs::read(model()).unwrap();
    let header = gguf::read_header_of_file(&model()).unwrap();
    // After the name: how many dimensions, each of them, the type, and where the numbers are.
    let at = bytes.windows(NAME.len()).position(|window| window == NAME).unwrap() + NAME.len();
    let offset = u64::from_le_bytes(bytes[at + 24..at + 32].try_into().unwrap());
    assert_eq!(bytes[at..at + 4], [2, 0, 0, 0], "a matrix");
    let data = usize::try_from(header.data_offset_bytes + offset).unwrap();
    // A half-precision number that is none.
    bytes[data..data + 2].copy_from_slice(&0x7e00_u16.to_le_bytes());
    let file = tempfile::NamedTempFile::with_suffix(".gguf").unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let failure = load_failure(file.path().to_path_buf());
    assert!(failure.message.contains("no finite numbers"), "{}", failure.message);
    assert_eq!(failure.fault, LoadFault::Artifact);
}
