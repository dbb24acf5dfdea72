//! Host memory for blocks that engine processes read: one memory file for each model, in slots of one size.
//!
//! Engines get a descriptor that is open for reading, so that they can map it for nothing else. (A seal against writing
//! would also keep the server itself from giving memory back.) A slot has one writer or some readers in this process,
//! never both: that is counted here, so that no two parts of the server can hold its bytes against each other. The
//! kernel gives memory to what was written, and takes it back from a slot that is freed.

#![expect(unsafe_code, reason = "memory that other processes map has no safe interface")]

use rustix::{
    fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags},
    mm::{MapFlags, ProtFlags},
};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering},
    },
};

/// What a slot's count says while it has a writer.
const WRITER: i32 = -1;
/// The unit of memory and of slots.
pub const PAGE_BYTES: u64 = 4096;
/// The most slots of an arena.
pub const SLOTS_MAX: u32 = 1 << 24;

/// Slots of one size in a memory file.
#[derive(Debug)]
pub struct Arena {
    descriptor: OwnedFd,
    for_engines: OwnedFd,
    base: NonNull<u8>,
    slot_bytes: usize,
    /// For each slot the number of its readers, or [`WRITER`].
    users: Vec<AtomicI32>,
}

// SAFETY: the mapping belongs to the arena alone and lives as long as it does; access to each slot is guarded by its
// count, which is atomic.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Makes an arena whose slots take no memory yet. `name` shows in the system's lists of mappings.
    pub fn create(name: &str, slot_bytes: u64, slots: u32) -> io::Result<Arc<Self>> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what);
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(PAGE_BYTES) || slots == 0 || slots > SLOTS_MAX {
            return Err(invalid("an arena has slots of whole pages"));
        }
        let bytes = slot_bytes.checked_mul(u64::from(slots)).ok_or_else(|| invalid("an arena of too many bytes"))?;
        let length = usize::try_from(bytes).map_err(|_| invalid("an arena of too many bytes"))?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
        let descriptor = rustix::fs::memfd_create(name, flags)
            // Older kernels do not know of executable memory files.
            .or_else(|_| rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING))?;
        rustix::fs::ftruncate(&descriptor, bytes)?;
        rustix::fs::fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        // Whoever opens it anew has no right to write either.
        rustix::fs::fchmod(&descriptor, Mode::RUSR)?;
        let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let for_engines = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that cannot shrink and
        // that nobody else has yet; it is unmapped on drop only.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &descriptor,
                0,
            )?
        };
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| io::Error::other("a mapping at address 0"))?;
        let users = (0..slots).map(|_| AtomicI32::new(0)).collect();
        Ok(Arc::new(Self { descriptor, for_engines, base, slot_bytes: length / slots as usize, users }))
    }

    /// What engines map.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.for_engines.as_fd()
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes as u64
    }

    /// Slots.
    pub fn slots(&self) -> u32 {
        self.users.len() as u32
    }

    /// The slot for its only user, to write; none if somebody uses it or it does not exist.
    pub fn writer(self: &Arc<Self>, slot: u32) -> Option<SlotWriter> {
        let users = self.users.get(slot as usize)?;
        users.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(SlotWriter { arena: Arc::clone(self), slot })
    }

    /// The slot for reading; none while it is written.
    pub fn reader(self: &Arc<Self>, slot: u32) -> Option<SlotReader> {
        let users = self.users.get(slot as usize)?;
        let more = |count: i32| (0..i32::MAX).contains(&count).then(|| count + 1);
        users.try_update(Ordering::Acquire, Ordering::Relaxed, more).ok()?;
        Some(SlotReader { arena: Arc::clone(self), slot })
    }

    /// Gives the memory of a slot back; it reads as zeros then. False if somebody uses it: then nothing happens.
    pub fn free(self: &Arc<Self>, slot: u32) -> io::Result<bool> {
        let Some(writer) = self.writer(slot) else { return Ok(false) };
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.descriptor, flags, u64::from(slot) * self.slot_bytes(), self.slot_bytes())?;
        drop(writer);
        Ok(true)
    }

    fn place(&self, slot: u32) -> *mut u8 {
        // SAFETY: readers and writers exist for slots of the arena only, so the place lies within the mapping.
        unsafe { self.base.as_ptr().add(slot as usize * self.slot_bytes) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping is this arena's own, of this length, and readers and writers hold the arena alive.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.slot_bytes * self.users.len()) };
        if let Err(error) = unmapped {
            tracing::error!(%error, "an arena cannot be unmapped");
        }
    }
}

/// The only user of a slot.
#[derive(Debug)]
pub struct SlotWriter {
    arena: Arc<Arena>,
    slot: u32,
}

impl AsMut<[u8]> for SlotWriter {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the slot lies within the mapping; its count says that this writer is its only user in this process,
        // and other processes cannot write.
        unsafe { std::slice::from_raw_parts_mut(self.arena.place(self.slot), self.arena.slot_bytes) }
    }
}

impl Drop for SlotWriter {
    fn drop(&mut self) {
        self.arena.users[self.slot as usize].store(0, Ordering::Release);
    }
}

/// One of those who read a slot.
#[derive(Debug)]
pub struct SlotReader {
    arena: Arc<Arena>,
    slot: u32,
}

impl AsRef<[u8]> for SlotReader {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the slot lies within the mapping; its count says that nobody writes it while there are readers.
        unsafe { std::slice::from_raw_parts(self.arena.place(self.slot), self.arena.slot_bytes) }
    }
}

impl Drop for SlotReader {
    fn drop(&mut self) {
        self.arena.users[self.slot as usize].fetch_sub(1, Ordering::Release);
    }
}

/// A memory file that one engine writes and the server reads: what is in it is copied before it is looked at, since the
/// engine can change it at any moment.
#[derive(Debug)]
pub struct Staging {
    descriptor: OwnedFd,
    bytes: u64,
}

impl Staging {
    /// Makes a file of so many bytes, which takes no memory yet.
    pub fn create(name: &str, bytes: u64) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let descriptor = rustix::fs::memfd_create(name, flags)?;
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        rustix::fs::ftruncate(&descriptor, bytes)?;
        rustix::fs::fcntl_add_seals(&descriptor, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { descriptor, bytes })
    }

    /// What the engine maps.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies bytes out, all that are asked for or none.
    pub fn read(&self, mut at: u64, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            let read = rustix::io::pread(&self.descriptor, &mut *into, at)?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            at += read as u64;
            into = &mut into[read..];
        }
        Ok(())
    }

    /// Gives its first bytes memory, which is this process's then, not the engine's.
    pub fn allocate(&self, bytes: u64) -> io::Result<()> {
        let bytes = bytes.clamp(1, self.bytes);
        Ok(rustix::fs::fallocate(&self.descriptor, FallocateFlags::empty(), 0, bytes)?)
    }

    /// Gives its memory back.
    pub fn clear(&self) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.descriptor, flags, 0, self.bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> Arc<Arena> {
        Arena::create("warmset-test", 8192, 4).unwrap()
    }

    #[test]
    fn a_slot_has_one_writer_or_some_readers() {
        let arena = arena();
        let mut writer = arena.writer(2).unwrap();
        assert!(arena.writer(2).is_none() && arena.reader(2).is_none() && !arena.free(2).unwrap());
        writer.as_mut()[..3].copy_from_slice(b"abc");
        drop(writer);
        let (one, other) = (arena.reader(2).unwrap(), arena.reader(2).unwrap());
        assert_eq!(&one.as_ref()[..3], b"abc");
        assert!(arena.writer(2).is_none() && !arena.free(2).unwrap());
        drop((one, other));
        assert!(arena.free(2).unwrap());
        assert_eq!(&arena.reader(2).unwrap().as_ref()[..3], [0; 3]);
        assert!(arena.writer(4).is_none() && arena.reader(4).is_none());
    }

    #[test]
    fn whoever_gets_the_descriptor_can_only_read() {
        let arena = arena();
        arena.writer(0).unwrap().as_mut()[0] = 7;
        let map = |protection| {
            // SAFETY: a mapping of its own, which is removed before anything else happens.
            unsafe {
                let mapped =
                    rustix::mm::mmap(std::ptr::null_mut(), 8192, protection, MapFlags::SHARED, arena.descriptor(), 0)?;
                let first = *mapped.cast::<u8>();
                rustix::mm::munmap(mapped, 8192)?;
                rustix::io::Result::Ok(first)
            }
        };
        assert_eq!(map(ProtFlags::READ), Ok(7));
        assert!(map(ProtFlags::READ | ProtFlags::WRITE).is_err());
        assert!(rustix::io::pwrite(arena.descriptor(), b"x", 0).is_err());
        assert!(rustix::fs::ftruncate(arena.descriptor(), 0).is_err());
        assert!(rustix::fs::ftruncate(&arena.descriptor, 0).is_err());
    }

    #[test]
    fn memory_is_taken_by_what_is_written_and_given_back() {
        let arena = arena();
        let blocks = || rustix::fs::fstat(arena.descriptor()).unwrap().st_blocks;
        assert_eq!(blocks(), 0);
        arena.writer(1).unwrap().as_mut().fill(1);
        assert_eq!(blocks(), 16);
        assert!(arena.free(1).unwrap());
        assert_eq!(blocks(), 0);
    }

    #[test]
    fn impossible_sizes_are_refused() {
        for (slot_bytes, slots) in [(0, 1), (4095, 1), (4096, 0), (4096, SLOTS_MAX + 1), (!4095, 2)] {
            assert!(Arena::create("warmset-test", slot_bytes, slots).is_err(), "{slot_bytes} times {slots}");
        }
    }

    #[test]
    fn what_an_engine_wrote_is_copied_out() {
        let staging = Staging::create("warmset-test", 5000).unwrap();
        rustix::io::pwrite(staging.descriptor(), b"state", 4990).unwrap();
        let mut bytes = [0; 5];
        staging.read(4990, &mut bytes).unwrap();
        assert_eq!(&bytes, b"state");
        assert!(staging.read(8190, &mut bytes).is_err());
        staging.clear().unwrap();
        staging.read(4990, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 5]);
    }
}
