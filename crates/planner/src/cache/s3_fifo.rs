//! S3-FIFO (Yang et al., SOSP 2023), as published: a small queue that new blocks go through, a main queue for those that were
//! used again meanwhile, and the names of as many that left the small one. It knows no chains; a request's blocks are used
//! from the last to the first, so that its last ones leave first.

use super::{
    Lookup, Policy,
    trace::{BlockId, Trace},
};
use std::collections::VecDeque;

/// The small queue has a tenth of the room.
const SMALL_SHARE: usize = 10;
const FREQUENCY_MAX: u8 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    Small,
    Main,
    Ghost,
}

pub(super) struct S3Fifo {
    small_max: usize,
    main_max: usize,
    small: VecDeque<BlockId>,
    main: VecDeque<BlockId>,
    ghost: VecDeque<BlockId>,
    places: Vec<Place>,
    frequencies: Vec<u8>,
}

impl S3Fifo {
    pub(super) fn new(trace: &Trace, blocks_max: usize) -> Self {
        let small_max = (blocks_max / SMALL_SHARE).max(1);
        Self {
            small_max,
            main_max: blocks_max.saturating_sub(small_max),
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghost: VecDeque::new(),
            places: vec![Place::Nowhere; trace.blocks()],
            frequencies: vec![0; trace.blocks()],
        }
    }

    fn is_there(&self, block: BlockId) -> bool {
        matches!(self.places[block as usize], Place::Small | Place::Main)
    }

    fn insert(&mut self, block: BlockId) {
        while self.small.len() + self.main.len() >= self.small_max + self.main_max {
            if self.small.len() >= self.small_max || self.main.is_empty() {
                self.evict_small();
            } else {
                self.evict_main();
            }
        }
        self.frequencies[block as usize] = 0;
        let place = if self.places[block as usize] == Place::Ghost { Place::Main } else { Place::Small };
        self.places[block as usize] = place;
        if place == Place::Main { &mut self.main } else { &mut self.small }.push_back(block);
    }

    fn evict_small(&mut self) {
        while let Some(block) = self.small.pop_front() {
            if self.frequencies[block as usize] > 1 {
                self.frequencies[block as usize] = 0;
                self.places[block as usize] = Place::Main;
                self.main.push_back(block);
                if self.main.len() > self.main_max {
                    return self.evict_main();
                }
                continue;
            }
            self.places[block as usize] = Place::Ghost;
            self.ghost.push_back(block);
            while self.ghost.len() > self.main_max
                && let Some(forgotten) = self.ghost.pop_front()
            {
                // Some are back, and their names only stand here still.
                if self.places[forgotten as usize] == Place::Ghost {
                    self.places[forgotten as usize] = Place::Nowhere;
                }
            }
            return;
        }
    }

    fn evict_main(&mut self) {
        while let Some(block) = self.main.pop_front() {
            let frequency = &mut self.frequencies[block as usize];
            if *frequency == 0 {
                self.places[block as usize] = Place::Nowhere;
                return;
            }
            *frequency -= 1;
            self.main.push_back(block);
        }
    }
}

impl Policy for S3Fifo {
    fn serve(&mut self, request: &Lookup<'_>) -> usize {
        let found = request.blocks.iter().take_while(|block| self.is_there(**block)).count();
        for block in request.blocks.iter().rev().copied() {
            if self.is_there(block) {
                let frequency = &mut self.frequencies[block as usize];
                *frequency = (*frequency + 1).min(FREQUENCY_MAX);
            } else {
                self.insert(block);
            }
        }
        found
    }
}
