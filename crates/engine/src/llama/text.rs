//! From the bytes of tokens to text that may be shown: characters are never cut, and what could become a stop text
//! is held back until it is known whether it does.

/// Text of one choice on its way out.
pub(super) struct TextFilter {
    stops: Vec<String>,
    /// Bytes that do not form a whole character yet.
    incomplete: Vec<u8>,
    /// Text that may be the beginning of a stop text.
    held: String,
    /// Text that may be shown and was not taken yet.
    ready: String,
    /// Bytes of tokens up to what is held, and of all.
    passed_bytes: usize,
    pushed_bytes: usize,
    stop_text: Option<String>,
}

impl TextFilter {
    pub(super) fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        let (incomplete, held, ready) = (Vec::new(), String::new(), String::new());
        Self { stops, incomplete, held, ready, passed_bytes: 0, pushed_bytes: 0, stop_text: None }
    }

    /// Takes the bytes of a token. True once a stop text is complete; it and what follows are dropped.
    pub(super) fn push(&mut self, bytes: &[u8]) -> bool {
        self.incomplete.extend_from_slice(bytes);
        self.pushed_bytes += bytes.len();
        self.take_characters();
        if self.stops.is_empty() {
            self.ready.push_str(&self.held);
            self.held.clear();
            self.passed_bytes = self.pushed_bytes - self.incomplete.len();
            return false;
        }
        let first_stop = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str()).zip(Some(stop))).min();
        if let Some((place, stop)) = first_stop {
            self.stop_text = Some(stop.clone());
            self.passed_bytes = self.pushed_bytes.saturating_sub(self.incomplete.len() + self.held.len() - place);
            self.ready.push_str(&self.held[..place]);
            self.held.clear();
            self.incomplete.clear();
            return true;
        }
        let safe = self.held.len() - self.longest_beginning();
        self.ready.push_str(&self.held[..safe]);
        self.held.drain(..safe);
        self.passed_bytes = self.pushed_bytes.saturating_sub(self.incomplete.len() + self.held.len());
        false
    }

    /// Bytes of tokens whose text is shown or may be, in order.
    pub(super) fn passed_bytes(&self) -> usize {
        self.passed_bytes
    }

    /// The stop text that came.
    pub(super) fn stop_text(&mut self) -> Option<String> {
        self.stop_text.take()
    }

    /// Lets go of everything: no more tokens will come. The beginning of a character without its end is dropped.
    pub(super) fn finish(&mut self) {
        if self.stop_text.is_none() {
            self.passed_bytes = self.pushed_bytes;
        }
        self.ready.push_str(&self.held);
        self.held.clear();
    }

    /// The text that may be shown now.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.ready)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Moves whole characters from `incomplete` to `held`. Bytes that can never become a character become U+FFFD.
    fn take_characters(&mut self) {
        let bytes = std::mem::take(&mut self.incomplete);
        let mut rest: &[u8] = &bytes;
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.held.push_str(text);
                    return;
                }
                Err(error) => {
                    let (valid, broken) = rest.split_at(error.valid_up_to());
                    self.held.push_str(&String::from_utf8_lossy(valid));
                    let Some(wrong) = error.error_len() else {
                        self.incomplete = broken.to_vec();
                        return;
                    };
                    self.held.push(char::REPLACEMENT_CHARACTER);
                    rest = &broken[wrong..];
                }
            }
        }
    }

    /// Bytes at the end of `held` that a stop text begins with.
    fn longest_beginning(&self) -> usize {
        let held = self.held.as_bytes();
        let beginning = |stop: &String| {
            let stop = stop.as_bytes();
            let longest = held.len().min(stop.len() - 1);
            (1..=longest).rev().find(|length| held.ends_with(&stop[..*length])).unwrap_or(0)
        };
        self.stops.iter().map(beginning).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&[u8]]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut filter = TextFilter::new(&stops);
        let mut shown = Vec::new();
        for piece in pieces {
            let stopped = filter.push(piece);
            shown.push(filter.take());
            if stopped {
                return (shown, true);
            }
        }
        filter.finish();
        shown.push(filter.take());
        (shown, false)
    }

    #[test]
    fn a_stop_text_across_tokens_is_never_shown() {
        let (shown, stopped) = run(&["END"], &[b"one E", b"N", b"D two"]);
        assert_eq!((shown, stopped), (vec!["one ".into(), String::new(), String::new()], true));
        let (shown, stopped) = run(&["END"], &[b"one E", b"N", b"Q"]);
        assert_eq!((shown.concat(), stopped), ("one ENQ".into(), false));
        let (shown, stopped) = run(&["\n\n", "\n# "], &[b"a\n", b"# b"]);
        assert_eq!((shown.concat(), stopped), ("a".into(), true));
        let (shown, _) = run(&["aab"], &[b"aaa", b"b"]);
        assert_eq!(shown, ["a", ""], "the earliest text that can still be a stop is held");
    }

    #[test]
    fn the_earliest_of_several_stops_wins_and_empty_ones_do_not_count() {
        let (shown, stopped) = run(&["", "yz", "xy"], &[b"wxyz"]);
        assert_eq!((shown.concat(), stopped), ("w".into(), true));
        let (shown, stopped) = run(&[""], &[b"wxyz"]);
        assert_eq!((shown.concat(), stopped), ("wxyz".into(), false));
    }

    #[test]
    fn characters_are_never_cut() {
        let smile = "\u{1f642}".as_bytes();
        let (shown, _) = run(&[], &[&smile[..1], &smile[1..3], &smile[3..], b"!"]);
        assert_eq!(shown, ["", "", "\u{1f642}", "!", ""]);
        let (shown, _) = run(&[], &[b"a", &smile[..2]]);
        assert_eq!(shown.concat(), "a", "a beginning without an end is dropped");
        let (shown, _) = run(&[], &[b"a\xffb\xfe"]);
        assert_eq!(shown.concat(), "a\u{fffd}b\u{fffd}");
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_same_text(text in ".{0,40}", cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8), stop in "[ab]{1,3}") {
            let bytes = text.as_bytes();
            let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            places.extend([0, bytes.len()]);
            places.sort_unstable();
            let pieces: Vec<&[u8]> = places.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            let (shown, stopped) = run(&[&stop], &pieces);
            let expected = text.split(stop.as_str()).next().unwrap_or("");
            prop_assert_eq!(shown.concat(), expected);
            prop_assert_eq!(stopped, text.contains(stop.as_str()));
        }
    }
}
