//! Who holds which bytes, with mapped artifact pages counted once however many processes map them.

use crate::{
    ids::Digest,
    memory::{Bytes, Footprint, HOST, MemoryVector},
};
use alloc::{collections::BTreeMap, vec::Vec};
use serde::{Deserialize, Serialize};

/// The bytes one model is charged with, placed on devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Charge {
    /// Bytes that go when it goes.
    pub private: MemoryVector,
    /// The file whose pages it maps.
    pub artifact: Digest,
    /// Host bytes of that file's pages.
    pub shared_host_bytes: Bytes,
}

impl Charge {
    /// Places a footprint on the host and on these accelerators (device indices, one for each shard).
    pub fn new(footprint: &Footprint, artifact: Digest, accelerators: &[usize]) -> Self {
        let mut private = MemoryVector::host(footprint.private_host_bytes);
        for (device, bytes) in accelerators.iter().zip(&footprint.accelerator_bytes) {
            private.add_at(*device, *bytes);
        }
        Self { private, artifact, shared_host_bytes: footprint.shared_host_bytes }
    }
}

/// Bytes held by all these charges together. The pages of one artifact count once, at their largest.
pub fn held_bytes<'a>(charges: impl Iterator<Item = &'a Charge>) -> MemoryVector {
    let mut sum = MemoryVector::default();
    let mut shared: BTreeMap<Digest, Bytes> = BTreeMap::new();
    for charge in charges {
        sum.add(&charge.private);
        let pages = shared.entry(charge.artifact).or_default();
        *pages = (*pages).max(charge.shared_host_bytes);
    }
    let pages: Vec<Bytes> = shared.into_values().collect();
    for bytes in pages {
        sum.add_at(HOST, bytes);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    #[test]
    fn pages_of_one_artifact_count_once() {
        let footprint = Footprint { private_host_bytes: 10, shared_host_bytes: 100, accelerator_bytes: vec![7, 8] };
        let one = Charge::new(&footprint, Digest([1; 32]), &[2, 1]);
        assert_eq!(one.private.0, vec![10, 8, 7]);
        let other = Charge::new(&footprint, Digest([2; 32]), &[1, 2]);
        let sum = held_bytes([&one, &one, &other].into_iter());
        assert_eq!(sum.0, vec![30 + 200, 8 + 8 + 7, 7 + 7 + 8]);
    }
}
