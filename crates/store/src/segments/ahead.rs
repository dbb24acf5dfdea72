//! Encrypting the next block while one is written: the processor and the disk work at the same time.
//!
//! A block is encrypted for the place it will have. If it gets another one, what was made ahead is thrown away unseen, and that
//! place's segment is never written again, so no two ciphertexts of one place ever leave the process.

use super::{
    block::PAGE_BYTES,
    buffer::AlignedBuffer,
    keys::{KeyId, SegmentKey},
    queue::BlockBytes,
    seal,
};
use std::{
    io,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};
use warmset_core::kv::BlockHeader;

/// A block to encrypt for its place in a segment.
pub(super) struct ToSeal {
    pub(super) block: BlockBytes,
    pub(super) header: BlockHeader,
    pub(super) key_id: KeyId,
    pub(super) key: SegmentKey,
    pub(super) segment: u32,
    pub(super) page: u32,
}

impl ToSeal {
    /// Encrypts a copy in this memory.
    pub(super) fn seal(&self, memory: &mut AlignedBuffer) -> io::Result<()> {
        let bytes = (*self.block).as_ref();
        let copy = memory.pages_mut(bytes.len() / PAGE_BYTES);
        copy.copy_from_slice(bytes);
        seal::seal(copy, &self.header, self.key_id, &self.key, self.page)
    }
}

/// What is being made, and for what place.
struct Promised {
    block: BlockBytes,
    segment: u32,
    page: u32,
}

/// The thread that encrypts ahead. It ends with its owner.
pub(super) struct Ahead {
    jobs: SyncSender<(ToSeal, AlignedBuffer)>,
    made: Receiver<(io::Result<()>, AlignedBuffer)>,
    promised: Option<Promised>,
    spare: Option<AlignedBuffer>,
}

impl Ahead {
    pub(super) fn start() -> io::Result<Self> {
        let (jobs, received) = sync_channel::<(ToSeal, AlignedBuffer)>(1);
        let (sender, made) = sync_channel(1);
        let run = move || {
            for (job, mut memory) in received {
                let outcome = job.seal(&mut memory);
                // The block's memory is free before anybody hears that it is not needed any more.
                drop(job);
                if sender.send((outcome, memory)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("kv-seal".to_owned()).spawn(run)?;
        Ok(Self { jobs, made, promised: None, spare: Some(AlignedBuffer::default()) })
    }

    /// Begins with a block.
    pub(super) fn begin(&mut self, job: ToSeal) {
        self.settle();
        let Some(memory) = self.spare.take() else { return };
        let promised = Promised { block: Arc::clone(&job.block), segment: job.segment, page: job.page };
        match self.jobs.send((job, memory)) {
            Ok(()) => self.promised = Some(promised),
            Err(unsent) => self.spare = Some(unsent.0.1),
        }
    }

    /// The encrypted form of a block at this place, if that is what was begun with, in exchange for other memory.
    pub(super) fn take(&mut self, block: &BlockBytes, segment: u32, page: u32, memory: &mut AlignedBuffer) -> bool {
        let is_this = self.promised.as_ref().is_some_and(|promised| {
            Arc::ptr_eq(&promised.block, block) && promised.segment == segment && promised.page == page
        });
        if !self.settle() || !is_this {
            return false;
        }
        if let Some(spare) = &mut self.spare {
            std::mem::swap(spare, memory);
        }
        true
    }

    /// Waits for what was begun, after which its block is not needed any more. Whether it was made.
    pub(super) fn settle(&mut self) -> bool {
        if self.promised.take().is_none() {
            return false;
        }
        let Ok((outcome, memory)) = self.made.recv() else { return false };
        self.spare = Some(memory);
        outcome.is_ok()
    }
}
