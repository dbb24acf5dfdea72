//! What llama.cpp's engine tells beside text, and what it can be held to, on the real model.

use crate::support::{Harness, greedy, text};
use warmset_engine::protocol::{GenerateJob, Output};

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
