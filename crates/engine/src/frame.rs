//! Frames: a length of four bytes, little endian, then that many bytes of JSON.
//!
//! The engine process reads and writes them blocking, its parent without blocking. Neither side reserves memory on the
//! word of the length alone.

use crate::protocol::MESSAGE_BYTES_MAX;
use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};
use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes of the length before each message.
const LENGTH_BYTES: usize = 4;
/// The buffer keeps at most this much memory between messages.
const KEPT_BUFFER_BYTES: usize = 1 << 20;

/// Why a frame cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The socket failed.
    #[error("the socket between worker and engine failed: {0}")]
    Io(#[from] io::Error),
    /// Longer than [`MESSAGE_BYTES_MAX`].
    #[error("a message of {bytes} bytes is over the limit of {MESSAGE_BYTES_MAX} bytes")]
    TooLarge {
        /// Its length.
        bytes: usize,
    },
    /// The other side ended in the middle of a message.
    #[error("the other side ended in the middle of a message")]
    Truncated,
    /// Not a message of this protocol.
    #[error("not a message of this protocol: {0}")]
    Invalid(#[from] serde_json::Error),
}

/// One message as a frame.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; LENGTH_BYTES];
    serde_json::to_writer(&mut frame, message)?;
    let bytes = frame.len() - LENGTH_BYTES;
    if bytes > MESSAGE_BYTES_MAX {
        return Err(FrameError::TooLarge { bytes });
    }
    let length = u32::try_from(bytes).map_err(|_| FrameError::TooLarge { bytes })?;
    frame[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
    Ok(frame)
}

/// Writes one message.
pub fn write<T: Serialize>(writer: &mut impl Write, message: &T) -> Result<(), FrameError> {
    writer.write_all(&encode(message)?)?;
    Ok(())
}

/// Reads one message; none if the other side has ended.
pub fn read<T: DeserializeOwned>(reader: &mut impl Read) -> Result<Option<T>, FrameError> {
    let mut length = Vec::with_capacity(LENGTH_BYTES);
    reader.by_ref().take(LENGTH_BYTES as u64).read_to_end(&mut length)?;
    if length.is_empty() {
        return Ok(None);
    }
    let bytes = length_of(&length).ok_or(FrameError::Truncated)?;
    if bytes > MESSAGE_BYTES_MAX {
        return Err(FrameError::TooLarge { bytes });
    }
    let mut body = Vec::new();
    reader.by_ref().take(bytes as u64).read_to_end(&mut body)?;
    if body.len() < bytes {
        return Err(FrameError::Truncated);
    }
    Ok(Some(serde_json::from_slice(&body)?))
}

fn length_of(buffer: &[u8]) -> Option<usize> {
    let length = buffer.first_chunk::<LENGTH_BYTES>()?;
    usize::try_from(u32::from_le_bytes(*length)).ok()
}

/// Reads frames without blocking. A call of [`FrameReader::next`] that is dropped loses nothing.
#[derive(Debug)]
pub struct FrameReader<R> {
    reader: R,
    buffer: Vec<u8>,
    /// Bytes of the buffer that were handed out already.
    taken: usize,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads from `reader`.
    pub fn new(reader: R) -> Self {
        Self { reader, buffer: Vec::new(), taken: 0 }
    }

    /// The next message; none if the other side has ended.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            if self.reader.read_buf(&mut self.buffer).await? == 0 {
                return if self.buffer.is_empty() { Ok(None) } else { Err(FrameError::Truncated) };
            }
        }
    }

    /// Takes a whole message out of the buffer, if one is there.
    fn take<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let rest = &self.buffer[self.taken..];
        let Some(bytes) = length_of(rest) else {
            self.forget_taken();
            return Ok(None);
        };
        if bytes > MESSAGE_BYTES_MAX {
            return Err(FrameError::TooLarge { bytes });
        }
        let Some(body) = rest.get(LENGTH_BYTES..LENGTH_BYTES + bytes) else {
            self.forget_taken();
            return Ok(None);
        };
        let message = serde_json::from_slice(body)?;
        self.taken += LENGTH_BYTES + bytes;
        Ok(Some(message))
    }

    fn forget_taken(&mut self) {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        if self.buffer.is_empty() && self.buffer.capacity() > KEPT_BUFFER_BYTES {
            self.buffer = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{FromEngine, ToEngine};
    use proptest::prelude::*;

    #[test]
    fn a_message_round_trips() {
        let mut frames = Vec::new();
        write(&mut frames, &ToEngine::Cancel { request: 7 }).unwrap();
        write(&mut frames, &ToEngine::Stop).unwrap();
        let mut reader = frames.as_slice();
        assert_eq!(read::<ToEngine>(&mut reader).unwrap(), Some(ToEngine::Cancel { request: 7 }));
        assert_eq!(read::<ToEngine>(&mut reader).unwrap(), Some(ToEngine::Stop));
        assert_eq!(read::<ToEngine>(&mut reader).unwrap(), None);
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_anything_is_read() {
        let frame = u32::try_from(MESSAGE_BYTES_MAX + 1).unwrap().to_le_bytes();
        let error = read::<ToEngine>(&mut frame.as_slice()).unwrap_err();
        assert!(matches!(error, FrameError::TooLarge { bytes } if bytes == MESSAGE_BYTES_MAX + 1), "{error}");
        let text = "x".repeat(MESSAGE_BYTES_MAX);
        assert!(matches!(encode(&text), Err(FrameError::TooLarge { .. })));
    }

    #[test]
    fn an_end_inside_a_message_is_an_error() {
        let frame = encode(&ToEngine::Stop).unwrap();
        for length in 1..frame.len() {
            let error = read::<ToEngine>(&mut &frame[..length]).unwrap_err();
            assert!(matches!(error, FrameError::Truncated), "{length}: {error}");
        }
    }

    /// Gives at most `step` bytes at a time.
    struct Trickle<'a> {
        bytes: &'a [u8],
        step: usize,
    }

    impl AsyncRead for Trickle<'_> {
        fn poll_read(
            mut self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
            buffer: &mut tokio::io::ReadBuf<'_>,
        ) -> std::task::Poll<io::Result<()>> {
            let length = self.step.min(self.bytes.len()).min(buffer.remaining());
            let (now, later) = self.bytes.split_at(length);
            buffer.put_slice(now);
            self.bytes = later;
            std::task::Poll::Ready(Ok(()))
        }
    }

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    proptest! {
        #[test]
        fn any_cut_of_the_stream_gives_the_same_messages(texts in prop::collection::vec(".{0,40}", 0..12), step in 1_usize..50) {
            let messages: Vec<_> =
                texts.iter().map(|text| FromEngine::Delta { request: 1, choice: 0, text: text.clone() }).collect();
            let mut frames = Vec::new();
            for message in &messages {
                write(&mut frames, message).unwrap();
            }
            let mut reader = FrameReader::new(Trickle { bytes: &frames, step });
            let read_back: Vec<FromEngine> = run(async {
                let mut all = Vec::new();
                while let Some(message) = reader.next().await.unwrap() {
                    all.push(message);
                }
                all
            });
            prop_assert_eq!(read_back, messages);
        }

        #[test]
        fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read::<FromEngine>(&mut bytes.as_slice());
            let _ = run(FrameReader::new(bytes.as_slice()).next::<FromEngine>());
        }
    }
}
