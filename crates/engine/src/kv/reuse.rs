//! Which sequence of an engine a prompt goes on from: what lies there already need not be computed.

use warmset_core::kv::{BLOCK_TOKENS, TrustDomain};

/// What an engine holds of a finished request, for the next one that begins alike.
#[derive(Debug, Clone)]
pub(crate) struct Held<T> {
    /// Tokens whose KV is there, from the first on.
    pub(crate) tokens: Vec<T>,
    /// So many of them were computed in whole blocks, those behind them in smaller pieces.
    pub(crate) whole: usize,
    /// Who may use it.
    pub(crate) domain: Option<TrustDomain>,
    /// Grows with each use of any sequence.
    pub(crate) last_use: u64,
}

impl<T> Default for Held<T> {
    fn default() -> Self {
        Self { tokens: Vec::new(), whole: 0, domain: None, last_use: 0 }
    }
}

/// One sequence as it is now.
#[derive(Debug)]
pub(crate) struct View<'a, T> {
    /// Nobody computes on it.
    pub(crate) idle: bool,
    /// So many of its first tokens wait to be saved, and are not to be lost before that.
    pub(crate) saving: usize,
    pub(crate) domain: Option<&'a TrustDomain>,
    /// Tokens whose KV is there, in two parts.
    pub(crate) tokens: [&'a [T]; 2],
    /// So many of them were computed in whole blocks, or are about to be.
    pub(crate) whole: usize,
    pub(crate) last_use: u64,
}

impl<T: PartialEq> View<'_, T> {
    fn held(&self) -> usize {
        self.tokens[0].len() + self.tokens[1].len()
    }

    /// Tokens that it has in common with a prompt whose last token is to be computed. Whole blocks of them, as long as
    /// another whole one is to be computed: only at their borders does that come out as if all had been. What is left over
    /// in the end is computed in pieces below a block anyhow: of that, what was computed in such pieces is in common too, but
    /// for the last two tokens, since a single one takes yet another way.
    pub(crate) fn common(&self, domain: Option<&TrustDomain>, prompt: &[T]) -> usize {
        if domain.is_none() || self.domain != domain {
            return 0;
        }
        let all_but_last = &prompt[..prompt.len().saturating_sub(1)];
        let held = self.tokens[0].iter().chain(self.tokens[1]);
        let alike = all_but_last.iter().zip(held).take_while(|(one, other)| one == other).count();
        let whole = whole_blocks(prompt.len());
        if alike < whole || self.whole > whole {
            return whole_blocks(alike);
        }
        alike.min(whole.max(prompt.len().saturating_sub(2)))
    }
}

/// Tokens of the whole blocks of so many.
pub(crate) fn whole_blocks(tokens: usize) -> usize {
    tokens / BLOCK_TOKENS as usize * BLOCK_TOKENS as usize
}

/// How a prompt begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Start {
    /// The sequence it is computed on.
    pub(crate) sequence: usize,
    /// Where its first tokens are copied from, if not there already.
    pub(crate) copy_from: Option<usize>,
    /// Tokens that need not be computed.
    pub(crate) tokens: usize,
}

/// A copy is worth this many tokens.
const COPY_TOKENS: usize = 2 * BLOCK_TOKENS as usize;

/// Chooses among idle sequences; none if there is none that may lose what it holds.
///
/// The sequence with the most in common is taken as it is if little more than that lies there; otherwise the common part
/// is copied to the one whose loss matters least: an empty one, or the one that was not used for longest.
pub(crate) fn choose<T: PartialEq>(views: &[View<'_, T>], domain: Option<&TrustDomain>, prompt: &[T]) -> Option<Start> {
    let idle = views.iter().enumerate().filter(|(_, view)| view.idle && view.saving == 0);
    let victim = idle.min_by_key(|(index, view)| (view.held() > 0, view.last_use, *index)).map(|(index, _)| index);
    let shared = views.iter().enumerate().map(|(index, view)| (view.common(domain, prompt), index, view));
    let best = shared.filter(|(common, ..)| *common > 0).max_by_key(|(common, index, view)| {
        (common + if view.idle { COPY_TOKENS } else { 0 }, view.last_use, std::cmp::Reverse(*index))
    });
    let fresh = victim.map(|sequence| Start { sequence, copy_from: None, tokens: 0 });
    let Some((common, index, view)) = best else { return fresh };
    let lost = view.held() - common;
    let least = victim.map_or(usize::MAX, |victim| views[victim].held().max(BLOCK_TOKENS as usize));
    if view.idle && view.saving <= common && (victim == Some(index) || lost <= least) {
        return Some(Start { sequence: index, copy_from: None, tokens: common });
    }
    if view.idle || common >= COPY_TOKENS {
        return victim.map(|sequence| Start { sequence, copy_from: Some(index), tokens: common });
    }
    fresh
}

/// The most tokens of a prompt that any sequence holds.
pub(crate) fn longest<T: PartialEq>(views: &[View<'_, T>], domain: Option<&TrustDomain>, prompt: &[T]) -> usize {
    views.iter().map(|view| view.common(domain, prompt)).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(first: u32, count: u32) -> Vec<u32> {
        (first..first + count).collect()
    }

    fn idle<'a>(domain: &'a TrustDomain, tokens: &'a [u32], last_use: u64) -> View<'a, u32> {
        View { idle: true, saving: 0, domain: Some(domain), tokens: [tokens, &[]], whole: 0, last_use }
    }

    #[test]
    fn a_second_turn_goes_on_where_the_first_one_ended() {
        let domain = TrustDomain([1; 32]);
        let (first, prompt) = (run(0, 200), run(0, 300));
        let views = [idle(&domain, &[], 0), idle(&domain, &first, 5)];
        assert_eq!(choose(&views, Some(&domain), &prompt), Some(Start { sequence: 1, copy_from: None, tokens: 192 }));
        assert_eq!(longest(&views, Some(&domain), &prompt), 192);
        // The last token is always computed, and a whole block if it is the last of one.
        assert_eq!(longest(&views, Some(&domain), &first[..128]), 64);
        assert_eq!(longest(&views, Some(&domain), &first[..129]), 128);
        // What does not make a block is not computed again, unless it comes to make one.
        assert_eq!(longest(&views, Some(&domain), &first[..190]), 188);
        assert_eq!(longest(&views, Some(&domain), &first[..193]), 192);
        assert_eq!(longest(&views, Some(&domain), &run(0, 230)), 200);
        assert_eq!(longest(&views, Some(&domain), &run(0, 256)), 192);
        // What a longer prompt has computed in a whole block comes out otherwise than in the end of a shorter one.
        let views = [View { whole: 192, ..idle(&domain, &first, 5) }];
        assert_eq!(longest(&views, Some(&domain), &first[..190]), 128);
        assert_eq!(longest(&views, Some(&domain), &first[..192]), 128);
        assert_eq!(longest(&views, Some(&domain), &first[..198]), 196);
        assert_eq!(longest(&views, Some(&domain), &run(0, 230)), 200);
    }

    #[test]
    fn a_long_conversation_is_not_lost_to_one_that_only_begins_alike() {
        let domain = TrustDomain([1; 32]);
        let long = run(0, 2000);
        let mut prompt = run(0, 200);
        prompt.extend(run(7000, 100));
        let views = [idle(&domain, &long, 5), idle(&domain, &[], 0)];
        assert_eq!(
            choose(&views, Some(&domain), &prompt),
            Some(Start { sequence: 1, copy_from: Some(0), tokens: 192 })
        );
        // With nowhere else to go it is.
        assert_eq!(
            choose(&views[..1], Some(&domain), &prompt),
            Some(Start { sequence: 0, copy_from: None, tokens: 192 })
        );
    }

    #[test]
    fn what_a_running_sequence_holds_is_copied_if_it_is_worth_it() {
        let domain = TrustDomain([1; 32]);
        let (running, prompt) = (run(0, 300), run(0, 400));
        let views = [View { idle: false, ..idle(&domain, &running, 9) }, idle(&domain, &[], 0)];
        assert_eq!(
            choose(&views, Some(&domain), &prompt),
            Some(Start { sequence: 1, copy_from: Some(0), tokens: 256 })
        );
        let fresh = Start { sequence: 1, copy_from: None, tokens: 0 };
        assert_eq!(choose(&views, Some(&domain), &prompt[..100]), Some(fresh));
        assert_eq!(choose(&views[..1], Some(&domain), &prompt), None);
    }

    #[test]
    fn what_waits_to_be_saved_is_not_lost() {
        let domain = TrustDomain([1; 32]);
        let (one, other) = (run(0, 200), run(500, 100));
        let saving = |saving| View { saving, ..idle(&domain, &one, 1) };
        let views = [saving(192), idle(&domain, &other, 2)];
        assert_eq!(choose(&views, Some(&domain), &run(900, 100)).unwrap().sequence, 1);
        assert_eq!(choose(&views[..1], Some(&domain), &run(900, 100)), None);
        // It may grow, and be copied, but not be cut.
        let goes_on = Start { sequence: 0, copy_from: None, tokens: 192 };
        assert_eq!(choose(&views[..1], Some(&domain), &run(0, 300)), Some(goes_on));
        let parts = [run(0, 128), run(900, 100)].concat();
        assert_eq!(choose(&views[..1], Some(&domain), &parts), None);
        let copied = Start { sequence: 1, copy_from: Some(0), tokens: 128 };
        assert_eq!(choose(&views, Some(&domain), &parts), Some(copied));
    }

    proptest! {
        #[test]
        fn nothing_is_shared_across_domains_or_without_one(
            holders in prop::collection::vec((0u8..3, 0u32..300, any::<bool>()), 1..5),
            asker in prop::option::of(0u8..3),
            length in 1u32..300,
            saving in prop::collection::vec(0usize..300, 5),
        ) {
            let domains: Vec<TrustDomain> = (0..3).map(|byte| TrustDomain([byte; 32])).collect();
            let all = run(0, 300);
            let views: Vec<View<'_, u32>> = (0u64..).zip(&holders).map(|(index, (domain, held, busy))| View {
                idle: !busy, saving: saving[index as usize].min(*held as usize), domain: Some(&domains[usize::from(*domain)]),
                tokens: [&all[..*held as usize / 2], &all[*held as usize / 2..*held as usize]], last_use: index,
                whole: whole_blocks(*held as usize) * usize::from(index % 2 == 0),
            }).collect();
            let domain = asker.map(|asker| domains[usize::from(asker)]);
            let prompt = &all[..length as usize];
            let start = choose(&views, domain.as_ref(), prompt);
            if start.is_none() {
                prop_assert!(views.iter().all(|view| !view.idle || view.saving > 0));
            }
            if let Some(start) = start {
                let kept = if start.copy_from.is_none() { start.tokens } else { 0 };
                prop_assert!(views[start.sequence].idle && views[start.sequence].saving <= kept);
                let source = start.copy_from.unwrap_or(start.sequence);
                if start.tokens > 0 {
                    prop_assert_eq!(views[source].domain, domain.as_ref());
                    prop_assert!(domain.is_some());
                }
                prop_assert!(start.tokens < prompt.len());
                prop_assert!(start.tokens.is_multiple_of(64) || prompt.len() - start.tokens / 64 * 64 < 64);
                prop_assert!(start.tokens.is_multiple_of(64) || views[source].whole <= start.tokens);
                prop_assert!(start.tokens.is_multiple_of(64) || prompt.len() - start.tokens >= 2);
                prop_assert!(start.tokens <= holders[source].1 as usize);
            }
        }
    }
}
