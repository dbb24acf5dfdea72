//! What is written to an engine process: messages, and descriptors that go with their bytes.

use crate::{child::DESCRIPTORS_MAX, frame, protocol::ToEngine};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::{
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};
use tokio::{
    io::{AsyncWriteExt, Interest},
    net::unix::OwnedWriteHalf,
    sync::mpsc,
};

/// One thing to write.
#[derive(Debug)]
pub(super) enum Outgoing {
    Message(ToEngine),
    /// For the next message.
    Descriptors(Vec<OwnedFd>),
}

/// Writes until there is nothing more to write, or nobody to read it.
pub(super) async fn write_messages(mut socket: OwnedWriteHalf, mut queue: mpsc::UnboundedReceiver<Outgoing>) {
    let mut descriptors = Vec::new();
    while let Some(next) = queue.recv().await {
        let message = match next {
            Outgoing::Message(message) => message,
            Outgoing::Descriptors(given) => {
                descriptors = given;
                continue;
            }
        };
        match frame::encode(&message) {
            Ok(frame) => {
                let written = write_frame(&mut socket, &frame, &std::mem::take(&mut descriptors)).await;
                if written.is_err() {
                    return;
                }
            }
            Err(error) => tracing::error!(%error, "a message for an engine cannot be written"),
        }
    }
}

async fn write_frame(socket: &mut OwnedWriteHalf, frame: &[u8], descriptors: &[OwnedFd]) -> std::io::Result<()> {
    let mut rest = frame;
    if !descriptors.is_empty() {
        let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let stream = socket.as_ref();
        let sent =
            stream.async_io(Interest::WRITABLE, || send_with_descriptors(stream.as_fd(), frame, &borrowed)).await?;
        rest = &frame[sent..];
    }
    socket.write_all(rest).await
}

/// Sends bytes, and descriptors along with the first of them. Returns how many bytes were sent.
pub(crate) fn send_with_descriptors(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> std::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(std::io::Error::other("more descriptors than any message needs"));
    }
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?)
}
