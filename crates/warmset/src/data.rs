//! The data directory: where it lies, and that one process at a time writes to it.

use anyhow::{Context, Result, bail};
use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Read, Seek, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How long a command waits for another command on the same data directory.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
const LOCK_PAUSE: Duration = Duration::from_millis(50);
/// How long a server that does not answer is taken for one that was killed: what it had just started may hold its lock
/// for a moment longer than it lives.
const GONE_PATIENCE: Duration = Duration::from_secs(1);
/// The longest address a lock file may hold.
const ADDRESS_BYTES_MAX: u64 = 256;

/// Where data lies unless told otherwise.
pub(crate) fn default_directory() -> PathBuf {
    let from = |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(data) = from("XDG_DATA_HOME") {
        return data.join("warmset");
    }
    from("HOME").map_or_else(|| PathBuf::from("/var/lib/warmset"), |home| home.join(".local/share/warmset"))
}

/// Whether anything was ever stored in a data directory.
pub(crate) fn is_used(root: &Path) -> bool {
    ["lock", "catalog.db"].iter().any(|name| root.join(name).exists())
}

/// The address of the server that has a data directory now. Makes and changes nothing.
pub(crate) fn server_of(root: &Path) -> Option<String> {
    let mut file = File::open(root.join("lock")).ok()?;
    // What stands in a lock that nobody holds is of an earlier server.
    matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)).then(|| read_address(&mut file)).flatten()
}

/// The right to write to a data directory. It ends with the process, however that ends.
#[derive(Debug)]
pub(crate) struct DataLock {
    file: File,
    root: PathBuf,
}

/// Who has a data directory.
#[derive(Debug)]
pub(crate) enum Locked {
    /// This process.
    Here(DataLock),
    /// A server, whose admin listener has this address.
    Server(String),
}

impl DataLock {
    /// Takes the data directory, or says which server has it. Waits for other commands.
    pub(crate) fn take(root: &Path) -> Result<Locked> {
        let create = || std::fs::create_dir_all(root);
        create().with_context(|| format!("cannot create the data directory {}", root.display()))?;
        let path = root.join("lock");
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = open.with_context(|| format!("cannot open {}: check its permissions", path.display()))?;
        let began = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => {
                    // What an earlier server wrote is no longer true.
                    file.set_len(0).with_context(|| format!("cannot write {}", path.display()))?;
                    return Ok(Locked::Here(Self { file, root: root.to_path_buf() }));
                }
                Err(TryLockError::Error(error)) => {
                    return Err(error).with_context(|| format!("cannot lock {}", path.display()));
                }
                Err(TryLockError::WouldBlock) => {}
            }
            if let Some(address) = read_address(&mut file)
                && (answers(&address) || began.elapsed() >= GONE_PATIENCE)
            {
                return Ok(Locked::Server(address));
            }
            if began.elapsed() >= LOCK_PATIENCE {
                bail!("{} is in use by another warmset command: wait until it is done", root.display());
            }
            std::thread::sleep(LOCK_PAUSE);
        }
    }

    /// Tells commands on this directory where the server that has it listens.
    pub(crate) fn announce(&mut self, admin_address: &str) -> Result<()> {
        let written = self.file.set_len(0).and_then(|()| self.file.rewind());
        let written = written.and_then(|()| self.file.write_all(format!("{admin_address}\n").as_bytes()));
        written.with_context(|| format!("cannot write to the data directory {}", self.root.display()))
    }

    /// The data directory.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }
}

/// Whether anybody listens there.
fn answers(address: &str) -> bool {
    address.parse().is_ok_and(|address| TcpStream::connect_timeout(&address, GONE_PATIENCE).is_ok())
}

/// The address in a lock file; none before the server knows it or if a command has the lock.
fn read_address(file: &mut File) -> Option<String> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(ADDRESS_BYTES_MAX).read_to_string(&mut text).ok()?;
    text.strip_suffix('\n').filter(|address| !address.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time_and_the_others_learn_its_address() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("data");
        assert_eq!((is_used(&root), server_of(&root)), (false, None));
        assert!(!root.exists(), "looking makes nothing");
        let Locked::Here(mut lock) = DataLock::take(&root).unwrap() else { panic!("nobody else has it") };
        lock.announce("127.0.0.1:8081").unwrap();
        assert_eq!(lock.root(), root);
        assert_eq!(server_of(&root).as_deref(), Some("127.0.0.1:8081"));
        match DataLock::take(&root).unwrap() {
            Locked::Server(address) => assert_eq!(address, "127.0.0.1:8081"),
            Locked::Here(_) => panic!("it is taken"),
        }
        drop(lock);
        assert_eq!(server_of(&root), None, "nobody has it");
        // The old address means nothing once its writer is gone.
        assert!(matches!(DataLock::take(&root).unwrap(), Locked::Here(_)));
        assert_eq!(std::fs::read_to_string(root.join("lock")).unwrap(), "");
    }
}
