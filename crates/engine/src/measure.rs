//! What one process really occupies, as the operating system counts it.
//!
//! Anonymous and shared memory is the process's own. Pages of the artifact's files are counted apart, since several
//! processes may map them and they are counted once. Pages of the program and its libraries are overhead: they are
//! there once, whatever is loaded. A tree of processes that a command started brings programs and libraries of its own,
//! which are there because of it alone: there all file pages count, once however many processes of the tree map them.

use crate::process::tree;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::PathBuf,
};
use warmset_core::{Bytes, Footprint};

/// What the names of memory files begin with that belong to the KV tier.
pub const KV_MEMORY_NAME: &str = "warmset-kv";

/// Bytes of one process.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Measurement {
    /// Anonymous memory.
    pub anonymous_bytes: Bytes,
    /// Shared memory: memfd and the like.
    pub shared_memory_bytes: Bytes,
    /// Resident pages of the artifact's files.
    pub artifact_file_bytes: Bytes,
    /// Resident pages of all other files: program and libraries.
    pub other_file_bytes: Bytes,
    /// Resident pages of programs and libraries that a command brought.
    pub command_file_bytes: Bytes,
    /// The most that was ever resident, of all kinds.
    pub peak_resident_bytes: Bytes,
}

impl Measurement {
    /// Measures a process that maps `artifact` files.
    pub fn of(pid: u32, artifact: &[PathBuf]) -> io::Result<Self> {
        let files = artifact.iter().map(identity).collect::<io::Result<BTreeSet<_>>>()?;
        let smaps = fs::read_to_string(format!("/proc/{pid}/smaps"));
        let status = status_of_living(pid)?;
        let mut measured = Self {
            // The counters behind `status` may lag by some pages; `smaps` walks the pages themselves.
            shared_memory_bytes: kibibytes(&status, "RssShmem"),
            peak_resident_bytes: kibibytes(&status, "VmHWM"),
            ..Self::default()
        };
        match smaps {
            Ok(smaps) => measured.add_mappings(&smaps, &files),
            // Hidden from us: without the mappings, file pages cannot be told apart.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                measured.anonymous_bytes = kibibytes(&status, "RssAnon");
                measured.artifact_file_bytes = kibibytes(&status, "RssFile");
            }
            Err(error) => return Err(error),
        }
        Ok(measured)
    }

    /// Measures a process and everything that came of it. What forked processes still share counts once.
    pub fn of_tree(root: u32, artifact: &[PathBuf]) -> io::Result<Self> {
        let artifact = artifact.iter().map(identity).collect::<io::Result<BTreeSet<_>>>()?;
        let own = identity(&std::env::current_exe()?)?;
        let mut sum = Self::default();
        let mut files = BTreeMap::new();
        for pid in std::iter::once(root).chain(tree::descendants(root)) {
            match sum.add_process(pid, &mut files) {
                // It has ended since it was found.
                Err(_) if pid != root => {}
                added => added?,
            }
        }
        for (file, (is_shared_memory, bytes)) in files {
            if is_shared_memory {
                sum.shared_memory_bytes += bytes;
            } else if artifact.contains(&file) {
                sum.artifact_file_bytes += bytes;
            } else if file == own {
                sum.other_file_bytes += bytes;
            } else {
                sum.command_file_bytes += bytes;
            }
        }
        let files = sum.artifact_file_bytes + sum.other_file_bytes + sum.command_file_bytes;
        sum.peak_resident_bytes += files + sum.shared_memory_bytes;
        Ok(sum)
    }

    /// Adds what one process of a tree has for itself; `files` gets the most that any of them maps of each file.
    fn add_process(&mut self, pid: u32, files: &mut BTreeMap<FileIdentity, (bool, Bytes)>) -> io::Result<()> {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}"));
        let smaps = read("smaps");
        let status = status_of_living(pid)?;
        let smaps = smaps?;
        let mut mapped: BTreeMap<FileIdentity, (bool, Bytes)> = BTreeMap::new();
        let mut anonymous = 0;
        for_each_mapping(&smaps, |mapping| {
            anonymous += mapping.anonymous_bytes;
            if mapping.file.inode != 0 {
                let entry = mapped.entry(mapping.file).or_insert((mapping.is_shared_memory, 0));
                entry.1 += mapping.resident_bytes.saturating_sub(mapping.anonymous_bytes);
            }
        });
        let file_bytes: Bytes = mapped.values().map(|(_, bytes)| bytes).sum();
        // Its share of what forked processes have in common; kernels before 5.11 do not tell it.
        let share = read("smaps_rollup").ok().map(|text| kibibytes(&text, "Pss_Anon")).filter(|bytes| *bytes > 0);
        let share = share.unwrap_or(anonymous);
        self.anonymous_bytes += share;
        let grown = kibibytes(&status, "VmHWM").saturating_sub(file_bytes).saturating_sub(anonymous);
        self.peak_resident_bytes += share + grown;
        for (file, (is_shared_memory, bytes)) in mapped {
            let known = files.entry(file).or_insert((is_shared_memory, 0));
            known.1 = known.1.max(bytes);
        }
        Ok(())
    }

    fn add_mappings(&mut self, smaps: &str, artifact: &BTreeSet<FileIdentity>) {
        for_each_mapping(smaps, |mapping| self.add(mapping, artifact));
    }

    fn add(&mut self, mapping: &Mapping, artifact: &BTreeSet<FileIdentity>) {
        self.anonymous_bytes += mapping.anonymous_bytes;
        let file_bytes = mapping.resident_bytes.saturating_sub(mapping.anonymous_bytes);
        if mapping.is_kv {
            // The tier counts its memory once, whoever maps it.
            self.shared_memory_bytes = self.shared_memory_bytes.saturating_sub(mapping.resident_bytes);
        } else if mapping.is_shared_memory {
            // Counted by `status`.
        } else if artifact.contains(&mapping.file) {
            self.artifact_file_bytes += file_bytes;
        } else if mapping.file.inode != 0 {
            self.other_file_bytes += file_bytes;
        }
    }

    /// What the process holds now, as the ledger counts it.
    pub fn steady(&self, accelerator_bytes: &[Bytes]) -> Footprint {
        Footprint {
            private_host_bytes: self.anonymous_bytes + self.shared_memory_bytes + self.command_file_bytes,
            shared_host_bytes: self.artifact_file_bytes,
            accelerator_bytes: accelerator_bytes.to_vec(),
        }
    }

    /// The most it has held so far, as the ledger counts it: file pages as they are now, the rest of the peak private.
    pub fn peak(&self, accelerator_bytes: &[Bytes]) -> Footprint {
        let steady = self.steady(accelerator_bytes);
        let files = self.artifact_file_bytes + self.other_file_bytes;
        let private = self.peak_resident_bytes.saturating_sub(files).max(steady.private_host_bytes);
        Footprint { private_host_bytes: private, ..steady }
    }
}

/// Calls `take` with every mapping of a process.
fn for_each_mapping(smaps: &str, mut take: impl FnMut(&Mapping)) {
    let mut mapping = Mapping::default();
    for line in smaps.lines() {
        if let Some(next) = Mapping::begin(line) {
            take(&mapping);
            mapping = next;
        } else if let Some(bytes) = field(line, "Rss:") {
            mapping.resident_bytes = bytes;
        } else if let Some(bytes) = field(line, "Anonymous:") {
            mapping.anonymous_bytes = bytes;
        }
    }
    take(&mapping);
}

/// Host bytes of the server itself and of its spare engines: what the reserve is for.
pub fn overhead(parent: u32, spares: &[u32]) -> io::Result<Bytes> {
    let own = Measurement::of(parent, &[])?;
    let mut total = own.anonymous_bytes + own.shared_memory_bytes + own.other_file_bytes;
    for spare in spares {
        // A spare that has just ended holds nothing. It runs the same program, whose pages are there once.
        if let Ok(measured) = Measurement::of(*spare, &[]) {
            total += measured.anonymous_bytes + measured.shared_memory_bytes;
        }
    }
    Ok(total)
}

/// A file as mappings name it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct FileIdentity {
    major: u64,
    minor: u64,
    inode: u64,
}

fn identity(path: &PathBuf) -> io::Result<FileIdentity> {
    let metadata = fs::metadata(path)?;
    let device = metadata.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    Ok(FileIdentity { major: u64::from(major), minor: u64::from(minor), inode: metadata.ino() })
}

#[derive(Debug, Default)]
struct Mapping {
    file: FileIdentity,
    is_shared_memory: bool,
    is_kv: bool,
    resident_bytes: Bytes,
    anonymous_bytes: Bytes,
}

impl Mapping {
    /// The first line of a mapping: `from-to rwxp offset major:minor inode path`.
    fn begin(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (from, to) = fields.next()?.split_once('-')?;
        u64::from_str_radix(from, 16).ok().zip(u64::from_str_radix(to, 16).ok())?;
        let (major, minor) = fields.nth(2)?.split_once(':')?;
        let file = FileIdentity {
            major: u64::from_str_radix(major, 16).ok()?,
            minor: u64::from_str_radix(minor, 16).ok()?,
            inode: fields.next()?.parse().ok()?,
        };
        let path = fields.next().unwrap_or("");
        let is_shared_memory = ["/memfd:", "/dev/shm/", "/dev/zero", "/SYSV"].iter().any(|it| path.starts_with(it));
        let is_kv = path.starts_with("/memfd:") && path["/memfd:".len()..].starts_with(KV_MEMORY_NAME);
        Some(Self { file, is_shared_memory, is_kv, ..Self::default() })
    }
}

/// The bytes of a line `name  123 kB`.
fn field(line: &str, name: &str) -> Option<Bytes> {
    let value = line.strip_prefix(name)?.trim().strip_suffix(" kB")?;
    value.parse::<Bytes>().ok()?.checked_mul(1024)
}

/// The figures of a process that has memory. One that has ended and that nobody waited for has a status, but no memory any
/// more: read after its mappings, it says that they are those of a living one, and all of them.
fn status_of_living(pid: u32) -> io::Result<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    if status.lines().any(|line| line.starts_with("VmHWM:")) {
        Ok(status)
    } else {
        Err(io::Error::new(io::ErrorKind::NotFound, format!("process {pid} has ended")))
    }
}

fn kibibytes(status: &str, name: &str) -> Bytes {
    status.lines().find_map(|line| field(line.strip_prefix(name)?, ":")).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c0a00000-55d0c0b00000 r-xp 00000000 fe:00 101    /usr/bin/warmset\nSize: 1024 kB\nRss:  500 kB\nAnonymous:  0 kB\n\
55d0c0c00000-55d0c0d00000 rw-p 00000000 fe:00 101    /usr/bin/warmset\nRss:  100 kB\nAnonymous:  60 kB\n\
55d0c1000000-55d0c2000000 rw-p 00000000 00:00 0      [heap]\nRss:  3000 kB\nAnonymous:  3000 kB\n\
7f0000000000-7f0010000000 r--s 00000000 fe:10 4711   /data/store/a b.gguf\nRss:  90000 kB\nAnonymous:  0 kB\n\
7f0020000000-7f0030000000 rw-s 00000000 00:01 4711   /memfd:arena (deleted)\nRss:  7000 kB\nAnonymous:  0 kB\n\
7fff00000000-7fff00002000 r-xp 00000000 00:00 0      [vdso]\nRss:  8 kB\nAnonymous:  0 kB\n";

    #[test]
    fn pages_are_sorted_by_what_they_belong_to() {
        let artifact = BTreeSet::from([FileIdentity { major: 0xfe, minor: 0x10, inode: 4711 }]);
        let mut measured = Measurement { shared_memory_bytes: 7000 << 10, ..Measurement::default() };
        measured.add_mappings(SMAPS, &artifact);
        assert_eq!(measured.anonymous_bytes, 3060 << 10);
        assert_eq!(measured.artifact_file_bytes, 90_000 << 10);
        assert_eq!(measured.other_file_bytes, 540 << 10);
        measured.peak_resident_bytes = 120_000 << 10;
        assert_eq!(measured.steady(&[5]).private_host_bytes, 10_060 << 10);
        assert_eq!(measured.peak(&[5]).private_host_bytes, (120_000 - 90_540) << 10);
        assert_eq!(measured.peak(&[5]).accelerator_bytes, [5]);
    }

    #[test]
    fn this_process_is_measured_as_it_grows() {
        const GROWTH_BYTES: u64 = 32 << 20;
        let pid = std::process::id();
        let seen_growing = || {
            let before = Measurement::of(pid, &[]).unwrap();
            // Else the optimiser would do without the memory.
            let grown = std::hint::black_box(vec![1_u8; GROWTH_BYTES as usize]);
            let after = Measurement::of(pid, &[]).unwrap();
            drop(grown);
            after.anonymous_bytes >= before.anonymous_bytes + GROWTH_BYTES - (1 << 20)
        };
        // Other tests of this process may give memory back at the same time.
        assert!((0..50).any(|_| seen_growing()));
        let after = Measurement::of(pid, &[]).unwrap();
        assert!(after.peak_resident_bytes >= after.anonymous_bytes);
        assert!(after.other_file_bytes > 0, "the program's own pages");
    }

    #[test]
    fn a_tree_is_measured_whole_and_shared_pages_once() {
        let script = "sleep 600 & sleep 600 & echo ready; wait";
        let mut shell = std::process::Command::new("sh");
        let mut shell = shell.args(["-c", script]).stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(shell.stdout.take().unwrap()), &mut ready).unwrap();
        let program = [fs::canonicalize("/bin/sleep").unwrap()];
        // A process that was forked and runs nothing yet maps nothing of its own.
        let runs_sleep = |pid: &u32| {
            let is_named = fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n");
            is_named && Measurement::of(*pid, &program).is_ok_and(|measured| measured.artifact_file_bytes > 0)
        };
        while !tree::descendants(shell.id()).iter().all(runs_sleep) {
            std::thread::yield_now();
        }
        let tree = Measurement::of_tree(shell.id(), &[]).unwrap();
        let mut below = tree::descendants(shell.id());
        below.push(shell.id());
        let each: Vec<Measurement> = below.iter().map(|pid| Measurement::of(*pid, &[]).unwrap()).collect();
        let anonymous: Bytes = each.iter().map(|one| one.anonymous_bytes).sum();
        let files: Bytes = each.iter().map(|one| one.other_file_bytes).sum();
        let as_artifact = Measurement::of_tree(shell.id(), &program).unwrap();
        tree::kill_descendants(shell.id());
        shell.wait().unwrap();
        assert!(tree.anonymous_bytes > 0 && tree.anonymous_bytes <= anonymous, "{tree:?} {anonymous}");
        assert!(tree.command_file_bytes > 0 && tree.command_file_bytes < files, "{tree:?} {files}");
        assert_eq!(tree.steady(&[]).private_host_bytes, tree.anonymous_bytes + tree.command_file_bytes);
        assert!(as_artifact.artifact_file_bytes > 0, "{as_artifact:?}");
        assert!(tree.peak(&[]).private_host_bytes >= tree.steady(&[]).private_host_bytes);
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        assert!(Measurement::of(u32::MAX, &[]).is_err());
        assert!(overhead(std::process::id(), &[u32::MAX]).unwrap() > 0);
    }

    #[test]
    fn a_process_that_has_ended_is_an_error_and_does_not_hold_nothing() {
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        let pid = ended.id();
        let is_over = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ");
        while !is_over() {
            std::thread::yield_now();
        }
        for measured in [Measurement::of(pid, &[]), Measurement::of_tree(pid, &[])] {
            assert_eq!(measured.expect_err("it has no memory").kind(), io::ErrorKind::NotFound);
        }
        ended.wait().unwrap();
    }

    #[test]
    fn status_lines_are_found_by_their_whole_name() {
        let status = "VmPeak:\t  10 kB\nVmHWM:\t  20 kB\nRssAnon:\t     7 kB\n";
        assert_eq!(kibibytes(status, "VmHWM"), 20 << 10);
        assert_eq!(kibibytes(status, "Rss"), 0);
        assert_eq!(kibibytes(status, "RssAnon"), 7 << 10);
    }
}
