//! The one seam between the segments and the operating system. What a disk can do wrong is put in here by tests.

use super::block::PAGE_BYTES;
use rustix::{
    fs::{Advice, FallocateFlags, OFlags, SeekFrom, fadvise, fallocate},
    io::Errno,
};
use std::{
    fs::{DirBuilder, File, OpenOptions},
    io::{self, ErrorKind},
    num::NonZeroU64,
    os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// What is in the directory. A directory in it counts as what it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name, as far as it is text.
    pub name: String,
    /// What it is: only regular files can be segments.
    pub is_file: bool,
    /// What it takes.
    pub size: Size,
}

/// What a file takes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Where it ends.
    pub length_bytes: u64,
    /// What it takes of the disk: less where it has holes.
    pub allocated_bytes: u64,
}

/// A directory of segment files.
pub trait Layer: Send + Sync {
    /// The names in it.
    fn names(&self) -> io::Result<Vec<String>>;
    /// One of the names.
    fn entry(&self, name: &str) -> io::Result<Entry>;
    /// What the directory itself takes.
    fn own_bytes(&self) -> io::Result<u64>;
    /// A new file; an error if there is one of this name.
    fn create(&self, name: &str) -> io::Result<Box<dyn LayerFile>>;
    /// A file that is there.
    fn open(&self, name: &str) -> io::Result<Box<dyn LayerFile>>;
    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes names that were created or removed durable.
    fn sync_names(&self) -> io::Result<()>;
    /// What can still be written to this file system.
    fn free_bytes(&self) -> io::Result<u64>;
}

/// One file of them. Offsets, lengths and memory are whole pages.
pub trait LayerFile: Send + Sync {
    /// Reads from there on; fewer bytes than asked for at the end, or for no reason.
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize>;
    /// Writes from there on; fewer bytes than given where the disk becomes full.
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<usize>;
    /// Makes what was written durable.
    fn sync(&self) -> io::Result<()>;
    /// Cuts the file.
    fn set_length(&self, length_bytes: u64) -> io::Result<()>;
    /// Gives a range back to the disk; it reads as zeros from then on.
    fn punch(&self, offset_bytes: u64, length_bytes: NonZeroU64) -> io::Result<()>;
    /// What it takes now.
    fn size(&self) -> io::Result<Size>;
    /// The next range from there on that is no hole.
    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<(u64, u64)>>;
}

impl dyn LayerFile + '_ {
    /// Reads all of it or fails; an end of the file within it is `UnexpectedEof`.
    pub(crate) fn read_exact_at(&self, mut buffer: &mut [u8], mut offset_bytes: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            let read = match self.read_at(buffer, offset_bytes) {
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            // Direct I/O goes on at a page only; a part of one is the end of the file or a fault.
            if read == 0 || (!read.is_multiple_of(PAGE_BYTES) && read < buffer.len()) {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            buffer = buffer.get_mut(read..).ok_or(ErrorKind::InvalidData)?;
            offset_bytes += read as u64;
        }
        Ok(())
    }

    /// Writes all of it or fails.
    pub(crate) fn write_all_at(&self, mut bytes: &[u8], mut offset_bytes: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = match self.write_at(bytes, offset_bytes) {
                Ok(written) => written,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            // What is left of a torn page is written again with it.
            let whole = written - written % PAGE_BYTES;
            if whole == 0 {
                return Err(Errno::NOSPC.into());
            }
            bytes = bytes.get(whole..).ok_or(ErrorKind::InvalidData)?;
            offset_bytes += whole as u64;
        }
        Ok(())
    }
}

/// A real directory. Files are opened for direct I/O where the file system has it; where not, what was read or written
/// does not stay in the page cache, whose place is in host memory's own tier.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    /// Creates the directory if needed; only its owner may look into it.
    pub fn open(path: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Ok(Self { path: path.to_path_buf() })
    }

    fn open_file(&self, name: &str, options: &OpenOptions) -> io::Result<Box<dyn LayerFile>> {
        let path = self.path.join(name);
        let flags = |direct: OFlags| (OFlags::NOFOLLOW | OFlags::CLOEXEC | direct).bits().cast_signed();
        match options.clone().custom_flags(flags(OFlags::DIRECT)).open(&path) {
            Ok(file) => Ok(Box::new(DirectoryFile { file, direct: true })),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {
                let file = options.clone().create_new(false).custom_flags(flags(OFlags::empty())).open(&path)?;
                Ok(Box::new(DirectoryFile { file, direct: false }))
            }
            Err(error) => Err(error),
        }
    }
}

impl Layer for Directory {
    fn names(&self) -> io::Result<Vec<String>> {
        self.path.read_dir()?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn entry(&self, name: &str) -> io::Result<Entry> {
        let metadata = self.path.join(name).symlink_metadata()?;
        let mut size = size_of(&metadata);
        if metadata.is_dir() {
            size.allocated_bytes += allocated_below(&self.path.join(name), 0);
        }
        Ok(Entry { name: name.to_owned(), is_file: metadata.is_file(), size })
    }

    fn own_bytes(&self) -> io::Result<u64> {
        Ok(size_of(&self.path.metadata()?).allocated_bytes)
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn LayerFile>> {
        self.open_file(name, OpenOptions::new().read(true).write(true).create_new(true).mode(0o600))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn LayerFile>> {
        self.open_file(name, OpenOptions::new().read(true).write(true))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.path.join(name))
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let figures = rustix::fs::statvfs(&self.path)?;
        // One that has no size does not know what is left of it.
        Ok(if figures.f_blocks == 0 { u64::MAX } else { figures.f_bavail.saturating_mul(figures.f_frsize) })
    }
}

/// Directories below directories are looked at so deep; what is deeper is not ours and too odd to count.
const DEPTH_MAX: usize = 16;

fn allocated_below(directory: &Path, depth: usize) -> u64 {
    let Ok(entries) = directory.read_dir() else { return 0 };
    let sizes = entries.flatten().map(|entry| {
        let Ok(metadata) = entry.path().symlink_metadata() else { return 0 };
        let below = if metadata.is_dir() && depth < DEPTH_MAX { allocated_below(&entry.path(), depth + 1) } else { 0 };
        size_of(&metadata).allocated_bytes.saturating_add(below)
    });
    sizes.fold(0, u64::saturating_add)
}

fn size_of(metadata: &std::fs::Metadata) -> Size {
    Size { length_bytes: metadata.len(), allocated_bytes: metadata.blocks().saturating_mul(512) }
}

struct DirectoryFile {
    file: File,
    direct: bool,
}

impl DirectoryFile {
    fn forget_cached(&self, offset_bytes: u64, length_bytes: u64) {
        if !self.direct
            && let Some(length_bytes) = NonZeroU64::new(length_bytes)
        {
            // Only advice: failing costs page cache.
            let _ = fadvise(&self.file, offset_bytes, Some(length_bytes), Advice::DontNeed);
        }
    }
}

impl LayerFile for DirectoryFile {
    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize> {
        let read = self.file.read_at(buffer, offset_bytes)?;
        self.forget_cached(offset_bytes, read as u64);
        Ok(read)
    }

    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> io::Result<usize> {
        self.file.write_at(bytes, offset_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()?;
        self.forget_cached(0, self.file.metadata()?.len());
        Ok(())
    }

    fn set_length(&self, length_bytes: u64) -> io::Result<()> {
        self.file.set_len(length_bytes)
    }

    fn punch(&self, offset_bytes: u64, length_bytes: NonZeroU64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, offset_bytes, length_bytes.get())?)
    }

    fn size(&self) -> io::Result<Size> {
        Ok(size_of(&self.file.metadata()?))
    }

    fn next_data(&self, offset_bytes: u64) -> io::Result<Option<(u64, u64)>> {
        match rustix::fs::seek(&self.file, SeekFrom::Data(offset_bytes)) {
            Ok(start) => Ok(Some((start, rustix::fs::seek(&self.file, SeekFrom::Hole(start))?))),
            Err(Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}
