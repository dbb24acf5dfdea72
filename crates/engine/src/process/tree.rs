//! Which processes came of one process, as `/proc` has it.

use rustix::process::{Pid, Signal};
use std::collections::{BTreeMap, BTreeSet};

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

/// The TCP ports that a process and its descendants listen on; none if the system does not show it.
pub(crate) fn listening_ports(root: u32) -> Option<BTreeSet<u16>> {
    let mut sockets = BTreeMap::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        // A system without version 6 has no such table.
        let text = std::fs::read_to_string(table).unwrap_or_default();
        sockets.extend(text.lines().filter_map(listener));
    }
    let mut ports = BTreeSet::new();
    for pid in std::iter::once(root).chain(descendants(root)) {
        match std::fs::read_dir(format!("/proc/{pid}/fd")) {
            Ok(entries) => {
                let links = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
                let inodes = links
                    .filter_map(|link| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u64>().ok());
                ports.extend(inodes.filter_map(|inode| sockets.get(&inode)));
            }
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return None,
            // It has just ended.
            Err(_) => {}
        }
    }
    Some(ports)
}

/// The inode and port of a line of `/proc/net/tcp`, if it is of a listening socket.
fn listener(line: &str) -> Option<(u64, u16)> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    if *fields.get(3)? != "0A" {
        return None;
    }
    let port = u16::from_str_radix(fields.get(1)?.rsplit_once(':')?.1, 16).ok()?;
    Some((fields.get(9)?.parse().ok()?, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn ports_are_found_while_somebody_listens() {
        let line =
            "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0";
        assert_eq!(listener(line), Some((4711, 8080)));
        assert_eq!(listener(&line.replace(" 0A ", " 01 ")), None);
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        assert!(listening_ports(std::process::id()).unwrap().contains(&port));
        drop(socket);
        assert!(!listening_ports(std::process::id()).unwrap().contains(&port));
        let other = std::net::TcpListener::bind("[::1]:0");
        if let Ok(other) = other {
            let port = other.local_addr().unwrap().port();
            assert!(listening_ports(std::process::id()).unwrap().contains(&port));
        }
    }

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
