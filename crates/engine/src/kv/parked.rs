//! What a request leaves behind that is to go on later, in this engine process or another one: its record, and the state
//! of its sequence as it is, the last incomplete block included. Nothing of it is computed again, since that would come out
//! a little differently.
//!
//! Length of the record 8, length of the state 8, the record as JSON, the state. The server keeps the bytes and reads
//! none of them.

use super::memory::Mapping;
use crate::protocol::{FailureKind, FromEngine};
use rustix::mm::ProtFlags;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

/// Two lengths.
const HEAD_BYTES: usize = 16;

/// Memory of the server for one request: one engine writes it, another one reads it.
#[derive(Debug)]
pub struct ParkedMemory {
    mapping: Mapping,
    writable: bool,
}

impl ParkedMemory {
    /// Maps what came to be written.
    pub fn for_writing(descriptors: Vec<OwnedFd>, bytes: u64) -> Result<Self, String> {
        Self::map(descriptors, bytes, ProtFlags::READ | ProtFlags::WRITE)
            .map(|mapping| Self { mapping, writable: true })
    }

    /// Maps what came to be read.
    pub fn for_reading(descriptors: Vec<OwnedFd>, bytes: u64) -> Result<Self, String> {
        Self::map(descriptors, bytes, ProtFlags::READ).map(|mapping| Self { mapping, writable: false })
    }

    fn map(descriptors: Vec<OwnedFd>, bytes: u64, protection: ProtFlags) -> Result<Mapping, String> {
        let [file]: [OwnedFd; 1] =
            descriptors.try_into().map_err(|all: Vec<_>| format!("{} descriptors came instead of 1", all.len()))?;
        Mapping::of_file(file, bytes, protection)
    }
}

/// The two parts of what is left behind.
pub(crate) struct Parts<T> {
    pub(crate) record: T,
    pub(crate) state_bytes: usize,
}

impl Parts<Vec<u8>> {
    /// Writes a record down.
    pub(crate) fn new(record: &impl Serialize, state_bytes: usize) -> Result<Self, String> {
        let record = serde_json::to_vec(record).map_err(|error| error.to_string())?;
        Ok(Self { record, state_bytes })
    }

    /// The memory that both take.
    pub(crate) fn bytes(&self) -> u64 {
        (HEAD_BYTES + self.record.len() + self.state_bytes) as u64
    }

    /// Writes the record, and the state by what writes it and says how long it is.
    pub(crate) fn write(
        &self,
        memory: &mut ParkedMemory,
        state: impl FnOnce(&mut [u8]) -> Result<usize, String>,
    ) -> Result<(), String> {
        let bytes = if memory.writable { memory.mapping.get_mut() } else { &mut [] };
        let (head, rest) = bytes.split_at_mut_checked(HEAD_BYTES).ok_or("the memory is too small")?;
        let (record, rest) = rest.split_at_mut_checked(self.record.len()).ok_or("the memory is too small")?;
        let rest = rest.get_mut(..self.state_bytes).ok_or("the memory is too small")?;
        record.copy_from_slice(&self.record);
        let written = state(rest)?;
        head[..8].copy_from_slice(&(self.record.len() as u64).to_le_bytes());
        head[8..].copy_from_slice(&(written as u64).to_le_bytes());
        Ok(())
    }
}

impl ParkedMemory {
    /// Reads the record, and gives the state.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<(T, &[u8]), String> {
        let (head, rest) = self.mapping.get().split_at_checked(HEAD_BYTES).ok_or("it is too short")?;
        let length = |at: usize| {
            let bytes = head[at..at + 8].try_into().ok().map(u64::from_le_bytes);
            bytes.and_then(|length| usize::try_from(length).ok()).unwrap_or(usize::MAX)
        };
        let (record, rest) = rest.split_at_checked(length(0)).ok_or("its record is cut off")?;
        let state = rest.get(..length(8)).ok_or("its state is cut off")?;
        let record = serde_json::from_slice(record).map_err(|error| format!("its record: {error}"))?;
        Ok((record, state))
    }
}

/// The last word to a request that cannot go on.
pub(crate) fn not_resumed(request: u64, reason: &str) -> FromEngine {
    FromEngine::Failed {
        request,
        kind: FailureKind::Internal,
        message: format!("the request gave way to another one and cannot go on: {reason}"),
        param: None,
    }
}

/// How long ago things happened to a request when it was stopped: in another process they count from then on, so that
/// what it waits in between is nobody's computing time.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Ages {
    stopped_after_seconds: [Option<f64>; 4],
}

impl Ages {
    pub(crate) fn of(moments: [Option<Instant>; 4]) -> Self {
        let now = Instant::now();
        Self { stopped_after_seconds: moments.map(|at| at.map(|at| now.saturating_duration_since(at).as_secs_f64())) }
    }

    pub(crate) fn moments(self) -> [Option<Instant>; 4] {
        let now = Instant::now();
        let before = |age: f64| {
            let age = Duration::try_from_secs_f64(age).unwrap_or_default();
            // A machine that was up for less than that has no such moment.
            now.checked_sub(age).unwrap_or(now)
        };
        self.stopped_after_seconds.map(|age| age.map(before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::fs::File;

    fn memory(bytes: u64) -> (ParkedMemory, ParkedMemory) {
        let file = File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        let given = || vec![file.try_clone().unwrap().into()];
        (ParkedMemory::for_writing(given(), bytes).unwrap(), ParkedMemory::for_reading(given(), bytes).unwrap())
    }

    #[test]
    fn what_is_left_behind_is_found_again() {
        let parts = Parts::new(&vec![1, 2, 3], 5).unwrap();
        let (mut write, read) = memory(parts.bytes());
        let state = |room: &mut [u8]| {
            room[..4].copy_from_slice(b"abcd");
            Ok(4)
        };
        parts.write(&mut write, state).unwrap();
        assert_eq!(read.read::<Vec<u32>>().unwrap(), (vec![1, 2, 3], &b"abcd"[..]));
        assert!(read.read::<String>().is_err(), "another record");
        let (mut short, nothing) = memory(parts.bytes() - 1);
        assert!(parts.write(&mut short, state).is_err());
        assert!(nothing.read::<Vec<u32>>().is_err());
        let (_, mut read_only) = memory(parts.bytes());
        assert!(parts.write(&mut read_only, state).is_err());
    }

    #[test]
    fn lengths_that_cannot_be_are_refused() {
        let (mut write, read) = memory(64);
        for head in [[0xff; 16], [40; 16]] {
            write.mapping.get_mut()[..16].copy_from_slice(&head);
            assert!(read.read::<Vec<u32>>().is_err());
        }
        assert!(ParkedMemory::for_reading(Vec::new(), 64).unwrap_err().contains("0 descriptors"));
    }

    #[test]
    fn ages_leave_the_time_between_out() {
        let long_ago = Instant::now().checked_sub(Duration::from_secs(5)).unwrap_or_else(Instant::now);
        let ages = Ages::of([Some(long_ago), None, Some(Instant::now()), None]);
        let [first, second, third, _] = ages.moments();
        assert!(second.is_none());
        let between = third.unwrap() - first.unwrap();
        assert!(between >= Duration::from_secs(4) || long_ago.elapsed() < Duration::from_secs(5));
    }
}
