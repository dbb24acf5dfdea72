//! What of a prompt can be shared, as a few hashes: one at each of a bounded number of places in its text.
//!
//! Each hash covers everything before its place, so equal hashes mean equal beginnings: text that comes again later
//! in another prompt never matches. The hash is salted with the trust domain's secret and the model, and not
//! cryptographic: a collision would send a request to a replica that is not warm, and show nothing to anybody.

use alloc::vec::Vec;
use core::hash::Hasher;
use twox_hash::XxHash3_64;

/// The most places on the fixed grid of one prompt.
pub(super) const GRID_BOUNDARIES_MAX: usize = 52;
/// The most ends of messages, from the first on, that are places of their own: shared prefixes end there.
pub(super) const HEAD_BOUNDARIES_MAX: usize = 8;
/// The last ends of messages: where the earlier turn of a conversation ended.
pub(super) const RECENT_BOUNDARIES_MAX: usize = 4;
/// The most boundaries that one prompt has.
pub const BOUNDARIES_MAX: usize = GRID_BOUNDARIES_MAX + HEAD_BOUNDARIES_MAX + RECENT_BOUNDARIES_MAX;

/// Distance of the first places on the grid, in bytes.
const GRID_STEP_BYTES: u64 = 1024;
/// From here on each place on the grid lies an eighth further than the one before it.
const GRID_LINEAR_BYTES: u64 = 8 * GRID_STEP_BYTES;
/// Ends of messages nearer than this to the place before them are not places of their own.
const HEAD_STEP_BYTES: u64 = 64;
/// A head shorter than this is nobody's in particular: the first message after it belongs to the anchor too.
const ANCHOR_BYTES_MIN: u64 = 1024;

/// Who may share with whom: equal salts only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Salt(u64);

impl Salt {
    /// From the secret of a trust domain, and the model: its digest, or what stands for it where there is none (its
    /// identifier at a plain replica). Gateways that shall agree without talking need the same secret.
    pub fn new(domain_secret: &[u8], model: &[u8]) -> Self {
        let mut hasher = XxHash3_64::with_seed(domain_secret.len() as u64);
        hasher.write(domain_secret);
        hasher.write(model);
        Self(hasher.finish())
    }
}

/// A place in a prompt's text and the hash of all before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boundary {
    /// Salted hash of the text up to here.
    pub hash: u64,
    /// Bytes of text up to here.
    pub end_bytes: u64,
}

/// The hashes of one prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixChain {
    /// In order. Whether a place is one of these depends only on the text before it.
    pub(super) levels: Vec<Boundary>,
    /// The last ends of messages behind the last match, in order; the last one is the end of the text.
    pub(super) recent: Vec<Boundary>,
    /// What decides who owns the prompt: the same for all requests of a tenant or of a conversation.
    pub(super) anchor: Boundary,
    /// The end of the message after the anchor: decides instead where everybody has the same anchor.
    pub(super) deeper: Boundary,
}

impl PrefixChain {
    /// Bytes of the whole prompt.
    pub fn text_bytes(&self) -> u64 {
        self.recent.last().map_or(0, |last| last.end_bytes)
    }

    /// The beginning by which the prompt's owners are found.
    pub fn anchor(&self) -> Boundary {
        self.anchor
    }

    /// All places, in order within each kind: what a worker reports warmth in.
    pub fn boundaries(&self) -> impl Iterator<Item = Boundary> + '_ {
        self.levels.iter().chain(&self.recent).copied()
    }
}

/// Reads a prompt piece by piece and keeps none of it.
pub struct PrefixBuilder {
    hasher: XxHash3_64,
    at_bytes: u64,
    grid_next: u64,
    grid_count: usize,
    head_count: usize,
    levels: Vec<Boundary>,
    recent: Vec<Boundary>,
    anchor: Option<Boundary>,
    deeper: Option<Boundary>,
}

impl PrefixBuilder {
    /// At the beginning of a prompt.
    pub fn new(salt: Salt) -> Self {
        Self {
            hasher: XxHash3_64::with_seed(salt.0),
            at_bytes: 0,
            grid_next: GRID_STEP_BYTES,
            grid_count: 0,
            head_count: 0,
            levels: Vec::with_capacity(16),
            recent: Vec::with_capacity(RECENT_BOUNDARIES_MAX),
            anchor: None,
            deeper: None,
        }
    }

    /// Goes on with the text. How it is cut into pieces makes no difference.
    pub fn push(&mut self, mut text: &[u8]) {
        while self.grid_count < GRID_BOUNDARIES_MAX {
            let room = usize::try_from(self.grid_next - self.at_bytes).unwrap_or(usize::MAX);
            if text.len() < room {
                break;
            }
            let (before, after) = text.split_at(room);
            self.take(before);
            text = after;
            self.levels.push(self.here());
            self.grid_count += 1;
            self.grid_next +=
                GRID_STEP_BYTES.max((self.grid_next / 8) * u64::from(self.grid_next >= GRID_LINEAR_BYTES));
        }
        self.take(text);
    }

    fn take(&mut self, text: &[u8]) {
        self.hasher.write(text);
        self.at_bytes += text.len() as u64;
    }

    fn here(&self) -> Boundary {
        Boundary { hash: self.hasher.finish(), end_bytes: self.at_bytes }
    }

    /// A message (or the list of tools) ends here: another prompt may be equal up to this place and differ after it.
    pub fn boundary(&mut self) {
        if self.at_bytes == 0 || self.recent.last().is_some_and(|last| last.end_bytes == self.at_bytes) {
            return;
        }
        let here = self.here();
        let before = self.levels.last().map_or(0, |last| last.end_bytes);
        if self.head_count < HEAD_BOUNDARIES_MAX && self.at_bytes - before >= HEAD_STEP_BYTES {
            self.levels.push(here);
            self.head_count += 1;
        }
        if self.anchor.is_some() {
            self.deeper.get_or_insert(here);
        } else if self.at_bytes >= ANCHOR_BYTES_MIN {
            self.anchor = Some(here);
        }
        if self.recent.len() == RECENT_BOUNDARIES_MAX {
            self.recent.remove(0);
        }
        self.recent.push(here);
    }

    /// The end of the prompt.
    pub fn finish(mut self) -> PrefixChain {
        self.boundary();
        let end = self.here();
        if self.recent.is_empty() {
            self.recent.push(end);
        }
        // A text in one piece has no head: what its first step shares with others has to do.
        let one_piece = self.recent.len() == 1;
        let first = self.levels.first().copied().filter(|_| one_piece);
        let anchor = first.or(self.anchor).unwrap_or(end);
        let deeper = self.deeper.unwrap_or(end);
        PrefixChain { levels: self.levels, recent: self.recent, anchor, deeper }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    fn salt() -> Salt {
        Salt::new(b"secret", b"model")
    }

    fn chain(salt: Salt, messages: &[&[u8]]) -> PrefixChain {
        let mut builder = PrefixBuilder::new(salt);
        for message in messages {
            builder.push(message);
            builder.boundary();
        }
        builder.finish()
    }

    #[test]
    fn a_text_alone_does_not_match_itself_behind_another_r17() {
        let (a, b) = (vec![b'a'; 4096], vec![b'b'; 4096]);
        let (alone, behind) = (chain(salt(), &[&b]), chain(salt(), &[&a, &b]));
        let known: Vec<u64> = alone.boundaries().map(|boundary| boundary.hash).collect();
        assert!(behind.boundaries().all(|boundary| !known.contains(&boundary.hash)));
    }

    #[test]
    fn salts_share_nothing() {
        let text = vec![b'a'; 9000];
        let others = [Salt::new(b"other", b"model"), Salt::new(b"secret", b"other"), Salt::new(b"secretm", b"odel")];
        let known: Vec<u64> = chain(salt(), &[&text]).boundaries().map(|boundary| boundary.hash).collect();
        for other in others {
            assert!(chain(other, &[&text]).boundaries().all(|boundary| !known.contains(&boundary.hash)));
        }
    }

    #[test]
    fn prompts_of_a_megabyte_and_more_have_few_boundaries_and_reach_far() {
        let text = vec![b'x'; 3 << 20];
        let long = chain(salt(), &[&text]);
        assert!(long.boundaries().count() <= BOUNDARIES_MAX);
        let reach = long.levels.last().unwrap().end_bytes;
        assert!(reach > 1 << 20, "{reach}");
        assert_eq!(long.text_bytes(), 3 << 20);
    }

    #[test]
    fn the_next_turn_knows_where_the_last_one_ended() {
        let (system, first, answer, second) = ([b's'; 5000], [b'q'; 700], [b'a'; 900], [b'r'; 300]);
        let one = chain(salt(), &[&system, &first]);
        let two = chain(salt(), &[&system, &first, &answer, &second]);
        let end = *one.recent.last().unwrap();
        assert!(two.boundaries().any(|boundary| boundary == end));
        assert_eq!(one.anchor(), two.anchor());
        assert_eq!(one.anchor().end_bytes, 5000);
    }

    #[test]
    fn a_short_head_anchors_at_its_first_question() {
        let one = chain(salt(), &[b"You are helpful.", &[b'q'; 2000], &[b'a'; 100]]);
        assert_eq!(one.anchor().end_bytes, 2016);
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(text in prop::collection::vec(any::<u8>(), 0..40_000), cut in 1..5000_usize) {
            let whole = chain(salt(), &[&text]);
            let mut builder = PrefixBuilder::new(salt());
            for piece in text.chunks(cut) {
                builder.push(piece);
            }
            prop_assert_eq!(builder.finish(), whole);
        }

        #[test]
        fn equal_beginnings_have_equal_levels(text in prop::collection::vec(any::<u8>(), 1..60_000), at in any::<prop::sample::Index>()) {
            let cut = at.index(text.len());
            let (whole, part) = (chain(salt(), &[&text]), chain(salt(), &[&text[..cut]]));
            let within: Vec<Boundary> =
                whole.levels.iter().copied().filter(|level| level.end_bytes <= cut as u64).collect();
            let grid: Vec<Boundary> = part.levels.iter().copied().filter(|level| within.contains(level)).collect();
            prop_assert_eq!(grid, within);
        }
    }
}
