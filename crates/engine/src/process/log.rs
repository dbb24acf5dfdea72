//! What an engine process writes: read from a pipe as it comes and kept in a file of bounded size.
//!
//! The pipe, rather than the file itself as standard output, lets a spare process move to its model's file and keeps
//! a talkative engine from filling the disk.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};
use tokio::{io::AsyncReadExt, net::unix::pipe::Receiver};

/// A log file is set aside when it reaches this size; one older file is kept.
pub const LOG_BYTES_MAX: u64 = 1 << 20;
/// Read from the pipe at once.
const PIPE_READ_BYTES: usize = 8 << 10;

/// The files of one log, oldest first.
pub fn log_files(path: &Path) -> [PathBuf; 2] {
    [older(path), path.to_owned()]
}

fn older(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// One log, which may move to another file.
#[derive(Debug)]
pub(super) struct EngineLog {
    path: PathBuf,
    file: Option<File>,
    length_bytes: u64,
}

impl EngineLog {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, file: None, length_bytes: 0 }
    }

    /// Writes to another file from now on.
    pub(super) fn move_to(&mut self, path: PathBuf) {
        *self = Self::new(path);
    }

    /// Appends, first setting the file aside if it would become too long.
    fn write(&mut self, text: &[u8]) -> std::io::Result<()> {
        let bytes = text.len() as u64;
        if self.file.is_none() {
            self.open()?;
        }
        if self.length_bytes > 0 && self.length_bytes + bytes > LOG_BYTES_MAX {
            std::fs::rename(&self.path, older(&self.path))?;
            self.open()?;
        }
        if let Some(file) = &mut self.file {
            file.write_all(text)?;
            self.length_bytes += bytes;
        }
        Ok(())
    }

    fn open(&mut self) -> std::io::Result<()> {
        let file = OpenOptions::new().append(true).create(true).open(&self.path)?;
        self.length_bytes = file.metadata()?.len();
        self.file = Some(file);
        Ok(())
    }
}

/// Reads the pipe until the engine is gone. Text that cannot be kept is dropped: an engine must never block on its
/// log.
pub(super) async fn pump(mut pipe: Receiver, log: Arc<Mutex<EngineLog>>) {
    let mut buffer = vec![0; PIPE_READ_BYTES];
    let mut failed = false;
    loop {
        match pipe.read(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(length) => {
                let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                // A short write into the page cache; not worth a thread.
                if let Err(error) = log.write(&buffer[..length])
                    && !std::mem::replace(&mut failed, true)
                {
                    tracing::warn!(path = %log.path.display(), %error, "an engine's log cannot be kept");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_never_grows_beyond_two_files_of_the_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("engine.log");
        let mut log = EngineLog::new(path.clone());
        let line = [b'x'; 4096];
        for _ in 0..3 * LOG_BYTES_MAX / 4096 {
            log.write(&line).unwrap();
        }
        log.write(b"last\n").unwrap();
        let sizes: Vec<u64> = log_files(&path).iter().map(|path| std::fs::metadata(path).unwrap().len()).collect();
        assert!(sizes.iter().all(|bytes| *bytes <= LOG_BYTES_MAX), "{sizes:?}");
        assert!(std::fs::read(&path).unwrap().ends_with(b"last\n"));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_log_goes_on_where_the_last_process_left_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("engine.log");
        EngineLog::new(path.clone()).write(b"first\n").unwrap();
        let mut log = EngineLog::new(directory.path().join("spare.log"));
        log.write(b"spare\n").unwrap();
        log.move_to(path.clone());
        log.write(b"second\n").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"first\nsecond\n");
    }
}
