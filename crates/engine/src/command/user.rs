//! Running a server as another user, and tying its life to its parent's.
#![expect(unsafe_code, reason = "what runs between fork and exec has no safe interface")]

use rustix::process::{Gid, Signal, Uid};
use std::{os::unix::process::CommandExt, process::Command};

/// A user with its groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    user: Uid,
    group: Gid,
    groups: Vec<Gid>,
}

impl Identity {
    /// Looks a user up by name. An error says what to do.
    pub(super) fn find(name: &str) -> Result<Self, String> {
        let user = uzers::get_user_by_name(name).ok_or_else(|| format!("there is no user {name} on this machine"))?;
        if user.uid() != rustix::process::geteuid().as_raw() && !rustix::process::geteuid().is_root() {
            return Err(format!(
                "only root can start a runtime as {name}: start the server as root, or leave user out"
            ));
        }
        let group = user.primary_group_id();
        let groups = uzers::get_user_groups(name, group).unwrap_or_default();
        let groups = groups.iter().map(|group| Gid::from_raw(group.gid())).collect();
        Ok(Self { user: Uid::from_raw(user.uid()), group: Gid::from_raw(group), groups })
    }

    /// Gives up everything else. Only for a process with one thread.
    fn assume(&self) -> rustix::io::Result<()> {
        if self.user == rustix::process::geteuid() && !self.user.is_root() {
            return Ok(());
        }
        rustix::thread::set_thread_groups(&self.groups)?;
        rustix::thread::set_thread_res_gid(self.group, self.group, self.group)?;
        rustix::thread::set_thread_res_uid(self.user, self.user, self.user)
    }
}

/// Lets a command start as this user and die with whoever started it.
pub(super) fn become_on_exec(command: &mut Command, identity: Option<Identity>) {
    let assume = move || {
        if let Some(identity) = &identity {
            identity.assume()?;
        }
        // After the above, which resets it.
        Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
    };
    // SAFETY: between fork and exec the closure makes system calls and nothing else: it allocates nothing, takes no lock,
    // and the child has this one thread, whose identity is therefore that of the process.
    unsafe { command.pre_exec(assume) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_that_is_not_there_is_named() {
        assert!(Identity::find("no-such-user-here").unwrap_err().contains("no user no-such-user-here"));
        let root = Identity::find("root");
        assert_eq!(root.is_ok(), rustix::process::geteuid().is_root());
    }
}
