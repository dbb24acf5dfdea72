//! Capping the memory of one process, so that going over the cap ends it and nobody else.
//!
//! A cgroup below the worker's own counts what is really resident, by version 2 of the interface or by version 1.
//! Where neither can be written, the limit on the data segment remains: it counts anonymous address space, and lets
//! mapped files through.

use super::child::raw_pid;
use rustix::process::{Resource, Rlimit};
use std::{
    fs,
    io::{Error, Result},
    path::{Component, Path, PathBuf},
};
use warmset_core::Bytes;

/// Groups are named after the worker and the engine: `warmset-engine-<worker>-<engine>`.
const GROUP_PREFIX: &str = "warmset-engine-";

/// By what means memory is capped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLimit {
    /// `memory.max` of a cgroup, version 2.
    CgroupVersion2,
    /// `memory.limit_in_bytes` of a cgroup, version 1.
    CgroupVersion1,
    /// The resource limit on the data segment.
    DataSegment,
}

impl MemoryLimit {
    /// In words, for logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CgroupVersion2 => "cgroup v2",
            Self::CgroupVersion1 => "cgroup v1",
            Self::DataSegment => "data segment",
        }
    }

    pub(super) fn set_resource_limit(pid: u32, bytes: Bytes) -> Result<Self> {
        let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
        rustix::process::prlimit(Some(raw_pid(pid)?), Resource::Data, limit)?;
        Ok(Self::DataSegment)
    }
}

/// A cgroup with one process in it.
#[derive(Debug)]
pub(super) struct MemoryGroup {
    path: PathBuf,
    limit: MemoryLimit,
    bytes: Bytes,
}

impl MemoryGroup {
    /// Makes a group below the worker's own, caps it and moves the process in.
    pub(super) fn create(pid: u32, bytes: Bytes) -> Result<Self> {
        let mut last = Error::other("no cgroup hierarchy with a memory controller is mounted");
        for (parent, limit) in own_groups() {
            match Self::create_in(&parent, limit, pid, bytes) {
                Ok(group) => return Ok(group),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn create_in(parent: &Path, limit: MemoryLimit, pid: u32, bytes: Bytes) -> Result<Self> {
        let path = parent.join(format!("{GROUP_PREFIX}{}-{pid}", std::process::id()));
        fs::create_dir(&path)?;
        // Dropping it on an error removes the directory.
        let group = Self { path, limit, bytes };
        match limit {
            MemoryLimit::CgroupVersion2 => {
                group.write("memory.max", bytes)?;
                // Without it a process over its cap swaps instead of ending; absent where swap is off.
                let _ = group.write("memory.swap.max", 0);
            }
            MemoryLimit::CgroupVersion1 => {
                group.write("memory.limit_in_bytes", bytes)?;
                let _ = group.write("memory.memsw.limit_in_bytes", bytes);
            }
            MemoryLimit::DataSegment => return Err(Error::other("the data segment has no cgroup")),
        }
        group.write("cgroup.procs", u64::from(pid))?;
        Ok(group)
    }

    fn write(&self, file: &str, value: u64) -> Result<()> {
        // Never creates: a directory that is not a cgroup has no such file.
        let mut open = fs::OpenOptions::new();
        std::io::Write::write_all(&mut open.write(true).open(self.path.join(file))?, value.to_string().as_bytes())
    }

    pub(super) fn limit(&self) -> MemoryLimit {
        self.limit
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Whether the kernel killed the process for going over the cap.
    pub(super) fn killed_over_cap(&self) -> bool {
        let file = match self.limit {
            MemoryLimit::CgroupVersion2 => "memory.events",
            _ => "memory.oom_control",
        };
        fs::read_to_string(self.path.join(file)).is_ok_and(|text| counter(&text, "oom_kill") > 0)
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "a cgroup stays behind until the next start");
        }
    }
}

/// The value of `name value` in a file of such lines.
fn counter(text: &str, name: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(key, _)| *key == name)
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

/// Removes the groups that earlier workers left behind when they were killed.
pub(super) fn sweep() {
    for (parent, _) in own_groups() {
        let Ok(entries) = fs::read_dir(parent) else { continue };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let owner = name.to_str().and_then(|name| name.strip_prefix(GROUP_PREFIX)?.split_once('-')).map(|it| it.0);
            if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
                // Fails while a process is still in it, which is right.
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
}

/// The worker's own groups in hierarchies with a memory controller, the preferred one first.
fn own_groups() -> Vec<(PathBuf, MemoryLimit)> {
    match (fs::read_to_string("/proc/self/mountinfo"), fs::read_to_string("/proc/self/cgroup")) {
        (Ok(mounts), Ok(membership)) => groups_of(&mounts, &membership),
        _ => Vec::new(),
    }
}

fn groups_of(mounts: &str, membership: &str) -> Vec<(PathBuf, MemoryLimit)> {
    let mut version_1 = None;
    let mut version_2 = None;
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        if controllers.is_empty() {
            version_2 = Some(path);
        } else if controllers.split(',').any(|controller| controller == "memory") {
            version_1 = Some(path);
        }
    }
    let mut found = Vec::new();
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let mut left = left.split(' ');
        let (Some(root), Some(point)) = (left.nth(3), left.next()) else { continue };
        let mut right = right.split(' ');
        let (kind, options) = (right.next(), right.nth(1).unwrap_or(""));
        let (own, limit) = match kind {
            Some("cgroup2") => (version_2, MemoryLimit::CgroupVersion2),
            Some("cgroup") if options.split(',').any(|option| option == "memory") => {
                (version_1, MemoryLimit::CgroupVersion1)
            }
            _ => continue,
        };
        if let Some(path) = own.and_then(|own| below(point, root, own)) {
            found.push((path, limit));
        }
    }
    found.sort_by_key(|(_, limit)| *limit != MemoryLimit::CgroupVersion2);
    found
}

/// Where group `own` is, in a hierarchy whose group `root` is mounted at `point`.
fn below(point: &str, root: &str, own: &str) -> Option<PathBuf> {
    let inside = Path::new(own).strip_prefix(root).ok()?;
    inside.components().all(|part| matches!(part, Component::Normal(_))).then(|| Path::new(point).join(inside))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS_VERSION_1: &str = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
        35 31 0:32 /docker/1f /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

    #[test]
    fn own_groups_are_found_below_their_mounts() {
        let found = groups_of(MOUNTS_VERSION_1, "4:memory:/docker/1f/app\n1:cpu:/\n0::/\n");
        assert_eq!(
            found,
            [
                (PathBuf::from("/sys/fs/cgroup/unified"), MemoryLimit::CgroupVersion2),
                (PathBuf::from("/sys/fs/cgroup/memory/app"), MemoryLimit::CgroupVersion1),
            ]
        );
        assert_eq!(groups_of(MOUNTS_VERSION_1, "4:memory:/elsewhere\n"), []);
        assert_eq!(groups_of(MOUNTS_VERSION_1, "0::/../../x\n"), []);
        assert_eq!(groups_of("", "0::/\n"), []);
        let unified = "25 1 0:22 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let own = "0::/system.slice/warmset.service\n";
        let path = PathBuf::from("/sys/fs/cgroup/system.slice/warmset.service");
        assert_eq!(groups_of(unified, own), [(path, MemoryLimit::CgroupVersion2)]);
    }

    #[test]
    fn kills_are_counted_in_both_formats() {
        assert_eq!(counter("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", "oom_kill"), 1);
        assert_eq!(counter("low 0\noom 3\noom_kill 2\noom_group_kill 0\n", "oom_kill"), 2);
        assert_eq!(counter("", "oom_kill"), 0);
    }

    #[test]
    fn a_directory_that_is_no_cgroup_is_refused_and_left_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        for limit in [MemoryLimit::CgroupVersion2, MemoryLimit::CgroupVersion1] {
            assert!(MemoryGroup::create_in(directory.path(), limit, 1, 1 << 30).is_err());
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        }
    }
}
