//! What this machine has: memory and cores, as far as the control groups allow.

use rustix::process::{Resource, getrlimit, setrlimit};
use std::path::Path;
use warmset_core::Bytes;

/// Share of the memory that the pool takes unless told otherwise, in hundredths.
const MEMORY_SHARE_PERCENT: u64 = 80;
/// The least reserve unless told otherwise.
const RESERVE_LEAST: Bytes = 384 << 20;
/// Limits above this stand for "no limit" in version 1 of the control groups.
const NO_LIMIT: Bytes = 1 << 60;

/// Memory of the machine, or of the control group that this process lives in.
pub(crate) fn memory_bytes() -> Option<Bytes> {
    let installed = meminfo_total(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(group_limit(Path::new("/sys/fs/cgroup"), &groups).map_or(installed, |limit| limit.min(installed)))
}

/// Cores this process may use.
pub(crate) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX))
}

/// The pool's memory unless told otherwise.
pub(crate) fn default_memory(machine: Bytes) -> Bytes {
    machine / 100 * MEMORY_SHARE_PERCENT
}

/// What is kept free of that unless told otherwise: a tenth, at least 384 MiB, never more than half.
pub(crate) fn default_reserve(memory: Bytes) -> Bytes {
    (memory / 10).max(RESERVE_LEAST).min(memory / 2)
}

fn meminfo_total(text: &str) -> Option<Bytes> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// The tightest memory limit of a control group and those around it, in either version.
fn group_limit(root: &Path, groups: &str) -> Option<Bytes> {
    let mut tightest: Option<Bytes> = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let (hierarchy, file) = if controllers.is_empty() {
            (root.to_path_buf(), "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (root.join("memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        let own = hierarchy.join(path.trim_start_matches('/'));
        for group in own.ancestors().take_while(|group| group.starts_with(&hierarchy)) {
            let limit = std::fs::read_to_string(group.join(file)).ok();
            if let Some(bytes) =
                limit.and_then(|text| text.trim().parse::<u64>().ok()).filter(|bytes| *bytes < NO_LIMIT)
            {
                tightest = Some(tightest.map_or(bytes, |known| known.min(bytes)));
            }
        }
    }
    tightest
}

/// Lets this process open so many files, as far as it may. Every connection is one.
pub(crate) fn raise_open_files(wanted: u64) {
    let mut limit = getrlimit(Resource::Nofile);
    let current = limit.current.unwrap_or(u64::MAX);
    if current >= wanted {
        return;
    }
    let allowed = limit.maximum.map_or(wanted, |maximum| maximum.min(wanted));
    limit.current = Some(allowed.max(current));
    let raised = setrlimit(Resource::Nofile, limit);
    if raised.is_err() || allowed < wanted {
        tracing::warn!(
            "only {allowed} files may be open, {wanted} may be needed: raise the limit (ulimit -n), or lower connections_max"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_limit_of_either_version_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert_eq!(group_limit(root.path(), "0::/a/b\n"), None);
        write("a/b/memory.max", "max\n");
        write("a/memory.max", "1000\n");
        assert_eq!(group_limit(root.path(), "0::/a/b\n"), Some(1000));
        write("memory/x/memory.limit_in_bytes", "900\n");
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(group_limit(root.path(), "0::/a/b\n5:cpu,memory:/x\n3:pids:/y\nnonsense\n"), Some(900));
    }

    #[test]
    fn defaults_leave_room_for_others() {
        assert_eq!(meminfo_total("MemTotal:       1024 kB\nMemFree: 1 kB\n"), Some(1 << 20));
        assert_eq!(default_memory(10 << 30), (10u64 << 30) / 100 * 80);
        assert_eq!(default_reserve(10 << 30), 1 << 30);
        assert_eq!(default_reserve(2 << 30), 384 << 20);
        assert_eq!(default_reserve(512 << 20), 256 << 20);
        assert!(memory_bytes().unwrap() > 0);
    }
}
