//! The reading end of an engine's socket: messages, and the descriptors that come with them.

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use std::{
    collections::VecDeque,
    io::{IoSliceMut, Read},
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::net::UnixStream},
};

/// The most descriptors that come with one message.
pub(crate) const DESCRIPTORS_MAX: usize = 2;
/// The most that are kept until a message asks for them: those of the next message may come before it is read.
const DESCRIPTORS_KEPT_MAX: usize = 2 * DESCRIPTORS_MAX;

/// A socket whose descriptors are kept beside the bytes.
pub(super) struct Inbox {
    socket: UnixStream,
    descriptors: VecDeque<OwnedFd>,
}

impl Inbox {
    pub(super) fn new(socket: UnixStream) -> Self {
        Self { socket, descriptors: VecDeque::new() }
    }

    /// The next descriptors, in the order in which they came; fewer if no more have come.
    pub(super) fn take_descriptors(&mut self, count: usize) -> Vec<OwnedFd> {
        self.descriptors.drain(..count.min(self.descriptors.len())).collect()
    }
}

impl Read for Inbox {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut into = [IoSliceMut::new(buffer)];
            match rustix::net::recvmsg(&self.socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other?,
            }
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                // Those beyond the limit close here.
                let room = DESCRIPTORS_KEPT_MAX - self.descriptors.len();
                self.descriptors.extend(descriptors.take(room));
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            super::log("more descriptors came with a message than any message needs");
        }
        Ok(received.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::send_with_descriptors;
    use std::os::fd::AsFd;

    #[test]
    fn descriptors_come_with_the_bytes_they_were_sent_with() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut inbox = Inbox::new(theirs);
        let (one, other) = std::io::pipe().unwrap();
        assert_eq!(send_with_descriptors(ours.as_fd(), b"ab", &[one.as_fd(), other.as_fd()]).unwrap(), 2);
        assert_eq!(send_with_descriptors(ours.as_fd(), b"c", &[]).unwrap(), 1);
        assert!(inbox.take_descriptors(2).is_empty());
        let mut bytes = [0; 3];
        inbox.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"abc");
        drop((one, other));
        let mut kept = inbox.take_descriptors(2);
        assert_eq!(kept.len(), 2);
        let mut writer = std::io::PipeWriter::from(kept.remove(1));
        std::io::Write::write_all(&mut writer, b"x").unwrap();
        drop(writer);
        let mut through = Vec::new();
        std::io::PipeReader::from(kept.remove(0)).read_to_end(&mut through).unwrap();
        assert_eq!(through, b"x");
    }

    #[test]
    fn no_more_are_kept_than_any_message_needs() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut inbox = Inbox::new(theirs);
        let (one, _other) = std::io::pipe().unwrap();
        for _ in 0..=DESCRIPTORS_KEPT_MAX {
            send_with_descriptors(ours.as_fd(), b"a", &[one.as_fd()]).unwrap();
            inbox.read_exact(&mut [0]).unwrap();
        }
        assert_eq!(inbox.take_descriptors(usize::MAX).len(), DESCRIPTORS_KEPT_MAX);
    }
}
