//! Bytes over devices. Device 0 is host memory, the others are accelerators in the order of the configuration.

use alloc::{vec, vec::Vec};
use serde::{Deserialize, Serialize};

/// A number of bytes.
pub type Bytes = u64;

/// The most accelerators that one machine has.
pub const ACCELERATORS_MAX: usize = 64;

/// Index of host memory in every [`MemoryVector`].
pub const HOST: usize = 0;

/// Bytes per device. Devices beyond the vector's length hold zero bytes.
#[derive(Debug, Default, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MemoryVector(pub Vec<Bytes>);

impl MemoryVector {
    /// Bytes in host memory only.
    pub fn host(bytes: Bytes) -> Self {
        Self(vec![bytes])
    }

    /// The bytes on one device.
    pub fn get(&self, device: usize) -> Bytes {
        self.0.get(device).copied().unwrap_or(0)
    }

    /// Adds bytes to one device.
    pub fn add_at(&mut self, device: usize, bytes: Bytes) {
        if self.0.len() <= device {
            self.0.resize(device + 1, 0);
        }
        self.0[device] = self.0[device].saturating_add(bytes);
    }

    /// Adds another vector, device by device.
    pub fn add(&mut self, other: &Self) {
        for (device, bytes) in other.0.iter().enumerate() {
            self.add_at(device, *bytes);
        }
    }

    /// Takes another vector away, device by device, never below zero.
    pub fn saturating_sub(&self, other: &Self) -> Self {
        let devices = self.0.len().max(other.0.len());
        Self((0..devices).map(|device| self.get(device).saturating_sub(other.get(device))).collect())
    }

    /// Whether every device has room for `self` within `limit`.
    pub fn fits_in(&self, limit: &Self) -> bool {
        self.0.iter().enumerate().all(|(device, bytes)| *bytes <= limit.get(device))
    }

    /// Whether no device holds a byte.
    pub fn is_zero(&self) -> bool {
        self.0.iter().all(|bytes| *bytes == 0)
    }

    /// The greater of both on every device.
    pub fn max(&self, other: &Self) -> Self {
        let devices = self.0.len().max(other.0.len());
        Self((0..devices).map(|device| self.get(device).max(other.get(device))).collect())
    }

    /// All bytes over all devices.
    pub fn total(&self) -> Bytes {
        self.0.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }
}

/// What one model occupies, before it is known on which accelerators it will lie.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footprint {
    /// Host bytes of this process alone: anonymous and shared memory.
    pub private_host_bytes: Bytes,
    /// Host bytes of mapped artifact files, counted once however many processes map them.
    pub shared_host_bytes: Bytes,
    /// Bytes on accelerators, one number for each accelerator the model needs (none, one, or several shards).
    pub accelerator_bytes: Vec<Bytes>,
}

impl Footprint {
    /// A model in host memory that shares nothing.
    pub fn host(bytes: Bytes) -> Self {
        Self { private_host_bytes: bytes, ..Self::default() }
    }

    /// All bytes over all devices.
    pub fn total_bytes(&self) -> Bytes {
        let accelerators = self.accelerator_bytes.iter().fold(0, |sum: Bytes, bytes| sum.saturating_add(*bytes));
        self.private_host_bytes.saturating_add(self.shared_host_bytes).saturating_add(accelerators)
    }

    /// The greater of both in every place.
    pub fn larger(&self, other: &Self) -> Self {
        let accelerators = MemoryVector(self.accelerator_bytes.clone());
        Self {
            private_host_bytes: self.private_host_bytes.max(other.private_host_bytes),
            shared_host_bytes: self.shared_host_bytes.max(other.shared_host_bytes),
            accelerator_bytes: accelerators.max(&MemoryVector(other.accelerator_bytes.clone())).0,
        }
    }
}
