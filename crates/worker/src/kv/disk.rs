//! The tier's blocks on disk: what the loop wants done there, and the answers as events.

use super::{Answer, KvCommand, NotErased, answer};
use std::{
    path::PathBuf,
    sync::{Arc, mpsc::Receiver},
    time::{Duration, Instant},
};
use tokio::sync::mpsc::WeakUnboundedSender;
use warmset_core::kv::{
    BLOCK_TOKENS, BlockKey, BlockNumber, DiskPlace, Event, FoundBlock, HEADER_BYTES, KvIdentity, ReadFailure,
    TrustDomain,
};
use warmset_store::{
    StoreError,
    arena::Arena,
    segments::{AppendError, BlockId, Figures, Location, Options, Recovery, Segments},
};

/// A read that takes longer is given up: whoever waited for it has long been computing.
const READ_DEADLINE: Duration = Duration::from_secs(30);
/// How often blocks are looked at that are older than they may become: after a part of that age, within bounds.
const EXPIRY_PARTS: u32 = 8;
const EXPIRY_INTERVAL_MIN: Duration = Duration::from_secs(1);
const EXPIRY_INTERVAL_MAX: Duration = Duration::from_secs(60);

/// Where KV lies on disk.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// The directory.
    pub directory: PathBuf,
    /// How it is kept.
    pub options: Options,
    /// How long a block is kept; none keeps it for as long as there is room.
    pub retention: Option<Duration>,
}

/// The disk, as the loop uses it. Nothing here blocks but [`Disk::open`]. What it tells the loop carries no sum of bytes:
/// that is the loop's to ask for.
pub(super) struct Disk {
    segments: Arc<Segments>,
    bytes_max: u64,
    free_bytes_min: u64,
    commands: WeakUnboundedSender<KvCommand>,
}

impl Disk {
    /// Opens the directory and begins to find what is there.
    pub(super) fn open(config: DiskConfig, commands: WeakUnboundedSender<KvCommand>) -> Result<Self, StoreError> {
        let Options { bytes_max, free_bytes_min, .. } = config.options;
        let (segments, recovery) = Segments::open(&config.directory, config.options)?;
        let segments = Arc::new(segments);
        tell_what_is_found(recovery, commands.clone()).map_err(|error| StoreError::Directory {
            what: "read",
            path: config.directory.clone(),
            error,
        })?;
        if let Some(retention) = config.retention {
            tokio::spawn(expire(Arc::downgrade(&segments), retention, commands.clone()));
        }
        Ok(Self { segments, bytes_max, free_bytes_min, commands })
    }

    /// Bytes that lie there, whoever wrote them.
    pub(super) fn used_bytes(&self) -> u64 {
        self.segments.figures().used_bytes
    }

    /// Why nothing is written there, if that is so.
    pub(super) fn fault(&self) -> Option<String> {
        self.segments.figures().fault.map(|fault| fault.to_string())
    }

    /// Bytes of the bound that blocks cannot have: others' files lie there, or the file system has less left.
    pub(super) fn others_bytes(&self) -> u64 {
        let Figures { used_bytes, foreign_bytes, free_bytes, .. } = self.segments.figures();
        let bound = self.bytes_max.saturating_sub(foreign_bytes);
        let blocks_bytes = used_bytes.saturating_sub(foreign_bytes);
        let left = blocks_bytes.saturating_add(free_bytes.saturating_sub(self.free_bytes_min));
        self.bytes_max - bound.min(left)
    }

    pub(super) fn write(&self, block: BlockNumber, arena: &Arc<Arena>, slot: u32) {
        let began = Instant::now();
        let Some(reader) = arena.reader(slot) else {
            return self.not_written(block, "slot");
        };
        let commands = self.commands.clone();
        let bytes: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(reader);
        let queued = self.segments.append(vec![bytes], move |results| {
            let outcome = match results.into_iter().next() {
                Some(Ok(Location { segment, page, pages })) => Ok(DiskPlace { segment, page, pages }),
                Some(Err(error)) => {
                    tracing::debug!(%error, "a block of KV is not on disk");
                    Err(error.reason().to_owned())
                }
                None => Err(AppendError::Closed.reason().to_owned()),
            };
            let seconds = began.elapsed().as_secs_f64();
            tell(&commands, Event::Written { block, outcome, seconds, others_bytes: 0 });
        });
        if queued.is_err() {
            self.not_written(block, "queue");
        }
    }

    fn not_written(&self, block: BlockNumber, reason: &str) {
        let outcome = Err(reason.to_owned());
        tell(&self.commands, Event::Written { block, outcome, seconds: 0.0, others_bytes: 0 });
    }

    pub(super) fn read(
        &self,
        block: BlockNumber,
        (identity, domain, key): (KvIdentity, TrustDomain, BlockKey),
        place: DiskPlace,
        (arena, slot): (&Arc<Arena>, u32),
    ) {
        let began = Instant::now();
        let commands = self.commands.clone();
        let Some(writer) = arena.writer(slot) else {
            let failure = Some(ReadFailure { reason: "slot".to_owned(), slot_is_held: true, is_lost: false });
            return tell(&commands, Event::ReadDone { block, seconds: 0.0, failure });
        };
        let location = Location { segment: place.segment, page: place.page, pages: place.pages };
        let wanted = BlockId { identity, domain, key };
        self.segments.read(location, wanted, writer, Instant::now() + READ_DEADLINE, move |result| {
            let failure = result.err().map(|failed| ReadFailure {
                reason: failed.error.reason().to_owned(),
                slot_is_held: failed.memory.is_none(),
                is_lost: !failed.error.is_passing(),
            });
            let seconds = began.elapsed().as_secs_f64();
            tell(&commands, Event::ReadDone { block, seconds, failure });
        });
    }

    pub(super) fn retire(&self, place: DiskPlace) {
        self.segments.retire(&Location { segment: place.segment, page: place.page, pages: place.pages });
    }

    /// Destroys what there is of a trust domain, and then says so.
    pub(super) fn purge(&self, domain: TrustDomain, answers: Vec<Answer>) {
        let segments = Arc::clone(&self.segments);
        tokio::task::spawn_blocking(move || {
            let erased = match segments.purge(&domain) {
                Ok(purged) => {
                    let (blocks, complete) = (purged.dropped.blocks, purged.is_complete);
                    tracing::info!(blocks, complete, "a trust domain's KV was purged");
                    if complete { Ok(()) } else { Err(not_erased(&segments)) }
                }
                Err(error) => {
                    tracing::error!(%error, "a trust domain's KV could not be purged");
                    Err(NotErased::Failed { reason: error.to_string() })
                }
            };
            answer(answers, &erased);
        });
    }

    /// Says when all that is in the directory has been told of.
    pub(super) fn when_found(&self, then: impl FnOnce(bool) -> KvCommand + Send + 'static) {
        let (segments, commands) = (Arc::clone(&self.segments), self.commands.clone());
        tokio::task::spawn_blocking(move || {
            let command = then(segments.wait_until_found());
            if let Some(commands) = commands.upgrade() {
                let _ = commands.send(command);
            }
        });
    }

    /// Does something once what was given up has left the disk, or will not.
    pub(super) fn when_cleared(&self, then: impl FnOnce(Result<(), NotErased>) + Send + 'static) {
        let segments = Arc::clone(&self.segments);
        tokio::task::spawn_blocking(move || {
            let cleared = segments.wait_until_cleared();
            then(if cleared { Ok(()) } else { Err(not_erased(&segments)) });
        });
    }
}

/// Why bytes are still there: later is soon enough only where the disk works.
fn not_erased(segments: &Segments) -> NotErased {
    let fault = segments.figures().fault;
    fault.map_or(NotErased::Late, |fault| NotErased::Failed { reason: fault.to_string() })
}

/// Tells the loop what the directory holds. A thread of its own: a disk that does not answer may keep it for ever, and
/// nobody waits for it.
fn tell_what_is_found(recovery: Receiver<Recovery>, commands: WeakUnboundedSender<KvCommand>) -> std::io::Result<()> {
    let run = move || {
        for found in recovery {
            match found {
                Recovery::Found(blocks) => {
                    let blocks = blocks.iter().filter_map(found_block).collect();
                    tell(&commands, Event::Found { blocks, others_bytes: 0 });
                }
                Recovery::Complete(recovered) => {
                    tracing::info!(blocks = recovered.blocks, "all KV on disk is known");
                }
            }
        }
    };
    std::thread::Builder::new().name("kv-found".to_owned()).spawn(run)?;
    Ok(())
}

/// Blocks older than they may be are given up.
async fn expire(segments: std::sync::Weak<Segments>, retention: Duration, commands: WeakUnboundedSender<KvCommand>) {
    let interval = (retention / EXPIRY_PARTS).clamp(EXPIRY_INTERVAL_MIN, EXPIRY_INTERVAL_MAX);
    loop {
        tokio::time::sleep(interval).await;
        let Some(segments) = segments.upgrade() else { return };
        let before = super::gather::unix_seconds().saturating_sub(retention.as_secs());
        let expired = tokio::task::spawn_blocking(move || segments.expire(before)).await.unwrap_or_default();
        let places: Vec<DiskPlace> =
            expired.into_iter().map(|Location { segment, page, pages }| DiskPlace { segment, page, pages }).collect();
        if !places.is_empty() {
            tell(&commands, Event::Expired { places });
        }
    }
}

fn found_block(found: &warmset_store::segments::Found) -> Option<FoundBlock> {
    let Location { segment, page, pages } = found.location;
    // Incomplete blocks belong to generations that were interrupted.
    (found.token_count == BLOCK_TOKENS).then_some(())?;
    Some(FoundBlock {
        identity: found.id.identity,
        domain: found.id.domain,
        key: found.id.key,
        parent: found.parent,
        depth: u32::try_from(found.first_token / u64::from(BLOCK_TOKENS)).ok()?,
        payload_bytes: found.location.bytes().saturating_sub(HEADER_BYTES as u64),
        place: DiskPlace { segment, page, pages },
    })
}

fn tell(commands: &WeakUnboundedSender<KvCommand>, event: Event) {
    // A tier that has ended needs no answers.
    if let Some(commands) = commands.upgrade() {
        let _ = commands.send(KvCommand::Disk(event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use tokio::sync::mpsc::unbounded_channel;

    #[test]
    fn a_directory_that_is_never_read_to_its_end_keeps_no_server_from_ending() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        // Of a disk that does not answer.
        let (_recovering, recovery) = mpsc::sync_channel(1);
        let (commands, _loop) = unbounded_channel();
        runtime.block_on(async { tell_what_is_found(recovery, commands.downgrade()).unwrap() });
        let (ended, has_ended) = mpsc::channel();
        std::thread::spawn(move || {
            drop(runtime);
            ended.send(()).unwrap();
        });
        has_ended.recv_timeout(Duration::from_secs(60)).expect("the runtime ends");
    }

    #[test]
    fn others_files_are_not_to_be_had() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("other"), vec![1; 1 << 20]).unwrap();
        let options = Options { bytes_max: 8 << 20, free_bytes_min: 0, ..Options::default() };
        let config = DiskConfig { directory: directory.path().to_path_buf(), options, retention: None };
        let (commands, _loop) = unbounded_channel();
        let disk = Disk::open(config, commands.downgrade()).unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while disk.others_bytes() == 0 {
            assert!(Instant::now() < end, "they are never counted");
            std::thread::yield_now();
        }
        assert!((1 << 20..2 << 20).contains(&disk.others_bytes()), "{}", disk.others_bytes());
        assert_eq!(disk.used_bytes(), disk.others_bytes());
    }
}
