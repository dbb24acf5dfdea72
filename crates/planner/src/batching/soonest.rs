//! Which of a fixed number of engines comes first: a tournament in which a change plays only the matches above it.
//!
//! Unlike a heap of events, an engine whose time changes does not leave an old entry behind. A change takes as many
//! comparisons as the number of engines has binary digits (Knuth, The Art of Computer Programming 3, section 5.4.1).

/// Nobody comes.
pub const NEVER: u64 = u64::MAX;

/// The least key of a fixed number of them; of equal ones that of the lowest number.
#[derive(Debug, Clone)]
pub struct Soonest {
    keys: Vec<u64>,
    /// The winner of each match; the first one is the final, those of the round below a match are at twice its place.
    winners: Vec<u32>,
}

impl Soonest {
    /// So many, all with the same key.
    pub fn new(count: usize, key: u64) -> Self {
        let places = count.max(1).next_power_of_two();
        let mut keys = vec![NEVER; places];
        keys[..count].fill(key);
        let mut soonest = Self { keys, winners: vec![0; places] };
        for place in (1..places).rev() {
            soonest.play(place);
        }
        soonest
    }

    fn contestant(&self, place: usize) -> u32 {
        let places = self.keys.len();
        if place >= places { (place - places) as u32 } else { self.winners[place] }
    }

    fn play(&mut self, place: usize) {
        let (left, right) = (self.contestant(2 * place), self.contestant(2 * place + 1));
        let right_wins = self.keys[right as usize] < self.keys[left as usize];
        self.winners[place] = if right_wins { right } else { left };
    }

    /// The key of one of them.
    pub fn key(&self, number: usize) -> u64 {
        self.keys[number]
    }

    /// Changes a key.
    pub fn set(&mut self, number: usize, key: u64) {
        self.keys[number] = key;
        let mut place = (number + self.keys.len()) / 2;
        while place > 0 {
            self.play(place);
            place /= 2;
        }
    }

    /// The least key and whose it is.
    pub fn first(&self) -> (u64, usize) {
        let number = if self.keys.len() == 1 { 0 } else { self.winners[1] as usize };
        (self.keys[number], number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_any_number_is_found_after_any_changes() {
        for count in [1usize, 2, 3, 4, 7, 64, 100] {
            let mut random = fastrand::Rng::with_seed(count as u64);
            let mut soonest = Soonest::new(count, NEVER);
            for _ in 0..2000 {
                soonest.set(random.usize(..count), random.u64(..50));
                let expected = (0..count).map(|number| (soonest.key(number), number)).min();
                assert_eq!(Some(soonest.first()), expected, "{count}");
            }
        }
        assert_eq!(Soonest::new(5, 3).first(), (3, 0));
    }
}
