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

/// Bytes held by some charges together, one more or less at a time. The pages of one artifact count once, at their
/// largest.
#[derive(Debug, Default, Clone)]
pub struct HeldSum {
    /// Per device. Wider than sizes are, so that what was added can be taken away again whatever they are.
    private: Vec<u128>,
    /// For each artifact how many hold how many bytes of its pages.
    shared: BTreeMap<Digest, BTreeMap<Bytes, u32>>,
    /// The largest of each artifact.
    shared_bytes: u128,
}

impl HeldSum {
    /// Somebody more holds bytes.
    pub fn add(&mut self, charge: &Charge) {
        let devices = charge.private.0.len();
        if self.private.len() < devices {
            self.private.resize(devices, 0);
        }
        for (sum, bytes) in self.private.iter_mut().zip(&charge.private.0) {
            *sum += u128::from(*bytes);
        }
        if charge.shared_host_bytes == 0 {
            return;
        }
        let sizes = self.shared.entry(charge.artifact).or_default();
        let before = largest(sizes);
        *sizes.entry(charge.shared_host_bytes).or_default() += 1;
        self.shared_bytes += u128::from(largest(sizes) - before);
    }

    /// Somebody who was added holds nothing any more.
    pub fn remove(&mut self, charge: &Charge) {
        for (sum, bytes) in self.private.iter_mut().zip(&charge.private.0) {
            *sum -= u128::from(*bytes);
        }
        if charge.shared_host_bytes == 0 {
            return;
        }
        let Some(sizes) = self.shared.get_mut(&charge.artifact) else { return };
        let before = largest(sizes);
        if let Some(holders) = sizes.get_mut(&charge.shared_host_bytes) {
            *holders -= 1;
            if *holders == 0 {
                sizes.remove(&charge.shared_host_bytes);
            }
        }
        self.shared_bytes -= u128::from(before - largest(sizes));
        if sizes.is_empty() {
            self.shared.remove(&charge.artifact);
        }
    }

    /// The sum, per device.
    pub fn total(&self) -> MemoryVector {
        let bytes = |bytes: u128| Bytes::try_from(bytes).unwrap_or(Bytes::MAX);
        let mut total = MemoryVector(self.private.iter().map(|sum| bytes(*sum)).collect());
        total.add_at(HOST, bytes(self.shared_bytes));
        total
    }

    /// Whether every device has room for the sum within `limit`.
    pub fn fits_in(&self, limit: &MemoryVector) -> bool {
        let host = self.private.first().copied().unwrap_or(0) + self.shared_bytes;
        let accelerators = self.private.iter().enumerate().skip(1);
        host <= u128::from(limit.get(HOST))
            && accelerators.into_iter().all(|(device, sum)| *sum <= u128::from(limit.get(device)))
    }
}

fn largest(sizes: &BTreeMap<Bytes, u32>) -> Bytes {
    sizes.last_key_value().map_or(0, |(bytes, _)| *bytes)
}

impl<'a> FromIterator<&'a Charge> for HeldSum {
    fn from_iter<I: IntoIterator<Item = &'a Charge>>(charges: I) -> Self {
        let mut sum = Self::default();
        charges.into_iter().for_each(|charge| sum.add(charge));
        sum
    }
}

/// Bytes held by all these charges together.
pub fn held_bytes<'a>(charges: impl Iterator<Item = &'a Charge>) -> MemoryVector {
    charges.collect::<HeldSum>().total()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{vec, vec::Vec};

    #[test]
    fn pages_of_one_artifact_count_once() {
        let footprint = Footprint { private_host_bytes: 10, shared_host_bytes: 100, accelerator_bytes: vec![7, 8] };
        let one = Charge::new(&footprint, Digest([1; 32]), &[2, 1]);
        assert_eq!(one.private.0, vec![10, 8, 7]);
        let other = Charge::new(&footprint, Digest([2; 32]), &[1, 2]);
        let sum = held_bytes([&one, &one, &other].into_iter());
        assert_eq!(sum.0, vec![30 + 200, 8 + 8 + 7, 7 + 7 + 8]);
    }
    proptest! {
        #[test]
        fn what_was_added_and_removed_leaves_the_sum_of_the_rest(
            charges in prop::collection::vec((any::<u64>(), 0_u8..3, prop_oneof![0_u64..4, any::<u64>()], 0_usize..3), 0..8),
            removed in prop::collection::vec(any::<bool>(), 8),
        ) {
            let charges: Vec<Charge> = charges
                .into_iter()
                .map(|(private, artifact, shared, device)| {
                    let footprint = Footprint {
                        private_host_bytes: private / 3, shared_host_bytes: shared, accelerator_bytes: vec![private],
                    };
                    Charge::new(&footprint, Digest([artifact; 32]), &[device])
                })
                .collect();
            let mut sum: HeldSum = charges.iter().collect();
            let mut left = Vec::new();
            for (charge, removed) in charges.iter().zip(removed) {
                if removed { sum.remove(charge) } else { left.push(charge) }
            }
            let mut expected = MemoryVector::default();
            let mut pages: BTreeMap<Digest, Bytes> = BTreeMap::new();
            for charge in &left {
                expected.add(&charge.private);
                let largest = pages.entry(charge.artifact).or_default();
                *largest = (*largest).max(charge.shared_host_bytes);
            }
            pages.into_values().for_each(|bytes| expected.add_at(HOST, bytes));
            let (total, limit) = (sum.total(), expected.clone());
            prop_assert!((0..4).all(|device| total.get(device) == expected.get(device)));
            prop_assert!(sum.fits_in(&limit) || limit.0.contains(&u64::MAX));
        }
    }
}
