//! KV that is used again, on a real model: within an engine, and through a tier as a worker keeps one.

#![cfg(feature = "llama")]

#[path = "support/mod.rs"]
#[expect(dead_code, reason = "shared with the tests of everything else")]
mod support;
#[path = "support/tier.rs"]
mod tier;

use proptest::prelude::*;
use support::{Answer, Harness, gemma, greedy, text};
use tier::World;
use warmset_core::kv::TrustDomain;
use warmset_engine::{
    port::Engine,
    protocol::{FinishReason, FromEngine, GenerateJob, KvGrant, Prompt, ToEngine},
};

fn domain(name: &str) -> TrustDomain {
    TrustDomain::named(name)
}

/// So many words that the model may go on from as it likes; `theme` sets one text apart from another.
fn words_of(theme: u32, count: u32) -> String {
    (0..count)
        .map(|index| {
            format!(
                "{} ",
                ["river", "stone", "lamp", "cloud", "seven"][((index * index + theme * index + theme) % 5) as usize]
            )
        })
        .collect()
}

fn job(words: &str, tokens: u32, domain: Option<TrustDomain>) -> GenerateJob {
    GenerateJob { kv_domain: domain, ignore_end: true, ..greedy(text(words), tokens) }
}

/// What the model says without anything to go on from.
fn undisturbed(job: &GenerateJob) -> Answer {
    Harness::new(2048, 1).run(GenerateJob { kv_domain: None, ..job.clone() })
}

fn cached(answer: &Answer) -> u32 {
    answer.usage().cached_tokens
}

#[test]
fn a_prompt_that_begins_like_one_before_is_computed_from_there_on_and_says_the_same() {
    let own = Some(domain("one"));
    let start = words_of(1, 200);
    let ends = ["", "and the river said", &words_of(2, 70), "and the river said"];
    let jobs = ends.map(|end| job(&format!("{start}{end}"), 24, own));
    let expected: Vec<Answer> = jobs.iter().take(3).map(undisturbed).collect();
    for parallel in [1, 3] {
        let mut harness = Harness::new(2048, parallel);
        for (turn, job) in jobs.iter().enumerate() {
            let answer = harness.run(job.clone());
            let prompt_tokens = answer.usage().prompt_tokens;
            let alone = &expected[if turn == 3 { 1 } else { turn }];
            assert_eq!(answer.text(), alone.text(), "{parallel} {turn}");
            if turn == 0 {
                assert_eq!(cached(&answer), 0);
            } else {
                assert!(cached(&answer) >= 192 && cached(&answer) < prompt_tokens, "{:?}", answer.usage());
                // Whole blocks, unless none is left to compute.
                let rest = prompt_tokens - cached(&answer) / 64 * 64;
                assert!(cached(&answer).is_multiple_of(64) || rest < 64, "{:?}", answer.usage());
            }
        }
    }
}

#[test]
fn what_is_to_be_forgotten_is_found_by_nobody() {
    let (own, other) = (Some(domain("one")), Some(domain("two")));
    let mut harness = Harness::new(2048, 2);
    let (mine, theirs) = (job(&words_of(1, 200), 4, own), job(&words_of(2, 200), 4, other));
    harness.run(mine.clone());
    harness.run(theirs.clone());
    harness.send(ToEngine::KvForget { domain: domain("one") });
    assert!(cached(&harness.run(theirs.clone())) > 0, "another domain's stays");
    assert_eq!(cached(&harness.run(mine.clone())), 0);
    assert!(cached(&harness.run(mine)) > 0, "what was asked after it is kept again");

    // What runs meanwhile goes on, and leaves nothing behind.
    let mut world = World::new(1);
    let running = world.start(job(&words_of(3, 200), 8, own));
    world.step();
    world.harness.send(ToEngine::KvForget { domain: domain("one") });
    world.finish(&[running]);
    assert_eq!(world.harness.answers[&running].usage().completion_tokens, 8);
    assert_eq!((world.tier.blocks(), world.tier.all_settled()), (0, true));
    assert_eq!(cached(&world.run(job(&words_of(3, 200), 4, own))), 0);
}

#[test]
fn a_second_turn_computes_its_new_tokens_only() {
    let own = Some(domain("one"));
    let mut harness = Harness::new(2048, 2);
    let first = words_of(3, 140);
    let answer = harness.run(job(&first, 150, own));
    let other = harness.run(job(&words_of(9, 100), 20, own));
    assert_eq!(cached(&other), 0);
    let second = format!("{first}{} {}", answer.text(), words_of(4, 30));
    let prepared = harness.prepare(job(&second, 16, own));
    let Some(FromEngine::Prepared { device_tokens, prompt_tokens, keys, .. }) = harness.kv.last().cloned() else {
        panic!("{:?}", harness.kv)
    };
    assert!(keys.is_empty(), "there is no tier");
    harness.grant(prepared);
    harness.finish(&[prepared]);
    let usage = harness.answers[&prepared].usage();
    assert_eq!(usage.cached_tokens, device_tokens);
    assert!(device_tokens > answer.usage().prompt_tokens, "what was generated is used, too: {usage:?}");
    assert!(prompt_tokens - device_tokens < 64 + 64 + 60, "{usage:?}");
}

#[test]
fn nothing_is_shared_across_domains_or_without_one() {
    let mut world = World::new(3);
    let words = words_of(5, 200);
    let answers: Vec<Answer> = [Some("a"), Some("b"), None, Some("a"), None]
        .iter()
        .map(|name| world.run(job(&words, 8, name.map(domain))))
        .collect();
    let hits: Vec<bool> = answers.iter().map(|answer| cached(answer) > 0).collect();
    assert_eq!(hits, [false, false, false, true, false]);
    assert!(answers.iter().all(|answer| answer.text() == answers[0].text()));
    // The same through the tier, with an engine that holds nothing itself.
    let mut again = world.restart(2);
    assert_eq!(cached(&again.run(job(&words, 8, Some(domain("c"))))), 0);
    assert_eq!(cached(&again.run(job(&words, 8, None))), 0);
    assert!(cached(&again.run(job(&words, 8, Some(domain("b"))))) >= 192);
}

#[test]
fn what_was_saved_is_restored_in_another_process_to_the_bit() {
    let own = Some(domain("one"));
    let mut world = World::new(3);
    let start = words_of(6, 330);
    let first = job(&start, 70, own);
    let answer = world.run(first.clone());
    assert_eq!(answer.text(), undisturbed(&first).text());
    assert!(world.tier.blocks() as u32 >= answer.usage().prompt_tokens / 64, "saved");
    // Of another number of sequences, so that its states begin otherwise.
    for parallel in [1, 2, 4] {
        let mut again = world.restart(parallel);
        again.tier.forgets = true;
        let second = job(&format!("{start} but then"), 24, own);
        let answer = again.run(second.clone());
        assert_eq!(answer.text(), undisturbed(&second).text());
        let most = (answer.usage().prompt_tokens - 1) / 64 * 64;
        assert!(cached(&answer) == most || cached(&answer) == most - 64, "{:?}", answer.usage());
        // The engine was told that the tier knows nothing, and offers all of it again: the bytes are the same.
        assert!(again.tier.compared >= 3 && again.tier.verified >= 3, "{:?}", again.tier);
        assert_eq!(again.tier.differs, 0);
        world = again;
    }
}

#[test]
fn blocks_that_are_something_else_are_not_used() {
    let own = Some(domain("one"));
    let mut world = World::new(1);
    let words = words_of(7, 400);
    world.run(job(&words, 4, own));
    let prompt = job(&words, 12, own);
    let expected = undisturbed(&prompt).text().to_owned();
    for (what, at) in [("magic", 0), ("header_checksum", 900), ("header_checksum", 4090)] {
        let mut again = world.restart(1);
        again.tier.damage(2, at);
        let answer = again.run(prompt.clone());
        assert_eq!((answer.text(), cached(&answer)), (expected.as_str(), 128), "{what}");
        assert_eq!(again.tier.rejected, [(2, what.to_owned())]);
        again.tier.damage(2, at);
    }
    // Bytes of a payload are compared when the sequence is written out again, and then nothing of it is used.
    let mut again = world.restart(1);
    again.tier.damage(2, 4096 + 777);
    let answer = again.run(prompt.clone());
    assert_eq!((answer.text(), cached(&answer)), (expected.as_str(), 0));
    assert_eq!((again.tier.rejected, again.tier.verified), (vec![(2, "verify".to_owned())], 0));
    world.tier.damage(2, 4096 + 777);
    // A block of another prompt, of another place, and none at all.
    for (slots, blocks, reason) in
        [(vec![1, 0], 0, "key"), (vec![0, 0], 1, "key"), (vec![0, 1, 9999], 2, "no such slot")]
    {
        let mut again = world.restart(1);
        let request = again.harness.prepare(prompt.clone());
        again.grant(request, KvGrant::Blocks { first: 0, slots, known: 0 });
        again.finish(&[request]);
        assert_eq!(cached(&again.harness.answers[&request]), blocks * 64);
        assert!(again.tier.rejected[0].1.contains(reason), "{:?}", again.tier.rejected);
        assert_eq!(again.harness.answers[&request].text(), expected);
    }
}

#[test]
fn blocks_that_come_while_a_prompt_is_computed_are_put_behind_what_is_there() {
    let own = Some(domain("one"));
    let mut world = World::new(1);
    let prompt = Prompt::Tokens { tokens: (0..1600).map(|index| 1000 + index * index % 701).collect() };
    let job = GenerateJob { kv_domain: own, ignore_end: true, ..greedy(prompt, 12) };
    let expected = undisturbed(&job).text().to_owned();
    world.run(job.clone());
    assert!(world.tier.blocks() >= 25);
    // 512 tokens are computed in a step. What came too soon waits, what came too late is of no use, and before a block that
    // is not what it must be, those before it are taken.
    for (first, slots, damaged, taken) in
        [(4, 20, None, 16), (8, 16, None, 16), (12, 12, None, 8), (4, 3, None, 0), (4, 20, Some(10), 2)]
    {
        let mut again = world.restart(2);
        again.tier.forgets = true;
        if let Some(block) = damaged {
            again.tier.damage(block, 0);
        }
        let request = again.harness.prepare(job.clone());
        again.grant(request, KvGrant::Recompute { known: 0 });
        again.step();
        let granted = (first..first + slots).collect();
        again.grant(request, KvGrant::Blocks { first, slots: granted, known: 0 });
        again.finish(&[request]);
        let answer = &again.harness.answers[&request];
        assert_eq!((answer.text(), cached(answer)), (expected.as_str(), taken * 64), "from {first} on");
        assert_eq!((again.tier.pinned(request), again.tier.differs), (0, 0));
        assert!(again.tier.compared >= 24, "all of it was offered again, to the bit: {}", again.tier.compared);
        if let Some(block) = damaged {
            again.tier.damage(block, 0);
        }
    }
}

#[test]
fn a_grant_is_answered_once_however_the_request_goes_on() {
    let own = Some(domain("one"));
    let mut world = World::new(1);
    let words = words_of(8, 300);
    world.run(job(&words, 4, own));
    let mut again = world.restart(1);
    // Held up by another one, then cancelled; ended before the grant comes; without anything to compute; another time
    // on the sequence itself, which holds more.
    let running = again.start(job(&words_of(1, 20), 200, None));
    again.step();
    let waiting = again.start(job(&words, 4, own));
    again.step();
    assert_eq!(again.tier.pinned(waiting), 1);
    again.cancel(waiting);
    assert_eq!(again.tier.pinned(waiting), 0);
    again.cancel(running);
    let gone = again.harness.prepare(job(&words, 4, own));
    again.cancel(gone);
    again.grant_blocks(gone);
    assert_eq!(again.tier.pinned(gone), 0);
    let nothing = again.run(GenerateJob { max_tokens: Some(0), ..job(&words, 4, own) });
    assert_eq!((nothing.finish(), cached(&nothing)), (FinishReason::Length, 0));
    assert!(cached(&again.run(job(&words, 4, own))) > 0);
    assert!(cached(&again.run(job(&words, 4, own))) > 0);
    let three = again.run(GenerateJob { choices: 3, ..job(&words, 4, own) });
    assert_eq!(three.texts.len(), 3);
    assert!(again.tier.all_settled(), "{:?}", again.tier);
}

#[test]
fn what_a_sequence_lost_is_told_not_to_be_saved() {
    let mut world = World::new(1);
    world.tier.slow = true;
    let one = world.run(job(&words_of(1, 200), 4, Some(domain("one"))));
    assert_eq!(world.tier.asked.len(), 1);
    // The only sequence is needed for something else.
    world.run(job(&words_of(2, 200), 4, None));
    world.tier.slow = false;
    world.allow();
    assert_eq!((world.tier.blocks(), world.tier.lost), (0, 1));
    // A long prompt is offered when it is computed, and can be written while its answer goes on.
    let long = job(&words_of(3, 800), 80, Some(domain("one")));
    let request = world.start(long);
    while world.tier.blocks() == 0 {
        assert!(!world.harness.answer(request).is_over());
        world.step();
    }
    assert!(!world.harness.answer(request).is_over(), "saved before its answer is complete");
    world.finish(&[request]);
    assert!(one.usage().prompt_tokens > 64);
}

#[test]
fn models_that_cannot_be_cut_answer_as_ever() {
    let mut harness = Harness::with_file(gemma(), 1024, 2);
    assert_eq!(harness.info.kv, None);
    let job = job(&words_of(1, 120), 12, Some(domain("one")));
    let first = harness.run(job.clone());
    let second = harness.run(job);
    assert_eq!((first.text(), cached(&second)), (second.text(), 0));
}

#[test]
fn a_prompt_of_tokens_at_every_border_is_right() {
    let own = Some(domain("one"));
    let mut world = World::new(2);
    for tokens in [1u32, 63, 64, 65, 128, 129, 576] {
        let prompt = || Prompt::Tokens { tokens: (0..tokens).map(|index| 1000 + index % 300).collect() };
        let job = GenerateJob { kv_domain: own, ignore_end: true, ..greedy(prompt(), 6) };
        let expected = undisturbed(&job).text().to_owned();
        let first = world.run(job.clone());
        let second = world.run(job.clone());
        assert_eq!((first.text(), second.text()), (expected.as_str(), expected.as_str()), "{tokens}");
        let whole = tokens / 64 * 64;
        let held = if whole == tokens { tokens - 64 } else { whole.max(tokens.saturating_sub(2)) };
        assert_eq!(cached(&second), held, "{tokens}");
        let mut again = world.restart(1);
        let third = again.run(job);
        assert_eq!((third.text(), cached(&third)), (expected.as_str(), (tokens - 1) / 64 * 64), "{tokens}");
    }
}

#[test]
fn the_beginning_of_a_longer_prompt_says_what_it_says_by_itself() {
    let own = Some(domain("one"));
    let tale = "Once upon a time a miller lived with his three sons near a river in the north. The eldest was strong, the \
                second was clever, and the youngest was kind to everyone who came to the mill. One winter the river froze, \
                and no grain could be ground. ";
    let short = format!("{tale}{tale}The eldest");
    let long = format!(
        "{short} {tale}So the father called his sons and said: whoever makes the wheel turn again shall have \
                        the mill. The eldest took an axe and went down to the ice. Then the youngest "
    );
    let longer = format!("{long}{tale}{tale}{tale}{tale}{tale}");
    let prompts = [short, long, longer];
    let wanted: Vec<String> =
        prompts.iter().map(|prompt| undisturbed(&job(prompt, 24, own)).text().to_owned()).collect();
    for sequences in [1, 2] {
        let mut harness = Harness::new(2048, sequences);
        for which in [1, 1, 0, 0, 2, 1, 0, 2, 2, 0, 1, 1] {
            let answer = harness.run(job(&prompts[which], 24, own));
            assert_eq!(answer.text(), wanted[which], "prompt {which}, {} tokens of it were there", cached(&answer));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2, ..ProptestConfig::default() })]
    #[test]
    fn eight_conversations_at_once_with_cancels_leave_nothing_behind(
        plan in prop::collection::vec((0u32..8, 0usize..14, any::<bool>(), 1u32..5), 8..16),
    ) {
        let mut world = World::new(4);
        world.tier.forgets = true;
        let mut open: Vec<(u64, usize)> = Vec::new();
        for (index, (conversation, patience, cancels, turn)) in plan.iter().enumerate() {
            let words = words_of(*conversation, 40 * turn + 30);
            let own = Some(domain(["a", "b", "c"][(conversation % 3) as usize]));
            let request = world.start(job(&words, 12, own));
            if *cancels {
                open.push((request, index + patience));
            }
            for _ in 0..3 {
                world.step();
            }
            for (request, _) in open.extract_if(.., |(_, when)| *when <= index) {
                world.cancel(request);
            }
        }
        let all: Vec<u64> = world.harness.answers.keys().copied().collect();
        world.finish(&all);
        prop_assert!(world.tier.all_settled(), "{:?}", world.tier);
        prop_assert!(!world.harness.engine.has_work());
    }
}

/// The one message that no test above sends.
#[test]
fn answers_about_saves_that_nobody_asked_for_change_nothing() {
    let mut world = World::new(1);
    for save in [0, 1, u64::MAX] {
        world.harness.send(ToEngine::SaveGo { save });
        world.harness.send(ToEngine::SaveSkip { save });
        world.harness.send(ToEngine::SaveEnd { save });
    }
    assert!(world.harness.kv.is_empty());
    assert!(world.run(job("a b c d", 4, Some(domain("one")))).failure.is_none());
}
