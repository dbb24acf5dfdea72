//! Which processes came of one process, as `/proc` has it.

use rustix::process::{Pid, Signal};
use std::collections::BTreeMap;

/// Processes looked at below one; more than any server starts.
const PROCESSES_MAX: usize = 65_536;

/// Every process that descends from `root`, itself not among them.
pub(crate) fn descendants(root: u32) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    for pid in entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).take(PROCESSES_MAX) {
        // A process that has just ended has no parent worth knowing.
        if let Some(parent) = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok().and_then(|stat| parent(&stat)) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut open = vec![root];
    while let Some(next) = open.pop() {
        let below = children.remove(&next).unwrap_or_default();
        found.extend_from_slice(&below);
        open.extend(below);
    }
    found
}

/// The parent in a line of `/proc/PID/stat`: the name before it, in brackets, may hold anything.
fn parent(stat: &str) -> Option<u32> {
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// Kills every process that descends from `root`. One that starts others meanwhile must be killed again.
pub(crate) fn kill_descendants(root: u32) {
    for pid in descendants(root) {
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            // It may be gone already.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn the_parent_is_found_after_a_name_with_brackets() {
        assert_eq!(parent("17 (a) b) (c) S 4 17 17 0"), Some(4));
        assert_eq!(parent("17 (a"), None);
    }

    #[test]
    fn children_and_their_children_are_found_and_killed() {
        let script = "sleep 600 & sleep 600 & echo ready; wait";
        let mut shell = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        let out = shell.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut ready).unwrap();
        assert_eq!(descendants(shell.id()).len(), 2);
        assert!(descendants(std::process::id()).len() >= 3);
        kill_descendants(shell.id());
        // The shell waits for both.
        shell.wait().unwrap();
    }
}
