//! Room kept for removals: on a full disk they need some to write down that something may be deleted.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// What a removal writes is a few pages of 4 KiB, in the log and in the database.
const RESERVE_BYTES: usize = 1 << 20;

/// A file of no content beside the database. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reserve(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    spent: AtomicBool,
}

impl Reserve {
    /// The reserve of a database file; it is laid down as soon as there is room.
    pub(crate) fn beside(database: &Path) -> Self {
        let mut path = database.as_os_str().to_owned();
        path.push("-reserve");
        let reserve = Self(Some(Arc::new(Inner { path: path.into(), spent: AtomicBool::new(true) })));
        reserve.restore();
        reserve
    }

    /// Gives the room up; whether there was any.
    pub(crate) fn spend(&self) -> bool {
        let Some(inner) = &self.0 else { return false };
        !inner.spent.swap(true, Ordering::SeqCst) && fs::remove_file(&inner.path).is_ok()
    }

    /// Takes the room back after it was given up. Without success the next call tries again.
    pub(crate) fn restore(&self) {
        let Some(inner) = &self.0 else { return };
        if !inner.spent.load(Ordering::SeqCst) {
            return;
        }
        let laid_down = lay_down(&inner.path);
        if laid_down.is_err() {
            // What was written of it is wanted by others.
            let _ = fs::remove_file(&inner.path);
        }
        inner.spent.store(laid_down.is_err(), Ordering::SeqCst);
    }
}

fn lay_down(path: &Path) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| found.len() == RESERVE_BYTES as u64) {
        return Ok(());
    }
    // No two blocks are alike, and none is zero: a file system that leaves such out would keep no room.
    let block =
        (0..RESERVE_BYTES as u64 / 8).flat_map(|number| number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    fs::write(path, block.collect::<Vec<u8>>())?;
    fs::File::open(path)?.sync_all()
}
