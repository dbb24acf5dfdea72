//! Memory that worker and engine process share, and large buffers.
#![expect(unsafe_code, reason = "mapping memory has no safe interface")]

use crate::protocol::KvOpen;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::{
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    time::{Duration, Instant},
};

/// Buffers above this size are given back when they have not been used for a while.
const KEPT_BYTES: usize = 16 << 20;
/// That long: whoever brings one prompt back often brings back another right after it, and memory that is new costs more time
/// than copying into it.
const KEPT_FOR: Duration = Duration::from_secs(10);
/// No system has smaller ones.
const PAGE_BYTES: usize = 4096;

/// A part of the address space that is this value's own.
#[derive(Debug)]
pub(super) struct Mapping {
    pointer: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to whoever holds the value, on whatever thread.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps the first `bytes` of a file.
    pub(super) fn of_file(file: impl AsFd, bytes: u64, protection: ProtFlags) -> Result<Self, String> {
        let length = rustix::fs::fstat(&file).map_err(|error| error.to_string())?.st_size;
        if u64::try_from(length).unwrap_or(0) < bytes {
            return Err(format!("it has {length} bytes, {bytes} are needed"));
        }
        let bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes > 0).ok_or("it has an impossible size")?;
        // SAFETY: a new mapping at a place that the kernel chooses disturbs nothing.
        let mapped = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0) };
        Self::new(mapped, bytes)
    }

    fn anonymous(bytes: usize) -> Result<Self, String> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as above.
        let mapped = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        let mapping = Self::new(mapped, bytes)?;
        // SAFETY: the range is the mapping just made; this advice changes no contents.
        let advised = unsafe { rustix::mm::madvise(mapping.pointer.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        // Without large pages it is slower, no more.
        let _ = advised;
        Ok(mapping)
    }

    fn new(mapped: rustix::io::Result<*mut std::ffi::c_void>, bytes: usize) -> Result<Self, String> {
        let pointer = mapped.map_err(|error| format!("it cannot be mapped: {error}"))?;
        let pointer = NonNull::new(pointer.cast()).ok_or("it is mapped nowhere")?;
        Ok(Self { pointer, bytes })
    }

    pub(super) fn get(&self) -> &[u8] {
        // SAFETY: the range is mapped and readable as long as `self` lives. What another process writes into it
        // meanwhile it writes, by the protocol, outside of the parts that are read here: slots are pinned from the
        // grant to `Restored`, the worker only reads the staging area, and nobody has the memory of a parked request
        // at the same time as another.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.bytes) }
    }

    /// Only for mappings that were made with the right to write.
    pub(super) fn get_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; writable by the constructors of all callers, and `&mut self` is the only way to write.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and every borrow of it has ended. It cannot fail for such a range.
        let _ = unsafe { rustix::mm::munmap(self.pointer.as_ptr().cast(), self.bytes) };
    }
}

/// The arena, for reading, and the staging area, for writing.
#[derive(Debug)]
pub struct KvMemory {
    arena: Mapping,
    staging: Mapping,
    slot_bytes: usize,
}

impl KvMemory {
    /// Maps what came with [`KvOpen`]: the arena, then the staging area.
    pub fn map(open: &KvOpen, descriptors: Vec<OwnedFd>) -> Result<Self, String> {
        let [arena, staging]: [OwnedFd; 2] =
            descriptors.try_into().map_err(|all: Vec<_>| format!("{} descriptors came instead of 2", all.len()))?;
        let arena_bytes = open.slot_bytes.checked_mul(u64::from(open.slots)).ok_or("the arena's size overflows")?;
        let slot_bytes = usize::try_from(open.slot_bytes).map_err(|_| "a slot is too large")?;
        let arena = Mapping::of_file(arena, arena_bytes, ProtFlags::READ).map_err(|error| format!("arena: {error}"))?;
        let staging = Mapping::of_file(staging, open.staging_bytes, ProtFlags::READ | ProtFlags::WRITE)
            .map_err(|error| format!("staging area: {error}"))?;
        Ok(Self { arena, staging, slot_bytes })
    }

    /// A slot of the arena.
    pub fn slot(&self, index: u32) -> Option<&[u8]> {
        let begin = (index as usize).checked_mul(self.slot_bytes)?;
        self.arena.get().get(begin..begin.checked_add(self.slot_bytes)?)
    }

    /// The staging area.
    pub fn staging(&mut self) -> &mut [u8] {
        self.staging.get_mut()
    }
}

/// A large buffer for one use after the other.
#[derive(Debug, Default)]
pub struct Scratch {
    held: Option<Mapping>,
    kept_until: Option<Instant>,
}

impl Scratch {
    /// So many bytes, with anything in them.
    pub fn take(&mut self, bytes: usize) -> Result<&mut [u8], String> {
        if self.held.as_ref().is_none_or(|held| held.bytes < bytes) {
            self.held = None;
            self.held = Some(Mapping::anonymous(bytes.max(1))?);
        }
        let held = self.held.as_mut().ok_or("no memory")?;
        Ok(&mut held.get_mut()[..bytes])
    }

    /// Has memory for so many bytes ready, which are wanted soon.
    pub fn prepare(&mut self, bytes: usize, now: Instant) {
        // Whoever takes it says so if there is none.
        if let Ok(all) = self.take(bytes) {
            all.chunks_mut(PAGE_BYTES).for_each(|page| page[0] = 0);
        }
        self.settle(now);
    }

    /// A use is over.
    pub fn settle(&mut self, now: Instant) {
        self.kept_until = self.held.as_ref().filter(|held| held.bytes > KEPT_BYTES).map(|_| now + KEPT_FOR);
    }

    /// When it may be time to give the memory back.
    pub fn next_timer(&self) -> Option<Instant> {
        self.kept_until
    }

    /// Gives the memory back if it has been kept long enough.
    pub fn tidy(&mut self, now: Instant) {
        if self.kept_until.take_if(|until| *until <= now).is_some() {
            self.held = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::{fs::File, os::unix::fs::FileExt};

    fn file(bytes: u64) -> File {
        let file = File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        file
    }

    fn open(slots: u32) -> KvOpen {
        let identity = warmset_core::kv::KvIdentity([0; 32]);
        KvOpen { identity, slot_bytes: 8192, slots, staging_bytes: 4096, verify: false }
    }

    #[test]
    fn both_sides_see_what_the_other_writes() {
        let (arena, staging) = (file(3 * 8192), file(4096));
        let given = vec![arena.try_clone().unwrap().into(), staging.try_clone().unwrap().into()];
        let mut memory = KvMemory::map(&open(3), given).unwrap();
        arena.write_all_at(b"block", 2 * 8192).unwrap();
        assert_eq!(&memory.slot(2).unwrap()[..5], b"block");
        assert_eq!((memory.slot(2).unwrap().len(), memory.slot(3), memory.slot(u32::MAX)), (8192, None, None));
        memory.staging()[..5].copy_from_slice(b"state");
        let mut read = [0; 5];
        staging.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(&read, b"state");
    }

    #[test]
    fn files_that_are_too_small_are_refused() {
        for (arena, staging, slots) in [(8191, 4096, 1), (8192, 4095, 1), (8192, 4096, 2), (8192, 4096, 0)] {
            let given = vec![file(arena).into(), file(staging).into()];
            assert!(KvMemory::map(&open(slots), given).is_err(), "{arena} {staging} {slots}");
        }
        assert!(KvMemory::map(&open(1), vec![file(8192).into()]).unwrap_err().contains("1 descriptors"));
    }

    #[test]
    fn a_buffer_grows_and_a_large_one_is_given_back_after_a_while() {
        let (mut scratch, now) = (Scratch::default(), Instant::now());
        scratch.take(10).unwrap().fill(1);
        scratch.settle(now);
        assert_eq!(scratch.take(10).unwrap(), [1; 10], "kept");
        assert_eq!(scratch.next_timer(), None);
        assert_eq!(scratch.take(KEPT_BYTES + 1).unwrap().len(), KEPT_BYTES + 1);
        scratch.settle(now);
        assert_eq!(scratch.next_timer(), Some(now + KEPT_FOR));
        scratch.tidy(now + KEPT_FOR / 2);
        assert!(scratch.held.is_some());
        scratch.prepare(KEPT_BYTES + 1, now + KEPT_FOR / 2);
        scratch.tidy(now + KEPT_FOR);
        assert!(scratch.held.is_some(), "it was wanted once more");
        scratch.tidy(now + KEPT_FOR * 3 / 2);
        assert!(scratch.held.is_none() && scratch.next_timer().is_none());
        assert!(scratch.take(0).unwrap().is_empty());
    }
}
