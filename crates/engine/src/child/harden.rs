//! How an engine process shuts itself in: no network, no core file, no inherited descriptors, no life after its parent.
#![expect(unsafe_code, reason = "namespaces and inherited descriptors have no safe interface")]

use super::Role;
use rustix::{
    fs::{Mode, OFlags},
    process::{Resource, Rlimit, Signal},
    thread::UnshareFlags,
};
use std::os::{
    fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
    unix::net::UnixStream,
};

/// The first descriptor that is not a standard stream.
const FIRST_OWN_DESCRIPTOR: RawFd = 3;
/// The kernel's own choice of a victim falls on an engine before it falls on the worker.
const OOM_SCORE_ADJUSTMENT: &str = "500";

unsafe extern "C" {
    /// Ends the process without running exit handlers, in the C library.
    safe fn _exit(status: i32) -> !;
}

/// Ends the process now, whatever other threads are doing: exit handlers would run under their feet.
pub(super) fn exit_at_once(code: u8) -> ! {
    _exit(i32::from(code))
}

/// Moves the socket away from standard input, puts nothing in its place, and closes whatever else was inherited.
pub(super) fn take_socket() -> Result<UnixStream, String> {
    let not_a_child = |_| "this command is started by `warmset serve`, not by hand".to_owned();
    let stdin = std::io::stdin();
    rustix::net::sockopt::socket_type(stdin.as_fd()).map_err(not_a_child)?;
    let socket = rustix::io::fcntl_dupfd_cloexec(stdin.as_fd(), FIRST_OWN_DESCRIPTOR).map_err(not_a_child)?;
    let nothing = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| format!("cannot open /dev/null: {error}"))?;
    // SAFETY: descriptor 0 is open, standard input owns it for the whole life of the process, and it is not closed
    // here: the wrapper is forgotten right after its one use.
    let mut descriptor_zero = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(0) });
    rustix::io::dup2(&nothing, &mut descriptor_zero)
        .map_err(|error| format!("cannot put /dev/null in place of standard input: {error}"))?;
    drop(nothing);
    close_others(socket.as_raw_fd());
    Ok(UnixStream::from(socket))
}

/// Closes every descriptor but the standard streams and `kept`.
fn close_others(kept: RawFd) {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let open: Vec<RawFd> = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    for descriptor in open {
        if descriptor < FIRST_OWN_DESCRIPTOR || descriptor == kept {
            continue;
        }
        // SAFETY: this runs before anything in this process has opened a descriptor of its own, apart from `kept`
        // and the directory just read, which is closed by now: closing what nobody here knows of cannot pull a
        // descriptor from under its owner. `fcntl` with F_GETFD only asks whether it is still open.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(descriptor) };
        if rustix::io::fcntl_getfd(borrowed).is_ok() {
            // SAFETY: as above; it is open, and this is its only owner in this process.
            drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
        }
    }
}

/// Gives up what an engine does not need. Only a parent that is gone is an error; the rest is best effort.
pub(super) fn shut_in(socket: &UnixStream, role: Role) -> Result<(), String> {
    if role == Role::Sealed
        && let Err(error) = leave_network()
    {
        super::log(&format!("keeps the network, as the system does not allow to leave it: {error}"));
    }
    let no_core = Rlimit { current: Some(0), maximum: Some(0) };
    if let Err(error) = rustix::process::setrlimit(Resource::Core, no_core) {
        super::log(&format!("cannot forbid core files: {error}"));
    }
    if let Err(error) = rustix::thread::set_no_new_privs(true) {
        super::log(&format!("cannot give up new privileges: {error}"));
    }
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJUSTMENT) {
        super::log(&format!("cannot offer itself to the kernel when memory runs out: {error}"));
    }
    // After the above, which may reset it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| format!("cannot tie its life to its parent's: {error}"))?;
    let peer =
        rustix::net::sockopt::socket_peercred(socket).map_err(|error| format!("cannot tell its parent: {error}"))?;
    if rustix::process::getppid() == Some(peer.pid) { Ok(()) } else { Err("its parent died while it started".into()) }
}

/// A network namespace of its own has no interface that is up. Without the right to make one, a user namespace gives
/// that right over nothing else.
fn leave_network() -> rustix::io::Result<()> {
    // SAFETY: this process has one thread so far, so no other thread shares the namespaces or descriptors; neither
    // flag touches the table of descriptors or the file system.
    if unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.is_ok() {
        return Ok(());
    }
    // SAFETY: as above.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNET) }?;
    // The kernel marks a process that changed its user namespace as not to be looked into, which would hide its
    // memory figures from the worker; core files are forbidden already.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable)
}
