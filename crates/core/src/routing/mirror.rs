//! What each replica is believed to hold: prefixes by hash, with who holds each, least recently used first out.
//!
//! It is updated when a request is routed, not when it is answered: a prefix that is being computed is as good as held,
//! or requests that come together would compute it once each. What replicas report corrects it.
//!
//! Every place of a prompt that a replica holds is one *residence*. A request touches its places from the deepest to
//! the shallowest, so that a replica's list gives up leaves before what they stand on, and a replica that holds a
//! place holds every place before it: the longest match is found by halving.

use super::{
    chain::{Boundary, PrefixChain},
    index::{Index, mix},
};
use alloc::vec::Vec;
use core::mem::size_of;

/// No number.
const NONE: u32 = u32::MAX;
/// The most replicas that one look-up tells about.
pub(super) const MATCHES_MAX: usize = 32;

/// What a place adds that was only heard of.
const CORRECTED_BYTES: u64 = 1024;

/// A place in prompts that somebody holds.
#[derive(Clone, Copy)]
struct Node {
    hash: u64,
    /// Bytes of text since the place before.
    own_bytes: u32,
    /// Its first residence; the next free node if nobody holds it.
    first: u32,
    holders: u32,
}

/// One place at one replica.
#[derive(Clone, Copy)]
struct Residence {
    node: u32,
    replica: u32,
    /// Used more recently by this replica.
    newer: u32,
    older: u32,
    /// Of the same node at another replica.
    node_before: u32,
    node_after: u32,
}

/// One replica's part.
#[derive(Clone, Copy)]
struct Held {
    newest: u32,
    oldest: u32,
    residences: u32,
    bytes: u64,
    capacity_bytes: u64,
}

const NOTHING_HELD: Held = Held { newest: NONE, oldest: NONE, residences: 0, bytes: 0, capacity_bytes: u64::MAX };

/// A replica that holds the beginning of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Match {
    pub(super) replica: usize,
    pub(super) end_bytes: u64,
}

/// The longest known beginning per replica, longest first.
#[derive(Debug, Default)]
pub(super) struct Matches {
    pub(super) found: Vec<Match>,
    /// Others may hold a part too: they were too many.
    pub(super) truncated: bool,
    /// How many of the levels anybody holds.
    known_levels: usize,
}

/// The beliefs.
pub(super) struct Mirror {
    nodes: Vec<Node>,
    residences: Vec<Residence>,
    node_index: Index,
    residence_index: Index,
    free_node: u32,
    free_residence: u32,
    replicas: Vec<Held>,
    residences_max: usize,
    budget_bytes: usize,
    /// Where the search for a replica with more than its share goes on.
    hand: usize,
    /// When each replica was last seen in a look-up: the look-up's number.
    seen: Vec<u32>,
    lookup: u32,
}

impl Mirror {
    /// Never more memory than `budget_bytes`, which is reserved and not touched before it is needed.
    pub(super) fn new(budget_bytes: usize) -> Self {
        let each = size_of::<Node>() + size_of::<Residence>();
        let mut places = 16;
        let room = |places: usize| (budget_bytes.saturating_sub(2 * 8 * places) / each).min(places / 8 * 6);
        while room(places * 2) > room(places) {
            places *= 2;
        }
        let residences_max = room(places).max(1);
        Self {
            nodes: Vec::with_capacity(residences_max),
            residences: Vec::with_capacity(residences_max),
            node_index: Index::new(places),
            residence_index: Index::new(places),
            free_node: NONE,
            free_residence: NONE,
            replicas: Vec::new(),
            residences_max,
            budget_bytes,
            hand: 0,
            seen: Vec::new(),
            lookup: 0,
        }
    }

    /// Forgets everything and gives the memory back.
    pub(super) fn reset(&mut self) {
        let replicas = core::mem::take(&mut self.replicas);
        *self = Self::new(self.budget_bytes);
        for (replica, held) in replicas.iter().enumerate() {
            self.add(replica, held.capacity_bytes);
        }
    }

    /// Bytes in use now: what has been written to, at most the budget.
    pub(super) fn used_bytes(&self) -> usize {
        self.nodes.len() * (size_of::<Node>() + 16) + self.residences.len() * (size_of::<Residence>() + 16)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.residence_index.len() == 0
    }

    /// A replica that holds nothing yet.
    pub(super) fn add(&mut self, replica: usize, capacity_bytes: u64) {
        if self.replicas.len() <= replica {
            self.replicas.resize(replica + 1, NOTHING_HELD);
            self.seen.resize(replica + 1, 0);
        }
        self.replicas[replica].capacity_bytes = capacity_bytes;
    }

    /// The replica holds nothing any more.
    pub(super) fn clear(&mut self, replica: usize) {
        while self.replicas[replica].oldest != NONE {
            self.evict(self.replicas[replica].oldest);
        }
    }

    /// The replica holds this much and no more.
    pub(super) fn set_capacity(&mut self, replica: usize, capacity_bytes: u64) {
        self.replicas[replica].capacity_bytes = capacity_bytes;
        self.trim(replica);
    }

    pub(super) fn held_bytes(&self, replica: usize) -> u64 {
        self.replicas[replica].bytes
    }

    fn node(&self, hash: u64) -> Option<u32> {
        self.node_index.get(hash, |number| self.nodes[number as usize].hash == hash)
    }

    fn residence(&self, node: u32, replica: usize) -> Option<u32> {
        let hash = mix(self.nodes[node as usize].hash, replica as u64);
        self.residence_index.get(hash, |number| {
            let residence = &self.residences[number as usize];
            residence.node == node && residence.replica as usize == replica
        })
    }

    /// Who holds how much of the prompt.
    pub(super) fn look_up(&mut self, chain: &PrefixChain, matches: &mut Matches) {
        matches.found.clear();
        matches.truncated = false;
        self.lookup = self.lookup.wrapping_add(1);
        let deepest_level = chain.levels.partition_point(|level| self.node(level.hash).is_some());
        matches.known_levels = deepest_level;
        let known_to = deepest_level.checked_sub(1).map_or(0, |last| chain.levels[last].end_bytes);
        for place in chain.recent.iter().rev().filter(|place| place.end_bytes > known_to) {
            self.collect(*place, matches);
        }
        for place in chain.levels[..deepest_level].iter().rev() {
            if !self.collect(*place, matches) {
                break;
            }
        }
    }

    /// Adds the holders of a place that were not found deeper; false if there is no room for more.
    fn collect(&mut self, place: Boundary, matches: &mut Matches) -> bool {
        let Some(node) = self.node(place.hash) else { return true };
        let node = self.nodes[node as usize];
        // Whoever holds a deeper place holds this one.
        if node.holders as usize <= matches.found.len() {
            return true;
        }
        let mut at = node.first;
        while at != NONE {
            let residence = self.residences[at as usize];
            let replica = residence.replica as usize;
            if self.seen[replica] != self.lookup {
                if matches.found.len() == MATCHES_MAX {
                    matches.truncated = true;
                    return false;
                }
                self.seen[replica] = self.lookup;
                matches.found.push(Match { replica, end_bytes: place.end_bytes });
            }
            at = residence.node_after;
        }
        true
    }

    /// How much of the prompt this replica holds, after [`Mirror::look_up`].
    pub(super) fn matched(&self, chain: &PrefixChain, matches: &Matches, replica: usize) -> u64 {
        if self.seen[replica] == self.lookup || !matches.truncated {
            return matches.found.iter().find(|found| found.replica == replica).map_or(0, |found| found.end_bytes);
        }
        let known = &chain.levels[..matches.known_levels];
        let holds =
            |level: &Boundary| self.node(level.hash).is_some_and(|node| self.residence(node, replica).is_some());
        known.partition_point(holds).checked_sub(1).map_or(0, |last| known[last].end_bytes)
    }

    /// The replica gets this prompt: it holds it from now on, and it is what it used last.
    pub(super) fn touch(&mut self, chain: &PrefixChain, replica: usize) {
        let level_end = chain.levels.last().map_or(0, |last| last.end_bytes);
        if let Some(end) = chain.recent.last().filter(|end| end.end_bytes > level_end) {
            self.touch_place(*end, level_end, replica);
        }
        for number in (0..chain.levels.len()).rev() {
            let before = number.checked_sub(1).map_or(0, |before| chain.levels[before].end_bytes);
            self.touch_place(chain.levels[number], before, replica);
        }
        self.trim(replica);
    }

    fn touch_place(&mut self, place: Boundary, before_bytes: u64, replica: usize) {
        if let Some(node) = self.node(place.hash)
            && let Some(residence) = self.residence(node, replica)
        {
            self.unlink_use(residence);
            self.link_newest(residence);
            return;
        }
        while self.residence_index.len() >= self.residences_max {
            self.evict_somewhere(replica);
        }
        let own_bytes = u32::try_from(place.end_bytes - before_bytes).unwrap_or(u32::MAX);
        let node = self.node(place.hash).unwrap_or_else(|| self.add_node(place.hash, own_bytes));
        self.add_residence(node, replica);
    }

    fn add_node(&mut self, hash: u64, own_bytes: u32) -> u32 {
        let node = Node { hash, own_bytes, first: NONE, holders: 0 };
        let number = if self.free_node == NONE {
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        } else {
            let number = self.free_node;
            self.free_node = self.nodes[number as usize].first;
            self.nodes[number as usize] = node;
            number
        };
        self.node_index.insert(hash, number);
        number
    }

    fn add_residence(&mut self, node: u32, replica: usize) {
        let first = self.nodes[node as usize].first;
        let residence =
            Residence { node, replica: replica as u32, newer: NONE, older: NONE, node_before: NONE, node_after: first };
        let number = if self.free_residence == NONE {
            self.residences.push(residence);
            (self.residences.len() - 1) as u32
        } else {
            let number = self.free_residence;
            self.free_residence = self.residences[number as usize].older;
            self.residences[number as usize] = residence;
            number
        };
        if first != NONE {
            self.residences[first as usize].node_before = number;
        }
        let place = &mut self.nodes[node as usize];
        place.first = number;
        place.holders += 1;
        let held = &mut self.replicas[replica];
        held.residences += 1;
        held.bytes += u64::from(place.own_bytes);
        self.residence_index.insert(mix(place.hash, replica as u64), number);
        self.link_newest(number);
    }

    fn link_newest(&mut self, number: u32) {
        let replica = self.residences[number as usize].replica as usize;
        let before = self.replicas[replica].newest;
        self.residences[number as usize].newer = NONE;
        self.residences[number as usize].older = before;
        self.replicas[replica].newest = number;
        if before == NONE {
            self.replicas[replica].oldest = number;
        } else {
            self.residences[before as usize].newer = number;
        }
    }

    fn unlink_use(&mut self, number: u32) {
        let Residence { newer, older, replica, .. } = self.residences[number as usize];
        let held = &mut self.replicas[replica as usize];
        if newer == NONE {
            held.newest = older;
        } else {
            self.residences[newer as usize].older = older;
        }
        if older == NONE {
            held.oldest = newer;
        } else {
            self.residences[older as usize].newer = newer;
        }
    }

    fn trim(&mut self, replica: usize) {
        while self.replicas[replica].bytes > self.replicas[replica].capacity_bytes {
            self.evict(self.replicas[replica].oldest);
        }
    }

    /// Makes room for one: at the replica that wants it if it has its share, else at one that has more than its share.
    fn evict_somewhere(&mut self, wanting: usize) {
        let share = (self.residences_max / self.replicas.len()).max(1) as u32;
        let mut victim = wanting;
        if self.replicas[wanting].residences < share {
            while self.replicas[self.hand].residences < share {
                self.hand = (self.hand + 1) % self.replicas.len();
            }
            victim = self.hand;
        }
        self.evict(self.replicas[victim].oldest);
    }

    fn evict(&mut self, number: u32) {
        self.unlink_use(number);
        let Residence { node, replica, node_before, node_after, .. } = self.residences[number as usize];
        let place = &mut self.nodes[node as usize];
        place.holders -= 1;
        if node_before == NONE {
            place.first = node_after;
        } else {
            self.residences[node_before as usize].node_after = node_after;
        }
        if node_after != NONE {
            self.residences[node_after as usize].node_before = node_before;
        }
        let Node { hash, own_bytes, holders, .. } = *place;
        self.residence_index.remove(mix(hash, u64::from(replica)), number);
        let held = &mut self.replicas[replica as usize];
        held.residences -= 1;
        held.bytes -= u64::from(own_bytes);
        self.residences[number as usize].older = self.free_residence;
        self.free_residence = number;
        if holders == 0 {
            self.node_index.remove(hash, node);
            self.nodes[node as usize].first = self.free_node;
            self.free_node = node;
        }
    }

    /// A replica says of one place whether it holds it.
    pub(super) fn correct(&mut self, replica: usize, place: Boundary, held: bool) {
        let known = self.node(place.hash).and_then(|node| self.residence(node, replica));
        match (known, held) {
            (Some(residence), false) => self.evict(residence),
            (None, true) => {
                // How much of it lies behind the place before is not said: what a node has already, or one step.
                let before_bytes = place.end_bytes - place.end_bytes.min(CORRECTED_BYTES);
                self.touch_place(place, before_bytes, replica);
                self.trim(replica);
            }
            _ => {}
        }
    }

    /// What is wrong with the lists, if anything.
    pub(super) fn fault(&self, replica: usize) -> Option<&'static str> {
        let held = &self.replicas[replica];
        let (mut at, mut newer, mut count, mut bytes) = (held.newest, NONE, 0, 0_u64);
        while at != NONE {
            let residence = &self.residences[at as usize];
            if residence.newer != newer || residence.replica as usize != replica || count > held.residences {
                return Some("a replica's list is not a list of its own");
            }
            if self.residence(residence.node, replica) != Some(at) {
                return Some("a residence is not found");
            }
            bytes += u64::from(self.nodes[residence.node as usize].own_bytes);
            (newer, at, count) = (at, residence.older, count + 1);
        }
        if count != held.residences || bytes != held.bytes {
            return Some("what a replica holds is not the sum of its residences");
        }
        let over = held.bytes > held.capacity_bytes || self.used_bytes() > self.budget_bytes.max(1024);
        over.then_some("more is held than there is room for")
    }

    /// Residences of all replicas, counted where they are kept.
    pub(super) fn residences(&self) -> usize {
        self.residence_index.len()
    }

    /// Residences of one replica.
    pub(super) fn residences_of(&self, replica: usize) -> usize {
        self.replicas[replica].residences as usize
    }
}
